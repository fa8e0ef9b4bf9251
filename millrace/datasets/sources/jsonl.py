"""Samples from files of JSON lines, which are divided into byte ranges. Each line is a sample.

A range contains the rows whose first byte is in the range, so every row is in exactly one range.
The cursor is a byte offset: a run that continues seeks to the offset.
"""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import orjson

from millrace import errors
from millrace.datasets.sample import BadRow, Row, Sample
from millrace.datasets.sources.files import SourceFiles, drop_etag
from millrace.datasets.sources.ranges import FileRange
from millrace.datasets.sources.table import FileTable, iterate_files
from millrace.schemas.dataset import ByteRange, FileRef, SourceRange

MAX_ROW_BYTES = 256 * 1024 * 1024
_SHOWN = 64 * 1024
_TAIL = 256 * 1024
_MAX_CONTAINERS = 8 << 20  # objects and arrays of a row; each takes up to 240 bytes when parsed
_LARGE = 1024 * 1024  # bytes of a line that is freed as soon as its columns are read
_BOM = b"\xef\xbb\xbf"
_LONG_NUMBER = re.compile(rb"\d{19}")


class JsonLinesSource:
    """The rows of JSON-lines files.

    Args:
        files: Files of the source.
        columns: Column of each field, by the field's extension. Text is written unchanged, and
            other values as JSON. None writes each row whole, as ``json``.
        block: Bytes read at a time.
        any_version: Whether a file is also read if it was written again after the plan was made.
    """

    def __init__(
        self,
        files: SourceFiles,
        columns: dict[str, str] | None = None,
        *,
        block: int = 4 << 20,
        any_version: bool = False,
    ) -> None:
        self._any_version = any_version
        self._files = files
        self._columns = tuple((columns or {}).items())
        self._block = block

    def iterate_rows(self, source_range: SourceRange, cursor: int) -> Iterator[Row]:
        """Yield the rows that begin in a byte range, from a byte offset of the file on."""
        if not isinstance(source_range, ByteRange):
            raise errors.ConfigurationError(
                f"JSON lines are divided by bytes, not {source_range.kind}."
            )
        if source_range.reason:
            if cursor < source_range.end:
                yield BadRow(source_range.file.path, source_range.reason, b"", source_range.end)
            return
        if self._any_version:
            source_range = source_range.model_copy(update={"file": drop_etag(source_range.file)})
        for offset, after, line in self._iterate_lines(source_range, cursor):
            if line[0] and not line[0].isspace():
                yield self._parse_row(source_range, offset, after, line)

    def _parse_row(
        self, source_range: ByteRange, offset: int, after: int, held: list[bytes]
    ) -> Row:
        """Parse a line. The line is removed from its list, so that it can be freed."""
        line = held.pop()
        begin = line[:_SHOWN]
        if len(line) > _LARGE and line.count(b"{") + line.count(b"[") > _MAX_CONTAINERS:
            return self._make_bad_row(
                source_range.file, offset, after, begin, "more objects and arrays than memory holds"
            )
        try:
            row: dict[str, Any] = orjson.loads(line)
            if type(row) is not dict:
                return self._make_bad_row(
                    source_range.file, offset, after, begin, "not a JSON object"
                )
            fields = {"json": line}
            if self._columns:
                if len(line) > _LARGE:
                    row = _select_columns(row, self._columns)
                    if all(type(value) is str for value in row.values()):
                        line = fields["json"] = b""
                fields = _make_fields(row, line, self._columns)
        except orjson.JSONDecodeError:
            return self._make_bad_row(source_range.file, offset, after, begin, "not valid JSON")
        except KeyError as error:
            return self._make_bad_row(source_range.file, offset, after, begin, f"no column {error}")
        except (TypeError, ValueError, RecursionError):  # nested too deeply, or not Unicode
            return self._make_bad_row(
                source_range.file, offset, after, begin, "a column cannot be written"
            )
        return Sample(f"{source_range.file_index:05d}-{offset:013d}", fields, after)

    def _make_bad_row(
        self, file: FileRef, offset: int, after: int, line: bytes, reason: str
    ) -> BadRow:
        return BadRow(f"{file.path}, byte {offset}", reason, line, after)

    def _iterate_lines(
        self, source_range: ByteRange, cursor: int
    ) -> Iterator[tuple[int, int, list[bytes]]]:
        """Yield offset, offset after, and bytes (without the newline) of each line of the range.

        The bytes are in a list of one element. The caller removes them, so that they can be freed.
        """
        position = max(cursor, source_range.start)
        # A cursor is the first byte of a row. The start of the range may be inside a row of the
        # previous range. The search for the end of that row begins one byte earlier.
        seeking = cursor <= source_range.start and source_range.start > 0
        if seeking:
            position -= 1
        if position >= source_range.end:
            return
        begun: list[bytes] = []  # parts of a row that continues in the next block
        for block in self._iterate_blocks(source_range, position):
            at = 0
            while (end := block.find(b"\n", at)) >= 0:  # faster than `split`
                line = block[at:end]
                if begun:
                    line = b"".join((*begun, line))
                    begun = []
                after = position + len(line) + 1
                if seeking:
                    seeking = False
                else:
                    held = [self._strip_line(line, position)]
                    line = b""
                    yield position, after, held
                position = after
                if position >= source_range.end:
                    return
                at = end + 1
            if at < len(block):
                begun.append(block[at:])
                if sum(map(len, begun)) > MAX_ROW_BYTES:
                    raise errors.ConfigurationError(
                        f"{source_range.file.path}: the row at byte {position} is longer than "
                        f"{MAX_ROW_BYTES} bytes. Leave the file out with exclude, or divide it."
                    )
        rest = b"".join(begun)
        begun = []
        if rest and not seeking:
            after, held = position + len(rest), [self._strip_line(rest, position)]
            rest = b""
            yield position, after, held

    def _iterate_blocks(self, source_range: ByteRange, position: int) -> Iterator[bytes]:
        """Yield the blocks of a range, then the blocks that the last row continues in."""
        end, size = max(source_range.end, position), source_range.file.size
        file = source_range.file
        yield from self._files.iterate_blocks(file, position, end, block=self._block)
        yield from self._files.iterate_blocks(file, end, size, block=_TAIL)

    @staticmethod
    def _strip_line(line: bytes, offset: int) -> bytes:
        if offset == 0 and line.startswith(_BOM):
            line = line[len(_BOM) :]
        return line[:-1] if line.endswith(b"\r") else line


