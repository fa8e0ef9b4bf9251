"""Pieces of a file, which are decompressed if the file is compressed, and lines in them."""

from collections.abc import Iterator
from typing import NamedTuple

from millrace import errors

MAX_ROW_BYTES = 256 * 1024 * 1024


class Piece(NamedTuple):
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


def split_lines(pieces: Iterator[Piece], path: str) -> Iterator[Line]:
    r"""Yield the lines of consecutive pieces. The end of a line is ``\n``, or the end of the file.

    Args:
        pieces: Pieces of the file.
        path: Path of the file, for messages.

    Raises:
        ConfigurationError: A line is longer than 256 MiB.
    """
    begun: list[bytes] = []  # parts of a line that continues in the next piece
    size = first = offset = next_cursor = 0  # of this line
    for cursor, piece_offset, data in pieces:
        at = 0
        while (end := data.find(b"\n", at)) >= 0:  # faster than `split`
            held = [data[at:end]]
            if begun:
                held = [b"".join((*begun, held[0]))]
                begun = []
            else:
                first, offset = cursor + at, piece_offset + at
            at = end + 1
            yield first, offset, cursor + at, held
        if at < len(data):
            if not begun:
                first, offset, size = cursor + at, piece_offset + at, 0
            begun.append(data[at:])
            size += len(data) - at
            check_row_size(size, path, offset)
        next_cursor = cursor + len(data)
    if begun:
        held = [b"".join(begun)]
        begun = []
        yield first, offset, next_cursor, held


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
