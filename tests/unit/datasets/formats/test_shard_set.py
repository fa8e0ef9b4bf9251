"""Batches of samples fill the same shards as single samples."""

import random

import pytest

from millrace.datasets.formats.shard_set import ShardSet
from millrace.datasets.sample import RowBatch, Sample, batch_rows
from millrace.schemas.dataset import ShardLayout


def make_samples(seed: int) -> list[Sample]:
    rng = random.Random(seed)
    return [
        Sample(f"{n:09d}", {"txt": "ü".encode() * rng.randrange(200), "cls": b"%d" % n}, n + 1)
        for n in range(400)
    ]


def fill_by_samples(layout: ShardLayout, samples: list[Sample]) -> list[list[bytes]]:
    shards, found = ShardSet(layout), list[list[bytes]]()

    def close() -> None:
        found.append([bytes(view) for view in shards.close()])
        shards.reset()

    for sample in samples:
        if not shards.add(sample, layout.shard_bytes):
            close()
            assert shards.add(sample, layout.shard_bytes)
        if shards.samples >= layout.shard_samples:
            close()
    close()
    return found


def fill_by_batches(
    layout: ShardLayout, samples: list[Sample], rng: random.Random
) -> list[list[bytes]]:
    shards, found = ShardSet(layout), list[list[bytes]]()

    def close() -> None:
        found.append([bytes(view) for view in shards.close()])
        shards.reset()

    while samples:
        [batch], samples = (
            [*batch_rows(iter(samples[: (size := rng.randrange(1, 60))]))],
            samples[size:],
        )
        assert isinstance(batch, RowBatch)
        while batch:
            added = shards.add_batch(batch, layout.shard_bytes, layout.shard_samples)
            batch = batch.slice(added, len(batch))
            if not added or shards.samples >= layout.shard_samples:
                close()
    close()
    return found


@pytest.mark.parametrize(
    "formats", [("mds",), ("litdata", "mds"), ("parquet",), ("parquet", "mds")]
)
@pytest.mark.parametrize(("shard_bytes", "shard_samples"), [(1, 1000), (5000, 1000), (9000, 17)])
def test_batches_fill_the_same_shards_as_single_samples(
    formats: tuple[str, ...], shard_bytes: int, shard_samples: int
) -> None:
    layout = ShardLayout(
        formats=formats,
        fields={"cls": "int", "txt": "str"},
        writer={},
        shard_bytes=shard_bytes,
        shard_samples=shard_samples,
    )
    assert ShardSet(layout).takes_batches
    for seed in range(3):
        samples = make_samples(seed)
        expected = fill_by_samples(layout, samples)
        assert len(expected) > 10
        assert fill_by_batches(layout, samples, random.Random(seed)) == expected
