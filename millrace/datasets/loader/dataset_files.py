"""Files of a dataset by their keys: from the disk of the node, else from one of its stores."""

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from millrace.block_mending import mend_file
from millrace.datasets.loader.disk_cache import DiskCache, LentFile
from millrace.datasets.loader.mirrored_files import (
    FileLocations,
    limit_retries,
    list_specs,
    open_mirrors,
)
from millrace.digest import BLOCK_SIZE, combine_blocks, hash_blocks, slice_blocks
from millrace.errors import ConfigurationError, CorruptError, MillraceError
from millrace.storage import Backend, Store, StoreSpec
from millrace.storage.mirror_locations import MirrorReport
from millrace.storage.mirrored import Check, MirroredReader
from millrace.storage.mirrored_download import download
from millrace.storage.mirrored_objects import MirroredObject

logger = logging.getLogger(__name__)
T = TypeVar("T")


class DatasetFiles:
    """Files of a dataset, verified by their digests. Threads may share the files.

    A file that is in a warmed folder is read there, without a copy. Otherwise the cache of the node
    has it or fetches it, from one of the stores.

    Args:
        source: URL of the store of the dataset, several that have the same files, or a bucket with
            mirrors. Keys are relative to each.
        cache: Cache on the disk of the node; None caches nothing.
        warmed: Folders with files of the dataset below their keys, or from `shards` on, as a
            prewarm leaves them. They need a cache, which remembers that the files were verified.

    Attributes:
        has_warned_of_copies: Whether a warning has said that whole files are copied. The fetcher of
            shards sets it.

    Raises:
        ConfigurationError: A URL names no store.
        NotFoundError: There is no such folder.
    """

    def __init__(
        self,
        source: FileLocations,
        *,
        cache: DiskCache | None = None,
        warmed: Sequence[Path] = (),
    ) -> None:
        self._reader = MirroredReader(open_mirrors(list_specs(source)))
        self._cache, self._warmed = cache, tuple(warmed)
        self._lock = threading.Lock()
        self._has_warned = self.has_warned_of_copies = False
        self._lent: dict[Path, list[LentFile]] = {}

    @property
    def stores(self) -> tuple[Store, ...]:
        """Stores of the files."""
        return self._reader.stores

    @property
    def has_cache(self) -> bool:
        """True if files are cached on the disk of the node."""
        return self._cache is not None

    def ask_stores(self, call: Callable[[Store], T]) -> T:
        """Return the answer of the first store that has one.

        Args:
            call: Function that asks a store, such as for a record.

        Raises:
            MillraceError: No store has an answer. The error is that of the last one.
        """
        *others, last = self.stores
        for store in others:
            try:
                return call(limit_retries(store))
            except MillraceError as error:
                logger.warning("%s Another location is asked.", error)
        return call(last)

    def read_object(self, item: MirroredObject, start: int, end: int, *, check: Check) -> bytes:
        """Return the bytes of a file between two offsets.

        Args:
            item: The file, with its digest.
            start: Offset of the first byte.
            end: Offset after the last byte.
            check: Function that raises `CorruptError` for damaged bytes, which are then read
                elsewhere.

        Raises:
            MillraceError: No location has the bytes.
        """
        if item.digest and (found := self._find_warmed(item.key, item.size, item.digest)):
            with found, found.path.open("rb") as file:
                return os.pread(file.fileno(), end - start, start)
        return self._reader.read_range(item, start, end, check=check)

    def read_blocks(self, item: MirroredObject, numbers: range) -> bytes:
        """Return adjacent blocks of a described file, verified by their digests.

        Args:
            item: The file, with the digests of its blocks.
            numbers: Numbers of the blocks.

        Raises:
            MillraceError: No location has the blocks.
        """
        expected = slice_blocks(item.blocks, numbers)

        def check(data: bytes) -> None:
            if hash_blocks(data) != expected:
                raise CorruptError("its bytes do not have the digests of their blocks")

        start, end = numbers.start * BLOCK_SIZE, min(numbers.stop * BLOCK_SIZE, item.size)
        return self.read_object(item, start, end, check=check)

    def lend_file(
        self, key: str, size: int, digest: str, *, blocks: bytes | Callable[[], bytes] = b""
    ) -> LentFile | None:
        """Return a verified file on the disk of the node. It is fetched if needed.

        The file stays until it is closed. Processes of the node fetch a file once.

        Args:
            key: Key of the file.
            size: Size in bytes.
            digest: Digest of the file.
            blocks: Joined digests of its blocks, by which a damaged part is read again alone. Or a
                function that returns them, which is called if they are of use: for a damaged file
                in the cache, or if a copy may differ from those of other locations.

        Returns:
            The file; None if there is no cache, or if the cache has no room.

        Raises:
            MillraceError: No location has the file.
        """
        lent = self._find_warmed(key, size, digest)
        if lent is None and self._cache is not None:

            def fetch(file: int, damaged: Path | None) -> None:
                known = blocks if isinstance(blocks, bytes) else b""
                if callable(blocks) and (damaged or len(self.stores) > 1):
                    known = blocks()
                item = MirroredObject(key, size, digest=digest, blocks=known)
                if damaged and known and combine_blocks(known) == digest:
                    mend_file(damaged, file, size, known, partial(self.read_blocks, item))
                else:
                    download(self._reader, item, file)

            lent = self._cache.lend(digest, size, fetch)
        return lent

    def fetch_file(self, key: str, size: int, digest: str, *, blocks: bytes = b"") -> Path | None:
        """Return the path of a verified file on the disk of the node, as `lend_file` does.

        The file stays until `release` or `close`.

        Returns:
            Path; None if there is no cache, or if the cache has no room. Then use `read_file`.

        Raises:
            MillraceError: No location has the file.
        """
        lent = self.lend_file(key, size, digest, blocks=blocks)
        if lent is None:
            return None
        with self._lock:
            self._lent.setdefault(lent.path, []).append(lent)
        return lent.path

    def release(self, path: Path) -> None:
        """Allow the removal of a file that `fetch_file` returned. Call it once for each."""
        with self._lock:
            found = self._lent.get(path)
            if found:
                found.pop().close()
            if not found:
                self._lent.pop(path, None)

    def read_file(self, key: str, size: int, digest: str, *, blocks: bytes = b"") -> bytes:
        """Return the verified bytes of a file, without the cache. Memory: its size.

        Raises:
            MillraceError: No location has the file.
        """
        item = MirroredObject(key, size, digest=digest, blocks=blocks)
        descriptor = os.memfd_create("file")
        with os.fdopen(descriptor, "r+b") as file:
            download(self._reader, item, descriptor)
            return file.read(size)

    def copy_file(self, key: str, size: int, digest: str, file: int) -> None:
        """Write the bytes of a file into an open file, verified, without the cache.

        Raises:
            MillraceError: No location has the file.
        """
        download(self._reader, MirroredObject(key, size, digest=digest), file)

    def make_report(self) -> MirrorReport:
        """Return the work of each location so far."""
        return self._reader.make_report()

    def close(self) -> None:
        """Release all files, and start no further requests."""
        with self._lock:
            lent = [one for each in self._lent.values() for one in each]
            self._lent.clear()
        for one in lent:
            one.close()
        self._reader.close()

    def _find_warmed(self, key: str, size: int, digest: str) -> LentFile | None:
        if self._cache is None:
            return None
        _, shards, below = key.rpartition("/shards/")
        for folder in self._warmed:
            # A prewarm leaves the shards below its `destination`, which may be any folder.
            for name in (key, f"shards/{below}") if shards else (key,):
                if lent := self._cache.lend_from(folder / name, digest, size):
                    return lent
        if self._warmed and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "No warmed folder (%s) has %s, which is read from the store, as are others that "
                "are missing. Name the folder that has `shards`, or that of the dataset, in it.",
                ", ".join(map(str, self._warmed)),
                key,
            )
        return None


