"""Samples from parquet files, which are divided at their row groups. Each row is a sample.

The cursor is the number of a row within its file. A run that continues reads the row group of that
row again, and no other.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from itertools import islice
from typing import Any, cast

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millrace import errors
from millrace.datasets.sample import BadRow, Row, Sample
from millrace.datasets.sources.files import SourceFiles, drop_etag
from millrace.datasets.sources.ranges import FileRange, iterate_unreadable
from millrace.datasets.sources.reader import SourceFileReader
from millrace.datasets.sources.table import FileTable, iterate_files
from millrace.schemas.dataset import FileRef, RowRange, SourceRange

_CONCURRENCY = 16  # concurrent reads of footers
_BATCH_BYTES = 4 << 20  # bytes of the rows that are decoded at a time
_MAX_BATCH_ROWS = 1024
_MAX_HELD_BYTES = 128 << 20  # of a row group that is read as a whole, while another is decoded
_FOOTER_BYTES = 64 << 10  # bytes at the end of a file that are read first
_SIGNATURE_BYTES = 28  # of a footer that is signed, since columns are encrypted
_PROBED_ROWS = 16  # rows by which the size of the rows of a group is estimated
_BUFFER_SIZE = 8 << 20  # bytes of a request for a column of a larger row group

Array = Any  # `pa.Array` of any type; its stubs do not type the elements
Values = list[Any]
"""Values of a column: bytes, None for null, or the reason (an exception) why one has no bytes."""


def divide_row_groups(
    files: SourceFiles,
    table: FileTable,
    partition_bytes: int,
    columns: Mapping[str, str] | None,
) -> list[FileRange]:
    """Divide the files of a source at their row groups. Reads the footer of every file.

    Args:
        files: Files of the source.
        table: Table of these files.
        partition_bytes: Approximate bytes of a range. A row group is not divided.
        columns: Column of each field, by the field's extension.

    Raises:
        ConfigurationError: A file is no parquet file, or does not have the columns.
    """

    def divide(described: tuple[int, FileRef, str]) -> list[FileRange]:
        number, file, reason = described
        if reason:
            return [
                RowRange(
                    file=file, file_index=number, start=0, end=1, size=file.size, reason=reason
                )
            ]
        if file.path in files.unseekable:
            raise errors.ConfigurationError(
                f"{files.make_url(file.path)}: the server sends no parts of files, which parquet "
                "needs. Copy the file to a bucket or a folder."
            )
        return _divide_file(files, file, number, partition_bytes, columns)

    rows = iterate_files(table, local=files.is_local)
    ranges: list[FileRange] = []
    with ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="footers") as pool:
        while batch := list(islice(rows, 4 * _CONCURRENCY)):
            for found in pool.map(divide, batch):
                ranges += found
    return ranges


def _divide_file(
    files: SourceFiles,
    file: FileRef,
    number: int,
    partition_bytes: int,
    columns: Mapping[str, str] | None,
) -> list[FileRange]:
    parquet = _open_file(files, file, SourceFileReader(files, file))
    _check_columns(files, file, parquet.schema_arrow, columns)
    ranges: list[FileRange] = []
    start = end = size = 0
    for group in range(parquet.metadata.num_row_groups):
        described = parquet.metadata.row_group(group)
        end += described.num_rows
        size += sum(described.column(i).total_compressed_size for i in range(described.num_columns))
        is_last = group + 1 == parquet.metadata.num_row_groups
        if end > start and (size >= partition_bytes or is_last):
            ranges.append(
                RowRange(file=file, file_index=number, start=start, end=end, size=max(1, size))
            )
            start, size = end, 0
    return ranges


def _check_columns(
    files: SourceFiles, file: FileRef, schema: pa.Schema, columns: Mapping[str, str] | None
) -> None:
    url = files.make_url(file.path)
    if not schema.names:
        raise errors.ConfigurationError(f"{url} has no columns. Leave the file out with `exclude`.")
    wanted = schema.names if columns is None else [*columns.values()]
    for name in sorted({name.partition(".")[0] for name in wanted} | set(wanted)):
        if schema.names.count(name) > 1:
            raise errors.ConfigurationError(
                f"{url} has several columns {name!r}. Rename them, or leave the file out with "
                "`exclude`."
            )
        kind: Any = cast("Any", schema).field(name).type if name in schema.names else None
        if kind is not None and _has_inexact_times(kind, top=True):
            raise errors.ConfigurationError(
                f"{url}: the column {name!r} has durations or times in nanoseconds within lists or "
                "structs, which JSON cannot hold exactly. Leave the column out of `columns`."
            )
    if columns is None:
        for field in cast("list[Any]", list(schema)):
            if path := _find_binary(field.type, field.name):
                raise errors.ConfigurationError(
                    f"{url}: the column {path} holds bytes, which JSON cannot hold. Name the "
                    f'columns to take, such as `columns: {{"bin": "{path}"}}`.'
                )
        return
    for column in columns.values():
        try:
            _find_path(schema, column)
        except KeyError:
            names = ", ".join(schema.names[:20]) + (", ..." if len(schema.names) > 20 else "")
            raise errors.ConfigurationError(
                f"{url} has no column {column!r}. Its columns are {names}. Correct `columns`, or "
                "leave the file out with `exclude`."
            ) from None


def _find_binary(kind: pa.DataType, path: str) -> str:
    """Return the path of the first binary value in a type; empty if there is none."""
    if _is_binary(kind):
        return path
    if isinstance(kind, pa.BaseExtensionType):
        return _find_binary(kind.storage_type, path)
    if pa.types.is_dictionary(kind):
        return _find_binary(kind.value_type, path)
    fields: list[Any] = [cast("Any", kind).field(i) for i in range(kind.num_fields)]
    is_struct = pa.types.is_struct(kind)
    found = (_find_binary(f.type, f"{path}.{f.name}" if is_struct else path) for f in fields)
    return next(filter(None, found), "")


def _has_inexact_times(kind: Any, *, top: bool = False) -> bool:
    """Decide whether a nested type has times that Python's types do not hold exactly."""
    if pa.types.is_temporal(kind):
        return not top and (pa.types.is_duration(kind) or getattr(kind, "unit", "") == "ns")
    return any(_has_inexact_times(kind.field(i).type) for i in range(kind.num_fields))


