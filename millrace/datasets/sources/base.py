"""Interface of a source, whose ranges can be read from any cursor."""

from collections.abc import Iterator
from typing import Protocol

from millrace.schemas.dataset import SourceRange
from millrace.schemas.sample import Row


class Source(Protocol):
    """Interface between the sharding engine and a source."""

    def iterate_rows(self, source_range: SourceRange, cursor: int) -> Iterator[Row]:
        """Yield the rows of a source range from a cursor on; 0 is its beginning.

        Seeking takes constant time: no byte before the cursor is read.

        Raises:
            ChangedError: A file has changed since the plan was made.
        """
        ...
