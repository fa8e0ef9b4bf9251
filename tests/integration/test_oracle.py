"""The oracle finds each fault of the digests of blocks, of datasets and of checkpoints."""

import io
import json
import random
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import pytest

from millrace.datasets import PipelineSettings, shard_dataset
from millrace.gradients import WeightState, begin_run
from millrace.keys.gradients import ChainKeys
from millrace.storage import open_store
from tests.oracle import (
    Folder,
    Verdict,
    compute_blake3,
    compute_block_list,
    compute_weights_digest,
    judge,
    judge_checkpoints,
    judge_epoch,
    read_checkpoints,
)
from tests.soak.formats import make_format_sources
from tests.soak.source_data import SourceData, make_columns

MIB = 1 << 20
SIZES = (3 * MIB, MIB + 5, 7)


def make_tar(members: Iterable[tuple[str, bytes]]) -> bytes:
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return body.getvalue()


def make_shard(number: int, size: int) -> bytes:
    """Return a shard with one sample of random text."""
    return make_tar([("a.id", b"a"), ("a.txt", random.Random(number).randbytes(size))])


FILES = [make_shard(number, size) for number, size in enumerate(SIZES)]
FAULTS: dict[str, Callable[[bytes], bytes | None]] = {
    "flipped": lambda body: body[:40] + bytes([body[40] ^ 1]) + body[41:],
    "shorter": lambda body: body[:-32],
    "longer": lambda body: body + body[:32],
    "swapped": lambda body: body[32:64] + body[:32] + body[64:],
    "empty": lambda _: b"",
    "missing": lambda _: None,
}


