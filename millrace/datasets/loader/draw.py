"""Draw pages of a parquet dataset: which rows a worker reads in a window.

A draw is a function of few integers, so a validator draws the pages of a worker again. Each row is
as likely as any other, and no page is drawn twice before all pages were drawn once.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from millrace.datasets.loader.permutation import Permutation
from millrace.errors import ConfigurationError

PAGE_ROWS = 100


class Page(NamedTuple):
    """A run of rows of one file.

    Attributes:
        file: Number of the file.
        start: First row in the file.
        end: Row after the last one.
    """

    file: int
    start: int
    end: int


class PageTable:
    """All pages of some files.

    A page has rows of one row group, since parquet begins new pages with each row group. So the
    last page of a row group may have fewer rows than the others.

    Args:
        row_groups: Numbers of rows of the row groups of each file.
        page_rows: Rows of a page.

    Raises:
        ConfigurationError: The files have no rows, or a page would have none.
    """

    def __init__(self, row_groups: Sequence[Sequence[int]], page_rows: int = PAGE_ROWS) -> None:
        if page_rows < 1:
            raise ConfigurationError("A page has at least one row. Correct `page_rows`.")
        self._page_rows = page_rows
        self._groups = [np.asarray(groups, np.int32) for groups in row_groups]
        self._ends = np.cumsum([int(self._count_pages(one).sum()) for one in self._groups])
        if not len(self):
            raise ConfigurationError("The files have no rows, so there are no pages to draw.")

    def __len__(self) -> int:
        """Return the number of pages."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, number: int) -> Page:
        """Return a page by its number, in the order of files and rows."""
        if not 0 <= number < len(self):
            raise IndexError(f"there is no page {number} of {len(self)}")
        file = int(np.searchsorted(self._ends, number, "right"))
        groups = self._groups[file]
        counts = self._count_pages(groups)
        in_file = number - (int(self._ends[file - 1]) if file else 0)
        group = int(np.searchsorted(np.cumsum(counts), in_file, "right"))
        first = int(groups[:group].sum(dtype=np.int64))
        start = first + (in_file - int(counts[:group].sum())) * self._page_rows
        return Page(file, start, min(start + self._page_rows, first + int(groups[group])))

    def count_rows(self, file: int) -> int:
        """Return the number of rows of a file."""
        return int(self._groups[file].sum(dtype=np.int64))

    def _count_pages(self, groups: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        return -(-groups.astype(np.int64) // self._page_rows)

    def draw(self, seed: int, window: int, count: int) -> list[Page]:
        """Return the pages of a window.

        The windows of a seed follow each other in a random order of all pages. After the last page,
        a new order begins.

        Args:
            seed: Seed of the order, such as the number of a worker.
            window: Number of the draw, from 0 on. The windows of a run are counted from 1 on, so
                window ``n`` of a run is draw ``n - 1``.
            count: Pages of each window.

        Raises:
            ValueError: The window or the count is negative.
        """
        if window < 0 or count < 0:
            raise ValueError("a window and a number of pages are not negative")
        drawn: list[Page] = []
        position, end = window * count, (window + 1) * count
        while position < end:
            epoch, first = divmod(position, len(self))
            taken = min(end - position, len(self) - first)
            order = Permutation(len(self), seed, epoch)
            drawn += [self[int(n)] for n in order.permute(np.arange(first, first + taken))]
            position += taken
        return drawn


def draw_templar_pages(
    config_rows: Mapping[str, int],
    seed: int,
    offset: int,
    count: int,
    page_rows: int = PAGE_ROWS,
) -> list[tuple[str, int]]:
    """Return pages as Templar's loader draws them: each with its config and its first row.

    Each config is as likely as any other, whatever its number of rows, and pages overlap.

    Args:
        config_rows: Number of rows of each config.
        seed: Seed, such as the number of a worker.
        offset: Draws to skip, as Templar's loader counts them: window times pages.
        count: Number of pages.
        page_rows: Rows of a page.

    Raises:
        ConfigurationError: There is no config, or a config is too small for a page.
    """
    names = sorted(config_rows)
    if small := [name for name in names if config_rows[name] - 1 - page_rows < 1]:
        raise ConfigurationError(
            f"The config {small[0]!r} has {config_rows[small[0]]} rows, and a draw needs at least "
            f"{page_rows + 2}. Leave the config out, or draw smaller pages."
        )
    if not names:
        raise ConfigurationError("There are no configs to draw pages from.")
    generator = np.random.PCG64(hash(seed) & 0xFFFFFFFF)
    generator.advance(offset)
    numbers = np.random.Generator(generator)
    drawn: list[tuple[str, int]] = []
    for _ in range(count):
        name = names[int(numbers.integers(0, len(names)))]
        drawn.append((name, int(numbers.integers(0, config_rows[name] - 1 - page_rows))))
    return drawn
