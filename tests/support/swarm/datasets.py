"""Complete datasets of any bytes, with the digests of all blocks, made without a sharding run."""

from collections.abc import Mapping

from blake3 import blake3

from millrace.datasets.indexes import make_indexes
from millrace.keys.datasets import DatasetKeys
from millrace.records import commit_once
from millrace.schemas.dataset import Manifest, ManifestShard
from millrace.storage import Store, put
from tests.oracle import compute_blake3

MIB = 1 << 20


def write_dataset(store: Store, name: str, shards: Mapping[str, bytes]) -> None:
    """Write shards by their keys, the manifest that names them, and the digests of their blocks."""
    for key, body in shards.items():
        put(store, key, body)
    put(store, DatasetKeys(name).block_digests, b"".join(map(hash_blocks, shards.values())))
    named = tuple(
        ManifestShard(
            format="webdataset",
            key=key,
            split="train",
            samples=1,
            size=len(body),
            digest=compute_blake3(body),
        )
        for key, body in shards.items()
    )
    manifest = Manifest(
        dataset=name, plan_digest=compute_blake3(b""), formats=("webdataset",), shards=named,
        samples={"train": len(named), "val": 0}, size=sum(shard.size for shard in named),
        quarantined=0,
    )  # fmt: skip
    for key, body in make_indexes(manifest).items():
        put(store, key, body)
    commit_once(store, DatasetKeys(name).manifest, manifest)


def hash_blocks(body: bytes) -> bytes:
    """Return the joined digests of the blocks of bytes that are not empty."""
    return b"".join(blake3(body[at : at + MIB]).digest() for at in range(0, len(body), MIB))
