"""Fetch the bytes of shards, each verified by the digests of the dataset before it is used.

Shards are read through this module only. A shard is read in one of
two ways:

- By parts of some MiB, each verified by the digests of its blocks. The parts that follow are
  fetched at the same time.
- As a whole file on the disk, if there is a cache, or if the dataset has no digests of blocks.
  Without a cache, the file has no name, and is gone when it is closed. A warning says so.
"""

import logging
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import NoReturn, Protocol, TypeVar

from millrace import errors
from millrace.block_lists import read_blocks_at
from millrace.datasets.loader.dataset_files import DatasetFiles
from millrace.datasets.loader.disk_cache import LentFile
from millrace.datasets.loader.mirrored_files import limit_retries
from millrace.datasets.loader.shard_parts import PartGrowth, ShardParts, allocate_view
from millrace.datasets.loader.shard_table import ListedShard, ShardTable
from millrace.digest import (
    BLOCK_DIGEST_SIZE,
    BLOCK_SIZE,
    combine_blocks,
    count_blocks,
    describe_blocks,
    find_differing_blocks,
    get_hex,
    slice_blocks,
)
from millrace.keys.datasets import DatasetKeys
from millrace.storage import Store, head, read, read_views_and_hash
from millrace.storage.mirrored_objects import MirroredObject
from millrace.threads import DaemonThreadPool

logger = logging.getLogger(__name__)
T = TypeVar("T")

