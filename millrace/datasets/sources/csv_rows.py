"""Samples from CSV files (RFC 4180), of which each becomes one range. Each row is a sample.

A newline within quotes ends no row, so only a read from the beginning of a file shows where its
rows begin. The cursor is that of the first byte of a row, as for JSON lines: a run that continues
seeks to the row.
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice, pairwise
from types import MappingProxyType
from typing import NamedTuple, cast

from millrace import errors
from millrace.datasets.formats.values import is_array
from millrace.datasets.sample import (
    BATCH_BYTES,
    BadRow,
    Row,
    RowBatch,
    Sample,
    iterate_rows,
    make_keys,
)
from millrace.datasets.sources.csv_values import (
    UTF_8,
    BadValuesError,
    RowParser,
    compile_row,
    decode_row,
    split_row,
)
from millrace.datasets.sources.files import SourceFiles
from millrace.datasets.sources.lines import MAX_ROW_BYTES, Line, Section, check_row_size
from millrace.datasets.sources.ranges import FileRange, iterate_unreadable
from millrace.datasets.sources.text_files import TextFiles, TextRange
from millrace.schemas.dataset import SourceRange
from millrace.storage import Store

_CONCURRENCY = 16  # concurrent reads of headers
_HEADER_BYTES = 64 << 10  # bytes of a file that are read at a time for its header
_SHOWN = 64 << 10  # bytes of a bad row that are kept
_DELIMITERS = ",;\t|"
_BOM = b"\xef\xbb\xbf"
_MARKS = {_BOM: "UTF-8", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_QUOTED = re.compile(rb'"[^"]*+"')


class CsvSource:
    """The rows of CSV files.

    Args:
        files: Files of the source.
        dataset_store: Store of the dataset, for the seek points of compressed files; None to read
            headers only.
        columns: Column of each field, by the field's extension. None writes each row whole, as
            ``json``.
        header: Names of the columns. None takes them from the first row of each file.
        delimiter: Character between two values. None takes a tab for files whose names end in
            ``.tsv``, before an extension of a compression, and a comma for others.
        encoding: Encoding of the files, of which ASCII is a part.
        types: Types of fields, by their names.
        any_version: Whether a file is also read if it was written again after the plan was made.

    Raises:
        ConfigurationError: A field has a type that no text has.
    """

    def __init__(
        self,
        files: SourceFiles,
        dataset_store: Store | None,
        columns: Mapping[str, str] | None,
        header: list[str] | None,
        delimiter: str | None,
        *,
        encoding: str = UTF_8,
        types: Mapping[str, str] = MappingProxyType({}),
        any_version: bool = False,
    ) -> None:
        for name, column in (columns or {}).items():
            if is_array(types.get(name)):
                raise errors.ConfigurationError(
                    f"`types` gives the field {name!r} the type {types[name]}, and the CSV column "
                    f"{column!r} has texts. Give the field another name in `columns`, and make "
                    f"{name!r} of it by `tokenize` or a function."
                )
        self._files = files
        self._text = TextFiles(files, dataset_store, any_version=any_version)
        self._columns, self._header, self._delimiter = columns, header, delimiter
        self._encoding = encoding

    def check_headers(self, ranges: Iterable[FileRange]) -> None:
        """Check that every file has the columns. Reads the beginning of each file.

        Raises:
            ConfigurationError: The header of a file cannot be read, or lacks a column.
        """
        readable = (one for one in ranges if isinstance(one, TextRange) and not one.reason)
        with ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="headers") as pool:
            while batch := list(islice(readable, 4 * _CONCURRENCY)):
                list(pool.map(self._read_header, batch))

    def iterate_rows(self, source_range: SourceRange, cursor: int) -> Iterator[Row]:
        """Yield the rows that begin within a range of a file's bytes, from a cursor on."""
        return iterate_rows(self.iterate_batches(source_range, cursor))

    def iterate_batches(self, source_range: SourceRange, cursor: int) -> Iterator[RowBatch | Row]:
        """Yield the same rows, with those of a block in batches."""
        if not isinstance(source_range, TextRange):
            raise errors.ConfigurationError(
                f"CSV files are divided by bytes, not {source_range.kind}."
            )
        if source_range.reason:
            yield from iterate_unreadable(source_range, cursor)
            return
        start, end = source_range.start_cursor, source_range.end_cursor
        names = self._read_header(source_range) if cursor < end else []
        if not names:
            return
        if self._header is not None and cursor <= source_range.start:
            self._read_first_row(source_range)  # which checks its encoding and line ends
        path, encoding = source_range.file.path, self._encoding
        delimiter = self._find_delimiter(path)
        parser = RowParser(names, delimiter, self._columns, encoding)
        sections = self._text.iterate_sections(source_range, cursor, from_start=True)
        is_header = self._header is None and cursor <= source_range.start
        for rows in _split_rows(sections, path, delimiter, encoding, parser):
            if isinstance(rows, _ParsedRows):
                first, after = (bisect_left(rows.cursors, one) for one in (start, end))
                first, is_header = max(first, is_header), False
                if first < after:
                    batch = _make_batch(source_range, rows)
                    yield batch.slice(first, after) if after - first < len(batch) else batch
                if after < len(rows.cursors):
                    return
                continue
            cursor, offset, next_cursor, held = rows
            if cursor >= end:
                return
            row = held.pop()
            if is_header:
                is_header = not row
            elif row and cursor >= start:
                yield _make_row(source_range, parser, offset, next_cursor, row)

    def _read_header(self, source_range: TextRange) -> list[str]:
        """Return the names of a file's columns; none if the file has no rows.

        Raises:
            ConfigurationError: The file has no header, or lacks a column.
        """
        path, names = source_range.file.path, self._header
        url = self._files.make_url(path)
        if names is None:
            row = self._read_first_row(source_range)
            if not row:
                return []
            try:
                text = decode_row(row, self._encoding)
                names = split_row(text, self._find_delimiter(path), 1 << 20)
            except BadValuesError as error:
                raise errors.ConfigurationError(
                    f"{url}: its first row cannot be read ({error}). Correct the file, or leave it "
                    "out with `exclude`."
                ) from None
            self._refuse_likely_delimiter(path, names)
        for name in names:
            if names.count(name) > 1:
                raise errors.ConfigurationError(
                    f"{url} has several columns {name!r}. Rename them, name the columns in "
                    "`header`, or leave the file out with `exclude`."
                )
        for column in (self._columns or {}).values():
            if column not in names:
                shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
                raise errors.ConfigurationError(
                    f"{url} has no column {column!r}. Its columns are {shown[:2000]}. Correct "
                    "`columns`, `delimiter` or `header`, or leave the file out with `exclude`."
                )
        return names

    def _refuse_likely_delimiter(self, path: str, names: list[str]) -> None:
        """Refuse a header of one column that another delimiter would divide.

        Raises:
            ConfigurationError: The settings name no delimiter, and the header has another one.
        """
        own = self._find_delimiter(path)
        other = next((one for one in _DELIMITERS.replace(own, "") if one in names[0]), None)
        if self._delimiter is None and len(names) == 1 and other:
            raise errors.ConfigurationError(
                f"{self._files.make_url(path)} has one column {names[0][:200]!r}. Write "
                f"`delimiter: {json.dumps(other)}`, or `delimiter: {json.dumps(own)}` if this is "
                "right."
            )

    def _read_first_row(self, source_range: TextRange) -> bytes:
        """Return the first row of a file; no bytes if the file has none.

        Raises:
            ConfigurationError: The file has another encoding by its mark, or its lines end in
                carriage returns, so that all rows would be one.
        """
        path = source_range.file.path
        first: TextRange = replace(source_range, start=0)
        sections = self._text.iterate_sections(first, 0, block=_HEADER_BYTES)
        rows = _split_rows(sections, path, self._find_delimiter(path), self._encoding)
        lines = cast("Iterator[Line]", rows)
        row = next((row for *_, [row] in lines if row), b"")
        if mark := next((one for one in _MARKS if row.startswith(one)), None):
            raise errors.ConfigurationError(
                f"{self._files.make_url(path)} begins with the mark of {_MARKS[mark]}, and "
                f"`encoding` is {self._encoding}. Convert the file to that encoding, for example "
                "by `iconv`, or leave it out with `exclude`."
            )
        if b"\r" in _QUOTED.sub(b"", row):
            raise errors.ConfigurationError(
                f"{self._files.make_url(path)}: its first row has a carriage return that is "
                "neither in quotes nor before the newline. Convert its line ends to newlines, for "
                "example by `tr '\\r' '\\n'`, or leave the file out with `exclude`."
            )
        return row

    def _find_delimiter(self, path: str) -> str:
        if self._delimiter is not None:
            return self._delimiter
        name = path.lower().removesuffix(".gz").removesuffix(".zst")
        return "\t" if name.endswith((".tsv", ".tab")) else ","


