"""A source: where samples come from, cut into splits that one can seek in."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from millrace.models.dataset import Piece


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


class Source(Protocol):
    """What the sharding engine asks of a source."""

    def rows(self, piece: Piece, cursor: int) -> Iterator[Row]:
        """The rows of a piece from a cursor on; 0 is its beginning.

        Seeking is O(1): nothing before the cursor is read.

        Raises:
            ChangedError: A file is no longer as it was when the plan was made.
        """
        ...
