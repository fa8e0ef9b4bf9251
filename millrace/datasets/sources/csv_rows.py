"""Samples from CSV files (RFC 4180), of which each becomes one range. Each row is a sample.

A newline within quotes ends no row, so only a read from the beginning of a file shows where its
rows begin. The cursor is that of the first byte of a row, as for JSON lines: a run that continues
seeks to the row.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import islice

import orjson

from millrace import errors
from millrace.datasets.sample import BadRow, Row, Sample
from millrace.datasets.sources.files import SourceFiles
from millrace.datasets.sources.pieces import MAX_ROW_BYTES, Line, Piece, check_row_size
from millrace.datasets.sources.ranges import FileRange, iterate_unreadable
from millrace.datasets.sources.text_files import TextFiles, TextRange
from millrace.schemas.dataset import SourceRange
from millrace.storage import Store

_CONCURRENCY = 16  # concurrent reads of headers
_HEADER_BYTES = 64 << 10  # bytes of a file that are read at a time for its header
_SHOWN = 64 << 10  # bytes of a bad row that are kept
_BOM = b"\xef\xbb\xbf"


class _BadRowError(Exception):
    """A row that cannot be read."""


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
        any_version: Whether a file is also read if it was written again after the plan was made.
    """

    def __init__(
        self,
        files: SourceFiles,
        dataset_store: Store | None,
        columns: Mapping[str, str] | None,
        header: list[str] | None,
        delimiter: str | None,
        *,
        any_version: bool = False,
    ) -> None:
        self._files = files
        self._text = TextFiles(files, dataset_store, any_version=any_version)
        self._columns, self._header, self._delimiter = columns, header, delimiter

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
        if not isinstance(source_range, TextRange):
            raise errors.ConfigurationError(
                f"CSV files are divided by bytes, not {source_range.kind}."
            )
        if source_range.reason:
            yield from iterate_unreadable(source_range, cursor)
            return
        start, end = source_range.start_cursor, source_range.end_cursor
        if cursor >= end:
            return
        names = self._read_header(source_range)
        parser = _RowParser(names, self._find_delimiter(source_range.file.path), self._columns)
        pieces = self._text.iterate_pieces(source_range, cursor, from_start=True)
        rows = self._iterate_lines(pieces, source_range.file.path)
        is_header = self._header is None and cursor <= source_range.start
        for first, offset, after, held in rows:
            if first >= end:
                return
            row = held.pop()
            if is_header:
                is_header = not row
            elif row and first >= start:
                yield _make_row(source_range, parser, offset, after, row)

    def _read_header(self, source_range: TextRange) -> list[str]:
        """Return the names of a file's columns.

        Raises:
            ConfigurationError: The file has no header, or lacks a column.
        """
        path, names = source_range.file.path, self._header
        url = self._files.make_url(path)
        if names is None:
            first: TextRange = source_range.model_copy(update={"start": 0})
            pieces = self._text.iterate_pieces(first, 0, block=_HEADER_BYTES)
            lines = self._iterate_lines(pieces, path)
            row = next((row for *_, [row] in lines if row), b"")
            try:
                names = _split_row(_decode(row), self._find_delimiter(path), 1 << 20)
            except _BadRowError as error:
                raise errors.ConfigurationError(
                    f"{url}: its first row cannot be read ({error}). Correct the file, or leave it "
                    "out with `exclude`."
                ) from None
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

    def _find_delimiter(self, path: str) -> str:
        if self._delimiter is not None:
            return self._delimiter
        name = path.lower().removesuffix(".gz").removesuffix(".zst")
        return "\t" if name.endswith((".tsv", ".tab")) else ","

    def _iterate_lines(self, pieces: Iterator[Piece], path: str) -> Iterator[Line]:
        """Yield the rows of a file, each as one line, without the end of the row."""
        return _split_rows(pieces, path, self._find_delimiter(path).encode())


def _split_rows(pieces: Iterator[Piece], path: str, delimiter: bytes) -> Iterator[Line]:
    """Yield the rows of consecutive pieces, which begin with a row.

    A row ends at a newline that is not within quotes, or at the end of the file.
    """
    unread = _UnreadBytes(path, _compile_row(delimiter))
    for piece in pieces:
        unread.append(piece)
        if unread.size >= unread.wanted:
            yield from unread.split()
    yield from unread.split()
    if unread.size:
        yield unread.take_rest()


