"""Packing of documents: their tokens are joined, and divided into samples of one length."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from millrace.datasets.field_names import TOKENS
from millrace.datasets.formats.base import read_field
from millrace.datasets.sample import BadRow, Row, Sample
from millrace.datasets.transforms.base import Packing, RowGroup, make_changed_error

_BAD_ROW = 1 << 32  # a `next_skip` counts tokens in its low bits, and bad rows above them


class _Start(NamedTuple):
    """Place of the first token of a sample.

    Attributes:
        cursor: Cursor of the source's row with the token.
        tokens: Tokens of this row before the token.
        key: Key of the document with the token.
        offset: Tokens of this document before the token.
    """

    cursor: int
    tokens: int
    key: str
    offset: int


def pack_groups(groups: Iterable[RowGroup], packing: Packing, skip: int) -> Iterator[Row]:
    """Yield samples of one length, with the tokens of all groups, and bad rows as they come.

    The last sample is shorter. The position of a row is that of the first token that is not yet in
    a sample: the `next_cursor` is that of the source's row with this token. The `next_skip` counts
    the tokens of this row before it, and the bad rows since the beginning of this row.

    Args:
        groups: Row groups whose samples have tokens.
        packing: Length and type of the samples.
        skip: The `next_skip` at which reading begins.

    Raises:
        ChangedError: The rows have fewer tokens or bad rows than were skipped.
    """
    packer = _Packer(packing, skip)
    for group in groups:
        yield from packer.pack(group)
    yield from packer.finish()


class _Packer:
    """The sample that is being filled, and the position in the present row group.

    Args:
        packing: Length and type of the samples.
        skip: The `next_skip` at which reading begins.
    """

    def __init__(self, packing: Packing, skip: int) -> None:
        self._length = packing.length
        self._array_type = np.dtype(packing.dtype).newbyteorder("<")
        self._skipped_bad_rows, self._skipped_tokens = divmod(skip, _BAD_ROW)
        # The sample, which is empty without a start.
        self._start: _Start | None = None
        self._parts: list[np.ndarray] = []
        self._size = 0
        self._bad_rows = 0  # since the beginning of the row with the first token
        # The group, and how much of it was used.
        self._group = RowGroup(0, 0, [])
        self._group_tokens = 0
        self._group_bad_rows = 0
        self._is_group_end = False

    def pack(self, group: RowGroup) -> Iterator[Row]:
        """Yield the rows that a group completes."""
        self._group, self._is_group_end = group._replace(rows=[]), False
        self._group_tokens = self._group_bad_rows = 0
        for left, row in zip(range(len(group.rows) - 1, -1, -1), group.rows, strict=True):
            if isinstance(row, BadRow):
                yield from self._pass_on(row, is_last=not left)
            else:
                yield from self._add_document(row, is_last=not left)
        if self._skipped_tokens:
            raise make_changed_error(group.cursor)

    def finish(self) -> Iterator[Row]:
        """Yield the last sample, which is shorter."""
        if self._skipped_bad_rows or self._skipped_tokens:
            raise make_changed_error(self._group.next_cursor)
        if self._start is not None:
            self._is_group_end = True
            yield self._take_sample(self._start)

    def _pass_on(self, row: BadRow, *, is_last: bool) -> Iterator[Row]:
        self._bad_rows += 1
        self._group_bad_rows += 1
        self._is_group_end = is_last
        if self._skipped_bad_rows:
            self._skipped_bad_rows -= 1
        else:
            cursor, skip = self._locate()
            yield row._replace(next_cursor=cursor, next_skip=skip)

    def _add_document(self, document: Sample, *, is_last: bool) -> Iterator[Row]:
        tokens = np.frombuffer(read_field(document.fields[TOKENS]), self._array_type)
        at = min(self._skipped_tokens, len(tokens))
        self._skipped_tokens -= at
        self._group_tokens += at
        while at < len(tokens):
            if self._start is None:
                self._start = _Start(self._group.cursor, self._group_tokens, document.key, at)
                self._bad_rows = self._group_bad_rows
            part = tokens[at : at + self._length - self._size]
            self._parts.append(part)
            self._size += len(part)
            self._group_tokens += len(part)
            at += len(part)
            self._is_group_end = is_last and at == len(tokens)
            if self._size == self._length:
                yield self._take_sample(self._start)

    def _take_sample(self, start: _Start) -> Sample:
        tokens = np.concatenate(self._parts).tobytes()
        self._start, self._parts, self._size = None, [], 0
        return Sample(f"{start.key}-{start.offset:08d}", {TOKENS: tokens}, *self._locate())

    def _locate(self) -> tuple[int, int]:
        """Return the position of the first token that is not yet in a sample."""
        if self._start is not None:
            return self._start.cursor, self._start.tokens + self._bad_rows * _BAD_ROW
        if self._is_group_end:
            return self._group.next_cursor, 0
        return self._group.cursor, self._group_tokens + self._group_bad_rows * _BAD_ROW