def _find_path(schema: pa.Schema, column: str) -> tuple[str, ...]:
    """Return the names that lead to a column, or to a part of one, such as ``image.bytes``.

    Raises:
        KeyError: There is no such column.
    """
    if schema.get_field_index(column) >= 0:
        return (column,)
    name, _, rest = column.partition(".")
    index = schema.get_field_index(name)
    kind: Any = cast("Any", schema).field(index).type if index >= 0 else None
    if not rest or kind is None or not pa.types.is_struct(kind):
        raise KeyError(column)
    return (name, *_find_path(pa.schema(list(kind)), rest))


def _open_file(
    files: SourceFiles, file: FileRef, reader: SourceFileReader, *, buffer_size: int = 0
) -> pq.ParquetFile:
    """Open a parquet file.

    Raises:
        ConfigurationError: The file is no parquet file, or is damaged.
    """
    try:
        start = max(0, file.size - _FOOTER_BYTES)
        tail = reader.fetch([(start, file.size)])
        reader.hold(tail)
        parquet = pq.ParquetFile(
            cast("Any", reader), buffer_size=buffer_size, page_checksum_verification=True
        )
        _ = parquet.schema_arrow.names
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _make_damage_error(files, file, error) from error
    length = int.from_bytes(tail[0][1][-8:-4], "little")
    if length - parquet.metadata.serialized_size == _SIGNATURE_BYTES:
        # pyarrow ends the process if it is asked about an encrypted column.
        raise errors.ConfigurationError(
            f"{files.make_url(file.path)} has encrypted columns. Decrypt the file, or leave it out "
            "with `exclude`."
        )
    return parquet


def _make_damage_error(
    files: SourceFiles, file: FileRef, error: Exception
) -> errors.ConfigurationError:
    return errors.ConfigurationError(
        f"{files.make_url(file.path)} is no parquet file, or is damaged ({error}). Replace the "
        "file, or leave it out with `exclude`."
    )


