"""JSON lines: one sample a line, cut into byte ranges.

A range owns the rows that begin in it, so that any cut gives every row to exactly one range.
The cursor is a byte offset: going on is a seek.
"""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import orjson

from millrace import errors
from millrace.datasets.sources.files import file_blocks, of_any_version
from millrace.schemas.dataset import ByteRange, FileRef, SourceRange
from millrace.schemas.sample import BadRow, Row, Sample
from millrace.storage import Store

LONGEST_ROW = 256 * 1024 * 1024
_SHOWN = 64 * 1024
_TAIL = 256 * 1024
_LARGE = 1024 * 1024  # bytes of a line that is let go as soon as its columns are read
_BOM = b"\xef\xbb\xbf"
_LONG_NUMBER = re.compile(rb"\d{19}")


class JsonLines:
    """The rows of JSON-lines files.

    Args:
        store: Where the files are.
        columns: Which column becomes which field: extension → column. Text is written as it
            is, everything else as JSON. None writes each row whole, as ``json``.
        block: Bytes read at a time.
        any_version: Whether files are read that were written again since the plan was made.
    """

    def __init__(
        self,
        store: Store,
        columns: dict[str, str] | None = None,
        *,
        block: int = 4 << 20,
        any_version: bool = False,
    ) -> None:
        self._any_version = any_version
        self._store = store
        self._columns = tuple((columns or {}).items())
        self._block = block

    def rows(self, piece: SourceRange, cursor: int) -> Iterator[Row]:
        """Yield the rows that begin in a byte range, from a byte offset of the file on."""
        if not isinstance(piece, ByteRange):
            raise errors.ConfigurationError(f"JSON lines are cut by bytes, not {piece.kind}.")
        if piece.reason:
            if cursor < piece.end:
                yield BadRow(piece.file.path, piece.reason, b"", piece.end)
            return
        if self._any_version:
            piece = piece.model_copy(update={"file": of_any_version(piece.file)})
        for offset, after, line in self._lines(piece, cursor):
            if line[0] and not line[0].isspace():
                yield self._row(piece, offset, after, line)

    def _row(self, piece: ByteRange, offset: int, after: int, held: list[bytes]) -> Row:
        """Make a row of a line. The line is taken out of its list, so that it can be let go."""
        line = held.pop()
        begin = line[:_SHOWN]
        try:
            row: dict[str, Any] = orjson.loads(line)
            if type(row) is not dict:
                return self._bad(piece.file, offset, after, begin, "not a JSON object")
            fields = {"json": line}
            if self._columns:
                if len(line) > _LARGE:
                    row = _only(row, self._columns)
                    if all(type(value) is str for value in row.values()):
                        line = fields["json"] = b""
                fields = _fields(row, line, self._columns)
        except orjson.JSONDecodeError:
            return self._bad(piece.file, offset, after, begin, "not valid JSON")
        except KeyError as error:
            return self._bad(piece.file, offset, after, begin, f"no column {error}")
        except (TypeError, ValueError, RecursionError):  # too deep, or text that is no Unicode
            return self._bad(piece.file, offset, after, begin, "a column cannot be written")
        return Sample(f"{piece.number:05d}-{offset:013d}", fields, after)

    def _bad(self, file: FileRef, offset: int, after: int, line: bytes, reason: str) -> BadRow:
        return BadRow(f"{file.path}, byte {offset}", reason, line, after)

    def _lines(self, piece: ByteRange, cursor: int) -> Iterator[tuple[int, int, list[bytes]]]:
        """Yield offset, offset after, and bytes (without the newline) of each line of the range.

        The bytes come in a list of one, for the caller to take out: nothing here holds them then.
        """
        position = max(cursor, piece.start)
        # From a cursor we stand at a row's first byte. At the range's own start we may stand in
        # the middle of a row of the range before: its end is looked for from one byte earlier.
        seeking = cursor <= piece.start and piece.start > 0
        if seeking:
            position -= 1
        if position >= piece.end:
            return
        begun: list[bytes] = []  # of the row that goes on in the next block
        for block in self._blocks(piece, position):
            at = 0
            while (end := block.find(b"\n", at)) >= 0:  # by far quicker than split
                line = block[at:end]
                if begun:
                    line = b"".join((*begun, line))
                    begun = []
                after = position + len(line) + 1
                if seeking:
                    seeking = False
                else:
                    held = [self._clean(line, position)]
                    line = b""
                    yield position, after, held
                position = after
                if position >= piece.end:
                    return
                at = end + 1
            if at < len(block):
                begun.append(block[at:])
                if sum(map(len, begun)) > LONGEST_ROW:
                    raise errors.ConfigurationError(
                        f"{piece.file.path}: the row at byte {position} is longer than "
                        f"{LONGEST_ROW} bytes. Leave the file out with exclude, or cut it up."
                    )
        rest = b"".join(begun)
        begun = []
        if rest and not seeking:
            after, held = position + len(rest), [self._clean(rest, position)]
            rest = b""
            yield position, after, held

    def _blocks(self, piece: ByteRange, position: int) -> Iterator[bytes]:
        """Yield the blocks of a range, and then of what follows it: for its last row only."""
        end, size = max(piece.end, position), piece.file.size
        yield from file_blocks(self._store, piece.file, position, end, block=self._block)
        yield from file_blocks(self._store, piece.file, end, size, block=_TAIL)

    @staticmethod
    def _clean(line: bytes, offset: int) -> bytes:
        if offset == 0 and line.startswith(_BOM):
            line = line[len(_BOM) :]
        return line[:-1] if line.endswith(b"\r") else line


def _only(row: dict[str, Any], columns: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    return {column: row[column] for _, column in columns}


def _fields(
    row: dict[str, Any], line: bytes, columns: tuple[tuple[str, str], ...]
) -> dict[str, bytes]:
    fields: dict[str, bytes] = {}
    for extension, column in columns:
        value = row[column]
        fields[extension] = value.encode() if type(value) is str else _json(value, line, column)
    return fields


def _json(value: object, line: bytes, column: str) -> bytes:
    """Return a column's value as JSON. orjson reads an integer of more than 64 bits as a float."""
    if type(value) in {float, list, dict} and _LONG_NUMBER.search(line):
        exact = json.loads(line)[column]
        return json.dumps(exact, ensure_ascii=False, separators=(",", ":")).encode()
    return orjson.dumps(value)


def cut_file(file: FileRef, number: int, split_bytes: int, *, reason: str = "") -> list[ByteRange]:
    """Cut one file into ranges of about equal size.

    Args:
        file: The file.
        number: Its place in the source's listing.
        split_bytes: About how many bytes make a range.
        reason: Why the file cannot be read by its name: it becomes one range, and one bad row.

    Raises:
        ConfigurationError: It is compressed, so that nobody can seek in it.
    """
    if reason and file.size:
        return [ByteRange(file=file, number=number, start=0, end=file.size, reason=reason)]
    if file.path.endswith((".gz", ".zst", ".bz2", ".xz")):
        raise errors.ConfigurationError(
            f"{file.path} is compressed, and a run could not go on in the middle of it: "
            "decompress it first."
        )
    parts = max(1, round(file.size / split_bytes))
    edges = [file.size * i // parts for i in range(parts + 1)]
    return [
        ByteRange(file=file, number=number, start=start, end=end)
        for start, end in pairwise(edges)
        if end > start
    ]


def divide(piece: ByteRange, size: int) -> tuple[ByteRange, ByteRange]:
    """Cut a range in two, the first of so many bytes."""
    middle = piece.start + size
    return (
        piece.model_copy(update={"end": middle}),
        piece.model_copy(update={"start": middle}),
    )
