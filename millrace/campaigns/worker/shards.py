"""Keep the shards of a dataset on the disk of a machine that trains."""

import logging
import os
from functools import partial
from pathlib import Path

from millrace import errors
from millrace.block_lists import read_blocks_of
from millrace.block_mending import mend_file
from millrace.digest import (
    BLOCK_SIZE,
    BlockHasher,
    compute_file_digest,
    describe_blocks,
    find_differing_blocks,
    hash_blocks,
    slice_blocks,
)
from millrace.schemas.dataset import Manifest, ManifestShard
from millrace.storage import Store, read_range, stream

log = logging.getLogger(__name__)


def fetch_shard(store: Store, manifest: Manifest, shard: ManifestShard, path: Path) -> None:
    """Make a file have the bytes of a shard.

    An intact file is not changed. Of a damaged file, only the damaged blocks are read from the
    store if the dataset has the digests of its blocks. Otherwise the whole shard is read. The file
    is replaced only by an intact file.

    Args:
        store: Store of the dataset.
        manifest: Manifest of the dataset.
        shard: Shard to fetch.
        path: Path of the file.

    Raises:
        CorruptError: The shard in the store differs from its manifest. The message names the bytes
            if the digests of the blocks are known.
    """
    if _matches_shard(path, shard):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        blocks = read_blocks_of(store, manifest, shard.key) if path.exists() else b""
        if blocks:
            fetch = partial(_fetch_blocks, store, shard, blocks)
            with temporary.open("w+b") as file:
                mend_file(path, file.fileno(), shard.size, blocks, fetch)
        else:
            if path.exists():
                log.warning(
                    "%s is damaged, and the digests of its blocks are missing: the whole shard is "
                    "read again", path,
                )  # fmt: skip
            _download(store, manifest, shard, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _matches_shard(path: Path, shard: ManifestShard) -> bool:
    """Decide whether a file has the size and the digest of a shard."""
    if not path.exists() or path.stat().st_size != shard.size:
        return False
    return compute_file_digest(path) == shard.digest


def _fetch_blocks(store: Store, shard: ManifestShard, blocks: bytes, numbers: range) -> bytes:
    """Return adjacent blocks of a shard.

    Raises:
        CorruptError: A block in the store has another digest.
    """
    start, end = numbers.start * BLOCK_SIZE, min(shard.size, numbers.stop * BLOCK_SIZE)
    data = read_range(store, shard.key, start, end)
    expected = slice_blocks(blocks, numbers)
    if differing := find_differing_blocks(hash_blocks(data), expected):
        raise _make_damaged_error(store, shard, [numbers.start + one for one in differing])
    return data


def _download(store: Store, manifest: Manifest, shard: ManifestShard, path: Path) -> None:
    """Read a whole shard into a file.

    Raises:
        CorruptError: The shard in the store has another digest.
    """
    hasher = BlockHasher()
    with path.open("wb") as file:
        # The object may have grown, so that only the shard's size is read.
        for data in stream(store, shard.key, end=shard.size):
            file.write(data)
            hasher.update(data)
    if hasher.compute() != shard.digest:
        blocks = read_blocks_of(store, manifest, shard.key)
        raise _make_damaged_error(store, shard, find_differing_blocks(hasher.blocks, blocks))


def _make_damaged_error(
    store: Store, shard: ManifestShard, numbers: list[int]
) -> errors.CorruptError:
    where = ""
    if numbers:
        start = numbers[0] * BLOCK_SIZE
        where = f" in bytes {start:,} to {min(shard.size, start + BLOCK_SIZE):,}"
        if len(numbers) > 1:
            where = f" in {describe_blocks(numbers)}, counted from 0"
    return errors.CorruptError(
        f"{store.make_url(shard.key)} is not what its manifest says{where}: run `millrace verify`."
    )
