"""Samples and bad rows, which a source yields and a format encodes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, cast


@dataclass(frozen=True, slots=True)
class LargeFile:
    """Large part of a sample, whose blocks are read only while the shard is encoded.

    Attributes:
        size: Bytes of the file.
        blocks: Function that yields the blocks of the file. The function raises `ChangedError` if
            the file has changed.
    """

    size: int
    blocks: Callable[[], Iterator[bytes]]

    def __len__(self) -> int:
        return self.size


class Sample(NamedTuple):
    """One sample of a source.

    Attributes:
        key: Name of the sample, unique in its partition.
        fields: Parts by their extensions (``txt``, ``json``). Formats sort them by extension.
        next_cursor: Cursor after the sample.
        next_skip: Part of the row at `next_cursor` that was yielded before, as transforms count it.
    """

    key: str
    fields: Mapping[str, bytes | LargeFile]
    next_cursor: int
    next_skip: int = 0


def make_samples(
    keys: Iterable[str], fields: Iterable[Mapping[str, bytes]], next_cursors: Iterable[int]
) -> Iterator[Sample]:
    """Yield the samples of consecutive rows. No Python code runs for a sample."""
    return map(_NEW_SAMPLE, zip(keys, fields, next_cursors, repeat(0), strict=False))


_NEW_SAMPLE: Callable[[Iterable[Any]], Sample] = partial(cast("Any", tuple).__new__, Sample)


class BadRow(NamedTuple):
    """A row that makes no sample.

    Attributes:
        where: Location of the row in the source.
        reason: Reason why the row makes no sample.
        data: Bytes of the row, or the first of them.
        next_cursor: Cursor after the row.
        next_skip: Part of the row at `next_cursor` that was yielded before, as transforms count it.
    """

    where: str
    reason: str
    data: bytes
    next_cursor: int
    next_skip: int = 0


Row = Sample | BadRow