_SMALL_LISTS = 1 << 20  # bytes of the digests of all blocks that are read in one request
_WHOLE_FILES = 4  # files that are fetched at once
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
        """Return a copy of the bytes between two offsets. Those that follow are fetched, too.

        Raises:
            CorruptError: The bytes do not have their digest.
            ChangedError: The shard has another size.
            NotFoundError: The shard is gone.
        """
        ...

    def read_views(self, start: int, end: int) -> list[memoryview]:
        """Return the same bytes as consecutive views, which may be read-only.

        The errors are those of `read`.
        """
        ...

    def read_on(self, start: int) -> memoryview:
        """Return a view of the bytes from an offset on, to the end of those that lie together.

        The errors are those of `read`.
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
        files: Files of the dataset. The caller closes them.
        table: Shards of the dataset.
        part_bytes: Bytes of a part, a multiple of the size of a block.
        parts_ahead: Number of parts of a shard that are fetched before they are read.
    """

    def __init__(
        self,
        files: DatasetFiles,
        table: ShardTable,
        *,
        part_bytes: int = 4 * BLOCK_SIZE,
        parts_ahead: int = 2,
    ) -> None:
        self._files, self._table = files, table
        self._part_bytes, self._parts_ahead = part_bytes, parts_ahead
        self._lock = threading.Lock()
        self._fetched: dict[str, Future[LentFile | None]] = {}  # whole files that are not open yet
        self._all_blocks: bytes | None = None
        self._lists_at: Store | None = None  # that had the digests of blocks of the last shard
        self._requests = DaemonThreadPool(_MAX_REQUESTS, "shard-requests")
        self._whole_files = DaemonThreadPool(_WHOLE_FILES, "shard-files")

    def open(self, number: int, growth: PartGrowth | None = None) -> OpenShard:
        """Open a shard by its number in the table.

        Args:
            number: Number of the shard.
            growth: Growth of the parts, which goes on from shard to shard; by default none.

        Raises:
            StoppedError: The fetcher was closed.
            MillraceError: The shard cannot be fetched.
        """
        if self._requests.is_shut_down:
            raise errors.StoppedError("The iteration of the samples has ended.")
        shard = self._table.shards[number]
        if self._files.has_cache and (opened := self._open_cached(shard)):
            return opened
        if blocks := self._read_blocks(shard):
            return ShardParts(
                self._name(shard),
                shard.size,
                lambda first, last: self._fetch_blocks(shard, blocks, first, last),
                self._requests,
                part_blocks=self._part_bytes // BLOCK_SIZE,
                parts_ahead=self._parts_ahead,
                growth=growth,
            )
        self._warn_of_copies()
        with tempfile.TemporaryFile(prefix="millrace-shard-") as file:
            copy = partial(
                self._files.copy_file, shard.key, shard.size, shard.digest, file.fileno()
            )
            try:
                self._read_twice(shard, copy)
            except errors.MillraceError as error:
                self._raise_explained(shard, error)
            except OSError as error:
                if error.errno not in errors.FULL_DISK:
                    raise
                raise errors.NoSpaceError(
                    f"{self._name(shard)} has {shard.size:,} bytes, and the folder "
                    f"{tempfile.gettempdir()} of temporary files has no room for them. Name a "
                    "larger one in the variable TMPDIR, or give `cache` a folder on another disk."
                ) from error
            return _ShardFile(self._name(shard), os.dup(file.fileno()), shard.size)

    def request(self, number: int) -> None:
        """Begin to fetch a whole file that is needed soon.

        Without a cache, and after `close`, nothing is done.
        """
        if self._files.has_cache:
            self._request_file(self._table.shards[number])

    def close(self) -> None:
        """Cancel the requests that have not begun, and release the files that are not open yet."""
        self._requests.shutdown()
        self._whole_files.shutdown()
        with self._lock:
            unused, self._fetched = list(self._fetched.values()), {}
        for one in unused:
            one.add_done_callback(_release)

    def _name(self, shard: ListedShard) -> str:
        return self._files.stores[0].make_url(shard.key)

    def _warn_of_copies(self) -> None:
        """Warn once in a process that whole shards are copied, and say why."""
        with self._lock:
            if self._files.has_warned_of_copies:
                return
            self._files.has_warned_of_copies = True
        store, key = self._files.stores[0], DatasetKeys(self._table.dataset).block_digests
        try:
            head(limit_retries(store), key)
            reason = f"{store.make_url(key)} does not fit the shards."
        except errors.MillraceError as error:
            reason = str(error)
        logger.warning(
            "The shards of %s are copied whole into %s before they are read, since the digests of "
            "their blocks cannot be used: %s Give `cache` a folder with room for shards, or "
            "correct that.",
            self._table.dataset,
            tempfile.gettempdir(),
            reason,
        )

    def _read_blocks(self, shard: ListedShard) -> bytes:
        """Return the joined digests of a shard's blocks; empty if they are not known."""
        if count_blocks(shard.size) == 1:
            return bytes.fromhex(get_hex(shard.digest))
        key = DatasetKeys(self._table.dataset).block_digests
        start = shard.first_block * BLOCK_DIGEST_SIZE
        size = self._table.block_count * BLOCK_DIGEST_SIZE
        if size > _SMALL_LISTS:
            return self._read_list(key, start, shard)
        with self._lock:
            if self._all_blocks is None:
                blocks = b""  # after an error of the store that may pass, the next call asks again
                with suppress(errors.NotFoundError, errors.DeniedError, errors.CorruptError):
                    blocks = self._files.ask_stores(lambda store: read(store, key, max_size=size))
                self._all_blocks = blocks
        own = self._all_blocks[start : start + count_blocks(shard.size) * BLOCK_DIGEST_SIZE]
        return own if own and combine_blocks(own) == shard.digest else b""

    def _read_list(self, key: str, start: int, shard: ListedShard) -> bytes:
        """Return the digests of a shard's blocks from the first store that has them.

        The store that had those of the last shard is asked first.
        """
        *others, last = sorted(self._files.stores, key=lambda store: store is not self._lists_at)
        for store in others:
            with suppress(errors.MillraceError):
                limited = limit_retries(store)
                if found := read_blocks_at(limited, key, start, shard.digest, shard.size):
                    self._lists_at = store
                    return found
        found = read_blocks_at(last, key, start, shard.digest, shard.size)
        self._lists_at = last if found else None
        return found

    def _fetch_blocks(
        self, shard: ListedShard, blocks: bytes, first: int, last: int
    ) -> list[memoryview]:
        """Return adjacent blocks of a shard, verified, as consecutive views."""
        expected = slice_blocks(blocks, range(first, last))
        start, end = first * BLOCK_SIZE, min(last * BLOCK_SIZE, shard.size)
        item = MirroredObject(shard.key, shard.size, digest=shard.digest, blocks=blocks)

        def read_blocks() -> list[memoryview]:
            if len(self._files.stores) > 1:
                return [memoryview(self._files.read_blocks(item, range(first, last)))]
            return self._read_and_compare(shard, expected, start, end)

        try:
            return self._read_twice(shard, read_blocks)
        except errors.MillraceError as error:
            self._raise_explained(shard, error)

    def _read_twice(self, shard: ListedShard, read_shard: Callable[[], T]) -> T:
        """Read bytes, and once more if they differ, since they may have changed on their way."""
        try:
            return read_shard()
        except errors.CorruptError as error:
            logger.warning(
                "%s is read again, since its bytes do not have their digest. %s",
                self._name(shard),
                error,
            )
            return read_shard()

    def _read_and_compare(
        self, shard: ListedShard, expected: bytes, start: int, end: int
    ) -> list[memoryview]:
        """Return blocks of the only store, which are hashed while they arrive."""
        store = self._files.stores[0]
        views, found = read_views_and_hash(store, shard.key, start, end, size=shard.size)
        if not found:
            raise errors.ChangedError(f"{self._name(shard)} has another size.")
        if found != expected:
            first = start // BLOCK_SIZE
            differing = [first + one for one in find_differing_blocks(found, expected)]
            raise errors.CorruptError(f"The damage is in {describe_blocks(differing)}.")
        return views

    def _raise_explained(self, shard: ListedShard, error: errors.MillraceError) -> NoReturn:
        """Raise an error that says what to do about a shard."""
        name, reason = self._name(shard), str(error)
        if isinstance(error, errors.NotFoundError):
            raise errors.NotFoundError(
                f"{name} was deleted after the dataset was completed. Restore it from a copy, or "
                f"shard the dataset again. {reason}"
            ) from error
        if isinstance(error, errors.ChangedError):
            raise errors.ChangedError(
                f"{name} was replaced: it does not have the {shard.size:,} bytes of the manifest. "
                "Restore it from a copy, or repair the dataset with `millrace run FILE "
                f"--repair`. {reason}"
            ) from error
        if isinstance(error, errors.CorruptError):
            raise errors.CorruptError(
                f"{name} does not have the digest of the manifest: it was replaced or is damaged. "
                f"Repair the dataset with `millrace run FILE --repair`. {reason}"
            ) from error
        raise error

    def _request_file(self, shard: ListedShard) -> Future[LentFile | None]:
        """Return a whole file, as soon as it is there; None without room for it."""
        with self._lock:
            known = self._fetched.get(shard.digest)
            if known is None:
                known = self._whole_files.submit(self._fetch_file, shard)
                self._fetched[shard.digest] = known
            return known

    def _open_cached(self, shard: ListedShard) -> OpenShard | None:
        """Open a file of the cache; return None if the cache has no room for it."""
        fetched = self._request_file(shard)
        with self._lock:
            if is_own := self._fetched.get(shard.digest) is fetched:
                del self._fetched[shard.digest]
        try:
            lent = fetched.result() if is_own else self._fetch_file(shard)
        except errors.MillraceError as error:
            self._raise_explained(shard, error)
        if lent is None:
            return None
        return _ShardFile(self._name(shard), os.open(lent.path, os.O_RDONLY), shard.size, lent)

    def _fetch_file(self, shard: ListedShard) -> LentFile | None:
        blocks = partial(self._find_blocks, shard)
        fetch = partial(self._files.lend_file, shard.key, shard.size, shard.digest, blocks=blocks)
        return self._read_twice(shard, fetch)

    def _find_blocks(self, shard: ListedShard) -> bytes:
        """Return the digests of a shard's blocks, by which the damage of a copy is found."""
        with suppress(errors.MillraceError):  # without them, the whole copies are compared
            return self._read_blocks(shard)
        return b""


def _release(fetched: Future[LentFile | None]) -> None:
    """Release a whole file that was fetched and is not needed."""
    if not fetched.cancelled() and not fetched.exception() and (lent := fetched.result()):
        lent.close()


class _ShardFile:
    """A shard that is a whole file on the disk.

    A file of the cache is lent as long as it is open. If it were removed before, its bytes would
    stay on the disk, and the cache would not count them.
    """

    def __init__(self, name: str, file: int, size: int, lent: LentFile | None = None) -> None:
        self.name, self.size = name, size
        self._file, self._lent = file, lent

    def read(self, start: int, end: int) -> memoryview:
        body = view = allocate_view(max(0, end - start))
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

    def read_views(self, start: int, end: int) -> list[memoryview]:
        return [self.read(start, end)]

    def read_on(self, start: int) -> memoryview:
        return self.read(start, min(start + BLOCK_SIZE, self.size))

    def release(self, offset: int) -> None:
        del offset  # the system keeps the bytes

    def close(self) -> None:
        pass

    def __del__(self) -> None:
        os.close(self._file)
        if self._lent is not None:
            self._lent.close()
