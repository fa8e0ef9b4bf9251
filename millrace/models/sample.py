"""A sample between its source and its format."""

from typing import NamedTuple


class Sample(NamedTuple):
    """One sample on its way in.

    Attributes:
        key: Its name, unique in the dataset.
        fields: Its parts by extension (``txt``, ``json``), in the order they are written.
        next: The cursor after it.
    """

    key: str
    fields: dict[str, bytes]
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