class _UnreadBytes:
    """Bytes of a file from the first unfinished row on, and the pieces that they are from.

    Attributes:
        size: Number of bytes.
        wanted: Number of bytes from which on they are searched for a row. It doubles after each
            search, so that a large row is not searched again for each piece.
    """

    def __init__(self, path: str, pattern: re.Pattern[bytes]) -> None:
        self.size = self.wanted = 0
        self._path, self._pattern = path, pattern
        self._parts: list[bytes] = []
        self._places: list[tuple[int, int, int]] = []  # index, cursor and offset of each piece

    def append(self, piece: Piece) -> None:
        """Add the next piece of the file."""
        self._places.append((self.size, piece.cursor, piece.offset))
        self._parts.append(piece.data)
        self.size += len(piece.data)

    def split(self) -> Iterator[Line]:
        """Yield the rows that are complete, and keep the bytes after them.

        Raises:
            ConfigurationError: An unfinished row is longer than 256 MiB.
        """
        data, at = self._join()
        begin, quote = 0, data.find(b'"', at)
        # Rows within one piece are the most. Their cursors differ by their distance in the piece.
        first, limit, cursor, offset = 0, -1, 0, 0
        while at < len(data):
            end = data.find(b"\n", at)
            if 0 <= quote < at:
                quote = data.find(b'"', at)
            if quote >= 0 and (end < 0 or quote < end):
                found = self._pattern.match(data, at)
                end = found.end() - 1 if found else -1
            if end < 0:
                break
            if end >= limit:
                first, limit, cursor, offset = self._find_piece(begin)
            held = [data[at:end].removesuffix(b"\r")]
            if end < limit:
                yield cursor + begin - first, offset + begin - first, cursor + end - first + 1, held
            else:
                yield self._make_line(begin, end, held)
            begin = at = end + 1
        self.size = len(data) - begin
        self.wanted = min(2 * self.size, MAX_ROW_BYTES + 1)
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
        return data, len(_BOM) * (is_start and data.startswith(_BOM))

    def _make_line(self, begin: int, end: int, held: list[bytes]) -> Line:
        """Return a row as a line. `end` is the index of its last byte."""
        cursor, offset = self._find_place(begin)
        return cursor, offset, self._find_place(end)[0] + 1, held

    def _find_piece(self, at: int) -> tuple[int, int, int, int]:
        """Return the first index of a byte's piece, the index after it, its cursor and offset."""
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


def _compile_row(delimiter: bytes) -> re.Pattern[bytes]:
    """Return the pattern of a row with its newline. A quote is special where a value begins."""
    mark = re.escape(delimiter)
    quoted = rb'"[^"]*+(?:""[^"]*+)*+"'
    value = rb'(?:(?!")|%s)' % quoted
    plain = rb"[^\n%s]++" % mark if len(delimiter) == 1 else rb"(?:(?!%s)[^\n])++" % mark
    return re.compile(rb"%s(?:%s|%s%s)*+\n" % (value, plain, mark, value))


class _RowParser:
    """Parser of the rows of one file.

    Args:
        names: Names of the columns.
        delimiter: Character between two values.
        columns: Column of each field, by the field's extension; None for whole rows.
    """

    def __init__(self, names: list[str], delimiter: str, columns: Mapping[str, str] | None) -> None:
        self._names, self._delimiter = names, delimiter
        self._indices = {e: names.index(column) for e, column in (columns or {}).items()}

    def parse(self, row: bytes) -> dict[str, bytes]:
        """Return the fields of a row's sample.

        Raises:
            _BadRowError: The row cannot be read, or has another number of values than columns.
        """
        names = self._names
        values = _split_row(_decode(row), self._delimiter, len(names))
        if len(values) != len(names):
            more = "more values" if len(values) > len(names) else f"{len(values)} values"
            raise _BadRowError(f"{more} for {len(names)} columns")
        if not self._indices:
            return {"json": orjson.dumps(dict(zip(names, values, strict=True)))}
        return {extension: values[i].encode() for extension, i in self._indices.items()}


def _make_row(
    source_range: TextRange, parser: _RowParser, offset: int, after: int, row: bytes
) -> Row:
    try:
        fields = parser.parse(row)
    except _BadRowError as error:
        where = f"{source_range.file.path}, byte {offset}"
        return BadRow(where, str(error), row[:_SHOWN], after)
    return Sample(f"{source_range.file_index:05d}-{offset:013d}", fields, after)


def _decode(row: bytes) -> str:
    try:
        return row.decode()
    except UnicodeDecodeError:
        raise _BadRowError("not UTF-8") from None


def _split_row(row: str, delimiter: str, most: int) -> list[str]:
    """Return the values of a row. At most one more than `most` are read.

    Raises:
        _BadRowError: A quote is at a wrong position.
    """
    if '"' not in row:
        return row.split(delimiter, most)
    value = _compile_value(delimiter)
    values: list[str] = []
    at = 0
    while len(values) <= most:
        found = value.match(row, at)
        if found is None:
            raise _BadRowError("a quote is not closed, or is followed by other characters")
        quoted, plain, end = found.groups()
        values.append(plain if quoted is None else quoted.replace('""', '"'))
        if not end:
            break
        at = found.end()
    return values


@lru_cache(maxsize=16)
def _compile_value(delimiter: str) -> re.Pattern[str]:
    mark = re.escape(delimiter)
    return re.compile(rf'(?:"([^"]*+(?:""[^"]*+)*+)"|((?:[^"{mark}][^{mark}]*+)?))({mark}|\Z)')
