"""Parse the rows of CSV files (RFC 4180), one by one and in blocks."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, repeat

import orjson

from millrace.datasets.sample import BATCH_BYTES

UTF_8 = "utf-8"

_MAX_COLUMNS = 100  # of rows that are parsed in blocks, since their pattern has all columns
_SMALL_BLOCK = 16 << 10  # bytes of a block, which grows with the rows up to `BATCH_BYTES`
_BLOCK_ROWS = 1024  # since each row of a few bytes takes a hundred bytes when it is parsed


class BadValuesError(Exception):
    """A row that cannot be read."""


class RowParser:
    """Parser of the rows of one file.

    Args:
        names: Names of the columns.
        delimiter: Character between two values.
        columns: Column of each field, by the field's extension; None for whole rows.
        encoding: Encoding of the file.
    """

    def __init__(
        self,
        names: list[str],
        delimiter: str,
        columns: Mapping[str, str] | None,
        encoding: str = UTF_8,
    ) -> None:
        self._delimiter, self._encoding = delimiter, encoding
        self._names = names
        self._indices = {e: names.index(column) for e, column in (columns or {}).items()}
        # Columns of which the values are taken; all for whole rows.
        self._taken = sorted({*self._indices.values()} or range(len(names)))
        mark = delimiter.encode(encoding)
        is_simple = len(names) <= _MAX_COLUMNS and len(mark) == 1
        self._block_bytes = _SMALL_BLOCK
        self._table = _compile_table(len(names), self._taken, mark) if is_simple else None

    def parse_block(self, data: bytes, begin: int) -> tuple[list[int], dict[str, list[bytes]]]:
        """Parse some rows from an index on, up to a row with a fault.

        Returns:
            Indices of the rows and the one after them, and the values of each field. There are no
            fields if `parse` must parse the first row, or find its fault.
        """
        if self._table is None:
            return [], {}
        block = data[begin : begin + min(self._block_bytes, BATCH_BYTES)]
        if not block.isascii():
            try:
                block.decode(self._encoding)
            except UnicodeDecodeError as error:
                block = block[: error.start]
        found: list[tuple[bytes, ...]] = self._table.findall(block)
        if found and not found[-1][0]:
            found.pop()  # the rest of the block
        if not found:
            self._block_bytes = min(2 * self._block_bytes, BATCH_BYTES)
            return [], {}
        rows, *groups = zip(*found, strict=True)
        edges = [*accumulate(map(len, rows), initial=begin)]
        self._block_bytes = max(_SMALL_BLOCK, (edges[-1] - begin) // len(rows) * _BLOCK_ROWS)
        values: dict[int, list[bytes]] = {}
        for number, index in enumerate(self._taken):
            quoted, plain = groups[2 * number], groups[2 * number + 1]
            if index == len(self._names) - 1 and b"\r" in block:
                plain = [one.removesuffix(b"\r") for one in plain]
            values[index] = _unquote(quoted, plain)
        if self._indices:
            encoded = {i: _encode_again(one, self._encoding) for i, one in values.items()}
            return edges, {extension: encoded[i] for extension, i in self._indices.items()}
        encoding = repeat(self._encoding)
        decoded = ([*map(bytes.decode, column, encoding)] for column in values.values())
        texts = zip(*decoded, strict=True)
        return edges, {
            "json": [orjson.dumps(dict(zip(self._names, row, strict=True))) for row in texts]
        }

    def parse(self, row: bytes) -> dict[str, bytes]:
        """Return the fields of a row's sample.

        Raises:
            BadValuesError: The row cannot be read, or has another number of values than columns.
        """
        names = self._names
        values = split_row(decode_row(row, self._encoding), self._delimiter, len(names))
        if len(values) != len(names):
            more = "more values" if len(values) > len(names) else f"{len(values)} values"
            raise BadValuesError(f"{more} for {len(names)} columns")
        if not self._indices:
            return {"json": orjson.dumps(dict(zip(names, values, strict=True)))}
        return {extension: values[i].encode() for extension, i in self._indices.items()}


def _compile_table(columns: int, taken: Sequence[int], delimiter: bytes) -> re.Pattern[bytes]:
    """Return the pattern of a row without faults, or else of the rest of the bytes.

    Its groups are the row with its newline, and two for each of the taken columns: the value of one
    with quotes, and the value of one without. They are empty for the rest of the bytes.
    """
    mark = re.escape(delimiter)
    values = [
        rb'(?:"(%s[^"]*+(?:""[^"]*+)*+)"|(%s(?:[^"\n%s][^\n%s]*+)?+))'
        % (*((b"",) * 2 if index in taken else (b"?:",) * 2), mark, mark)
        for index in range(columns)
    ]
    not_empty = rb"(?!\r?\n)" if columns == 1 else b""
    return re.compile(rb"(%s%s\r?\n)|[\s\S]++" % (not_empty, mark.join(values)))


def _unquote(quoted: Sequence[bytes], plain: Sequence[bytes]) -> list[bytes]:
    """Return the values of a column, of which one of the two is empty."""
    if all(quoted):
        return [*map(bytes.replace, quoted, repeat(b'""'), repeat(b'"'))]
    if not any(quoted):
        return [*plain]
    return [q.replace(b'""', b'"') if q else p for q, p in zip(quoted, plain, strict=True)]


def _encode_again(values: list[bytes], encoding: str) -> list[bytes]:
    """Return the values of a column in UTF-8."""
    if encoding == UTF_8:
        return values
    return [one if one.isascii() else one.decode(encoding).encode() for one in values]


def compile_row(delimiter: bytes) -> re.Pattern[bytes]:
    """Return the pattern of a row with its newline. A quote is special where a value begins."""
    mark = re.escape(delimiter)
    quoted = rb'"[^"]*+(?:""[^"]*+)*+"'
    value = rb'(?:(?!")|%s)' % quoted
    plain = rb"[^\n%s]++" % mark if len(delimiter) == 1 else rb"(?:(?!%s)[^\n])++" % mark
    return re.compile(rb"%s(?:%s|%s%s)*+\n" % (value, plain, mark, value))


def decode_row(row: bytes, encoding: str) -> str:
    """Return a row as text.

    Raises:
        BadValuesError: The row has bytes that are no characters of the encoding.
    """
    try:
        return row.decode(encoding)
    except UnicodeDecodeError as error:
        if encoding != UTF_8:
            code = row[error.start]
            raise BadValuesError(f"the byte 0x{code:02x} is no character of {encoding}") from None
        hint = "set `encoding` of a source of the kind `csv`, or convert the file"
        raise BadValuesError(f"not UTF-8: {hint}, as `iconv -f latin1 -t utf-8` does") from None


def split_row(row: str, delimiter: str, most: int) -> list[str]:
    """Return the values of a row. At most one more than `most` are read.

    Raises:
        BadValuesError: A quote is at a wrong position.
    """
    if '"' not in row:
        return row.split(delimiter, most)
    value = _compile_value(delimiter)
    values: list[str] = []
    at = 0
    while len(values) <= most:
        found = value.match(row, at)
        if found is None:
            raise BadValuesError("a quote is not closed, or is followed by other characters")
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
