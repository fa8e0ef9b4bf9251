"""Samples from files of JSON lines, which are divided into byte ranges. Each line is a sample.

A range contains the rows whose first byte is in the range, so every row is in exactly one range.
The cursor is a byte offset: a run that continues seeks to the offset. A compressed file becomes one
range, in which a run seeks to a seek point.
"""

import json
import re
from collections.abc import Iterator, Mapping
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import orjson

from millrace import errors
from millrace.datasets.formats.base import BadSampleError, FieldType, guess_type
from millrace.datasets.formats.values import encode_array, is_array
from millrace.datasets.sample import (
    LARGE_ROW,
    BadRow,
    Row,
    RowBatch,
    Sample,
    iterate_rows,
    make_keys,
)
from millrace.datasets.sources.files import SourceFiles
from millrace.datasets.sources.ranges import iterate_unreadable
from millrace.datasets.sources.text_files import TextFiles, TextRange, strip_lines
from millrace.schemas.dataset import SourceRange
from millrace.storage import Store

_SHOWN = 64 * 1024
_MAX_CONTAINERS = 8 << 20  # objects and arrays of a row; each takes up to 240 bytes when parsed
LARGE_LINE = 1024 * 1024
"""Bytes of a line that is freed as soon as its columns are read."""
_LONG_NUMBER = re.compile(rb"\d{19}")
_ARRAY_HINT = ", but an array: write an object in each line, as `jq -c '.[]'` does"


class _BadLineError(Exception):
    """A line makes no sample. The message is the reason for the quarantine."""


class _Column(NamedTuple):
    """Column of a field.

    Attributes:
        extension: Extension of the field.
        name: Name of the column.
        kind: Type of the field.
    """

    extension: str
    name: str
    kind: str

    @property
    def keeps_text(self) -> bool:
        """True if a text is written unchanged."""
        return self.kind != FieldType.JSON and not is_array(self.kind)


class JsonLinesSource:
    """The rows of JSON-lines files.

    Args:
        files: Files of the source.
        dataset_store: Store of the dataset, for the seek points of compressed files; None without
            such files.
        columns: Column of each field, by the field's extension. Text is written unchanged, and
            other values as JSON. In a field that is JSON, text is JSON too. In a field that is an
            array, lists of integers become its items. None writes each row whole, as ``json``.
        types: Types of fields, by their names. Others have the types of their extensions. Only a
            field that is JSON can be null.
        any_version: Whether a file is also read if it was written again after the plan was made.
    """

    def __init__(
        self,
        files: SourceFiles,
        dataset_store: Store | None,
        columns: dict[str, str] | None = None,
        *,
        types: Mapping[str, str] = MappingProxyType({}),
        any_version: bool = False,
    ) -> None:
        self._files = TextFiles(files, dataset_store, any_version=any_version)
        self._columns = tuple(
            _Column(extension, name, types.get(extension, guess_type(extension)))
            for extension, name in (columns or {}).items()
        )

    def iterate_rows(self, source_range: SourceRange, cursor: int) -> Iterator[Row]:
        """Yield the rows that begin within a range of a file's bytes, from a cursor on."""
        return iterate_rows(self.iterate_batches(source_range, cursor))

    def iterate_batches(self, source_range: SourceRange, cursor: int) -> Iterator[RowBatch | Row]:
        """Yield the same rows in batches, where this is possible."""
        if not isinstance(source_range, TextRange):
            raise errors.ConfigurationError(
                f"JSON lines are divided by bytes, not {source_range.kind}."
            )
        if source_range.reason:
            yield from iterate_unreadable(source_range, cursor)
            return
        for lines in self._files.iterate_batches(source_range, cursor):
            columns = self._parse_lines(lines.data)
            if columns:
                keys = make_keys(source_range.file_index, lines.offsets, 13)
                yield RowBatch(keys, columns, lines.next_cursors)
                continue
            for _, offset, after, held in strip_lines(lines):
                yield self._parse_row(source_range, offset, after, held)

    def _parse_lines(self, lines: list[bytes]) -> dict[str, list[bytes]]:
        """Return the columns of small lines, or nothing if a line must be looked at by itself."""
        if max(map(len, lines)) >= LARGE_ROW:
            return {}
        columns: dict[str, list[bytes]] = {}
        try:
            rows: list[dict[str, Any]] = [*map(orjson.loads, lines)]
            if set(map(type, rows)) != {dict}:
                return {}
            for column in self._columns:
                values = [*map(itemgetter(column.name), rows)]
                if column.keeps_text and set(map(type, values)) == {str}:
                    columns[column.extension] = [*map(str.encode, values)]
                elif column.kind != FieldType.JSON and None in values:
                    return {}
                else:
                    columns[column.extension] = [
                        _encode_value(value, line, column)
                        for value, line in zip(values, lines, strict=True)
                    ]
        except (BadSampleError, KeyError, TypeError, ValueError, RecursionError):
            return {}
        if not self._columns:
            columns["json"] = [one.removesuffix(b"\n").removesuffix(b"\r") for one in lines]
        return columns

    def _parse_row(
        self, source_range: TextRange, offset: int, after: int, held: list[bytes]
    ) -> Row:
        """Parse a line. The line is removed from its list, so that it can be freed."""
        begin = held[0][:_SHOWN]
        try:
            fields = self._read_fields(held)
        except _BadLineError as error:
            reason = str(error)
        except KeyError as error:
            reason = f"no column {error}"
        except (TypeError, ValueError, RecursionError):  # nested too deeply, or not Unicode
            reason = "a column cannot be written"
        else:
            return Sample(f"{source_range.file_index:05d}-{offset:013d}", fields, after)
        return BadRow(f"{source_range.file.path}, byte {offset}", reason, begin, after)

    def _read_fields(self, held: list[bytes]) -> dict[str, bytes]:
        """Return the fields of a line.

        Raises:
            _BadLineError: The line makes no sample.
        """
        line = held.pop()
        if exceeds_memory(line):
            raise _BadLineError("more objects and arrays than memory holds")
        try:
            parsed: Any = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise _BadLineError(explain_refusal(line, error) or _explain_fault(line)) from None
        if type(parsed) is not dict:
            hint = _ARRAY_HINT if isinstance(parsed, list) else ""
            raise _BadLineError(f"not a JSON object{hint}")
        row = cast("dict[str, Any]", parsed)
        if not self._columns:
            return {"json": line}
        for column in self._columns:
            if row[column.name] is None and column.kind != FieldType.JSON:
                raise _BadLineError(f"the column {column.name!r} is null")
        if len(line) > LARGE_LINE:
            row = {column.name: row[column.name] for column in self._columns}
            if all(type(value) is str for value in row.values()):
                line = b""
        return _make_fields(row, line, self._columns)


