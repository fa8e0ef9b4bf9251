"""A sample between its source and its format."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class LargeFile:
    """A part of a sample that is read only while its shard is encoded.

    Attributes:
        size: Bytes.
        blocks: Read it from its beginning; raises `ChangedError` if it is another by then.
    """

    size: int
    blocks: Callable[[], Iterator[bytes]]

    def __len__(self) -> int:
        return self.size


class Sample(NamedTuple):
    """One sample on its way in.

    Attributes:
        key: Its name, unique in the dataset.
        fields: Its parts by extension (``txt``, ``json``), in the order they are written.
        next: The cursor after it.
    """

    key: str
    fields: Mapping[str, bytes | LargeFile]
    next: int


class BadRow(NamedTuple):
    """A row that makes no sample.

    Attributes:
        where: Its place in the source.
        reason: What is wrong with it.
        data: Its bytes, or the beginning of them.
        next: The cursor after it.
    """

    where: str
    reason: str
    data: bytes
    next: int


Row = Sample | BadRow
