"""Table of the files of a source, with one packed ``bytes`` for each file to save memory.

A row is ``path NUL size NUL etag``. The order of UTF-8 bytes is that of the text, so a sorted list
of rows is in the order of the paths. A name that is not UTF-8 keeps its bytes.
"""

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from millrace.digest import make_hasher
from millrace.schemas.dataset import FileRef

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_NUL = b"\0"
_NUL_IN_PATH = b"\xc0\x80"  # an overlong NUL, which no UTF-8 text contains


@dataclass(frozen=True, slots=True)
class FileTable:
    """The files of a source. Memory: its path, its ETag and about 60 bytes for each file.

    Attributes:
        rows: Packed files, in the order of their paths.
        size: Bytes of all files.
        markers: Number of empty objects that only show a folder. The rows do not have them.
    """

    rows: list[bytes]
    size: int
    markers: int

    @classmethod
    def collect(cls, found: Iterable[tuple[str, int, str]]) -> "FileTable":
        """Pack and sort files, given as path, size and ETag."""
        rows: list[bytes] = []
        empty: list[bytes] = []
        size = markers = 0
        for path, length, etag in found:
            if length == 0 and path.endswith("/"):
                markers += 1
                continue
            row = pack_row(path, length, etag)
            rows.append(row)
            size += length
            if length == 0:
                empty.append(row)
        rows.sort()
        # Some stores drop the final slash of a marker's key. Then the key is the name of a folder.
        for row in empty:
            folder = row.partition(_NUL)[0] + b"/"
            below = bisect_left(rows, folder)
            if below < len(rows) and rows[below].startswith(folder):
                del rows[bisect_left(rows, row)]
                markers += 1
        return cls(rows, size, markers)

    def __len__(self) -> int:
        return len(self.rows)

    def compute_digest(self) -> str:
        """Return the digest of every path, size and ETag."""
        hasher = make_hasher()
        for row in self.rows:
            hasher.update(row + b"\n")
        return hasher.compute()


def pack_row(path: str, size: int, etag: str) -> bytes:
    """Return the row of a file."""
    return b"%b\0%d\0%b" % (encode_path(path), size, etag.encode())


def unpack_row(row: bytes) -> FileRef:
    """Return the file of a row. A name that is not UTF-8 is shown with escapes."""
    path, size, etag = row.split(_NUL)
    return FileRef(path=escape_path(decode_path(path)), size=int(size), etag=etag.decode())


def iterate_files(table: FileTable, *, local: bool) -> Iterator[tuple[int, FileRef, str]]:
    """Yield the number of each file, the file, and the reason why its name cannot be read.

    Args:
        table: The files.
        local: Whether the files are in a folder of this machine.
    """
    for number, row in enumerate(table.rows):
        path = decode_path(row.partition(_NUL)[0])
        yield number, unpack_row(row), find_unreadable_reason(path, local=local)


def encode_path(path: str) -> bytes:
    """Return a path without NUL bytes, in the order of its text."""
    return path.encode("utf-8", "surrogateescape").replace(_NUL, _NUL_IN_PATH)


def decode_path(path: bytes) -> str:
    """Reverse `encode_path`. Bytes that are not UTF-8 become lone surrogates."""
    return path.replace(_NUL_IN_PATH, _NUL).decode("utf-8", "surrogateescape")


def escape_path(path: str) -> str:
    """Escape the control characters and non-UTF-8 bytes of a path, for records."""
    if path.isprintable():
        return path
    text = path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def find_unreadable_reason(path: str, *, local: bool) -> str:
    """Return the reason why a file cannot be read by its name; empty if the file can be read.

    The reason may be the file in the source, or the member of a shard. Webdataset reads names with
    spaces of any kind, joiners and marks. Webdataset cannot read names with control characters, or
    with bytes that are not UTF-8. Clients of buckets refuse keys with empty segments.
    """
    if not path.isprintable():
        kinds = {unicodedata.category(character) for character in path}
        if "Cs" in kinds:
            return "its name is not UTF-8"
        if "Cc" in kinds:
            return "its name has control characters"
    if not local and not {"", ".", ".."}.isdisjoint(path.split("/")):
        return "its key has an empty or a relative segment, which clients of stores refuse"
    return ""
