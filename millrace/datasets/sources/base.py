"""Interface of a source, whose ranges can be read from any cursor."""

from collections.abc import Iterator
from typing import Protocol

from millrace.datasets.sample import Row
from millrace.schemas.dataset import SourceRange


class Source(Protocol):
    """Source of samples, as the sharding engine reads it."""

    def iterate_rows(self, source_range: SourceRange, cursor: int) -> Iterator[Row]:
        """Yield the rows of a source range from a cursor on; 0 is the beginning of the range.

        No byte of a file before the cursor is read. A list of files may be read again.

        Raises:
            ChangedError: A file has changed since the plan was made.
        """
        ...
