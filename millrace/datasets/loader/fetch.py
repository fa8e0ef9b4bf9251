"""Fetch the bytes of shards, each verified by the digests of the dataset before it is used.

The other modules of `ShardLoader` reach a store through this module only. A shard is read in one of
two ways:

- By parts of some MiB, each verified by the digests of its blocks. The parts that follow are
  fetched at the same time.
- As a whole file on the disk, if there is a folder for a cache, or if the dataset has no digests of
  blocks. Without a folder for a cache, the file has no name, and is gone when it is closed.
"""

import os
import secrets
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np

from millrace import errors
from millrace.block_lists import read_blocks_at
from millrace.datasets.loader.shard_table import ListedShard, ShardTable
from millrace.digest import (
    BLOCK_DIGEST_SIZE,
    BLOCK_SIZE,
    combine_blocks,
    compute_file_digest,
    count_blocks,
    describe_blocks,
    find_differing_blocks,
    get_hex,
    slice_blocks,
)
from millrace.keys.datasets import DatasetKeys
from millrace.storage import Store, read, read_and_hash
from millrace.threads import DaemonThreadPool

_SMALL_LISTS = 1 << 20  # bytes of the digests of all blocks that are read in one request
_FILE_PART = 8 * BLOCK_SIZE  # bytes of a request for a whole file
_FILE_REQUESTS = 4  # concurrent requests for one whole file
_MAX_REQUESTS = 16  # concurrent requests of a fetcher


class OpenShard(Protocol):
    """Verified bytes of an open shard. One thread at a time reads them.

    Attributes:
        name: URL of the shard, for messages.
        size: Bytes of the shard.
    """

    name: str
    size: int

    def read(self, start: int, end: int) -> memoryview:
        """Return the bytes between two offsets. Those that follow are fetched at the same time.

        Raises:
            CorruptError: The bytes do not have their digest.
            ChangedError: The shard has another size.
            NotFoundError: The shard is gone.
        """
        ...

    def read_once(self, start: int, end: int) -> memoryview:
        """Return the bytes between two offsets. No others are fetched or kept.

        The errors are those of `read`.
        """
        ...

    def release(self, offset: int) -> None:
        """Free the memory of the bytes before an offset, which are not read again."""
        ...

    def close(self) -> None:
        """Free the memory. A file is closed when nothing refers to the shard any more."""
        ...


