"""Sections of a file, which are decompressed if the file is compressed, and lines in them."""

import io
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from millrace import errors
from millrace.datasets.sample import BATCH_BYTES, LARGE_ROW

MAX_ROW_BYTES = 256 * 1024 * 1024
_STEP = 64 << 10  # bytes that are split at a time, since each may be a line
_MAX_LINES = 1024


class Section(NamedTuple):
    """Some bytes of a file, decompressed if it is compressed.

    Attributes:
        cursor: Cursor of the first byte. The cursor of another byte is larger by its index.
        offset: Offset of the first byte.
        data: The bytes.
    """

    cursor: int
    offset: int
    data: bytes


Line = tuple[int, int, int, list[bytes]]
"""A line of a file: the cursor and the offset of its first byte, the cursor after the line, and a
list with the bytes of the line, without the newline. The caller removes the bytes from the list, so
that they can be freed."""


class Lines:
    """Consecutive lines of a file.

    Attributes:
        cursors: Cursors of the first bytes of the lines.
        offsets: Offsets of the first bytes of the lines.
        next_cursors: Cursors after the lines.
        data: Bytes of the lines, with their newlines unless they are in several sections.
        size: Number of bytes.
    """

    def __init__(self) -> None:
        self.cursors: list[int] = []
        self.offsets: list[int] = []
        self.next_cursors: list[int] = []
        self.data: list[bytes] = []
        self.size = 0

    def append(self, cursor: int, offset: int, next_cursor: int, line: bytes) -> None:
        """Append a line."""
        self.cursors.append(cursor)
        self.offsets.append(offset)
        self.next_cursors.append(next_cursor)
        self.data.append(line)
        self.size += len(line)

    def extend(self, section: Section, at: int, lines: list[bytes]) -> int:
        """Append lines of a section that begin at an index; return the index after them."""
        edges = [*accumulate(map(len, lines), initial=at)]
        self.cursors += map(section.cursor.__add__, edges[:-1])
        self.offsets += map(section.offset.__add__, edges[:-1])
        self.next_cursors += map(section.cursor.__add__, edges[1:])
        self.data += lines
        self.size += edges[-1] - at
        return edges[-1]

    def keep(self, start: int, end: int) -> None:
        """Remove the lines that do not begin between two cursors."""
        first, after = bisect_left(self.cursors, start), bisect_left(self.cursors, end)
        for one in (self.cursors, self.offsets, self.next_cursors, self.data):
            del one[after:], one[:first]

    def is_full(self) -> bool:
        """Decide whether the lines should be used before more are appended."""
        return self.size >= BATCH_BYTES or len(self.data) >= _MAX_LINES

    def reach(self, end: int) -> bool:
        """Decide whether the last line ends at a cursor, or after the cursor."""
        return bool(self.next_cursors) and self.next_cursors[-1] >= end

    def take(self) -> Iterator[Line]:
        """Yield each line, and remove its bytes, so that they can be freed."""
        self.data.reverse()
        for cursor, offset, after in zip(
            self.cursors, self.offsets, self.next_cursors, strict=True
        ):
            yield cursor, offset, after, [self.data.pop().removesuffix(b"\n")]


def split_lines(sections: Iterator[Section], path: str, end: int) -> Iterator[Lines]:
    r"""Yield the lines of consecutive sections. A line ends at ``\n``, or with the file.

    Lines are yielded about 256 KiB at a time, and those before an error before it is raised. There
    may be none at the end.

    Args:
        sections: Sections of the file.
        path: Path of the file, for messages.
        end: Cursor. Lines are yielded at once if the last one ends there or later.

    Raises:
        ConfigurationError: A line is longer than 256 MiB.
    """
    lines = Lines()
    begun: list[bytes] = []  # parts of a line that continues in the next section
    size = first = offset = next_cursor = 0  # of this line
    try:
        for section in sections:
            data, at = section.data, 0
            next_cursor = section.cursor + len(data)
            if begun:
                at = data.find(b"\n") + 1
                begun.append(data[: at - 1] if at else data)
                size += len(begun[-1])
                if not at:
                    check_row_size(size, path, offset)
                    continue
                lines.append(first, offset, section.cursor + at, b"".join(begun))
                begun = []
                # A large line is not held while more is read.
                if lines.size >= LARGE_ROW or lines.reach(end):
                    yield lines
                    lines = Lines()
            stream = io.BytesIO(data)  # shares the bytes
            stream.seek(at)
            while found := stream.readlines(_STEP):
                if not found[-1].endswith(b"\n"):
                    begun.append(found.pop())
                at = lines.extend(section, at, found)
                del found
                if lines.is_full() or lines.reach(end):
                    yield lines
                    lines = Lines()
            if begun:
                first, offset, size = section.cursor + at, section.offset + at, len(begun[0])
                check_row_size(size, path, offset)
    except Exception:
        yield lines
        raise
    if begun:
        lines.append(first, offset, next_cursor, b"".join(begun))
    yield lines


def check_row_size(size: int, path: str, offset: int) -> None:
    """Check that a row is not larger than memory should hold.

    Raises:
        ConfigurationError: The row is longer than 256 MiB.
    """
    if size > MAX_ROW_BYTES:
        raise errors.ConfigurationError(
            f"{path}: the row at byte {offset} is longer than {MAX_ROW_BYTES} bytes. Leave the "
            "file out with exclude, or divide it."
        )
