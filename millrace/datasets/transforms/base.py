"""Interface of a transform, which makes the samples of a row from the samples before it."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from millrace.datasets.sample import BadRow, LargeFile, Row, Sample
from millrace.errors import ChangedError

_BATCH_BYTES = 1 << 20  # bytes of the fields of a batch; a larger row is a batch of its own
_SHOWN = 64 << 10  # bytes of a refused sample that are kept
IMPURE_FUNCTION = (
    "a function of the transforms depends on more than its sample, such as the time, the order of "
    "a set, a counter or random numbers without a seed"
)
"""Usual reason for other results of the same samples, for messages."""


class RowGroup(NamedTuple):
    """The rows that transforms have made of one row of a source.

    Attributes:
        cursor: Cursor of the row in the source.
        next_cursor: Cursor after the row.
        rows: Samples and bad rows in their order. Their own cursors are not used.
    """

    cursor: int
    next_cursor: int
    rows: list[Row]


class Packing(NamedTuple):
    """Length and type of packed samples.

    Attributes:
        length: Number of tokens of a sample.
        dtype: Type of a token, ``uint16`` or ``uint32``.
    """

    length: int
    dtype: str


class SampleTransform(Protocol):
    """Function from a sample to any number of samples.

    The result depends on the sample alone, and not on the samples beside it. So a run may continue
    at any row.

    Attributes:
        batch_rows: Largest number of rows of the source whose samples are given in one call.
    """

    batch_rows: int

    def apply(self, samples: Sequence[Sample]) -> list[list[Row]]:
        """Return the rows that each sample becomes. A sample that fails becomes a bad row."""
        ...


def apply_transform(transform: SampleTransform, groups: Iterable[RowGroup]) -> Iterator[RowGroup]:
    """Apply a transform to the samples of row groups. Bad rows stay as they are.

    Memory: the row groups of one batch, which have about 1 MiB or are one group.
    """
    batch: list[RowGroup] = []
    size = 0
    for group in groups:
        size += sum(map(_count_bytes, group.rows))
        batch.append(group)
        del group  # a large row is not held while the next is read
        if len(batch) >= transform.batch_rows or size >= _BATCH_BYTES:
            yield from _apply_to_batch(transform, batch)
            size = 0
    yield from _apply_to_batch(transform, batch)


def _apply_to_batch(transform: SampleTransform, batch: list[RowGroup]) -> Iterator[RowGroup]:
    """Yield the transformed groups of a batch, and empty the batch."""
    made = transform.apply([r for group in batch for r in group.rows if isinstance(r, Sample)])
    made.reverse()
    batch.reverse()
    while batch:
        cursor, next_cursor, before = batch.pop()
        rows: list[Row] = []
        for row in before:
            rows += made.pop() if isinstance(row, Sample) else [row]
        del before
        held = [RowGroup(cursor, next_cursor, rows)]
        del rows
        yield held.pop()


def _count_bytes(row: Row) -> int:
    if isinstance(row, BadRow):
        return len(row.data)
    return sum(map(len, row.fields.values()))


def make_bad_row(sample: Sample, reason: str) -> BadRow:
    """Return the bad row for a sample, with the first bytes of its first field."""
    fields = (sample.fields[name] for name in sorted(sample.fields))
    data = next((field for field in fields if not isinstance(field, LargeFile)), b"")
    return BadRow(sample.key, reason, data[:_SHOWN], sample.next_cursor)


def make_changed_error(cursor: int) -> ChangedError:
    """Return the error for a row that becomes less than a commit says.

    Args:
        cursor: Cursor of the row.
    """
    return ChangedError(
        f"The transforms make less of the row at {cursor} than they made before the last commit: "
        f"{IMPURE_FUNCTION}. Correct the function, and shard the source under another dataset name."
    )
