"""Read pages of a parquet dataset from a store, several at once, and in order."""

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace import errors
from millrace.datasets.loader.cache import ByteCache
from millrace.datasets.loader.column import ColumnLayout, read_layout, read_rows
from millrace.datasets.loader.draw import PAGE_ROWS, Page, PageTable
from millrace.datasets.loader.mirrored_files import (
    FileLocations,
    MirroredStoreFiles,
    open_loader_files,
)
from millrace.datasets.sources.files import Patterns, fetch_ahead, list_files
from millrace.datasets.sources.table import iterate_files
from millrace.storage.mirrored import MirrorReport

_CONCURRENCY = 16  # concurrent reads of footers when a dataset is opened


@dataclass(slots=True)
class PageCounts:
    """Counts of what a loader has read.

    Attributes:
        pages: Number of pages.
        fetched: Number of bytes that were fetched for these pages.
        whole_groups: Number of pages for which a whole row group was fetched, since the file has no
            offset index.
    """

    pages: int = 0
    fetched: int = 0
    whole_groups: int = 0


class PageLoader:
    """Pages of one column of a parquet dataset.

    The files are those that were there when the loader was opened. A file that is written again
    later is an error, so that two versions are not mixed. Several threads may use a loader.

    Args:
        source: URL of the dataset, or URL and credentials. All places of a source are possible: a
            store, a folder, a web server that sends parts of files, or the Hugging Face Hub. Or
            several URLs of stores that have the same files, or a bucket with mirrors.
        column: Column to read.
        include: Patterns of the paths of the files.
        page_rows: Rows of a page, at most. Millrace cuts the pages of its files at 100 rows.
        concurrency: Pages that are fetched at once.
        cache_bytes: Limit of the memory for the places of pages.
        paths: Paths of the files, for a web server, which cannot be listed.

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
        cache_bytes: int = 256 << 20,
        paths: Sequence[str] | None = None,
    ) -> None:
        self._files = open_loader_files(source, paths)
        self._column, self._concurrency = column, concurrency
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._layouts: ByteCache[ColumnLayout] = ByteCache(cache_bytes)
        self.counts = PageCounts()
        table = list_files(self._files, Patterns(include))
        self._refs = [
            file
            for _, file, reason in iterate_files(table, local=self._files.is_local)
            if not reason
        ]
        with ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="footers") as pool:
            groups = list(pool.map(self._read_row_groups, range(len(self._refs))))
        self.table = PageTable(groups, page_rows)

    def __len__(self) -> int:
        """Return the number of pages of the dataset."""
        return len(self.table)

    def draw(self, seed: int, window: int, count: int) -> list[Page]:
        """Return the pages of a window, see `PageTable.draw`."""
        return self.table.draw(seed, window, count)

    def make_mirror_report(self) -> MirrorReport | None:
        """Return the work of each location; None if the source has one location."""
        files = self._files
        return files.make_report() if isinstance(files, MirroredStoreFiles) else None

    def read(self, pages: Iterable[Page]) -> Iterator[Any]:
        """Yield the values of each page as a ``pyarrow.ChunkedArray``, in the order of the pages.

        Several pages are fetched at once, up to 64 MiB or one page.

        Raises:
            ChangedError: A file was written again after the loader was opened, or is gone.
            CorruptError: A page does not have its checksum, or a file is damaged.
            ConfigurationError: The process was forked after the loader was opened.
        """
        self._check_process()
        sized = ((page, self._estimate_size(page)) for page in pages)
        for _, values in fetch_ahead(self._read_page, sized, self._concurrency):
            yield values

    def _read_page(self, page: Page) -> Any:
        file = self._refs[page.file]
        try:
            found = read_rows(self._files, file, self._read_layout(page.file), page.start, page.end)
        except errors.ChangedError as error:
            raise errors.ChangedError(
                f"{self._files.make_url(file.path)} was replaced or deleted after the loader was "
                "opened. Open the loader again for the new version."
            ) from error
        with self._lock:
            self.counts.pages += 1
            self.counts.fetched += found.fetched
            self.counts.whole_groups += not found.is_exact
        return found.values

    def _read_row_groups(self, number: int) -> list[int]:
        return np.diff(self._read_layout(number).starts).tolist()

    def _read_layout(self, number: int) -> ColumnLayout:
        def read() -> tuple[ColumnLayout, int]:
            layout = read_layout(self._files, self._refs[number], self._column)
            return layout, layout.size

        return self._layouts.get(number, read)

    def _estimate_size(self, page: Page) -> int:
        """Return about the bytes of a page, as if all rows of the file were equal."""
        rows = self._read_layout(page.file).rows
        return self._refs[page.file].size * (page.end - page.start) // rows

    def _check_process(self) -> None:
        """Check that this process has opened the loader. The client of stores hangs after a fork.

        Raises:
            ConfigurationError: The process was forked afterwards.
        """
        if os.getpid() != self._process and not self._files.is_local:
            raise errors.ConfigurationError(
                "This process was forked after the loader was opened, and its client of the store "
                "would hang. Open the loader in the process that reads, or start processes by "
                "`spawn`: `DataLoader(..., multiprocessing_context='spawn')`."
            )