def _explain_fault(line: bytes) -> str:
    """Return why a line is no JSON, with advice for files of other kinds."""
    if line.startswith(b"PAR1"):
        return "not valid JSON, but a parquet file: set `kind: parquet`"
    return "not valid JSON" + (_ARRAY_HINT if line.strip() in {b"[", b"[{"} else "")


def explain_refusal(text: bytes, error: orjson.JSONDecodeError) -> str:
    """Return why orjson refuses JSON that has the grammar of JSON; empty if it has not.

    Args:
        text: The JSON text.
        error: Error of orjson.
    """
    try:
        json.loads(text.decode(), parse_constant=_refuse_constant)
    except RecursionError:
        pass
    except ValueError:
        return ""
    return f"JSON that cannot be read back: {error.msg}"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


def exceeds_memory(text: bytes) -> bool:
    """Decide whether a JSON text could take many times its size when it is parsed."""
    return len(text) > LARGE_LINE and text.count(b"{") + text.count(b"[") > _MAX_CONTAINERS


def _make_fields(
    row: dict[str, Any], line: bytes, columns: tuple[_Column, ...]
) -> dict[str, bytes]:
    """Return the fields of a line.

    Raises:
        _BadLineError: A value is not of the type of its field.
    """
    fields: dict[str, bytes] = {}
    for column in columns:
        try:
            fields[column.extension] = _encode_value(row[column.name], line, column)
        except BadSampleError as error:
            raise _BadLineError(f"the column {column.name!r} {error}") from None
    return fields


def _encode_value(value: object, line: bytes, column: _Column) -> bytes:
    """Return a text as it is, integers of an array as its items, and another value as JSON.

    orjson reads an integer of more than 64 bits as a float. Then `json` parses the line again.

    Raises:
        BadSampleError: The value is not of the type of an array.
    """
    if is_array(column.kind):
        return encode_array(value, column.kind)
    if isinstance(value, str) and column.keeps_text:
        return value.encode()
    if type(value) in {float, list, dict} and _LONG_NUMBER.search(line):
        exact = json.loads(line)[column.name]
        return json.dumps(exact, ensure_ascii=False, separators=(",", ":")).encode()
    return orjson.dumps(value)
