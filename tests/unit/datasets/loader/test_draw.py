"""Draws of pages: the same for all who know few integers, and fair to all rows."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.datasets.loader.draw import Page, PageTable, draw_templar_pages
from millrace.errors import ConfigurationError

CONFIGS = {"CC-2013-20": 820_000, "CC-2014-10": 5_000_000_000, "a": 103, "z": 7000}


FILES = st.lists(st.lists(st.integers(0, 400), max_size=4), min_size=1, max_size=5).filter(
    lambda files: any(map(sum, files))
)


@given(files=FILES, page_rows=st.integers(1, 300))
def test_the_pages_have_each_row_once(files: list[list[int]], page_rows: int) -> None:
    table = PageTable(files, page_rows)
    found = [(page.file, row) for page in map(table.__getitem__, range(len(table)))
             for row in range(page.start, page.end)]  # fmt: skip
    assert found == [(file, row) for file, groups in enumerate(files) for row in range(sum(groups))]
    for page in map(table.__getitem__, range(len(table))):
        ends = np.cumsum(files[page.file])
        group = int(np.searchsorted(ends, page.start, "right"))
        assert page.end <= ends[group]
        assert page.end - page.start == page_rows or page.end == ends[group]


@given(files=FILES, seed=st.integers(), count=st.integers(1, 40))
def test_the_windows_of_a_seed_have_each_page_once_in_an_epoch(
    files: list[list[int]], seed: int, count: int
) -> None:
    table = PageTable(files)
    windows = -(-3 * len(table) // count)
    drawn = [page for window in range(windows) for page in table.draw(seed, window, count)]
    for epoch in range(3):
        of_epoch = drawn[epoch * len(table) : (epoch + 1) * len(table)]
        assert set(Counter(of_epoch).values()) == {1}
        assert len(of_epoch) == len(table)


def test_a_validator_draws_the_pages_of_a_worker() -> None:
    """The draw of a window does not depend on other draws, and never changes."""
    table = PageTable([[250], [], [1], [100], [500, 0, 500]])
    assert table.draw(3, 4, 4) == [
        Page(4, 400, 500), Page(4, 500, 600), Page(4, 600, 700), Page(4, 100, 200),
    ]  # fmt: skip
    assert table.draw(3, 0, 0) == []


def test_a_file_with_more_rows_is_drawn_more_often() -> None:
    table = PageTable([[100_000], [450_000] * 2])
    drawn = Counter(page.file for seed in range(50) for page in table.draw(seed, 0, 20))
    assert 60 < drawn[0] < 140


def test_templars_draw_is_templars() -> None:
    """By the rule of its loader: sorted configs, and a first row below the last page of each."""
    assert draw_templar_pages(CONFIGS, 7, 12, 6) == [
        ("a", 0), ("z", 3070), ("CC-2014-10", 2767486704), ("a", 1), ("z", 5572), ("z", 4831),
    ]  # fmt: skip
    assert draw_templar_pages(CONFIGS, 7, 12, 3) == draw_templar_pages(CONFIGS, 7, 12, 6)[:3]


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda: PageTable([]), "no rows"),
        (lambda: PageTable([[], [0]]), "no rows"),
        (lambda: PageTable([[5]], 0), "at least one row"),
        (lambda: draw_templar_pages({}, 1, 0, 1), "no configs"),
        (lambda: draw_templar_pages({"a": 101}, 1, 0, 1), "'a' has 101 rows"),
    ],
)
def test_what_has_no_pages_is_refused(act, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        act()


def test_a_page_or_window_that_does_not_exist_is_refused() -> None:
    table = PageTable([[100]])
    for number in (1, -1):
        with pytest.raises(IndexError):
            table[number]
    for window, count in ((-1, 1), (1, -1)):
        with pytest.raises(ValueError, match="not negative"):
            table.draw(1, window, count)
