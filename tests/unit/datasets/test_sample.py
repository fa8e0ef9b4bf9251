"""Batches of samples have the rows, the order and the positions of the single samples."""

from collections.abc import Iterator

import pytest

from millrace.datasets.sample import (
    LARGE_ROW,
    BadRow,
    LargeFile,
    Row,
    RowBatch,
    Sample,
    batch_rows,
    iterate_rows,
    make_keys,
)

SMALL = [
    Sample(f"k{n}", {"txt": b"%d" % n, "cls": b"%d" % (n % 7)}, n + 1, n % 3) for n in range(9)
]
BAD = BadRow("a.jsonl, byte 7", "not valid JSON", b"{", 10)
LARGE = Sample("large", {"txt": bytes(LARGE_ROW), "cls": b"1"}, 11)
FILE = Sample("file", {"txt": LargeFile(2, lambda: iter([b"ab"])), "cls": b"1"}, 12)
OTHER = Sample("other", {"txt": b"", "json": b"{}"}, 13)


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (SMALL, [9]),
        ([], []),
        ([*SMALL, BAD, *SMALL], [9, 0, 9]),
        ([*SMALL, LARGE, *SMALL], [9, 0, 9]),
        ([SMALL[0], FILE], [0, 0]),
        ([SMALL[0], OTHER], [0, 0]),
        ([SMALL[0], OTHER._replace(fields={"txt": b""})], [0, 0]),
    ],
)
def test_batches_have_the_rows_in_their_order(rows: list[Row], sizes: list[int]) -> None:
    batches = list(batch_rows(iter(rows)))
    assert [len(one) if isinstance(one, RowBatch) else 0 for one in batches] == sizes
    assert list(iterate_rows(iter(batches))) == rows


def test_a_part_of_a_batch_has_the_positions_of_its_samples() -> None:
    [batch] = batch_rows(iter(SMALL))
    assert isinstance(batch, RowBatch)
    assert list(batch.slice(2, 5).iterate_samples()) == SMALL[2:5]
    assert [batch.slice(2, 5).get_position(n) for n in range(3)] == [(3, 2), (4, 0), (5, 1)]
    assert not batch.slice(9, 9)


def test_the_rows_before_an_error_are_there_before_the_error() -> None:
    def fail() -> Iterator[Row]:
        yield from SMALL
        raise OSError("gone")

    batches = batch_rows(fail())
    assert isinstance(batch := next(batches), RowBatch)
    assert list(batch.iterate_samples()) == SMALL
    with pytest.raises(OSError, match="gone"):
        next(batches)


def test_keys_are_numbers_with_zeros() -> None:
    assert make_keys(3, [0, 17, 10**13], 13) == [
        "00003-0000000000000",
        "00003-0000000000017",
        "00003-10000000000000",
    ]
    assert make_keys(3, [], 13) == []
