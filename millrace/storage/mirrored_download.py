"""Download an object of which several stores have copies into a file, and verify its digest."""

import os
from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import Future

from millrace import errors
from millrace.digest import (
    BLOCK_SIZE,
    Algorithm,
    combine_blocks,
    find_differing_blocks,
    get_algorithm,
    hash_blocks,
    make_hasher,
    slice_blocks,
)
from millrace.storage.mirrored import MirroredReader
from millrace.storage.mirrored_objects import FetchedRange, MirroredObject
from millrace.threads import DaemonThreadPool

_PART_BYTES = 8 * BLOCK_SIZE
_CONCURRENCY = 4


def download(
    reader: MirroredReader, item: MirroredObject, file: int, *, concurrency: int = _CONCURRENCY
) -> None:
    """Write an object into an open file by parts, and compare its digest.

    With the digests of the blocks, a part that differs is read again elsewhere. Otherwise the whole
    object is, from one location after another. Memory: 8 MiB for each part. After an error, reads
    under way are not waited for, and write nothing.

    Args:
        reader: Reader of the locations.
        item: The object, with its digest.
        file: Descriptor of the file, which gets the size and the bytes of the object.
        concurrency: Number of parts that are read at once.

    Raises:
        CorruptError: No location has the bytes of the digest.
        NoSpaceError, OSError: The file cannot be written.
        MillraceError: No location has the object.
    """
    os.ftruncate(file, item.size)  # not to 0: its bytes may be reserved on the disk
    parts = _Download(reader, item, file, concurrency)
    if parts.run(()):
        return
    numbers = range(len(reader.stores))
    for alone in numbers:  # to find out which copy differs
        if parts.run([number for number in numbers if number != alone]):
            return
    raise parts.error or errors.CorruptError(
        f"{item.key} has not the digest {item.digest} at any location. Restore the object."
    )


class _Download:
    def __init__(
        self, reader: MirroredReader, item: MirroredObject, file: int, concurrency: int
    ) -> None:
        self._reader, self._item, self._file = reader, item, file
        self._concurrency = concurrency
        self.error: errors.MillraceError | None = None

    def run(self, avoid: Collection[int]) -> bool:
        """Write all parts; return False if the digest differs, and leave out a copy that does."""
        item = self._item
        is_own = get_algorithm(item.digest) is Algorithm.BLAKE3
        hasher = None if is_own else make_hasher(get_algorithm(item.digest))
        copies = set[FetchedRange]()
        joined, offset = b"", 0
        try:
            for fetched, blocks in self._read_parts(avoid, is_own=is_own):
                offset = self._write(fetched.data, offset)
                joined += blocks
                if hasher is not None:
                    hasher.update(fetched.data)
                copies.add(fetched._replace(data=b""))
        except errors.MillraceError as error:
            if not avoid:
                raise
            self.error = error  # of this location alone
            return False
        found = hasher.compute() if hasher else combine_blocks(joined or hash_blocks(b""))
        if found == item.digest:
            return True
        if len(copies) == 1:
            (fetched,) = copies
            self._reader.reject(item, fetched, "its bytes do not have the digest of the object")
        return False

    def _read_parts(
        self, avoid: Collection[int], *, is_own: bool
    ) -> Iterator[tuple[FetchedRange, bytes]]:
        """Yield the parts in order, each with the digests of its blocks; several are read ahead."""
        starts = iter(range(0, self._item.size, _PART_BYTES))
        waiting: deque[Future[tuple[FetchedRange, bytes]]] = deque()
        pool = DaemonThreadPool(self._concurrency, "download")
        try:
            while True:
                while len(waiting) < self._concurrency:
                    start = next(starts, None)
                    if start is None:
                        break
                    waiting.append(pool.submit(self._read_part, start, avoid, is_own=is_own))
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            pool.shutdown()

    def _write(self, data: bytes, offset: int) -> int:
        """Write a part, and return the offset after it.

        No other thread writes: it could go on after the end, when the file is closed, and write
        into another file of the same descriptor.
        """
        view = memoryview(data)
        while view:
            written = os.pwrite(self._file, view, offset)
            offset, view = offset + written, view[written:]
        return offset

    def _read_part(
        self, start: int, avoid: Collection[int], *, is_own: bool
    ) -> tuple[FetchedRange, bytes]:
        """Read a part, and compare the digests of its blocks where they are known."""
        item = self._item
        end = min(item.size, start + _PART_BYTES)
        expected = slice_blocks(item.blocks, range(start // BLOCK_SIZE, -(-end // BLOCK_SIZE)))
        while True:
            fetched = self._reader.fetch(item, start, end, is_checked=True, avoid=avoid)
            blocks = hash_blocks(fetched.data) if is_own else b""
            if not expected or not find_differing_blocks(blocks, expected):
                break
            self._reader.reject(item, fetched, "its bytes do not have the digests of their blocks")
        return fetched, blocks