class ProcessFiles:
    """Files of a dataset, which each process opens anew.

    Args:
        specs: Stores of the dataset.
        cache: Cache on the disk of the node, or its folder.
        warmed: Folders with files of the dataset.
    """

    def __init__(
        self,
        specs: Sequence[StoreSpec],
        cache: DiskCache | Path | str | None,
        warmed: Sequence[Path | str] | Path | str,
    ) -> None:
        folders = [warmed] if isinstance(warmed, Path | str) else warmed
        self._specs = list(specs)
        self._warmed = [_parse_folder("warmed", folder) for folder in folders]
        self._folder, self._max_bytes = None, sys.maxsize
        if isinstance(cache, DiskCache):
            self._folder, self._max_bytes = cache.folder, cache.max_bytes
        elif cache is not None:
            self._folder = _parse_folder("cache", cache)
        if warmed and self._folder is None:
            raise ConfigurationError(
                "`warmed` folders need a `cache`, which remembers that their files were verified. "
                "Name a folder on a local disk as `cache`."
            )
        self._opened: DatasetFiles | None = None
        self._process = 0

    def open(self) -> DatasetFiles:
        """Return the files. They are opened at the first call in a process.

        Raises:
            ConfigurationError: The process was forked after the stores were opened, so that the
                client of the stores would hang.
        """
        if self._opened is not None and self._process == os.getpid():
            return self._opened
        before = () if self._opened is None else self._opened.stores
        if any(store.location.backend is not Backend.FILE for store in before):
            raise ConfigurationError(
                "This process was forked after the loader was opened, and its client of the store "
                "would hang. Open the loader in the process that reads, or start processes by "
                "`spawn`: `DataLoader(..., multiprocessing_context='spawn')`."
            )
        cache = DiskCache(self._folder, self._max_bytes) if self._folder else None
        self._opened = DatasetFiles(self._specs, cache=cache, warmed=self._warmed)
        self._process = os.getpid()
        return self._opened

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a new process, which opens the stores again."""
        return {**vars(self), "_opened": None}


def _parse_folder(argument: str, folder: Path | str) -> Path:
    """Return the path of a folder.

    Raises:
        ConfigurationError: The text is a URL.
    """
    if isinstance(folder, str) and "://" in folder:
        scheme = folder.partition("://")[0]
        raise ConfigurationError(
            f"`{argument}` is a folder of this machine, and no URL ({scheme}://). Write the path "
            "of a folder, such as /data/shards."
        )
    return Path(folder).expanduser().absolute()
