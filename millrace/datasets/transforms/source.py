"""Source whose samples are changed by transforms on their way to the shards."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from millrace.datasets.sample import BadRow, Row, RowBatch, batch_rows, iterate_rows
from millrace.datasets.sources.base import BatchSource, Source
from millrace.datasets.transforms.base import (
    Packing,
    RowGroup,
    SampleTransform,
    apply_transform,
    make_changed_error,
)
from millrace.datasets.transforms.function import FunctionTransform, watch_functions
from millrace.datasets.transforms.json_check import JsonCheck
from millrace.schemas.dataset import SourceRange


@dataclass(frozen=True, slots=True)
class TransformChain:
    """Transforms in their order, and the packing after them.

    Attributes:
        transforms: The transforms.
        packing: Packing of the tokens that the last transform makes; None for no packing.
    """

    transforms: Sequence[SampleTransform]
    packing: Packing | None = None


class RowCounts(NamedTuple):
    """Numbers of rows of a source.

    Attributes:
        rows: Number of rows.
        dropped: Number of those that became no row.
    """

    rows: int
    dropped: int


class TransformedSource:
    """Source whose samples are changed by transforms.

    A row of the source may become many samples, and a packed sample has tokens of many rows. So a
    position is a cursor of the source, and the part of its row that was already yielded. Reading
    from the position of any row yields the rows after it.

    The iteration counts the rows of the source that it reads. After each row that it yields, the
    caller asks `get_share` for the share of a bad one, and `take_rows` for the counts up to it.

    Args:
        source: The source.
        chain: Transforms of the samples. Without any, the rows of the source are not touched.
        json_check: Check of the fields that are JSON; None if Millrace has made all of them.

    Attributes:
        has_transforms: Whether there are transforms.
        calls_functions: Whether a transform calls a function of the user.
    """

    def __init__(
        self, source: Source, chain: TransformChain, json_check: JsonCheck | None = None
    ) -> None:
        self._source, self._chain, self._json_check = source, chain, json_check
        self._read: deque[_ReadRows] = deque()
        self.has_transforms = bool(chain.transforms)
        self.calls_functions = any(isinstance(one, FunctionTransform) for one in chain.transforms)

    def wrap_source(self, wrap: Callable[[Source], Source]) -> "TransformedSource":
        """Return the same transforms of what a function makes of the source."""
        return TransformedSource(wrap(self._source), self._chain, self._json_check)

    def iterate_rows(self, source_range: SourceRange, cursor: int, skip: int = 0) -> Iterator[Row]:
        """Yield the rows of a source range from a position on.

        Memory: one row and what the transforms make of it, or a batch of about 1 MiB.

        Args:
            source_range: Range of the source.
            cursor: The `next_cursor` of the last row that was read; 0 for the beginning.
            skip: The `next_skip` of this row; 0 for the beginning.

        Raises:
            ChangedError: A file has changed since the plan was made, or a transform makes less of
                a row than before.
        """
        if self._chain.transforms:
            return self._transform_rows(source_range, cursor, skip)
        if self._json_check is None:
            return self._source.iterate_rows(source_range, cursor)
        if isinstance(self._source, BatchSource):
            return iterate_rows(self.iterate_batches(source_range, cursor))
        return self._json_check.check_rows(self._source.iterate_rows(source_range, cursor))

    def _transform_rows(self, source_range: SourceRange, cursor: int, skip: int) -> Iterator[Row]:
        groups = _group_rows(self._source.iterate_rows(source_range, cursor), cursor)
        for transform in self._chain.transforms:
            groups = apply_transform(transform, groups)
        if self._json_check is not None:
            groups = self._json_check.check_groups(groups)
        groups = self._count_rows(groups)
        if self._chain.packing is not None:
            # Numpy is imported only for what needs it.
            from millrace.datasets.transforms.packing import pack_groups  # noqa: PLC0415

            return pack_groups(groups, self._chain.packing, skip)
        return _number_rows(groups, skip)

    def iterate_batches(
        self, source_range: SourceRange, cursor: int, skip: int = 0
    ) -> Iterator[RowBatch | Row]:
        """Yield the rows of `iterate_rows`, with consecutive small samples in batches."""
        if isinstance(self._source, BatchSource) and not self._chain.transforms:
            batches = self._source.iterate_batches(source_range, cursor)
            return batches if self._json_check is None else self._json_check.check_batches(batches)
        return batch_rows(self.iterate_rows(source_range, cursor, skip))

    def take_rows(self, end: float = math.inf) -> RowCounts:
        """Return the numbers of rows before a position. Later calls do not count them again.

        A row that has become several samples is before a position if all of these are. The numbers
        depend on the position alone, and not on how far the iteration is: in which commit a row is
        counted is the same in every run. Without transforms, nothing is counted.

        Args:
            end: Cursor of the position, which is that of a row that was yielded.
        """
        rows = dropped = 0
        while self._read and self._read[0].cursor < end:
            taken = self._read.popleft()
            rows += taken.count
            dropped += 0 if taken.parts else taken.count
        return RowCounts(rows, dropped)

    def get_share(self) -> float:
        """Return the share of one sample in the first row that was not taken and not dropped."""
        return next((1 / one.parts for one in self._read if one.parts), 1.0)

    def _count_rows(self, groups: Iterable[RowGroup]) -> Iterator[RowGroup]:
        """Count the rows of the source, and give bad rows their share of the row."""
        self._read.clear()
        with watch_functions():
            for group in groups:
                parts = len(group.rows)
                if parts or not self._read or self._read[-1].parts:
                    self._read.append(_ReadRows(group.cursor, parts))
                else:
                    self._read[-1].count += 1
                if parts > 1:
                    group.rows[:] = [_set_share(row, 1 / parts) for row in group.rows]
                held = [group]
                del group  # a large row is not held while the next is read
                yield held.pop()


@dataclass(slots=True)
class _ReadRows:
    """A row of a source, or consecutive rows that became no row.

    Attributes:
        cursor: Cursor of the first one.
        parts: Number of rows that it has become; 0 for consecutive rows that became none.
        count: Number of rows of the source.
    """

    cursor: int
    parts: int
    count: int = 1


def _set_share(row: Row, share: float) -> Row:
    return row._replace(share=share) if isinstance(row, BadRow) else row


def _group_rows(rows: Iterator[Row], cursor: int) -> Iterator[RowGroup]:
    for row in rows:
        held = [RowGroup(cursor, row.next_cursor, [row])]
        cursor = row.next_cursor
        del row  # a large row is not held while the next is read
        yield held.pop()


def _number_rows(groups: Iterable[RowGroup], skip: int) -> Iterator[Row]:
    """Yield the rows of groups with their positions, without the first rows of the first group."""
    for cursor, next_cursor, rows in groups:
        if skip and skip >= len(rows):
            raise make_changed_error(cursor)
        count = len(rows)
        rows.reverse()
        del rows[count - skip :]
        while rows:
            row = rows.pop()
            is_last = not rows
            position = (next_cursor, 0) if is_last else (cursor, count - len(rows))
            held = [row._replace(next_cursor=position[0], next_skip=position[1])]
            del row
            yield held.pop()
        skip = 0
    if skip:
        raise make_changed_error(0)
