"""Write and read the digests of the blocks of files, with which a part of a file is verified alone.

A complete dataset has one object with the digests of all blocks of all shards, joined in the order
of the manifest: 32 bytes for each MiB. A checkpoint has an object for each file of more than one
block. Another record has the root of each file, so these objects need no trust: digests that do not
fit their root are not used.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress

from millrace import errors
from millrace.digest import BLOCK_DIGEST_SIZE, check_blocks, count_blocks
from millrace.keys.datasets import DatasetKeys
from millrace.schemas.dataset import CommittedShard, Manifest, ManifestShard
from millrace.storage import Store, head, read, read_range

_MAX_SIZE = 1 << 30  # bytes of the object that readers hold in memory: 32 TiB of shards


class ShardBlockList:
    """Joined digests of the blocks of shards, in the order in which the shards are added.

    Attributes:
        content: The digests; empty for more than 32 TiB of shards, since readers hold all in
            memory.
    """

    def __init__(self) -> None:
        self.content = bytearray()
        self._size = 0

    def add(self, shard: CommittedShard) -> None:
        """Add the digests of a shard.

        Raises:
            CorruptError: The digests of the blocks do not fit the shard.
        """
        self._size += BLOCK_DIGEST_SIZE * count_blocks(shard.size)
        if self._size > _MAX_SIZE:
            self.content = bytearray()
        else:
            self.content += shard.decode_blocks()


def join_shard_blocks(manifest: Manifest, committed: Mapping[str, CommittedShard]) -> bytes:
    """Return the content of the object with the digests of all blocks, from the ledger.

    Args:
        manifest: Manifest of the dataset.
        committed: Shards of the ledger, by their keys.

    Returns:
        Content of a `ShardBlockList`.

    Raises:
        CorruptError: The ledger lacks the commit of a shard, or has another shard in it.
    """
    blocks = ShardBlockList()
    for shard in manifest.shards:
        own = committed.get(shard.key)
        if own is None or (own.digest, own.size) != (shard.digest, shard.size):
            raise errors.CorruptError(
                f"The ledger has no commit of {shard.key} as the manifest names it, so the block "
                "digests of the dataset cannot be made."
            )
        blocks.add(own)
    return bytes(blocks.content)


def read_shard_blocks(store: Store, manifest: Manifest) -> dict[str, bytes]:
    """Return the joined digests of the blocks of each shard, by the key of the shard. One request.

    Digests that do not fit the digest of their shard are left out, and all are left out if the
    object is missing or cannot be read. Then a reader uses the digest of the whole shard.

    Args:
        store: Store of the dataset.
        manifest: Manifest of the dataset.

    Raises:
        UnavailableError: The store does not answer.
    """
    if _is_too_large(manifest):
        return {}
    sizes = [_measure_list(shard) for shard in manifest.shards]
    try:
        # A longer object is not read, since its digests are of other shards.
        joined = read(store, DatasetKeys(manifest.dataset).block_digests, max_size=sum(sizes))
    except (errors.NotFoundError, errors.DeniedError, errors.CorruptError):
        return {}
    found: dict[str, bytes] = {}
    start = 0
    for shard, size in zip(manifest.shards, sizes, strict=True):
        with suppress(errors.CorruptError):
            blocks = joined[start : start + size]
            found[shard.key] = check_blocks(blocks, shard.digest, shard.size)
        start += size
    return found


def read_blocks_of(store: Store, manifest: Manifest, key: str) -> bytes:
    """Return the joined digests of the blocks of one shard. One request.

    Args:
        store: Store of the dataset.
        manifest: Manifest of the dataset.
        key: Key of the shard.

    Returns:
        Digests; empty if they are missing, cannot be read, or do not fit the shard.

    Raises:
        UnavailableError: The store does not answer.
    """
    start = 0
    for shard in manifest.shards:
        size = _measure_list(shard)
        if shard.key == key:
            key = DatasetKeys(manifest.dataset).block_digests
            return read_blocks_at(store, key, start, shard.digest, shard.size)
        start += size
    return b""


def read_blocks_at(store: Store, key: str, start: int, digest: str, size: int) -> bytes:
    """Return the joined digests of the blocks of one shard, of which the place is known.

    At most one request.

    Args:
        store: Store of the dataset.
        key: Key of the object with the digests of all blocks.
        start: Offset of the shard's digests in this object.
        digest: BLAKE3 digest of the shard.
        size: Size of the shard in bytes.

    Returns:
        Digests; empty if they are missing, cannot be read, or do not fit the shard.

    Raises:
        UnavailableError: The store does not answer.
    """
    stop = start + BLOCK_DIGEST_SIZE * count_blocks(size)
    return _accept(lambda: read_range(store, key, start, stop), digest, size)


def describe_block_digests(store: Store, manifest: Manifest, found: Mapping[str, bytes]) -> str:
    """Describe the fault of the object with the digests of all blocks. At most one request.

    Args:
        store: Store of the dataset.
        manifest: Manifest of the dataset.
        found: Result of `read_shard_blocks`.

    Returns:
        Short text; empty if the object has the digests of every shard.
    """
    lacking = len(manifest.shards) - len(found)
    if not lacking or _is_too_large(manifest):
        return ""
    try:
        head(store, DatasetKeys(manifest.dataset).block_digests)
    except errors.NotFoundError:
        return "missing"
    except errors.MillraceError:
        return "the store cannot read it"
    return f"its digests do not fit {lacking:,} of {len(manifest.shards):,} shards"


def read_file_blocks(store: Store, key: str, digest: str, size: int) -> bytes:
    """Return the joined digests of the blocks of one file. At most one request.

    Args:
        store: Store of the file.
        key: Key of the object that has the digests of this file only.
        digest: BLAKE3 digest of the file.
        size: Size of the file in bytes.

    Returns:
        Digests; empty if they are missing, cannot be read, or do not fit the file.

    Raises:
        UnavailableError: The store does not answer.
    """
    expected = BLOCK_DIGEST_SIZE * count_blocks(size)
    if expected > _MAX_SIZE:
        return b""
    return _accept(lambda: read(store, key, max_size=expected), digest, size)


def _is_too_large(manifest: Manifest) -> bool:
    return sum(map(_measure_list, manifest.shards)) > _MAX_SIZE


def _measure_list(shard: ManifestShard) -> int:
    """Return the bytes of the joined digests of a shard's blocks."""
    return BLOCK_DIGEST_SIZE * count_blocks(shard.size)


def _accept(read_list: Callable[[], bytes], digest: str, size: int) -> bytes:
    """Return the digests that a function reads, if they fit a file; otherwise nothing.

    Raises:
        UnavailableError: The store does not answer.
    """
    try:
        return check_blocks(read_list(), digest, size)
    except errors.UnavailableError:
        raise
    except errors.MillraceError:  # missing, of another length, or of another file
        return b""