class _ParsedRows(NamedTuple):
    """Consecutive rows with their values.

    Attributes:
        cursors: Cursors of the first bytes of the rows.
        offsets: Offsets of the first bytes of the rows.
        next_cursors: Cursors after the rows.
        columns: Values of each field.
    """

    cursors: list[int]
    offsets: list[int]
    next_cursors: list[int]
    columns: dict[str, list[bytes]]


def _split_rows(
    sections: Iterator[Section],
    path: str,
    delimiter: str,
    encoding: str,
    parser: RowParser | None = None,
) -> Iterator[Line | _ParsedRows]:
    """Yield the rows of consecutive sections, which begin with a row.

    A row ends at a newline that is not within quotes, or at the end of the file. The rows before an
    error are yielded before the error is raised.

    Args:
        sections: Sections of the file.
        path: Path of the file, for messages.
        delimiter: Character between two values.
        encoding: Encoding of the file.
        parser: Parser of rows without faults; None to yield each row as a line.
    """
    mark = _BOM if encoding == UTF_8 else b""
    unread = _UnreadBytes(path, compile_row(delimiter.encode(encoding)), parser, mark)
    try:
        for section in sections:
            unread.append(section)
            if unread.size >= unread.wanted:
                yield from unread.split()
    except Exception:
        yield from unread.split()
        raise
    yield from unread.split()
    if unread.size:
        yield unread.take_rest()


