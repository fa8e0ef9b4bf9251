"""Import of checkpoints of other tools from a folder: which files, which values, which refusals."""

import argparse
import random
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import save, save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from millrace import errors
from millrace.checkpoints import (
    ImportedCheckpoint,
    Saver,
    SaveSettings,
    import_checkpoint,
    importing,
    load,
)
from millrace.checkpoints.foreign_files import LocalForeignFiles, StoredForeignFiles
from millrace.checkpoints.progress_events import PartStored
from millrace.storage import Store, list_objects, open_store, put

SMALL = SaveSettings(part_bytes=4096)


class Net(torch.nn.Module):
    """A model with a shared parameter, buffers, and versions of its modules in its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(40, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x)))


def make_tensors(*names: str) -> dict[str, torch.Tensor]:
    dice = torch.Generator().manual_seed(len(names))
    return {name: torch.randn(30, 20, generator=dice) for name in names}


def make_training() -> dict[str, Any]:
    """Return what a training script gives to ``torch.save``."""
    torch.manual_seed(5)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    for _ in range(2):
        net(torch.arange(16)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": {"last_epoch": 2, "rates": (1e-3, 1e-4)},
        "rng": torch.get_rng_state(),
        "epoch": 3,
        "name": "тест",
        "best": None,
        "dtype": torch.bfloat16,
    }


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "bucket").as_uri())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "others"
    path.mkdir()
    return path


def import_and_load(
    source: Path | str, store: Store, **more: Any
) -> tuple[ImportedCheckpoint, dict[str, Any]]:
    done = import_checkpoint(str(source), store, "job", settings=SMALL, **more)
    return done, load(store, "job", step=done.checkpoint.step).state


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected.detach())
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert_equal(found[name], value)
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert (type(found), found) == (type(expected), expected)


def test_a_safetensors_file_becomes_the_weights_of_a_model(folder: Path, store: Store) -> None:
    tensors = make_tensors("a", "b.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text("{}")
    done, state = import_and_load(folder, store)
    assert_equal(state, {"model": tensors})
    assert (done.files, done.tensors, done.checkpoint.step) == (("model.safetensors",), 2, 0)
    assert done.checkpoint.notes == {"imported from": f"{folder.as_uri()}/model.safetensors"}


def test_an_import_is_the_checkpoint_that_a_saver_makes(folder: Path, store: Store) -> None:
    tensors = make_tensors(*"abcdefgh")
    save_file(tensors, folder / "model.safetensors")
    done, _ = import_and_load(folder, store)
    with Saver(store, "saved", SMALL) as saver:
        assert saver.save({"model": tensors}, step=0).result().root == done.checkpoint.root
    assert import_and_load(folder, store)[0].checkpoint == done.checkpoint


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_an_index_names_the_files(kind: str, folder: Path, store: Store) -> None:
    first, second = make_tensors("a", "b"), make_tensors("c")
    stem = "model" if kind == "safetensors" else "pytorch_model"
    names = [f"{stem}-0000{n}-of-00002.{kind}" for n in (1, 2)]
    for name, tensors in zip(names, (first, second), strict=True):
        if kind == "bin":
            torch.save(tensors, folder / name)
        else:
            save_file(tensors, folder / name)
    places = dict.fromkeys(first, names[0]) | dict.fromkeys(second, names[1])
    index = folder / f"{stem}.{kind}.index.json"
    index.write_bytes(orjson.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    save_file(make_tensors("z"), folder / "adapter_model.safetensors")
    done, state = import_and_load(folder, store)
    assert_equal(state, {"model": first | second})
    assert done.files == tuple(names)

    index.write_bytes(orjson.dumps({"weight_map": places | {"d": names[1]}}))
    with pytest.raises(errors.CorruptError, match="names 'd', which no file has"):
        import_and_load(folder, store)
    (folder / names[1]).unlink()
    with pytest.raises(errors.CorruptError, match=r"00002-of-00002.* is not beside it"):
        import_and_load(folder, store)
    for wrong in (b"{", b"[]", b'{"weight_map": {"a": 3}}', b'{"weight_map": {}}'):
        index.write_bytes(wrong)
        with pytest.raises(errors.CorruptError, match=r"index of weights|names no files"):
            import_and_load(folder, store)


def test_the_state_of_a_training_is_as_torch_loads_it(folder: Path, store: Store) -> None:
    path = folder / "step_1000" / "model.bin"
    path.parent.mkdir()
    training = make_training()
    torch.save(training, path)
    done, state = import_and_load(folder, store)
    assert done.checkpoint.step == 1000
    assert done.files == ("step_1000/model.bin",)
    expected = torch.load(path, weights_only=True)
    expected["model"] = dict(expected["model"])
    assert_equal(state, expected)
    tied = {name: done.checkpoint.tensors.get(f"model.{name}") for name in ("embed", "head")}
    assert sum(record is not None for record in tied.values()) < 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(24.0).reshape(4, 6).t(),
        lambda: torch.arange(24)[3:20:2],
        lambda: torch.tensor(3.5),
        lambda: torch.zeros(0, 4),
        lambda: torch.ones(1, 5).expand(3, 5),
        lambda: torch.tensor([True, False]),
        lambda: torch.tensor([-3, 4], dtype=torch.int8),
        lambda: torch.tensor([1 + 2j]),
        lambda: torch.tensor([0.1], dtype=torch.float64),
        lambda: torch.tensor([0.1], dtype=torch.float16),
        lambda: torch.tensor([0.1], dtype=torch.bfloat16),
        lambda: torch.nn.Parameter(torch.ones(3)),
    ],
)
def test_tensors_of_every_kind(
    make: Callable[[], torch.Tensor], folder: Path, store: Store
) -> None:
    torch.save(OrderedDict(w=make()), folder / "weights.pt")
    assert_equal(import_and_load(folder / "weights.pt", store)[1], {"model": {"w": make()}})


def test_the_newest_step_or_the_given_one(folder: Path, store: Store) -> None:
    for step in (50, 1000, 200):
        (folder / f"checkpoint-{step}").mkdir()
        save_file(
            {"w": torch.tensor([float(step)])}, folder / f"checkpoint-{step}/model.safetensors"
        )
        torch.save({"lr": 0.1}, folder / f"checkpoint-{step}/optimizer.pt")
    (folder / "logs").mkdir()
    done, state = import_and_load(folder, store)
    assert (done.checkpoint.step, state["model"]["w"].item()) == (1000, 1000.0)
    done, state = import_and_load(folder, store, step=200)
    assert (done.checkpoint.step, state["model"]["w"].item()) == (200, 200.0)
    with pytest.raises(errors.NotFoundError, match=r"no folder of step 7. It has checkpoint-50, "):
        import_and_load(folder, store, step=7)
    done, _ = import_and_load(folder / "checkpoint-50", store)
    assert done.checkpoint.step == 50
    done, _ = import_and_load(folder / "checkpoint-50", store, step=3)
    assert done.checkpoint.step == 3


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("global_step123", 123),
        ("globalstep5", 5),
        ("iter_0000100", 100),
        ("Checkpoint=7", 7),
        ("epoch=3-step=100", 100),
        ("2000", 2000),
        ("2024-01", 0),
        ("liter-2b", 0),
        ("llama-3", 0),
    ],
)
def test_the_step_is_in_the_name(name: str, step: int, folder: Path, store: Store) -> None:
    (folder / name).mkdir()
    save_file(make_tensors("a"), folder / name / "model.safetensors")
    assert import_and_load(folder / name, store)[0].checkpoint.step == step


def test_one_dict_of_a_file_is_imported_alone(folder: Path, store: Store) -> None:
    whole = {"args": argparse.Namespace(lr=1), "state": {"model": make_tensors("a"), "n": 3}}
    torch.save(whole, folder / "last.ckpt")
    _, state = import_and_load(folder, store, only="state.model")
    assert_equal(state, {"model": make_tensors("a")})
    with pytest.raises(errors.ConfigurationError, match=r"no value 'model'.*args, state"):
        import_and_load(folder, store, only="model")
    with pytest.raises(errors.ConfigurationError, match=r"'state.n' is no dict"):
        import_and_load(folder, store, only="state.n")


def test_plain_values_of_schedulers_are_imported(folder: Path, store: Store) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 3, 5])
    saved = {
        "model": model.state_dict(), "scheduler": scheduler.state_dict(),
        "size": torch.Size([3, 4]), "bytes": b"ab\xff", 0.5: "half",
    }  # fmt: skip
    torch.save(saved, folder / "model.pt")
    _, state = import_and_load(folder, store)
    assert state["scheduler"]["milestones"] == {3: 2, 5: 1}
    assert (state["size"], state["bytes"], state[0.5]) == ((3, 4), b"ab\xff", "half")


@pytest.mark.parametrize(
    "name", ["epoch=3-step=100.ckpt", "my model.pt", "модель.bin", "a+b#[x].pt", "a%20b.pth", "w"]
)
def test_a_file_of_any_name(name: str, folder: Path, store: Store) -> None:
    torch.save(make_tensors("a"), folder / name)
    done, state = import_and_load(folder / name, store)
    assert_equal(state, {"model": make_tensors("a")})
    assert done.checkpoint.step == (100 if "step" in name else 0)


def test_a_folder_whose_name_looks_like_a_file(folder: Path, store: Store) -> None:
    (folder / "run.ckpt").mkdir()
    save_file(make_tensors("a"), folder / "run.ckpt" / "model.safetensors")
    assert import_and_load(folder / "run.ckpt", store)[0].tensors == 1


def test_a_final_model_beside_folders_of_steps(folder: Path, store: Store) -> None:
    for name, value in (("checkpoint-500", 500.0), ("checkpoint-1000", 1000.0), (".", -1.0)):
        (folder / name).mkdir(exist_ok=True)
        save_file({"w": torch.tensor([value])}, folder / name / "model.safetensors")
    torch.save({"state": {}}, folder / "optimizer.pt")

    def get_weight(**more: Any) -> tuple[int, float]:
        done, state = import_and_load(folder, store, **more)
        return done.checkpoint.step, state["model"]["w"].item()

    assert get_weight(step=500) == (500, 500.0)
    assert get_weight() == (0, -1.0)
    assert get_weight(step=1500) == (1500, -1.0)
    (folder / "model.safetensors").unlink()
    (folder / "tmp-checkpoint-2000").mkdir()
    assert get_weight() == (1000, 1000.0)
    (folder / "checkpoint-1000-old").mkdir()
    with pytest.raises(errors.ConfigurationError, match="two folders of step 1000"):
        get_weight()


def test_a_part_of_the_weights_is_not_all(folder: Path, store: Store) -> None:
    save_file(make_tensors("a"), folder / "model-00001-of-00002.safetensors")
    for source in (folder, folder / "model-00001-of-00002.safetensors"):
        with pytest.raises(errors.CorruptError, match="is one of 2 files, and their index"):
            import_and_load(source, store)
    (folder / "model-00001-of-00002.safetensors").unlink()
    torch.save({"state": make_tensors("a")}, folder / "optimizer.pt")
    with pytest.raises(errors.NotFoundError, match="has no weights"):
        import_and_load(folder, store)


def test_a_file_that_is_cut_after_its_copy_is_imported_as_it_was(
    folder: Path, store: Store
) -> None:
    path = folder / "last.ckpt"
    torch.save(make_tensors("a", "b"), path)
    _, state = import_and_load(path, store)

    def cut(event: object) -> None:
        if isinstance(event, PartStored):
            path.write_bytes(b"")

    import_checkpoint(str(path), store, "other", settings=SMALL, progress=cut)
    assert path.read_bytes() == b""
    assert_equal(load(store, "other").state, state)


def test_a_file_that_is_written_while_it_is_copied_is_not_imported(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "last.ckpt"
    torch.save(make_tensors("a", "b"), path)
    copy = shutil.copyfile

    def copy_and_write(source: Path, target: Path) -> None:
        copy(source, target)
        path.write_bytes(path.read_bytes()[:-1])

    monkeypatch.setattr(shutil, "copyfile", copy_and_write)
    with pytest.raises(errors.ChangedError, match="was written while it was imported"):
        import_checkpoint(str(path), store, "job")
    with pytest.raises(errors.NotFoundError):
        load(store, "job")


INDEX = "model.safetensors.index.json"
SHARDS = tuple(f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


REPLACEMENTS = (
    (INDEX, SHARDS), (SHARDS[0], SHARDS), (SHARDS[1], SHARDS), (SHARDS[1], (INDEX,))
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "after", "replaced"),
    [(kind, *each) for kind in ("folder", "store") for each in REPLACEMENTS],
)
def test_files_of_two_versions_are_not_imported(
    folder: Path,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    after: str,
    replaced: tuple[str, ...],
) -> None:
    """Each file is whole, and some are replaced after another one was copied."""
    source = open_store(folder.as_uri() if kind == "folder" else "memory://replaced")
    place = folder if kind == "folder" else source
    cls = LocalForeignFiles if kind == "folder" else StoredForeignFiles
    fetch = cls.fetch

    def put_version(number: float, names: tuple[str, ...]) -> None:
        for name in names:
            places = {name[6:11]: name for name in SHARDS}
            body = orjson.dumps({"metadata": {"version": number}, "weight_map": places})
            tensor = {name[6:11]: torch.full((20,), number)}
            put(source, name, body if name == INDEX else save(tensor))

    def fetch_and_replace(self: Any, key: str, target: Path) -> Path:
        path = fetch(self, key, target)
        if key == after:
            put_version(2, replaced)
        return path

    monkeypatch.setattr(importing, "open_foreign_files", lambda _: (cls(place), ""))
    put_version(1, (INDEX, *SHARDS))
    with monkeypatch.context() as during:
        during.setattr(cls, "fetch", fetch_and_replace)
        with pytest.raises(errors.ChangedError, match="was written while it was imported: import"):
            import_checkpoint("x", store, "job", settings=SMALL)
    assert not list(list_objects(store))


def test_unclear_and_missing_weights(folder: Path, store: Store) -> None:
    with pytest.raises(errors.NotFoundError, match="has no weights: no file that ends with"):
        import_and_load(folder, store)
    for url in ("hf://u:secret@a/b", "hf://a/b?token=secret", "hf://a/b@main?token=secret"):
        with pytest.raises(errors.ConfigurationError, match="names no repository") as refusal:
            import_checkpoint(url, store, "job")
        assert "secret" not in str(refusal.value)
    with pytest.raises(errors.ConfigurationError, match="'hf://a' names no repository"):
        import_checkpoint("hf://a", store, "job")
    with pytest.raises(errors.NotFoundError, match=r"no .*/w\.pt"):
        import_and_load(folder / "w.pt", store)
    with pytest.raises(errors.NotFoundError, match="There is no file or folder"):
        import_and_load(folder / "none", store)
    for name in ("best.pt", "last.pt"):
        torch.save(make_tensors("a"), folder / name)
    with pytest.raises(errors.ConfigurationError, match=r"\(best.pt, last.pt\): write the URL"):
        import_and_load(folder, store)
    assert import_and_load((folder / "last.pt").as_uri(), store)[0].files == ("last.pt",)
    torch.save(make_tensors("a"), folder / "model.pt")
    assert import_and_load(folder, store)[0].files == ("model.pt",)
    dcp = folder / "dcp"
    with pytest.warns(UserWarning, match="single process"):
        save_dcp(make_tensors("a"), checkpoint_id=dcp, no_dist=True)
    with pytest.raises(errors.ConfigurationError, match=r"dcp_to_torch FOLDER FILE.pt"):
        import_and_load(dcp, store)


def test_files_that_are_not_states_are_refused(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "model.pt"

    def refuse(message: str) -> None:
        with pytest.raises(errors.CorruptError, match=message) as caught:
            import_and_load(path, store)
        assert "model.pt cannot be imported" in str(caught.value)

    torch.save({"args": argparse.Namespace(lr=1), "w": torch.ones(2)}, path)
    refuse(r"args has a value of another kind \(argparse.Namespace\).*--only model")
    torch.save({"device": torch.device("cpu"), "w": torch.ones(2)}, path)
    refuse(r"a value of another kind \(torch.device\)")
    torch.save(torch.nn.Linear(2, 2), path)
    refuse(r"it is a torch.nn.modules.linear.Linear, and not a dict: save its state_dict")
    torch.save([torch.ones(2)], path)
    refuse("not a dict")
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    refuse(r"not an archive.* with torch 1\.6")
    path.write_bytes(b"")
    refuse("empty")
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n")
    with pytest.raises(errors.CorruptError, match=r"pointer of Git LFS.*run git lfs pull"):
        import_and_load(path, store)
    for empty in ({}, {"epoch": 3}):
        torch.save(empty, path)
        refuse("has no tensors")
    torch.save({"w": torch.tensor([1 + 2j]).conj()}, path)
    refuse("values that torch computes when it loads them")
    torch.save({"w": torch.zeros(0, 1 << 30, 1 << 31)}, path)
    refuse("a tensor has a wrong shape")
    torch.save({"w": torch.ones(2), "texts": ["a" * (1 << 20)] * 100}, path)
    refuse("longer than 64 MiB")
    shared = torch.ones(1 << 20)
    torch.save({f"w{n}": shared.expand(32, 1 << 20)[n:] for n in range(4)}, path)
    refuse("many times its size")
    nested: list[Any] = [1]
    for _ in range(40):
        nested = [nested, nested]
    monkeypatch.setattr("millrace.checkpoints.importing._MAX_VALUES", 1000)
    torch.save({"w": nested}, path)
    refuse("more than 1,000 values")
    monkeypatch.undo()
    save_file(make_tensors("a"), folder / "one.safetensors")
    whole = (folder / "one.safetensors").read_bytes()
    head = orjson.dumps(
        {"w": {"dtype": "F32", "shape": [0, 1 << 30, 1 << 31], "data_offsets": [0, 0]}}
    )
    heads = [len(text).to_bytes(8, "little") + text for text in (b"5", b"null", head)]
    for body in (whole[:-1], whole[:7], b"", whole + b"x", *heads):
        (folder / "one.safetensors").write_bytes(body)
        with pytest.raises(errors.CorruptError, match=r"one.safetensors cannot be imported"):
            import_and_load(folder / "one.safetensors", store)
    assert not list(Path(store.location.bucket).rglob("metadata*"))


def test_a_file_with_a_flipped_bit_is_refused_or_the_same(folder: Path, store: Store) -> None:
    path = folder / "model.pt"
    torch.save({"model": OrderedDict(make_tensors("a", "b")), "step": 3}, path)
    whole = path.read_bytes()
    expected = import_and_load(path, store)[1]
    with zipfile.ZipFile(path) as archive:
        (data,) = (info for info in archive.infolist() if info.filename.endswith("data/0"))
    dice = random.Random(4)
    places = [data.header_offset + 200, *(dice.randrange(len(whole)) for _ in range(150))]
    refused = 0
    for number, place in enumerate(places):
        body = bytearray(whole)
        body[place] ^= 1 << dice.randrange(8)
        path.write_bytes(body)
        try:
            _, state = import_and_load(path, store, step=10 + number)
        except errors.MillraceError:
            refused += 1
        else:
            for name in ("a", "b"):  # other bits are names, numbers and padding
                found = state.get("model", {}).get(name)
                assert found is None or torch.equal(found, expected["model"][name])
    assert refused > 100