def _select_columns(row: dict[str, Any], columns: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    return {column: row[column] for _, column in columns}


def _make_fields(
    row: dict[str, Any], line: bytes, columns: tuple[tuple[str, str], ...]
) -> dict[str, bytes]:
    fields: dict[str, bytes] = {}
    for extension, column in columns:
        value = row[column]
        fields[extension] = (
            value.encode() if type(value) is str else _encode_column(value, line, column)
        )
    return fields


def _encode_column(value: object, line: bytes, column: str) -> bytes:
    """Return a column's value as JSON.

    orjson reads an integer of more than 64 bits as a float. Then `json` parses the line again.
    """
    if type(value) in {float, list, dict} and _LONG_NUMBER.search(line):
        exact = json.loads(line)[column]
        return json.dumps(exact, ensure_ascii=False, separators=(",", ":")).encode()
    return orjson.dumps(value)


def divide_files(files: SourceFiles, table: FileTable, partition_bytes: int) -> list[FileRange]:
    """Divide the files of a source into ranges of about equal size.

    A file of which no part can be read alone becomes one range.

    Args:
        files: Files of the source.
        table: Table of these files.
        partition_bytes: Approximate bytes of a range.

    Raises:
        ConfigurationError: A file is compressed, so no run could seek to a row.
    """
    ranges: list[FileRange] = []
    for number, file, reason in iterate_files(table, local=files.is_local):
        whole = file.path in files.unseekable
        size = max(1, file.size) if whole and not reason else partition_bytes
        ranges += divide_file(file, number, size, reason=reason)
    return ranges


def divide_file(
    file: FileRef, file_index: int, partition_bytes: int, *, reason: str = ""
) -> list[ByteRange]:
    """Divide a file into ranges of about equal size.

    Args:
        file: The file.
        file_index: Index of the file in the source's listing.
        partition_bytes: Approximate bytes of a range.
        reason: Reason why the file cannot be read by its name. Then the file becomes one range
            with one bad row. Empty if the file can be read.

    Raises:
        ConfigurationError: The file is compressed, so no run could seek to a row.
    """
    if reason and file.size:
        return [ByteRange(file=file, file_index=file_index, start=0, end=file.size, reason=reason)]
    if file.path.endswith((".gz", ".zst", ".bz2", ".xz")):
        raise errors.ConfigurationError(
            f"{file.path} is compressed, and a run could not continue in the middle of it: "
            "decompress it first."
        )
    parts = max(1, round(file.size / partition_bytes))
    edges = [file.size * i // parts for i in range(parts + 1)]
    return [
        ByteRange(file=file, file_index=file_index, start=start, end=end)
        for start, end in pairwise(edges)
        if end > start
    ]
