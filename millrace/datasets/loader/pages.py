"""Read pages of a parquet dataset from a store, several at once, and in order."""

import logging
import os
import threading
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np

from millrace import errors
from millrace.datasets.loader.column import (
    ColumnLayout,
    measure_groups,
    read_layout,
    read_rows,
)
from millrace.datasets.loader.draw import PAGE_ROWS, Page, PageTable
from millrace.datasets.loader.mirrored_files import (
    FileLocations,
    MirroredStoreFiles,
    list_specs,
    open_loader_files,
)
from millrace.datasets.loader.page_cache import (
    ByteCache,
    CacheKind,
    CacheReference,
    get_cache_lock,
    get_shared_cache,
)
from millrace.datasets.loader.page_index import (
    FOOTER_CONCURRENCY,
    ListedFiles,
    expand_row_groups,
    find_index,
    warn_of_stale,
)
from millrace.datasets.sources.files import READ_AHEAD_BYTES, Patterns, SourceFiles, fetch_ahead
from millrace.storage.mirror_locations import MirrorReport
from millrace.threads import DaemonThreadPool

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class PageCounts:
    """Counts of what a loader has read.

    Attributes:
        pages: Number of pages.
        cached: Number of these pages that were in the cache, as rows or as tokens.
        fetched: Number of bytes that were fetched for these pages.
        whole_groups: Number of pages for which a whole row group was fetched, since the file has no
            offset index.
    """

    pages: int = 0
    cached: int = 0
    fetched: int = 0
    whole_groups: int = 0


