"""A source: where samples come from, cut into splits that one can seek in."""

from collections.abc import Iterator
from typing import Protocol

from millrace.schemas.dataset import SourceRange
from millrace.schemas.sample import Row


class Source(Protocol):
    """Interface between the sharding engine and a source."""

    def rows(self, piece: SourceRange, cursor: int) -> Iterator[Row]:
        """Yield the rows of a piece from a cursor on; 0 is its beginning.

        Seeking is O(1): nothing before the cursor is read.

        Raises:
            ChangedError: A file is no longer as it was when the plan was made.
        """
        ...
