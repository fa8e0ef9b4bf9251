"""Files of a source as Python files, for libraries that seek in them."""

import io
from collections.abc import Iterable

from millrace.datasets.sources.files import SourceFiles
from millrace.schemas.dataset import FileRef

_MAX_GAP = 128 << 10  # bytes between two ranges that are read in one request


class SourceFileReader(io.RawIOBase):
    """A file of a source, as it was when it was listed.

    Args:
        files: Files of the source.
        file: The file.
    """

    def __init__(self, files: SourceFiles, file: FileRef) -> None:
        self._files, self._file = files, file
        self._position = 0
        self._held: list[tuple[int, bytes]] = []

    def hold(self, ranges: Iterable[tuple[int, bytes]]) -> None:
        """Serve later reads from these ranges, given as offset and bytes, instead of the store."""
        self._held = list(ranges)

    def fetch(self, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, bytes]]:
        """Read ranges, given by their ends. Ranges that nearly touch are read in one request.

        Raises:
            OSError: A range is not within the file.
            ChangedError: The file has changed or is gone.
        """
        merged: list[tuple[int, int]] = []
        for start, end in sorted(ranges):
            if not 0 <= start <= end <= self._file.size:
                raise OSError(f"a part from {start} to {end} is not within its bytes")
            if merged and start - merged[-1][1] <= _MAX_GAP:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((start, end))
        return [(start, self._read_range(start, end)) for start, end in merged]

    def read(self, size: int = -1, /) -> bytes:
        """Read up to a number of bytes at the present position.

        Raises:
            ChangedError: The file has changed or is gone.
        """
        start = self._position
        end = self._file.size if size < 0 else min(start + size, self._file.size)
        self._position = max(start, end)
        for offset, data in self._held:
            if offset <= start and end <= offset + len(data):
                return data[start - offset : end - offset]
        return self._read_range(start, end)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Change the position, and return the new one."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def _read_range(self, start: int, end: int) -> bytes:
        if start >= end:
            return b""
        blocks = list(self._files.iterate_blocks(self._file, start, end))
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)
