"""Shards and indexes of one format, and fields of every type, for the tests of formats."""

from collections.abc import Iterable

from millrace.datasets.formats import Fields, FieldType, ShardFormat
from millrace.datasets.sample import Sample
from millrace.digest import compute_digest
from millrace.keys.datasets import CommitName, DatasetKeys
from millrace.schemas.dataset import ManifestShard

ALL_TYPES = {
    "body": FieldType.BYTES,
    "count": FieldType.INT,
    "meta": FieldType.JSON,
    "score": FieldType.FLOAT,
    "text": FieldType.STR,
    "wide": FieldType.UINT32_ARRAY,
    "words": FieldType.UINT16_ARRAY,
}


def describe_shard(
    shard_format: ShardFormat,
    keys: DatasetKeys,
    body: bytes,
    samples: int,
    split: str = "train",
    number: int = 0,
) -> ManifestShard:
    """Return a shard as the manifest has it, with the key that the engine gives it."""
    name = CommitName(f"{split}-00000", number)
    return ManifestShard(
        format=shard_format.name,
        key=keys.make_shard_key(shard_format.name, split, name, shard_format.extension),
        split=split,
        samples=samples,
        size=len(body),
        digest=compute_digest(body),
    )


def make_objects(
    shard_format: ShardFormat,
    keys: DatasetKeys,
    fields: Fields,
    shards: Iterable[Iterable[Sample]],
) -> dict[str, bytes]:
    """Return the shards of the split ``train`` and their indexes, by their keys."""
    encoder = shard_format.make_encoder(fields, 1 << 16)
    objects: dict[str, bytes] = {}
    described: list[ManifestShard] = []
    for number, samples in enumerate(shards):
        for sample in samples:
            encoder.prepare(sample)
            encoder.append()
        body = bytes(encoder.close())
        described.append(describe_shard(shard_format, keys, body, encoder.samples, number=number))
        objects[described[-1].key] = body
        encoder.reset()
    return {**objects, **shard_format.make_indexes(keys, fields, described)}