class _UnreadBytes:
    """Bytes of a file from the first unfinished row on, and the sections that they are from.

    Attributes:
        size: Number of bytes.
        wanted: Number of bytes from which on they are searched for a row. It doubles after each
            search, so that a large row is not searched again for each section.
    """

    def __init__(
        self, path: str, pattern: re.Pattern[bytes], parser: RowParser | None, mark: bytes
    ) -> None:
        self._least = BATCH_BYTES if parser else 0
        self.size, self.wanted = 0, self._least
        self._path, self._pattern, self._parser, self._mark = path, pattern, parser, mark
        self._parts: list[bytes] = []
        self._places: list[tuple[int, int, int]] = []  # index, cursor and offset of sections

    def append(self, section: Section) -> None:
        """Add the next section of the file."""
        index, cursor, offset = self._places[-1] if self._places else (0, -1, -1)
        ahead = self.size - index
        if (cursor + ahead, offset + ahead) != (section.cursor, section.offset):
            self._places.append((self.size, section.cursor, section.offset))
        self._parts.append(section.data)
        self.size += len(section.data)

    def split(self) -> Iterator[Line | _ParsedRows]:
        """Yield the rows that are complete, and keep the bytes after them.

        Rows without faults are yielded with their values, and others as lines.

        Raises:
            ConfigurationError: An unfinished row is longer than 256 MiB.
        """
        data, at = self._join()
        begin, quote = 0, data.find(b'"', at)
        # Most rows are within one section. Their cursors differ by their distance in the section.
        first, limit, cursor, offset = 0, -1, 0, 0
        while at < len(data):
            if self._parser is not None and begin == at:  # not after a byte order mark
                edges, columns = self._parser.parse_block(data, begin)
                if columns:
                    yield self._locate_rows(edges, columns)
                    begin = at = edges[-1]
                    continue
            end = data.find(b"\n", at)
            if 0 <= quote < at:
                quote = data.find(b'"', at)
            if quote >= 0 and (end < 0 or quote < end):
                found = self._pattern.match(data, at)
                end = found.end() - 1 if found else -1
            if end < 0:
                break
            if end >= limit:
                first, limit, cursor, offset = self._find_section(begin)
            held = [data[at:end].removesuffix(b"\r")]
            if end < limit:
                yield cursor + begin - first, offset + begin - first, cursor + end - first + 1, held
            else:
                yield self._make_line(begin, end, held)
            begin = at = end + 1
        self.size = len(data) - begin
        self.wanted = max(self._least, min(2 * self.size, MAX_ROW_BYTES + 1))
        if self.size:
            last = max(n for n, (index, _, _) in enumerate(self._places) if index <= begin)
            self._places = [(i - begin, cursor, at) for i, cursor, at in self._places[last:]]
            check_row_size(self.size, self._path, self._find_place(0)[1])
            self._parts = [data[begin:]]
        else:
            self._places = []

    def take_rest(self) -> Line:
        """Return the last row of the file, which has no newline, or a quote that is not closed."""
        data, at = self._join()
        size, row = len(data), data[at:]
        del data
        if self._pattern.match(row + b"\n"):
            return self._make_line(0, size - 1, [row.removesuffix(b"\r")])
        return self._make_line(0, size - 1, [row.removesuffix(b"\n")])

    def _join(self) -> tuple[bytes, int]:
        """Return all bytes, and the index of the first one after a byte order mark."""
        data = b"".join(self._parts)
        self._parts = []
        is_start = bool(self._places) and self._places[0][0] == self._places[0][2] == 0
        return data, len(self._mark) * (is_start and data.startswith(self._mark))

    def _make_line(self, begin: int, end: int, held: list[bytes]) -> Line:
        """Return a row as a line. `end` is the index of its last byte."""
        cursor, offset = self._find_place(begin)
        return cursor, offset, self._find_place(end)[0] + 1, held

    def _locate_rows(self, edges: list[int], columns: dict[str, list[bytes]]) -> _ParsedRows:
        """Return rows with their positions, by the indices of the rows and the one after them."""
        cursors: list[int] = []
        offsets: list[int] = []
        next_cursors: list[int] = []
        places = [*self._places, (self.size, 0, 0)]
        for (index, cursor, offset), (limit, _, _) in pairwise(places):
            begins = edges[bisect_left(edges, index) : bisect_left(edges, limit, hi=len(edges) - 1)]
            cursors += map((cursor - index).__add__, begins)
            offsets += map((offset - index).__add__, begins)
            ends = edges[max(1, bisect_right(edges, index)) : bisect_right(edges, limit)]
            next_cursors += map((cursor - index).__add__, ends)
        return _ParsedRows(cursors, offsets, next_cursors, columns)

    def _find_section(self, at: int) -> tuple[int, int, int, int]:
        """Return the first index of a byte's section, the index after it, its cursor and offset."""
        number = max(n for n, (index, _, _) in enumerate(self._places) if index <= at)
        ends = [index for index, _, _ in self._places[number + 1 :]] or [self.size]
        index, cursor, offset = self._places[number]
        return index, ends[0], cursor, offset

    def _find_place(self, at: int) -> tuple[int, int]:
        """Return cursor and offset of a byte."""
        number = len(self._places) - 1
        while self._places[number][0] > at:
            number -= 1
        index, cursor, offset = self._places[number]
        return cursor + at - index, offset + at - index


def _make_batch(source_range: TextRange, rows: _ParsedRows) -> RowBatch:
    keys = make_keys(source_range.file_index, rows.offsets, 13)
    return RowBatch(keys, rows.columns, rows.next_cursors)


def _make_row(
    source_range: TextRange, parser: RowParser, offset: int, after: int, row: bytes
) -> Row:
    try:
        fields = parser.parse(row)
    except BadValuesError as error:
        where = f"{source_range.file.path}, byte {offset}"
        return BadRow(where, str(error), row[:_SHOWN], after)
    return Sample(f"{source_range.file_index:05d}-{offset:013d}", fields, after)
