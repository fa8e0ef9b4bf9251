"""Rows of Arrow tables as samples. Each row is a sample.

Text and bytes are written unchanged, and other values as JSON. Lists of integers become the items
of a field that is an array.
"""

import io
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime, time
from decimal import Decimal
from itertools import pairwise
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from millrace import errors
from millrace.datasets.formats.base import BadSampleError, is_json
from millrace.datasets.formats.values import encode_array, is_array
from millrace.datasets.sample import BadRow, Row, RowBatch, Sample, make_keys

Array = Any  # `pa.Array` of any type; its stubs do not type the elements
Values = list[Any]
"""Values of a column: bytes, None for null, or the reason (an exception) why one has no bytes."""
Columns = dict[str, Values]
"""Values of each field, by the field's extension."""

_REFUSALS = (ValueError, OverflowError, KeyError)
"""Errors of values that Python does not hold: no Unicode, a time too far, or in an unknown zone."""
_OLD_ZONE = "US/Eastern"  # a name that only whole databases of time zones have
_UNIT_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}  # decimal digits of a second
_SMALL_VALUE = 4096  # mean bytes of values that are copied at once before they are divided


class Int96Type(pa.ExtensionType):
    """Times of parquet's type INT96, which has nanoseconds of any year.

    Arrow's nanoseconds hold the years from 1677 to 2262, and other times wrap. So each time is
    stored twice: in milliseconds, and in nanoseconds that may have wrapped.
    """

    def __init__(self) -> None:
        units: Any = [(unit, pa.timestamp(unit)) for unit in ("ms", "ns")]
        super().__init__(pa.struct(units), "millrace.int96")

    def __arrow_ext_serialize__(self) -> bytes:
        """Return nothing: the type has no parameters."""
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: Any, serialized: Any) -> "Int96Type":
        """Return the type."""
        return cls()


def make_int96(milliseconds: Array, nanoseconds: Array) -> Array:
    """Return times of parquet's type INT96.

    Args:
        milliseconds: The times in milliseconds.
        nanoseconds: The same times in nanoseconds. Those of other years have wrapped.
    """
    pair = cast("Any", pa.StructArray).from_arrays([milliseconds, nanoseconds], ["ms", "ns"])
    return cast("Any", pa.ExtensionArray).from_storage(Int96Type(), pair)


