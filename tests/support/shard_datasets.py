"""Small complete datasets in a store, with a manifest and the digests of all blocks."""

from collections.abc import Sequence
from dataclasses import replace

from millrace.block_lists import join_shard_blocks
from millrace.datasets.formats import Fields, open_format
from millrace.datasets.sample import Sample
from millrace.digest import compute_digest, hash_blocks
from millrace.keys.datasets import DatasetKeys
from millrace.records import commit_once
from millrace.schemas.dataset import (
    CommittedShard,
    Manifest,
    ManifestShard,
    encode_sample_offsets,
)
from millrace.storage import Store, put
from tests.support.formats import describe_shard


def write_dataset(
    store: Store,
    name: str,
    formats: Sequence[str],
    fields: Fields,
    shards: Sequence[Sequence[Sample]],
    *,
    split: str = "train",
    has_blocks: bool = True,
) -> Manifest:
    """Write a dataset, and return its manifest.

    Args:
        store: Store of the dataset.
        name: Name of the dataset.
        formats: Formats of the shards. Each has all samples.
        fields: Types of the fields.
        shards: Samples of each shard.
        split: Split of the samples.
        has_blocks: Whether the dataset has the digests of its blocks.
    """
    keys = DatasetKeys(name)
    described: list[ManifestShard] = []
    committed: dict[str, CommittedShard] = {}
    encoders = {one: open_format(one).make_encoder(fields, 1 << 16) for one in formats}
    for number, samples in enumerate(shards):
        for one, encoder in encoders.items():
            for sample in samples:
                encoder.prepare(sample)
                encoder.append()
            body = bytes(encoder.close())
            shard = replace(
                describe_shard(open_format(one), keys, body, len(samples), split, number),
                sample_offsets=encode_sample_offsets(encoder.sample_offsets),
            )
            put(store, shard.key, body)
            described.append(shard)
            committed[shard.key] = CommittedShard(
                format=one, key=shard.key, size=shard.size, digest=shard.digest,
                blocks=CommittedShard.encode_blocks(hash_blocks(body)),
            )  # fmt: skip
            encoder.reset()
    manifest = Manifest(
        dataset=name,
        plan_digest=compute_digest(name.encode()),
        formats=tuple(formats),
        fields={name: kind.value for name, kind in fields.items()},
        shards=tuple(described),
        samples={split: sum(map(len, shards))},
        size=sum(shard.size for shard in described),
        quarantined=0,
    )
    if has_blocks:
        put(store, keys.block_digests, join_shard_blocks(manifest, committed))
    commit_once(store, keys.manifest, manifest)
    return manifest