class ParquetSource:
    """The rows of parquet files.

    Args:
        files: Files of the source.
        columns: Column of each field, by the field's extension. Text and bytes are written
            unchanged, and other values as JSON. None writes each row whole, as ``json``.
        any_version: Whether a file is also read if it was written again after the plan was made.
    """

    def __init__(
        self,
        files: SourceFiles,
        columns: Mapping[str, str] | None = None,
        *,
        any_version: bool = False,
    ) -> None:
        self._files, self._columns, self._any_version = files, columns, any_version

    def iterate_rows(self, source_range: SourceRange, cursor: int) -> Iterator[Row]:
        """Yield the rows of a range, from a row of the file on."""
        if not isinstance(source_range, RowRange):
            raise errors.ConfigurationError(
                f"Parquet files are divided by rows, not {source_range.kind}."
            )
        file = source_range.file
        if source_range.reason:
            yield from iterate_unreadable(source_range, cursor)
            return
        if self._any_version:
            file = drop_etag(file)
        position = max(cursor, source_range.start)
        try:
            for batch in self._iterate_batches(file, position, source_range.end):
                yield from self._make_rows(file, source_range.file_index, position, batch)
                position += batch.num_rows
        except MemoryError:  # Arrow's is an `ArrowException`, too
            raise
        except (pa.ArrowException, OSError) as error:
            raise _make_damage_error(self._files, file, error) from error

    def _iterate_batches(self, file: FileRef, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows from `start` to `end` of a file in batches.

        A row group of up to 128 MiB is read as a whole, while the one before it is decoded.
        """
        reader = SourceFileReader(self._files, file)
        parquet = _open_file(self._files, file, reader, buffer_size=_BUFFER_SIZE)
        names = self._select_names(parquet.schema_arrow)
        groups = _select_groups(parquet.metadata, start, end)

        def fetch(group: int) -> list[tuple[int, bytes]]:
            ranges = _find_chunks(parquet.metadata.row_group(group), names)
            whole = sum(stop - begin for begin, stop in ranges) <= _MAX_HELD_BYTES
            return reader.fetch(ranges) if whole else []

        with ThreadPoolExecutor(1, thread_name_prefix="row-groups") as pool:
            pending = pool.submit(fetch, groups[0][0]) if groups else None
            for index, (group, first) in enumerate(groups):
                assert pending is not None
                reader.hold(pending.result())
                following = groups[index + 1][0] if index + 1 < len(groups) else None
                pending = pool.submit(fetch, following) if following is not None else None
                at = first
                for batch in self._decode_group(parquet, group, names):
                    lower, upper = max(start - at, 0), min(end - at, batch.num_rows)
                    at += batch.num_rows
                    if lower < upper:
                        yield batch.slice(lower, upper - lower)
                if at - first != parquet.metadata.row_group(group).num_rows:
                    raise OSError(f"its row group {group} has another number of rows than it says")

    def _decode_group(
        self, parquet: pq.ParquetFile, group: int, names: list[str] | None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a row group in batches of about 4 MiB.

        The size of the rows is that of the first ones, since a repeated value is stored once.
        """

        def decode(rows: int) -> Iterator[pa.RecordBatch]:
            return cast("Any", parquet).iter_batches(
                rows, row_groups=[group], columns=names, use_threads=False
            )

        probed = next(decode(_PROBED_ROWS), None)
        if probed is None:
            return iter(())
        row_bytes = max(1, probed.nbytes // max(1, probed.num_rows))
        return decode(min(_MAX_BATCH_ROWS, max(1, _BATCH_BYTES // row_bytes)))

    def _select_names(self, schema: pa.Schema) -> list[str] | None:
        """Return the paths of the columns to read; None for all."""
        if self._columns is None:
            return None
        return sorted({".".join(_find_path(schema, name)) for name in self._columns.values()})

    def _make_rows(
        self, file: FileRef, file_index: int, first: int, batch: pa.RecordBatch
    ) -> Iterator[Row]:
        if self._columns is None:
            fields = {"json": _encode_rows(batch)}
        else:
            fields = {
                extension: _encode_column(_follow_path(batch, column))
                for extension, column in self._columns.items()
            }
        for index in range(batch.num_rows):
            number = first + index
            sample: dict[str, bytes] = {}
            reason = ""
            for extension, values in fields.items():
                value = values[index]
                if isinstance(value, bytes):
                    sample[extension] = value
                    continue
                what = f"the column {self._columns[extension]!r}" if self._columns else "the row"
                reason = (
                    f"{what} is null" if value is None else f"{what} cannot be written: {value}"
                )
                break
            if reason:
                yield BadRow(f"{file.path}, row {number}", reason, b"", number + 1)
            else:
                yield Sample(f"{file_index:05d}-{number:010d}", sample, number + 1)


def _select_groups(metadata: pq.FileMetaData, start: int, end: int) -> list[tuple[int, int]]:
    """Return the row groups with the rows from `start` to `end`, each with its first row."""
    groups: list[tuple[int, int]] = []
    first = 0
    for group in range(metadata.num_row_groups):
        after = first + metadata.row_group(group).num_rows
        if first < end and start < after:
            groups.append((group, first))
        first = after
    return groups


def _find_chunks(group: pq.RowGroupMetaData, names: list[str] | None) -> list[tuple[int, int]]:
    """Return the ranges of a row group's columns in the file."""
    ranges: list[tuple[int, int]] = []
    for index in range(group.num_columns):
        chunk = group.column(index)
        path = chunk.path_in_schema
        if names is not None and not any(
            path == name or path.startswith(f"{name}.") for name in names
        ):
            continue
        offsets = (chunk.dictionary_page_offset, chunk.data_page_offset)
        begin = min(offset for offset in offsets if offset is not None)
        ranges.append((begin, begin + chunk.total_compressed_size))
    return ranges


def _follow_path(batch: pa.RecordBatch, column: str) -> Array:
    """Return a column, or a part of one, whose nulls include those of what it is part of."""
    first, *rest = _find_path(batch.schema, column)
    array: Array = cast("Any", batch).column(first)
    for name in rest:
        array = cast("Any", pc).struct_field(array, name)
    return array


def _is_binary(kind: pa.DataType) -> bool:
    return (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_binary_view(kind)
    )


def _encode_column(array: Array) -> Values:
    """Return the bytes of a column's values."""
    array = _drop_extension(array)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    if pa.types.is_string(kind):
        return array.cast(pa.binary()).to_pylist()
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return array.cast(pa.large_binary()).to_pylist()
    if _is_binary(kind):
        return array.to_pylist()
    return [_encode_json(value) for value in _read_values(array)]


def _encode_rows(batch: pa.RecordBatch) -> Values:
    """Return each row as a JSON object."""
    columns = [_read_values(array) for array in cast("Any", batch).columns]
    names = batch.schema.names
    rows: Values = []
    for values in zip(*columns, strict=True):
        faults = [value for value in values if isinstance(value, Exception)]
        rows.append(faults[0] if faults else _encode_json(dict(zip(names, values, strict=True))))
    return rows


def _read_values(array: Array) -> list[Any]:
    """Return a column's values as JSON can hold them, or the exception why one has no such value.

    Times and decimals become text, since Python's types hold fewer digits.
    """
    array = _drop_extension(array)
    kind = array.type
    if pa.types.is_temporal(kind) or pa.types.is_decimal(kind):
        try:
            texts: list[str | None] = array.cast(pa.string()).to_pylist()
        except pa.ArrowInvalid as error:  # such as an unknown time zone
            return [error] * len(array)
        if not pa.types.is_temporal(kind):
            return texts
        return [text if text is None else _format_time(text) for text in texts]
    try:
        return array.to_pylist()
    except (ValueError, OverflowError):  # not Unicode, or a time beyond Python's
        return [_read_value(array[index]) for index in range(len(array))]


def _drop_extension(array: Array) -> Array:
    """Return the stored values of an extension type, such as the text of JSON."""
    return array.storage if isinstance(array.type, pa.BaseExtensionType) else array


def _format_time(text: str) -> str | ValueError:
    """Return Arrow's text of a time by ISO 8601. Arrow's remark on a time out of range is none."""
    if text.startswith("<"):
        return ValueError(text.strip("<>"))
    return text.replace(" ", "T", 1)


def _read_value(scalar: "pa.Scalar[Any]") -> Any:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError) as error:
        return error


def _encode_json(value: Any) -> bytes | Exception:
    if isinstance(value, Exception):
        return value
    try:
        return orjson.dumps(value, default=_convert_value)
    except (TypeError, ValueError) as error:
        return error


def _convert_value(value: object) -> object:
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(f"JSON cannot hold a value of type {type(value).__name__}")
