"""Source whose samples are changed by transforms on their way to the shards."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from millrace.datasets.sample import Row, RowBatch, batch_rows, iterate_rows
from millrace.datasets.sources.base import BatchSource, Source
from millrace.datasets.transforms.base import (
    Packing,
    RowGroup,
    SampleTransform,
    apply_transform,
    make_changed_error,
)
from millrace.datasets.transforms.function import watch_functions
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


class TransformedSource:
    """Source whose samples are changed by transforms.

    A row of the source may become many samples, and a packed sample has tokens of many rows. So a
    position is a cursor of the source, and the part of its row that was already yielded. Reading
    from the position of any row yields the rows after it.

    Args:
        source: The source.
        chain: Transforms of the samples. Without any, the rows of the source are not touched.
        json_check: Check of the fields that are JSON; None if Millrace has made all of them.
    """

    def __init__(
        self, source: Source, chain: TransformChain, json_check: JsonCheck | None = None
    ) -> None:
        self._source, self._chain, self._json_check = source, chain, json_check
        self._dropped: deque[_DroppedRows] = deque()

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
        if self._json_check is None:
            return self._transform_rows(source_range, cursor, skip)
        if isinstance(self._source, BatchSource) and not self._chain.transforms:
            return iterate_rows(self.iterate_batches(source_range, cursor))
        return self._json_check.check_rows(self._transform_rows(source_range, cursor, skip))

    def _transform_rows(self, source_range: SourceRange, cursor: int, skip: int) -> Iterator[Row]:
        rows = self._source.iterate_rows(source_range, cursor)
        if not self._chain.transforms:
            return rows
        groups = _group_rows(rows, cursor)
        for transform in self._chain.transforms:
            groups = apply_transform(transform, groups)
        groups = self._count_dropped(groups)
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

    def take_dropped(self, end: float = math.inf) -> int:
        """Return the number of dropped rows before a position. Later calls do not count them.

        Rows that became no row are dropped. The number depends on the position alone, and not on
        how far the iteration is: in which commit a row is counted is the same in every run.

        Args:
            end: Cursor of the position, which is that of a row that was yielded.
        """
        count = 0
        while self._dropped and self._dropped[0].cursor < end:
            count += self._dropped.popleft().count
        return count

    def _count_dropped(self, groups: Iterable[RowGroup]) -> Iterator[RowGroup]:
        self._dropped.clear()
        is_following = False
        with watch_functions():
            for group in groups:
                if group.rows:
                    is_following = False
                elif is_following:
                    self._dropped[-1].count += 1
                else:
                    self._dropped.append(_DroppedRows(group.cursor))
                    is_following = True
                held = [group]
                del group  # a large row is not held while the next is read
                yield held.pop()


@dataclass(slots=True)
class _DroppedRows:
    """Consecutive rows of a source that became no row.

    Attributes:
        cursor: Cursor of the first one.
        count: Number of rows.
    """

    cursor: int
    count: int = 1


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
