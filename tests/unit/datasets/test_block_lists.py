"""Digests of the blocks of shards: written, read, verified, repaired, and used to mend files."""

import json
from pathlib import Path

import pytest

from millrace import errors
from millrace.block_lists import read_blocks_of, read_shard_blocks
from millrace.campaigns.worker import shards as worker_shards
from millrace.campaigns.worker.shards import fetch_shard
from millrace.datasets import PipelineSettings, repair_dataset, shard_dataset, verify_dataset
from millrace.digest import BLOCK_SIZE, hash_blocks
from millrace.storage import delete, open_store, put, read

KEY = "d/block_digests.bin"


@pytest.fixture
def settings(tmp_path: Path) -> PipelineSettings:
    (tmp_path / "source").mkdir()
    lines = [json.dumps({"id": n, "text": f"{n} " * 20_000}) for n in range(90)]
    (tmp_path / "source" / "a.jsonl").write_text("\n".join(lines))
    return PipelineSettings.model_validate(
        {
            "dataset": "d",
            "source": {"url": (tmp_path / "source").as_uri(), "columns": {"txt": "text"}},
            "store": {"url": (tmp_path / "store").as_uri()},
            "sharding": {"shard_bytes": "4MiB"},
            "execution": {"workers": 0},
        }
    )


def test_block_digests_are_verified_and_made_again(settings: PipelineSettings) -> None:
    manifest = shard_dataset(settings).manifest
    store = open_store(settings.store)
    whole = read(store, KEY)
    expected = {shard.key: hash_blocks(read(store, shard.key)) for shard in manifest.shards}
    assert whole == b"".join(expected.values())
    assert len(whole) < manifest.size / 10_000
    assert read_shard_blocks(store, manifest) == expected
    assert verify_dataset(store, "d").is_intact
    first = manifest.shards[0].key
    for damaged in (None, b"", whole[:-1], whole + b"x", b"x" + whole[1:]):
        delete(store, [KEY])
        if damaged is not None:
            put(store, KEY, damaged)
        assert read_blocks_of(store, manifest, first) in {b"", expected[first]}
        assert first not in read_shard_blocks(store, manifest) or damaged == whole[:-1]
        found = verify_dataset(store, "d")
        assert [fault.key for fault in found.all_faults] == [KEY]
        assert repair_dataset(settings).remade_keys == (KEY,)
        assert read(store, KEY) == whole
    data = bytearray(read(store, first))
    data[2 * BLOCK_SIZE + 5] ^= 1
    put(store, first, data)
    (fault,) = verify_dataset(store, "d").faults
    assert "the digest differs in MiB 2, counted from 0" in fault.reason


def test_only_damaged_blocks_are_read_again(
    settings: PipelineSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = shard_dataset(settings).manifest
    store, shard, path = open_store(settings.store), manifest.shards[0], tmp_path / "data" / "s.tar"
    ranges: list[int] = []

    def count(*args: object, **options: object) -> bytes:
        data = read_range(*args, **options)
        ranges.append(len(data))
        return data

    read_range = worker_shards.read_range
    monkeypatch.setattr(worker_shards, "read_range", count)
    fetch_shard(store, manifest, shard, path)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[BLOCK_SIZE + 9] ^= 4
    cut = whole[: 2 * BLOCK_SIZE + 3]
    for damaged, size in (
        (flipped, BLOCK_SIZE), (cut, len(whole) - 2 * BLOCK_SIZE), (whole + b"xyz", 0),
    ):  # fmt: skip
        ranges.clear()
        path.write_bytes(damaged)
        fetch_shard(store, manifest, shard, path)
        assert (path.read_bytes(), sum(ranges)) == (whole, size)
    path.write_bytes(flipped)
    put(store, shard.key, flipped)
    with pytest.raises(errors.CorruptError, match="in bytes 1,048,576 to 2,097,152"):
        fetch_shard(store, manifest, shard, path)
    assert path.read_bytes() == flipped
    assert [file.name for file in path.parent.iterdir()] == ["s.tar"]