class _GroupMemory:
    """Memory of the row groups that threads read whole: 64 MiB, or that of the largest one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held = 0

    @contextmanager
    def hold(self, size: int) -> Generator[None]:
        """Wait until there is memory for a row group, and hold it. Nothing waits for 0 bytes."""
        with self._changed:
            self._changed.wait_for(
                lambda: not size or self._held + size <= max(size, READ_AHEAD_BYTES)
            )
            self._held += size
        try:
            yield
        finally:
            with self._changed:
                self._held -= size
                self._changed.notify_all()


class PageLoader:
    """Pages of one column of a parquet dataset.

    The files are those that were there when the loader was opened. A file that is written again
    later is an error, so that two versions are not mixed. Several threads may use a loader. So may
    a process that was forked, such as a worker of a `DataLoader`: it sends its own requests.

    Where the folder has Templar's index of the files, ``_shard_sizes.json``, the files are those
    that it names. Others are left out, with a warning.

    Places of pages come from the index of the pages, where `millrace dataset index` has made one.
    For other files, and for those that were written since, the end of each file is read.

    Args:
        source: URL of the dataset, or URL and credentials. All places of a source are possible: a
            store, a folder, a web server that sends parts of files, or the Hugging Face Hub. Or
            several URLs of stores that have the same files, or a bucket with mirrors.
        column: Column to read.
        include: Patterns of the paths of the files.
        page_rows: Rows of a page, at most. Millrace cuts the pages of its files at 100 rows.
        concurrency: Pages that are fetched at once.
        cache_bytes: Limit of the memory for places of pages, pages and tokens. None shares 256 MiB
            with the other loaders of this process.
        paths: Paths of the files, for a web server, which cannot be listed.

    Attributes:
        counts: Counts of what was read.
        table: All pages of the dataset.
        stale: Paths of the files that the index of the pages has in an earlier version.

    Raises:
        NotFoundError: There are no such files, or a file has no such column.
        ConfigurationError: The files have no rows.
        CorruptError: A file is no parquet file, or is damaged.

    Example:
        loader = PageLoader("s3://bucket/fineweb")
        for texts in loader.read(loader.draw(seed=uid, window=12, count=6)):
            print(texts.to_pylist())
    """

    def __init__(
        self,
        source: FileLocations,
        column: str = "text",
        *,
        include: Sequence[str] = ("*.parquet",),
        page_rows: int = PAGE_ROWS,
        concurrency: int = 8,
        cache_bytes: int | None = None,
        paths: Sequence[str] | None = None,
    ) -> None:
        self._specs, self._paths = list_specs(source), paths
        self._listed = 0
        self._open()
        self._column, self._concurrency = column, concurrency
        self._cache_bytes = cache_bytes
        self._cache = _open_cache(cache_bytes)
        self.counts = PageCounts()
        listed = ListedFiles.collect(self._opened, include)
        if isinstance(self._opened, MirroredStoreFiles):
            self._listed = self._opened.listed
        self._index = find_index(self._opened, listed, column)
        indexed = self._index.paths if self._index else set[str]()
        self._refs = listed.select_named(self._opened, Patterns(include))
        self._entries = [self._index.find(file) if self._index else None for file in self._refs]
        self.stale = tuple(
            file.path
            for file, entry in zip(self._refs, self._entries, strict=True)
            if entry is None and file.path in indexed
        )
        warn_of_stale(self._opened.url, self.stale)
        with ThreadPoolExecutor(FOOTER_CONCURRENCY, thread_name_prefix="footers") as pool:
            groups = list(pool.map(self._read_row_groups, range(len(self._refs))))
        self.table = PageTable(groups, page_rows)

    def __len__(self) -> int:
        """Return the number of pages of the dataset."""
        return len(self.table)

    @property
    def paths(self) -> list[str]:
        """Paths of the files, by their numbers."""
        return [file.path for file in self._refs]

    def __enter__(self) -> Self:
        """Return the loader."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the loader."""
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the loader without its cache and its client, for a process that is spawned."""
        return {n: v for n, v in self.__dict__.items() if n not in {"_cache", "_opened"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the same files. Nothing is listed again."""
        self.__dict__.update(state)
        self._open()
        self._cache = _open_cache(self._cache_bytes)

    def close(self) -> None:
        """Free the memory of the loader. Other loaders keep what they have read."""
        self._cache.close()

    def draw(self, seed: int, window: int, count: int) -> list[Page]:
        """Return the pages of a window, counted from 0 on, see `PageTable.draw`."""
        return self.table.draw(seed, window, count)

    def describe(self, page: Page) -> str:
        """Return the URL of the file of a page, and the rows of the page."""
        url = self._files.make_url(self._refs[page.file].path)
        return f"{url}, rows {page.start} to {page.end - 1}"

    def make_mirror_report(self) -> MirrorReport | None:
        """Return the work of each location; None if the source has one location."""
        files = self._files
        return files.make_report() if isinstance(files, MirroredStoreFiles) else None

    def read(self, pages: Iterable[Page]) -> Iterator[Any]:
        """Yield the values of each page as a ``pyarrow.ChunkedArray``, in the order of the pages.

        Several pages are fetched at once, up to 64 MiB or one page. Where a file has no offset
        index, row groups are fetched whole, also up to 64 MiB or one row group at once. The end of
        the iteration, also by an error, waits for none of them.

        Raises:
            ChangedError: A file was written again after the loader was opened, or is gone.
            CorruptError: A page does not have its checksum, or a file is damaged.
            ConfigurationError: The loader was closed, or the process was forked during the call. Or
                a row group that has to be fetched whole has more than 1 GiB of values.
        """
        return self._fetch_ahead(self._get_page, pages)

    def map(
        self,
        function: Callable[[Page, Any], T],
        pages: Iterable[Page],
        *,
        key: Hashable,
        measure: Callable[[T], int],
    ) -> Iterator[T]:
        """Yield the results of a function for each page, in the order of the pages.

        The thread that fetches a page calls the function. Results are cached instead of the pages.

        Args:
            function: Function of a page and its values, a ``pyarrow.ChunkedArray``.
            pages: The pages.
            key: Key of the function among all functions of this process.
            measure: Function that returns the bytes of a result.

        Raises:
            MillraceError: A page cannot be read, with the errors of `read`.
        """

        def get(page: Page, memory: _GroupMemory) -> T:
            def make() -> T:
                return function(page, self._fetch_page(page, memory))

            return self._get(CacheKind.TOKENS, page, key, make, measure)

        return self._fetch_ahead(get, pages)

    def _fetch_ahead(
        self, get: Callable[[Page, _GroupMemory], T], pages: Iterable[Page]
    ) -> Iterator[T]:
        process, memory = os.getpid(), _GroupMemory()

        def fetch(page: Page) -> T:
            return get(page, memory)

        sized = ((page, self._estimate_size(page)) for page in pages)
        pool = DaemonThreadPool(self._concurrency, "pages")
        try:
            for _, found in fetch_ahead(fetch, sized, self._concurrency, pool=pool):
                yield found
                if os.getpid() != process:
                    raise errors.ConfigurationError(
                        "This process was forked while it read pages, and has no threads that "
                        "fetch the others. Begin to read after the fork."
                    )
        finally:
            pool.shutdown()

    def _get_page(self, page: Page, memory: _GroupMemory) -> Any:
        return self._get(
            CacheKind.PAGE, page, None, lambda: self._fetch_page(page, memory), _measure_values
        )

    def _get(
        self,
        kind: CacheKind,
        page: Page,
        key: Hashable,
        make: Callable[[], T],
        measure: Callable[[T], int],
    ) -> T:
        is_cached = True

        def make_sized() -> tuple[T, int]:
            nonlocal is_cached
            is_cached = False
            value = make()
            return value, measure(value)

        full_key = (self._identify(page.file), page.start, page.end, key)
        value = self._cache.get(kind, full_key, make_sized)
        with get_cache_lock():
            self.counts.pages += 1
            self.counts.cached += is_cached
        return value

    def _fetch_page(self, page: Page, memory: _GroupMemory) -> Any:
        file = self._refs[page.file]
        try:
            layout = self._read_layout(page.file)
            with memory.hold(measure_groups(layout, page.start, page.end)):
                found = read_rows(self._files, file, layout, page.start, page.end)
        except errors.ChangedError as error:
            raise errors.ChangedError(
                f"{self._files.make_url(file.path)} was replaced or deleted after the loader was "
                "opened. Open the loader again for the new version."
            ) from error
        with get_cache_lock():
            self.counts.fetched += found.fetched
            self.counts.whole_groups += not found.is_exact
        return found.values

    def _read_row_groups(self, number: int) -> list[int]:
        if (entry := self._entries[number]) is not None:
            return expand_row_groups(entry.row_groups)
        return np.diff(self._read_layout(number).starts).tolist()

    def _read_layout(self, number: int) -> ColumnLayout:
        def read() -> tuple[ColumnLayout, int]:
            layout = self._read_indexed_layout(number)
            if layout is None:
                layout = read_layout(self._files, self._refs[number], self._column)
            return layout, layout.size

        # An index that was made later may have checksums that the layouts of another loader lack.
        digest = self._index.digest if self._index else None
        return self._cache.get(CacheKind.LAYOUT, (self._identify(number), digest), read)

    def _read_indexed_layout(self, number: int) -> ColumnLayout | None:
        """Return the layout of a file from the index; None if the index cannot be used."""
        index, entry = self._index, self._entries[number]
        if index is None or entry is None:
            return None

        def read_all() -> tuple[bytes, int]:
            body = index.read_all(self._files)
            return body, len(body)

        try:
            whole = None
            if index.is_small:
                whole = self._cache.get(CacheKind.LAYOUT, index.digest, read_all)
            return index.read_layout(self._files, entry, whole)
        except (errors.CorruptError, errors.ChangedError) as error:
            self._index = None  # so the warning comes once
            _log.warning("The index of the pages is not used: %s", error)
            return None

    def _identify(self, number: int) -> Hashable:
        """Return the version of a file and the column, by which loaders share what they read."""
        file = self._refs[number]
        locations = tuple((spec.url, spec.endpoint) for spec in self._specs)
        return locations, file.path, file.size, file.etag, self._column

    @property
    def _files(self) -> SourceFiles:
        """Files of the dataset. A process that was forked opens them again."""
        if os.getpid() != self._process:
            self._open()
        return self._opened

    def _open(self) -> None:
        """Open the files for this process. Their ETags are those of the location of the listing."""
        self._opened = open_loader_files(self._specs, self._paths, listed=self._listed)
        self._process = os.getpid()

    def _estimate_size(self, page: Page) -> int:
        """Return about the bytes of a page, as if all rows of the file were equal."""
        rows = self.table.count_rows(page.file)
        return self._refs[page.file].size * (page.end - page.start) // rows


def _open_cache(cache_bytes: int | None) -> CacheReference:
    cache = get_shared_cache() if cache_bytes is None else ByteCache(cache_bytes)
    return cache.open()


def _measure_values(values: Any) -> int:
    return values.get_total_buffer_size()