class ShardFetcher:
    """Verified bytes of the shards of a table.

    Args:
        store: Store of the dataset.
        table: Shards of the dataset.
        cache: Folder for whole files. The files stay there.
        part_bytes: Bytes of a part, a multiple of the size of a block.
        parts_ahead: Number of parts of a shard that are fetched before they are read.
    """

    def __init__(
        self,
        store: Store,
        table: ShardTable,
        *,
        cache: Path | None = None,
        part_bytes: int = 4 * BLOCK_SIZE,
        parts_ahead: int = 2,
    ) -> None:
        self._store, self._table, self._cache = store, table, cache
        self._part_bytes, self._parts_ahead = part_bytes, parts_ahead
        self._lock = threading.Lock()
        self._files: dict[str, Future[Path]] = {}
        self._all_blocks: bytes | None = None
        self._requests = DaemonThreadPool(_MAX_REQUESTS, "shard-requests")
        self._whole_files = DaemonThreadPool(_FILE_REQUESTS, "shard-files")

    def open(self, number: int) -> OpenShard:
        """Open a shard by its number in the table.

        Raises:
            MillraceError: The shard cannot be fetched.
        """
        shard = self._table.shards[number]
        if self._cache is not None:
            path = self._request_file(shard).result()
            return _ShardFile(self._name(shard), os.open(path, os.O_RDONLY), shard.size)
        if blocks := self._read_blocks(shard):
            return _ShardParts(
                self._name(shard),
                shard.size,
                lambda first, last: self._fetch_blocks(shard, blocks, first, last),
                self._requests,
                part_blocks=self._part_bytes // BLOCK_SIZE,
                parts_ahead=self._parts_ahead,
            )
        with tempfile.TemporaryFile(prefix="millrace-shard-") as file:
            self._copy(shard, file.fileno())
            return _ShardFile(self._name(shard), os.dup(file.fileno()), shard.size)

    def request(self, number: int) -> None:
        """Begin to fetch a whole file that is needed soon. Without a cache, nothing is done."""
        if self._cache is not None:
            self._request_file(self._table.shards[number])

    def close(self) -> None:
        """Cancel the requests that have not begun."""
        self._requests.shutdown()
        self._whole_files.shutdown()

    def _name(self, shard: ListedShard) -> str:
        return self._store.make_url(shard.key)

    def _read_blocks(self, shard: ListedShard) -> bytes:
        """Return the joined digests of a shard's blocks; empty if they are not known."""
        if count_blocks(shard.size) == 1:
            return bytes.fromhex(get_hex(shard.digest))
        key = DatasetKeys(self._table.dataset).block_digests
        start = shard.first_block * BLOCK_DIGEST_SIZE
        every = self._table.blocks * BLOCK_DIGEST_SIZE
        if every > _SMALL_LISTS:
            return read_blocks_at(self._store, key, start, shard.digest, shard.size)
        with self._lock:
            if self._all_blocks is None:
                self._all_blocks = b""
                with suppress(errors.NotFoundError, errors.DeniedError, errors.CorruptError):
                    self._all_blocks = read(self._store, key, max_size=every)
        own = self._all_blocks[start : start + count_blocks(shard.size) * BLOCK_DIGEST_SIZE]
        return own if own and combine_blocks(own) == shard.digest else b""

    def _fetch_blocks(self, shard: ListedShard, blocks: bytes, first: int, last: int) -> memoryview:
        """Return adjacent blocks of a shard, verified."""
        expected = slice_blocks(blocks, range(first, last))
        body, found = self._read(shard, first * BLOCK_SIZE, last * BLOCK_SIZE)
        if found != expected:
            differing = [first + one for one in find_differing_blocks(found, expected)]
            raise self._make_damage_error(shard, f" in {describe_blocks(differing)}")
        return body

    def _read(self, shard: ListedShard, start: int, end: int) -> tuple[memoryview, bytes]:
        """Return bytes of a shard, up to its end, and the digests of their blocks."""
        body = _allocate(min(end, shard.size) - start)
        try:
            found = read_and_hash(self._store, shard.key, [body], size=shard.size, start=start)
        except errors.NotFoundError as error:
            raise errors.NotFoundError(
                f"{self._name(shard)} was deleted after the dataset was completed. Restore it from "
                "a copy, or shard the dataset again."
            ) from error
        if not found:
            raise errors.ChangedError(
                f"{self._name(shard)} was replaced: it does not have the {shard.size:,} bytes of "
                "the manifest. Restore it from a copy, or repair the dataset with `millrace verify "
                "FILE --repair`."
            )
        return body, found

    def _make_damage_error(self, shard: ListedShard, where: str = "") -> errors.CorruptError:
        return errors.CorruptError(
            f"{self._name(shard)} does not have the digest of the manifest: it was replaced or is "
            f"damaged{where}. Repair the dataset with `millrace verify FILE --repair`."
        )

    def _request_file(self, shard: ListedShard) -> Future[Path]:
        """Return the path of a whole file, as soon as it is there. Each file is fetched once."""
        with self._lock:
            known = self._files.get(shard.digest)
            if known is None or (known.done() and known.exception()):
                known = self._whole_files.submit(self._fetch_file, shard)
                self._files[shard.digest] = known
            return known

    def _fetch_file(self, shard: ListedShard) -> Path:
        """Return the path of a shard in the cache, whose bytes were verified by this fetcher."""
        assert self._cache is not None
        path = self._cache / get_hex(shard.digest)
        part = self._cache / f".{path.name}-{secrets.token_hex(4)}"
        try:
            self._cache.mkdir(parents=True, exist_ok=True)
            if path.exists() and compute_file_digest(path) == shard.digest:
                return path
            with part.open("wb", buffering=0) as file:
                self._copy(shard, file.fileno())
            part.replace(path)
        except OSError as error:
            raise errors.NoSpaceError(
                f"{self._name(shard)} could not be written into {self._cache}: {error.strerror}. "
                "Free some space, or choose another folder as `cache`."
            ) from error
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)
        return path

    def _copy(self, shard: ListedShard, file: int) -> None:
        """Write a shard into a file, and verify its digest."""

        def copy_part(start: int) -> bytes:
            body, found = self._read(shard, start, start + _FILE_PART)
            while body:
                written = os.pwrite(file, body, start)
                body, start = body[written:], start + written
            return found

        starts = range(0, max(1, shard.size), _FILE_PART)
        parts = [self._requests.submit(copy_part, start) for start in starts]
        try:
            blocks = b"".join(part.result() for part in parts)
        finally:
            # The file must not be closed while a request writes into it.
            for part in parts:
                if not part.cancel():
                    part.exception()
        if combine_blocks(blocks) != shard.digest:
            raise self._make_damage_error(shard)


