"""A sample between its source and its format."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class LargeFile:
    """A part of a sample that is read only while its shard is encoded.

    Attributes:
        size: Bytes of the file.
        blocks: Function that reads the file from its beginning. It raises `ChangedError` if the
            file has changed by then.
    """

    size: int
    blocks: Callable[[], Iterator[bytes]]

    def __len__(self) -> int:
        return self.size


class Sample(NamedTuple):
    """One sample of a source.

    Attributes:
        key: Name of the sample, unique in the dataset.
        fields: Parts by extension (``txt``, ``json``), in the order in which they are written.
        next_cursor: Cursor after the sample.
    """

    key: str
    fields: Mapping[str, bytes | LargeFile]
    next_cursor: int


class BadRow(NamedTuple):
    """A row that makes no sample.

    Attributes:
        where: Location in the source.
        reason: Why the row makes no sample.
        data: Bytes of the row, or their beginning.
        next_cursor: Cursor after the row.
    """

    where: str
    reason: str
    data: bytes
    next_cursor: int


Row = Sample | BadRow