def write(path: Path, body: bytes | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if body is not None:
        path.write_bytes(body)


def write_record(path: Path, record: dict[str, object]) -> None:
    write(path, json.dumps({"record": record}).encode())


def get_digits(body: bytes) -> str:
    return compute_blake3(body).removeprefix("blake3:")


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """A checkpoint of three files, the first of them in an earlier step's folder."""
    folder = tmp_path / "jobs/job/checkpoints"
    parts: list[dict[str, object]] = []
    for number, body in enumerate(FILES):
        step = 7 if number else 3
        parts.append({"step": step, "digest": compute_blake3(body), "size": len(body)})
        write(folder / f"step_{step:09d}/parts/{get_digits(body)}.safetensors", body)
        if len(body) > MIB:
            write(get_list(folder, number), compute_block_list(body))
    write_record(folder / "step_000000007/metadata.json", {"step": 7, "parts": parts})
    return folder


def get_list(folder: Path, number: int) -> Path:
    step = 7 if number else 3
    return folder / f"step_{step:09d}/block_digests/{get_digits(FILES[number])}.bin"


@pytest.mark.parametrize("job", ["", "jobs/job"])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_a_list_of_a_checkpoint_is_found(checkpoints, tmp_path, fault, number, job):
    assert judge_checkpoints(Folder(tmp_path), job, is_cleaned=True) == []
    write(get_list(checkpoints, number), FAULTS[fault](compute_block_list(FILES[number])))
    (found,) = judge_checkpoints(Folder(tmp_path), job, is_cleaned=False)
    assert get_list(checkpoints, number).name in found


def test_lists_that_no_large_file_needs_are_found_after_a_cleaning(checkpoints, tmp_path):
    strays = [
        checkpoints / f"step_000000003/block_digests/{'6' * 64}.bin",
        get_list(checkpoints, 2),
    ]
    for stray in strays:
        write(stray, bytes(64))
    assert judge_checkpoints(Folder(tmp_path), is_cleaned=False) == []
    found = judge_checkpoints(Folder(tmp_path), is_cleaned=True)
    assert len(found) == 2
    assert all(stray.name in fault for stray, fault in zip(strays, found, strict=True))
    assert judge_checkpoints(Folder(tmp_path), "jobs/other", is_cleaned=True) == []


@pytest.mark.parametrize("body", [None, b"other bytes", FILES[1][:-1] + b"?"])
def test_missing_and_damaged_files_of_a_checkpoint_are_found(checkpoints, tmp_path, body):
    name = f"{get_digits(FILES[1])}.safetensors"
    write(checkpoints / "step_000000007/parts" / name, body)
    (found,) = judge_checkpoints(Folder(tmp_path), is_cleaned=False)
    assert name in found


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_the_lists_of_a_dataset_is_found(tmp_path, fault):
    shards = {
        f"shards/webdataset/train/train-00000-{number:06d}.tar": body
        for number, body in enumerate(FILES)
    }
    for name, body in shards.items():
        write(tmp_path / "d" / name, body)
    named = [
        {"key": f"d/{name}", "size": len(body), "digest": compute_blake3(body), "samples": 1}
        | {"split": "train"}
        for name, body in shards.items()
    ]
    write_record(tmp_path / "d/plan.json", {"partitions": []})
    manifest = {"shards": named, "samples": {"train": 3}, "quarantined": 0}
    write_record(tmp_path / "d/manifest.json", manifest)
    write(tmp_path / "d/index.json", json.dumps({"shardlist": []}).encode())

    def find_problems() -> list[str]:
        verdict = judge(Folder(tmp_path), "d", rows=Counter(), bad_rows=Counter(), reference=None)
        return [problem for problem in verdict.problems if "block_digests" in problem]

    joined = b"".join(map(compute_block_list, FILES))
    write(tmp_path / "d/block_digests.bin", joined)
    assert find_problems() == []
    write(tmp_path / "d/block_digests.bin", FAULTS[fault](joined))
    assert len(find_problems()) == 1


def test_the_digest_of_saved_weights_is_that_of_the_chain(tmp_path):
    keys = ChainKeys("run", "1")
    state = WeightState(
        {"w": np.arange(300_000, dtype=np.float32).reshape(100, 3000), "b": np.ones(3, np.float32)},
        {"w": np.zeros((100, 3000), np.float32), "b": np.full(3, 2, np.float32)},
    )
    start = begin_run(open_store(tmp_path.as_uri()), keys, state)
    ((step, checkpoint),) = read_checkpoints(Folder(tmp_path), keys.job).items()
    assert (step, checkpoint["position"]) == (0, {"window": 0})
    assert compute_weights_digest(Folder(tmp_path), checkpoint) == start.state == state.digest()


def swap_splits(manifest: dict[str, Any]) -> None:
    """Name each shard's other split."""
    for shard in manifest["shards"]:
        shard["split"] = {"train": "val", "val": "train"}[shard["split"]]


def swap_counts(manifest: dict[str, Any]) -> None:
    """Exchange the numbers of samples of the two splits."""
    train, val = manifest["samples"]["train"], manifest["samples"]["val"]
    manifest["samples"] = {"train": val, "val": train}


def shard_columns(folder: Path) -> SourceData:
    """Make a dataset ``d`` of JSON lines in the folder ``store``, and return its source."""
    source = make_columns(folder / "source", random.Random(1))
    settings = {
        "dataset": "d",
        "source": {**source.source, "url": source.folder.as_uri()},
        "store": {"url": (folder / "store").as_uri()},
        "sharding": source.sharding,
        "execution": {"workers": 0, "max_quarantined": 0.2},
    }
    shard_dataset(PipelineSettings.model_validate(settings))
    return source


def test_wrong_splits_and_quarantined_rows_are_found(tmp_path):
    source = shard_columns(tmp_path)

    def find_problems(bad_rows: Counter[str] = source.bad_rows, share: float = 0.15) -> list[str]:
        verdict = judge(
            Folder(tmp_path / "store"), "d", rows=source.rows, bad_rows=bad_rows, reference=None,
            val_share=share,
        )  # fmt: skip
        assert (verdict.lost, verdict.duplicated) == (0, 0)
        return verdict.problems

    assert find_problems() == []
    manifest = tmp_path / "store/d/manifest.json"
    original = manifest.read_bytes()
    for mutate, found in ((swap_splits, "is in train"), (swap_counts, "the manifest counts")):
        envelope = json.loads(original)
        mutate(envelope["record"])
        manifest.write_text(json.dumps(envelope))
        assert any(found in problem for problem in find_problems())
    manifest.write_bytes(original)
    other_row = source.bad_rows - Counter(list(source.bad_rows)[:1]) + Counter(["another row"])
    assert len(find_problems(other_row)) == 1
    assert len(find_problems(share=0.5)) == 1
    assert find_problems() == []


def read_members(shard: Path) -> list[tuple[str, bytes]]:
    with tarfile.open(shard) as tar:
        return [(one.name, cast("IO[bytes]", tar.extractfile(one)).read()) for one in tar]


def test_lost_and_doubled_rows_are_counted(tmp_path):
    source = shard_columns(tmp_path)

    def count() -> tuple[int, int]:
        verdict = judge(
            Folder(tmp_path / "store"), "d", rows=source.rows, bad_rows=source.bad_rows,
            reference=None, val_share=0.15,
        )  # fmt: skip
        assert verdict.is_correct == (verdict.lost == verdict.duplicated == 0)
        return verdict.lost, verdict.duplicated

    assert count() == (0, 0)
    shard = min((tmp_path / "store/d/shards/webdataset/train").glob("*.tar"))
    original, (first, second, *others) = shard.read_bytes(), read_members(shard)
    assert {Path(first[0]).suffix, Path(second[0]).suffix} == {".id", ".txt"}
    changed = [(n, body[:-1] + b"~" if n.endswith(".txt") else body) for n, body in (first, second)]
    for members, found in (
        (others, (1, 0)),
        ([first, second, *others, first, second], (0, 1)),
        ([*changed, *others], (1, 1)),
        ([*changed, *others, *changed], (1, 2)),
    ):
        shard.write_bytes(make_tar(members))
        assert count() == found
    shard.unlink()
    assert count() == (len(others) // 2 + 1, 0)
    shard.write_bytes(original)
    assert count() == (0, 0)


def test_lost_and_doubled_samples_of_an_epoch_are_counted(tmp_path):
    shard_columns(tmp_path)
    shards = (tmp_path / "store/d/shards/webdataset/train").glob("*.tar")
    members = dict(chain.from_iterable(map(read_members, shards)))
    first, *others = [
        (name.removesuffix(".txt"), body.decode())
        for name, body in members.items()
        if name.endswith(".txt")
    ]
    for received, found in (
        ([first, *others], (0, 0)),
        (others, (1, 0)),
        ([first, *others, first], (0, 1)),
        ([(first[0], "other text"), *others], (1, 1)),
        ([("other key", first[1]), *others], (1, 1)),
        ([], (len(others) + 1, 0)),
    ):
        verdict = judge_epoch(Folder(tmp_path / "store"), "d", received)
        assert (verdict.lost, verdict.duplicated) == found
        assert verdict.is_correct == (found == (0, 0))


@pytest.mark.parametrize("fault", ["flipped", "missing", "surplus", "index"])
def test_a_fault_in_another_format_than_webdataset_is_found(tmp_path, fault):
    generator = random.Random(0)
    (source,) = make_format_sources(tmp_path / "code", [make_columns(tmp_path / "rows", generator)])
    settings = PipelineSettings.model_validate(
        {
            "dataset": "d",
            "source": {"url": source.folder.as_uri(), **source.source},
            "store": {"url": (tmp_path / "out").as_uri()},
            "sharding": source.sharding,
            "execution": {"workers": 0, "max_quarantined": 0.2},
        }
    )
    shard_dataset(settings)

    def judge_again(reference: dict[str, str] | None) -> Verdict:
        return judge(
            Folder(tmp_path / "out"),
            "d",
            rows=source.rows,
            bad_rows=source.bad_rows,
            reference=reference,
            val_share=0.15,
        )

    reference = judge_again(None)
    assert reference.is_correct
    shard = tmp_path / "out/d/shards/mds/train/train-00000-000000.mds"
    match fault:
        case "flipped" | "missing":
            write(shard, FAULTS[fault](shard.read_bytes()))
        case "surplus":
            write(shard.with_name("train-00000-000900.mds"), shard.read_bytes())
        case "index":
            write(shard.with_name("index.json"), b"{}")
    found = judge_again(reference.digests)
    assert found.differing == 1
    assert (found.lost, found.duplicated) == (0, 0)
    assert bool(found.problems) == (fault != "index")
