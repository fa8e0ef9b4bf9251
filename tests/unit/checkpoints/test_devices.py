"""A state is saved from any device, and loaded to any device.

Tests run on the processor, and on a GPU too where there is one.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.checkpoints import Saver, SaveSettings, load, load_into
from millrace.checkpoints.pinned_memory import PinnedMemory, map_pinned
from millrace.checkpoints.snapshot import SnapshotBuffers, StateShards
from millrace.storage import Store, open_store

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SETTINGS = SaveSettings.model_validate({"part_bytes": 40_000, "uploads": 2})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path.as_uri())


def make_state(device: str, seed: int = 0) -> dict[str, Any]:
    dice = torch.Generator().manual_seed(seed)
    large = torch.randn(300, 100, generator=dice)
    state = {
        "large": large,
        "turned": large.T,
        "rows": large[::3],
        "half": large.bfloat16(),
        "complex": torch.complex(large, large.flip(0)).conj(),
        "negative": torch.complex(large, large.flip(0)).conj().imag,
        "bool": large > 0,
        "number": torch.tensor(3.5),
        "empty": torch.empty(0, 7),
        "parameter": torch.nn.Parameter(large[:5]),
    }
    return {name: tensor.to(device) for name, tensor in state.items()}


def check_equal(found: dict[str, Any], wanted: dict[str, Any], device: str) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].device.type, found[name].dtype) == (device, tensor.dtype)
        resolved = tensor.detach().cpu().resolve_conj().resolve_neg()
        assert torch.equal(found[name].cpu(), resolved), name


@pytest.mark.parametrize("transposed", [False, True])
def test_a_copy_into_memory_of_a_file_begins_with_resolved_values(monkeypatch, transposed):
    """A copy from a GPU ends later, so that torch must not resolve the bits in its target."""
    copied = list[torch.Tensor]()
    copy = torch.Tensor.copy_

    def copy_and_note(target: torch.Tensor, source: torch.Tensor, **more: bool) -> torch.Tensor:
        copied.append(source)
        return copy(target, source, **more)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_and_note)
    values = torch.complex(torch.ones(3, 2), torch.arange(6.0).view(3, 2)).conj()
    state = {"conj": values, "neg": values.imag}
    shards = StateShards({name: one.T if transposed else one for name, one in state.items()})
    SnapshotBuffers().snapshot(shards, 10_000)
    assert not any(one.is_conj() or one.is_neg() for one in copied)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("there", DEVICES)
@pytest.mark.parametrize("here", DEVICES)
def test_a_state_is_saved_from_one_device_and_loaded_to_another(store, here, there, in_place):
    with Saver(store, "job", SETTINGS) as saver:
        for step in (1, 2):
            saver.save(make_state(here, step), step=step, in_place=in_place).result()
    for step in (1, 2):
        wanted = make_state(there, step)
        check_equal(load(store, "job", step=step, device=there).state, wanted, there)
        filled = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
        load_into(filled, store, "job", step=step)
        check_equal(filled, wanted, there)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_a_state_that_is_still_being_computed_is_saved_as_it_will_be(store, device, in_place):
    """On a GPU, the computation goes on in a stream of the caller when the save begins."""
    factor = torch.eye(1000, device=device)
    with torch.cuda.stream(torch.cuda.Stream() if device == "cuda" else None):
        value = torch.full((1000, 1000), 3.0, device=device)
        for _ in range(200 if device == "cuda" else 5):
            value = value @ factor
        with Saver(store, "job", SETTINGS) as saver:
            save = saver.save({"value": value}, step=1, in_place=in_place)
            save.wait_for_state()
            value.zero_()
            save.result()
    assert torch.equal(load(store, "job").state["value"], torch.full((1000, 1000), 3.0))


@pytest.mark.parametrize("device", DEVICES)
def test_memory_for_a_gpu_is_pinned_as_long_as_it_exists(device):
    shards = StateShards(make_state(device))
    for _ in range(20):  # often at the same address
        memory = shards.allocate(10_000_000)
        assert torch.frombuffer(memory, dtype=torch.uint8).is_pinned() == (device == "cuda")
        if isinstance(memory, PinnedMemory):
            memory.pin()  # CUDA refuses to pin it twice
            assert torch.ones(3, device=device).sum() == 3
        del memory


class Runtime:
    """Stand-in of CUDA's runtime: the memory that is pinned."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")  # from Python 3.12 on
def test_memory_is_unpinned_by_its_process_only(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr("millrace.checkpoints.pinned_memory._get_runtime", lambda: runtime)
    memory = map_pinned(5_000_000)
    memory[:3] = b"abc"
    assert list(runtime.pinned.values()) == [5_000_000]
    child = os.fork()
    if not child:
        zeros = memory[:3] == bytes(3)
        del memory
        os._exit(0 if zeros and runtime.pinned else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert memory[:3] == b"abc"
    del memory
    assert not runtime.pinned
