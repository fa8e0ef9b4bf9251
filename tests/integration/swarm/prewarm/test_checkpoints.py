"""Checkpoints on every node: a machine that joins loads its weights from the others."""

from pathlib import Path

import pytest
import torch
from pydantic import ByteSize

from millrace import errors
from millrace.checkpoints import Saver, SaveSettings, load
from millrace.keys.checkpoints import CheckpointKeys
from millrace.schemas.checkpoint import Checkpoint
from millrace.storage import StoreSpec, delete, open_store, put, read
from millrace.swarm import Request, preview, prewarm
from tests.stores import make_spec
from tests.support.swarm.swarms import Agent, make_settings, read_files, running

KEYS = CheckpointKeys("runs/one")
NEWEST = Request(checkpoint=KEYS.job)


def make_state(step: int) -> dict[str, torch.Tensor]:
    dice = torch.Generator().manual_seed(step)
    return {name: torch.randn(3 << 18, generator=dice) for name in ("v", "w")}


@pytest.fixture
def spec(request: pytest.FixtureRequest) -> StoreSpec:
    return make_spec("rgw", request)


@pytest.fixture
def saved(spec: StoreSpec) -> Checkpoint:
    """Two checkpoints of several files."""
    with Saver(open_store(spec), KEYS.job, SaveSettings(part_bytes=ByteSize(3 << 20))) as saver:
        saver.save(make_state(1), step=1).result()
        return saver.save(make_state(2), step=2).result()


@pytest.mark.parametrize(
    ("count", "values"),
    [(3, 1 << 18), pytest.param(8, 1 << 23, marks=pytest.mark.soak)],
    ids=["small", "512 MiB"],
)
def test_a_machine_that_joins_gets_the_weights_from_nodes_that_have_them(
    spec: StoreSpec, tmp_path: Path, count: int, values: int
) -> None:
    store = open_store(spec)
    state = {f"w{number:02}": torch.randn(values) for number in range(16)}
    with Saver(store, KEYS.job) as saver, running(tmp_path, count) as nodes:
        saved = saver.save(state, step=1).result()
        prewarm(make_settings(spec, nodes[:-1], requests=[NEWEST]))
        report = prewarm(make_settings(spec, nodes, requests=[NEWEST]))
        assert report.nodes[-1].from_peers == report.size > 4 * 16 * values
        assert report.store_bytes < report.size / 100
        assert report.unverified == 0
        delete(store, [KEYS.make_part_key(part.step, part.digest) for part in saved.parts])
        found = load(store.with_warmed(nodes[-1].root), KEYS.job, step=1)
    assert found.checkpoint == saved
    assert all(torch.equal(found.state[name], tensor) for name, tensor in state.items())


def test_another_step_and_another_folder_can_be_requested(
    spec: StoreSpec, saved: Checkpoint, nodes: list[Agent]
) -> None:
    request = Request(checkpoint=KEYS.job, step=1, destination="first")
    prewarm(make_settings(spec, nodes[:1], requests=[request]))
    files = read_files(nodes[0].root)
    assert {path.split("/")[0] for path in files} == {"first"}
    assert {path.split("/")[1] for path in files} == {"step_000000001"}
    assert sum(path.endswith(".safetensors") for path in files) == len(saved.parts)


def test_a_checkpoint_that_is_not_whole_is_refused(spec: StoreSpec, saved: Checkpoint) -> None:
    store, settings = open_store(spec), make_settings(spec, [], requests=[NEWEST])
    part = saved.parts[0]
    key = KEYS.make_part_key(part.step, part.digest)
    put(store, key, b"cut")
    with pytest.raises(errors.CorruptError, match=rf"3 bytes, and {part.size} by the metadata of"):
        preview(settings)
    delete(store, [key])
    with pytest.raises(errors.NotFoundError, match="is missing, and step 2 of runs/one has it"):
        preview(settings)
    other = make_settings(spec, [], requests=[Request(checkpoint="runs/two")])
    with pytest.raises(errors.NotFoundError, match="runs/two has no checkpoint"):
        preview(other)


@pytest.mark.parametrize("damage", ["none", "bytes", "size", "missing", "no folder"])
def test_a_checkpoint_is_read_from_the_disk_as_far_as_it_is_there_undamaged(
    spec: StoreSpec, saved: Checkpoint, tmp_path: Path, damage: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    store, folder = open_store(spec), tmp_path / "warm"
    first, *others = saved.parts
    for part in saved.parts if damage != "no folder" else ():
        key = KEYS.make_part_key(part.step, part.digest)
        copied = read(store, key)
        if part is first and damage == "missing":
            continue
        if part is first and damage in {"bytes", "size"}:
            copied = copied[:-1] + bytes([copied[-1] ^ 1]) if damage == "bytes" else copied[:-1]
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(copied)
    if damage == "none":  # nothing is left to read in the store
        delete(store, [KEYS.make_part_key(part.step, part.digest) for part in others])
    found = load(store.with_warmed(folder), KEYS.job, step=2)
    assert torch.equal(found.state["w"], make_state(2)["w"])
    assert torch.equal(found.state["v"], make_state(2)["v"])
    warned = [one for one in caplog.messages if f"It is read from {store.url}." in one]
    assert len(warned) == (damage in {"bytes", "size"})