class _ShardParts:
    """A shard that is read by parts."""

    def __init__(
        self,
        name: str,
        size: int,
        fetch: Callable[[int, int], memoryview],
        pool: DaemonThreadPool,
        *,
        part_blocks: int,
        parts_ahead: int,
    ) -> None:
        self.name, self.size = name, size
        self._fetch, self._pool = fetch, pool
        self._part_blocks, self._parts_ahead = part_blocks, parts_ahead
        self._part_bytes = part_blocks * BLOCK_SIZE
        self._parts: dict[int, Future[memoryview]] = {}

    def read(self, start: int, end: int) -> memoryview:
        if start >= end:
            return memoryview(bytearray())
        first, last = start // self._part_bytes, (end - 1) // self._part_bytes
        count = -(-self.size // self._part_bytes)
        for number in range(first, min(last + 1 + self._parts_ahead, count)):
            if number not in self._parts:
                self._parts[number] = self._pool.submit(self._fetch_part, number)
        bodies = [self._parts[number].result() for number in range(first, last + 1)]
        at = first * self._part_bytes
        if len(bodies) == 1:
            return bodies[0][start - at : end - at]
        bodies[0] = bodies[0][start - at :]
        bodies[-1] = bodies[-1][: end - last * self._part_bytes]
        joined = _allocate(end - start)
        at = 0
        for body in bodies:
            joined[at : at + len(body)] = body
            at += len(body)
        return joined

    def read_once(self, start: int, end: int) -> memoryview:
        if start >= end:
            return memoryview(bytearray())
        first = start // BLOCK_SIZE
        fetched = self._pool.submit(self._fetch, first, -(-end // BLOCK_SIZE)).result()
        return fetched[start - first * BLOCK_SIZE : end - first * BLOCK_SIZE]

    def release(self, offset: int) -> None:
        for number in [one for one in self._parts if (one + 1) * self._part_bytes <= offset]:
            del self._parts[number]

    def close(self) -> None:
        for part in self._parts.values():
            part.cancel()
        self._parts = {}

    def _fetch_part(self, number: int) -> memoryview:
        first = number * self._part_blocks
        return self._fetch(first, min(first + self._part_blocks, count_blocks(self.size)))


class _ShardFile:
    """A shard that is a whole file on the disk."""

    def __init__(self, name: str, file: int, size: int) -> None:
        self.name, self.size = name, size
        self._file = file

    def read(self, start: int, end: int) -> memoryview:
        body = view = _allocate(max(0, end - start))
        while view:
            count = os.preadv(self._file, [view], start)
            if not count:
                raise errors.ChangedError(
                    f"The copy of {self.name} in the cache was cut short while it was read. Start "
                    "again, and let no other program write into the cache."
                )
            view, start = view[count:], start + count
        return body

    read_once = read

    def release(self, offset: int) -> None:
        del offset  # the system keeps the bytes

    def close(self) -> None:
        pass

    def __del__(self) -> None:
        os.close(self._file)


def _allocate(size: int) -> memoryview:
    """Return memory that is not written first, unlike that of a `bytearray`."""
    return np.empty(size, np.uint8).data