def make_rows(
    batch: pa.RecordBatch,
    columns: Mapping[str, str] | None,
    *,
    file_index: int,
    first: int,
    cursor: int,
    where: str,
    types: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[RowBatch | Row]:
    """Yield the rows of a batch: at once, or one by one if a row makes no sample.

    Args:
        batch: The rows.
        columns: Column of each field, by the field's extension. None writes each row whole, as
            ``json``.
        file_index: Number of the file or the shard, for the keys of the samples.
        first: Number of the first row in the file or the shard.
        cursor: Cursor of the first row. That of each further row is larger by one.
        where: Location of the file or the shard, for bad rows.
        types: Types of fields, by their names. Others have the types of their extensions. In a
            column without a type of its own, in which all values are null, only JSON can be null.
    """
    if columns is None:
        values: Columns = {"json": _encode_rows(batch)}
    else:
        values = {
            extension: encode_column(
                follow_path(batch, column),
                takes_null=is_json(extension, types),
                field_type=types.get(extension, ""),
            )
            for extension, column in columns.items()
        }
    keys = make_keys(file_index, range(first, first + batch.num_rows), 10)
    next_cursors = range(cursor + 1, cursor + 1 + batch.num_rows)
    if all(set(map(type, one)) <= {bytes} for one in values.values()):
        yield RowBatch(keys, values, next_cursors)
        return
    for index, (key, after) in enumerate(zip(keys, next_cursors, strict=True)):
        fields = _make_fields(values, index, columns)
        if isinstance(fields, str):
            yield BadRow(f"{where}, row {first + index}", fields, b"", after)
        else:
            yield Sample(key, fields, after)


def _make_fields(
    values: Columns, index: int, columns: Mapping[str, str] | None
) -> dict[str, bytes] | str:
    """Return the fields of one row, or the reason why the row makes no sample."""
    fields: dict[str, bytes] = {}
    for extension, column_values in values.items():
        value = column_values[index]
        if isinstance(value, bytes):
            fields[extension] = value
            continue
        what = f"the column {columns[extension]!r}" if columns else "the row"
        if isinstance(value, BadSampleError):
            return f"{what} {value}"
        return f"{what} is null" if value is None else f"{what} cannot be written: {value}"
    return fields


def check_columns(url: str, schema: pa.Schema, columns: Mapping[str, str] | None) -> None:
    """Check that a table has the columns of the settings, and that samples can hold them.

    Args:
        url: URL of the table, for messages.
        schema: Schema of the table.
        columns: Column of each field, by the field's extension; None for whole rows.

    Raises:
        ConfigurationError: The table lacks a column, or a column cannot be written.
    """
    if not schema.names:
        raise errors.ConfigurationError(f"{url} has no columns. Leave the file out with `exclude`.")
    wanted = schema.names if columns is None else [*columns.values()]
    for name in sorted({name.partition(".")[0] for name in wanted} | set(wanted)):
        if schema.names.count(name) > 1:
            raise errors.ConfigurationError(
                f"{url} has several columns {name!r}. Rename them, or leave the file out with "
                "`exclude`."
            )
    if columns is None:
        for field in cast("list[Any]", list(schema)):
            _refuse_inexact_times(url, field.name, field.type, top=True)
            if path := find_binary(field.type, field.name):
                raise errors.ConfigurationError(
                    f"{url}: the column {path} holds bytes, which JSON cannot hold. Name the "
                    f'columns to take, such as `columns: {{"bin": "{path}"}}`.'
                )
        return
    for column in columns.values():
        try:
            kind = _find_type(schema, column)
        except KeyError:
            names = ", ".join(schema.names[:20]) + (", ..." if len(schema.names) > 20 else "")
            raise errors.ConfigurationError(
                f"{url} has no column {column!r}. Its columns are {names}. Correct `columns`, or "
                "leave the file out with `exclude`."
            ) from None
        _refuse_inexact_times(url, column, kind, top=column in schema.names)
        if (path := find_binary(kind, column)) and not is_binary(_unwrap(kind)):
            raise errors.ConfigurationError(
                f"{url}: the column {column!r} holds bytes in {path}, which JSON cannot hold. Name "
                "another part of it in `columns`, or leave it out."
            )


def _refuse_inexact_times(url: str, column: str, kind: Any, *, top: bool) -> None:
    """Refuse a column, or a part of one, with times that samples cannot hold exactly.

    Raises:
        ConfigurationError: The column has such times.
    """
    if _has_inexact_times(kind, top=top):
        raise errors.ConfigurationError(
            f"{url}: the column {column!r} has durations or times in nanoseconds within lists or "
            "structs, which JSON cannot hold exactly. Leave the column out of `columns`."
        )


def _unwrap(kind: Any) -> Any:
    """Return the type of the values of a column, without an extension and a dictionary."""
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def guess_types(schema: pa.Schema, columns: Mapping[str, str] | None) -> dict[str, str]:
    """Return the types of the fields by the types of their columns, as `FieldType` names them.

    A column in which all values are null has no type of its own, and gives its field none.

    Args:
        schema: Schema of the table, which has the columns.
        columns: Column of each field, by the field's extension; None for whole rows.
    """
    if columns is None:
        return {"json": "json"}
    found: dict[str, str] = {}
    for extension, column in columns.items():
        kind = _find_type(schema, column)
        if not pa.types.is_null(kind):
            found[extension] = _guess_type(kind)
    return found


def _find_type(schema: pa.Schema, column: str) -> Any:
    """Return the type of a column, or of a part of one.

    Raises:
        KeyError: There is no such column.
    """
    kind: Any = pa.struct(cast("Any", list(cast("Any", schema))))
    for name in find_path(schema, column):
        kind = kind.field(name).type
    return kind


def _guess_type(kind: Any) -> str:
    if isinstance(kind, pa.BaseExtensionType):
        return "json"
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if is_text(kind):
        return "str"
    if is_binary(kind):
        return "bytes"
    if pa.types.is_integer(kind) and not pa.types.is_uint64(kind):
        return "int"
    return "float" if pa.types.is_floating(kind) else "json"


def find_binary(kind: pa.DataType, path: str) -> str:
    """Return the path of the first binary value in a type; empty if there is none."""
    if is_binary(kind):
        return path
    if isinstance(kind, pa.BaseExtensionType):
        return find_binary(kind.storage_type, path)
    if pa.types.is_dictionary(kind):
        return find_binary(kind.value_type, path)
    fields: list[Any] = [cast("Any", kind).field(i) for i in range(kind.num_fields)]
    is_struct = pa.types.is_struct(kind)
    found = (find_binary(f.type, f"{path}.{f.name}" if is_struct else path) for f in fields)
    return next(filter(None, found), "")


def _has_inexact_times(kind: Any, *, top: bool = False) -> bool:
    """Decide whether a nested type has times that Python's types do not hold exactly."""
    if pa.types.is_temporal(kind):
        return not top and (pa.types.is_duration(kind) or getattr(kind, "unit", "") == "ns")
    return any(_has_inexact_times(kind.field(i).type) for i in range(kind.num_fields))


def find_path(schema: pa.Schema, column: str) -> tuple[str, ...]:
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
    return (name, *find_path(pa.schema(list(kind)), rest))


def follow_path(batch: pa.RecordBatch, column: str) -> Array:
    """Return a column, or a part of one, whose nulls include those of what it is part of."""
    first, *rest = find_path(batch.schema, column)
    array: Array = cast("Any", batch).column(first)
    for name in rest:
        array = cast("Any", pc).struct_field(array, name)
    return array


def is_text(kind: pa.DataType) -> bool:
    """Decide whether the values of a type are text."""
    return (
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def is_binary(kind: pa.DataType) -> bool:
    """Decide whether the values of a type are bytes."""
    return (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_binary_view(kind)
    )


def encode_column(array: Array, *, takes_null: bool = True, field_type: str = "") -> Values:
    """Return the bytes of a column's values.

    Args:
        array: Values of the column.
        takes_null: Whether their field can be null, if the column has no type of its own.
        field_type: Type of their field. Lists of integers become the items of an array.
    """
    if is_array(field_type):
        return _encode_arrays(_drop_extension(array), field_type)
    if isinstance(array.type, Int96Type):
        return [_encode_json(value) for value in _read_values(array)]
    array = _drop_extension(array)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    if pa.types.is_string_view(kind):
        array = array.cast(pa.large_binary())
    if is_text(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return _slice_values(array)
    if is_binary(kind) or (pa.types.is_null(kind) and not takes_null):
        return array.to_pylist()
    if pa.types.is_integer(kind) and not array.null_count:
        return _slice_values(array.cast(pa.string()))  # the digits are those of JSON
    return [_encode_json(value) for value in _read_values(array)]


def _encode_arrays(array: Array, field_type: str) -> Values:
    """Return lists of integers as the items of arrays, and bytes as they are.

    Lists whose integers fit are converted at once. Others are checked one by one.
    """
    if is_binary(array.type):
        return encode_column(array)
    item = getattr(array.type, "value_type", None)
    if item is not None and pa.types.is_integer(item) and not pa.types.is_dictionary(array.type):
        lists = array.drop_null()
        items = lists.flatten()
        bounds = cast("Any", pc).min_max(items).as_py()
        dtype = np.dtype(field_type.removesuffix("[]")).newbyteorder("<")
        if (
            not items.null_count
            and (bounds["min"] or 0) >= 0
            and (bounds["max"] or 0) <= np.iinfo(dtype).max
        ):
            data = io.BytesIO(items.to_numpy().astype(dtype).tobytes())
            sizes = cast("Any", pc).list_value_length(array).to_pylist()
            return [None if n is None else data.read(n * dtype.itemsize) for n in sizes]
    return [_encode_array(value, field_type) for value in _read_values(array)]


def _encode_array(value: Any, field_type: str) -> bytes | Exception | None:
    if value is None or isinstance(value, Exception):
        return value
    try:
        return encode_array(value, field_type)
    except BadSampleError as error:
        return error


def _slice_values(array: Array) -> Values:
    """Return the values of an array of text or bytes, which are slices of one buffer of Arrow.

    This is several times faster than `to_pylist`, which makes an object of Arrow for each value.
    """
    if not len(array):
        return []
    is_large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, offsets, data = array.buffers()
    dtype = np.dtype(np.int64 if is_large else np.int32)
    begin = array.offset * dtype.itemsize
    edges = np.frombuffer(offsets, dtype, len(array) + 1, begin)
    view = memoryview(data or b"")[edges[0] : edges[-1]]
    values: Values
    if len(view) > _SMALL_VALUE * len(array):
        ends = (edges - edges[0]).tolist()
        values = [view[start:end].tobytes() for start, end in pairwise(ends)]
    else:  # a copy is read in half the time
        values = [*map(io.BytesIO(view).read, np.diff(edges).tolist())]
    if array.null_count:
        for index in cast("Any", pc).indices_nonzero(array.is_null()).to_pylist():
            values[index] = None
    return values


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

    Times, durations and decimals become text, since Python's types hold fewer digits.
    """
    if isinstance(array.type, Int96Type):
        return _format_int96(array.storage)
    array = _drop_extension(array)
    kind = array.type
    if pa.types.is_decimal(kind):
        return array.cast(pa.string()).to_pylist()
    if pa.types.is_duration(kind):
        digits = _UNIT_DIGITS[kind.unit]
        values = array.cast(pa.int64()).to_pylist()
        return [None if one is None else _format_duration(one, digits) for one in values]
    if pa.types.is_temporal(kind):
        return _format_times(array)
    try:
        return array.to_pylist()
    except _REFUSALS:
        return [_read_value(array[index]) for index in range(len(array))]


def _format_duration(value: int, digits: int) -> str:
    """Return a duration by ISO 8601, in seconds with the digits that are not zero.

    Args:
        value: The duration in its unit.
        digits: Decimal digits of a second that the unit has.
    """
    seconds = Decimal(abs(value)).scaleb(-digits).normalize()
    return f"{'-' if value < 0 else ''}PT{seconds:f}S"


def _drop_extension(array: Array) -> Array:
    """Return the stored values of an extension type, such as the text of JSON."""
    return array.storage if isinstance(array.type, pa.BaseExtensionType) else array


def _format_times(array: Array) -> list[str | ValueError | None]:
    """Return times by ISO 8601, or the exception why one has no text.

    ISO 8601 has no offsets with seconds, such as those before standard time. Such a time is in UTC.

    Raises:
        ConfigurationError: This machine has no whole database of time zones.
    """
    zone: str | None = getattr(array.type, "tz", None)
    if zone is None:
        return [text and _format_time(text) for text in array.cast(pa.string()).to_pylist()]
    times = array.cast(pa.timestamp(array.type.unit))  # in UTC, which needs no database
    in_utc: list[str | ValueError | None] = [
        text and _format_time(text, "Z") for text in times.cast(pa.string()).to_pylist()
    ]
    if zone == "UTC":
        return in_utc
    try:
        texts = array.cast(pa.string()).to_pylist()
    except pa.ArrowInvalid as error:
        _check_time_zones(error)
        return [text and error for text in in_utc]
    local: Array = cast("Any", pc).local_timestamp(array)
    offsets: Array = pc.subtract(local, times).cast(pa.duration("s"))
    seconds = offsets.cast(pa.int64()).to_pylist()
    # Arrow's text of a time out of range is that of another time, if the type has a zone.
    return [
        utc if not isinstance(utc, str) or offset % 60 else _format_time(text)
        for utc, text, offset in zip(in_utc, texts, seconds, strict=True)
    ]


def _check_time_zones(error: Exception) -> None:
    """Check that a zone is unknown because of the source, and not because of this machine.

    Raises:
        ConfigurationError: This machine does not know a zone that a whole database has.
    """
    known: Array = pa.array([0], pa.timestamp("s", _OLD_ZONE))
    try:
        known.cast(pa.string())
        known.to_pylist()
    except _REFUSALS:
        raise errors.ConfigurationError(
            f"This machine has no whole database of time zones ({error}). Install it (`apt-get "
            "install tzdata`, and `tzdata-legacy` where there is one), and run the dataset again."
        ) from error


def _format_int96(array: Array) -> list[str | ValueError | None]:
    """Return times by ISO 8601, with nine digits of a second."""
    texts: list[str | None] = array.field("ms").cast(pa.string()).to_pylist()
    thousandths = array.field("ms").cast(pa.int64())
    # Both operations wrap, as the nanoseconds do, so that the difference is right.
    digits = pc.subtract(array.field("ns").cast(pa.int64()), pc.multiply(thousandths, 1_000_000))
    return [
        text and _format_time(text, f"{more:06}")
        for text, more in zip(texts, digits.to_pylist(), strict=True)
    ]


def _format_time(text: str, suffix: str = "") -> str | ValueError:
    """Return Arrow's text of a time by ISO 8601. Arrow's remark on a time out of range is none."""
    if text.startswith("<"):
        return ValueError(text.strip("<>"))
    return text.replace(" ", "T", 1) + suffix


def _read_value(scalar: "pa.Scalar[Any]") -> Any:
    try:
        return scalar.as_py()
    except (KeyError, pa.ArrowInvalid) as error:
        _check_time_zones(error)
        return ValueError(f"no time zone {error}")
    except _REFUSALS as error:
        return error


def _encode_json(value: Any) -> bytes | Exception:
    if isinstance(value, Exception):
        return value
    try:
        # orjson's own text of a time lacks the seconds of its offset, or zeros of its fraction.
        return orjson.dumps(value, default=_convert_value, option=orjson.OPT_PASSTHROUGH_DATETIME)
    except (TypeError, ValueError) as error:
        return error


def _convert_value(value: object) -> object:
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, datetime):
        offset = value.utcoffset()
        return (value.astimezone(UTC) if offset and offset.seconds % 60 else value).isoformat()
    if isinstance(value, date | time):
        return value.isoformat()
    raise TypeError(f"JSON cannot hold a value of type {type(value).__name__}")
