"""The formats ``parquet`` and ``pages``: a shard is a parquet file, and a sample is a row.

The column ``__key__`` is followed by a column for each field, in the order of the fields' names.
Texts and JSON are strings, arrays are lists. A field that a sample does not have is null.

Readers that take a few rows read few bytes. A row group has up to about 1,000 rows, and all row
groups of a file have equally many rows, except for a few more in the last one. Some readers compute
the row group of a row that way. A page has up to 100 rows and about 1 MiB. The page index has the
offset of each page. Texts have no statistics, because these would make up most of the footer.
Pages have checksums.

``pages`` has two index objects for each split, as the loaders of Templar read them:

- ``_shard_sizes.json`` has the shards of the split and their numbers of rows. Paths are keys below
  the URL of the store, so the index also fits a copy in another bucket. Readers that open paths of
  S3 put the name of the bucket in front.
- ``_metadata.yaml`` names the split and the pattern of its files.

Each split has its own index objects, because those loaders draw pages from all that an index names.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from millrace.datasets.field_names import KEY
from millrace.datasets.formats.base import (
    BadSampleError,
    Fields,
    FieldType,
    group_shards,
    read_field,
)
from millrace.datasets.formats.values import (
    check_array,
    check_names,
    check_text,
    encode_key,
    parse_float,
    parse_int,
)
from millrace.datasets.sample import Sample
from millrace.errors import ConfigurationError
from millrace.keys.datasets import DatasetKeys
from millrace.memory import map_anonymous
from millrace.schemas.dataset import ManifestShard

_TEXT = "text"  # column that the loaders of pages read
_TEXT_FIELD = "txt"  # field that becomes this column if no field has its name

_GROUP_ROWS = 1000
_PAGE_ROWS = 100
_PAGE_BYTES = 1 << 20
_COMPRESSION_LEVEL = 3

_MAX_VALUE = (1 << 31) - (1 << 20)  # sizes of pages are signed integers of 32 bits

# Bounds of what a file has besides its values, in bytes.
_FILE_OVERHEAD = 256  # signatures, version of the writer
_COLUMN_OVERHEAD = 192  # of the schema; the name of the column also counts
_CHUNK_OVERHEAD = 320  # of one column in one row group; the name of the column also counts
_PAGE_OVERHEAD = 224  # header, levels, frame of zstd, entries of the page index

Value = bytes | int | float | None


class ParquetFormat:
    """The format ``parquet``."""

    name = "parquet"
    extension = "parquet"
    writer: Mapping[str, str] = MappingProxyType({"parquet": "1", "pyarrow": pa.__version__})
    has_types = True

    def make_encoder(self, fields: Fields, capacity: int) -> "ParquetEncoder":
        """Return an encoder.

        Raises:
            ConfigurationError: A field has a name that no column can have.
        """
        return ParquetEncoder(fields, {name: name for name in fields}, capacity)

    def make_indexes(
        self, keys: DatasetKeys, fields: Fields, shards: Sequence[ManifestShard]
    ) -> Mapping[str, bytes]:
        """Return no objects: a parquet file has its own index."""
        del keys, fields, shards
        return {}


class PagesFormat:
    """The format ``pages``: parquet files with a column ``text``, and an index of their rows."""

    name = "pages"
    extension = "parquet"
    writer: Mapping[str, str] = MappingProxyType({"pages": "1", "pyarrow": pa.__version__})
    has_types = True

    def make_encoder(self, fields: Fields, capacity: int) -> "ParquetEncoder":
        """Return an encoder. A field ``txt`` becomes the column ``text``, unless there is one.

        Raises:
            ConfigurationError: There is no field for the column ``text``, or a field has a name
                that no column can have.
        """
        columns = name_page_columns(fields)
        if not any(
            column == _TEXT and fields[name] is FieldType.STR for name, column in columns.items()
        ):
            raise ConfigurationError(
                "The format pages needs a field `text` or `txt` of the type `str`. Name its column "
                'in `columns` of the source, such as `{"text": "content"}`, and give it this type.'
            )
        return ParquetEncoder(fields, columns, capacity)

    def make_indexes(
        self, keys: DatasetKeys, fields: Fields, shards: Sequence[ManifestShard]
    ) -> Mapping[str, bytes]:
        """Return ``_shard_sizes.json`` and ``_metadata.yaml`` of each split, by their keys."""
        del fields
        indexes: dict[str, bytes] = {}
        for prefix, named in group_shards(keys, self.name, shards):
            own = [shard for _, shard in named]
            split = own[0].split
            sizes = {
                "split": split,
                "shards": [{"path": shard.key, "num_rows": shard.samples} for shard in own],
                "total_rows": sum(shard.samples for shard in own),
            }
            indexes[f"{prefix}_shard_sizes.json"] = orjson.dumps(
                {split: sizes}, option=orjson.OPT_INDENT_2
            )
            indexes[f"{prefix}_metadata.yaml"] = _make_metadata(split, f"{prefix}*.parquet")
        return indexes


def name_page_columns(fields: Iterable[str]) -> dict[str, str]:
    """Return the column of each field in the format ``pages``."""
    columns = {name: name for name in fields}
    if _TEXT not in columns and _TEXT_FIELD in columns:
        columns[_TEXT_FIELD] = _TEXT
    return columns


def _make_metadata(split: str, pattern: str) -> bytes:
    lines = (
        "configs:",
        f"- config_name: {split}",
        "  data_files:",
        f"  - split: {split}",
        f"    path: {json.dumps(pattern)}",
        "",
    )
    return "\n".join(lines).encode()


class ParquetEncoder:
    """Encoder of parquet files in a buffer.

    The values of a shard are kept as they are, and `close` compresses them. So `close` takes most
    of the time. The same samples make the same bytes with the same version of pyarrow.

    Args:
        fields: Types of the fields.
        columns: Name of the column of each field.
        capacity: Initial bytes of the buffer.

    Raises:
        ConfigurationError: A field has a name that no column can have.
    """

    sample_offsets: Sequence[tuple[int, int]] = ()  # a shard has its own table

    def __init__(self, fields: Fields, columns: Mapping[str, str], capacity: int) -> None:
        fields = dict(sorted(fields.items()))
        self._fields = fields
        self._rules = [(name, _CHECKS[kind], _BOUNDS[kind]) for name, kind in fields.items()]
        self._schema = _make_schema(fields, columns)
        self._names_size = sum(len(name.encode()) for name in self._schema.names)
        # Bounds of numbers are short. Bounds of texts would be whole texts.
        numbers = {FieldType.INT, FieldType.FLOAT}
        self._statistics = [columns[name] for name, kind in fields.items() if kind in numbers]
        self._capacity = capacity
        self._buffer = map_anonymous(capacity)
        self.samples = 0
        self._values_size = 0
        self._values: list[list[Value]] = [[] for _ in self._schema.names]
        self._prepared: tuple[list[Value], int] | None = None
        self._shard: memoryview | None = None

    @property
    def size(self) -> int:
        """Upper bound of the shard's bytes if it were closed now.

        The bound is the bytes of the values before compression, and the most that zstd, the headers
        of the pages, the page index and the footer can add. So a shard is never larger than the
        limit. A shard of texts has about a quarter of the limit, since texts are compressed.
        """
        return self._compute_bound(self.samples, self._values_size)

    def prepare(self, sample: Sample) -> int:
        """Prepare a sample, and return the size that the shard would have with the sample.

        Raises:
            BadSampleError: A field has no type or does not fit its type.
        """
        check_names(sample, self._fields)
        key = encode_key(sample)
        row: list[Value] = [key]
        size = len(key) + 5
        for name, check, bound in self._rules:
            data = sample.fields.get(name)
            if data is None:
                row.append(None)
                size += 1
                continue
            if len(data) > _MAX_VALUE:
                raise BadSampleError(
                    f"the field {name!r} has {len(data)} bytes, and a parquet value has up to "
                    f"{_MAX_VALUE}"
                )
            raw = read_field(data)
            try:
                row.append(check(raw))
            except BadSampleError as error:
                raise BadSampleError(f"the field {name!r} {error}") from error
            size += bound(len(raw))
        self._prepared = row, size
        return self._compute_bound(self.samples + 1, self._values_size + size)

    def append(self) -> None:
        """Append the sample that was prepared last."""
        if self._prepared is None:
            raise RuntimeError("No sample was prepared.")
        row, size = self._prepared
        self._prepared = None
        for values, value in zip(self._values, row, strict=True):
            values.append(value)
        self.samples += 1
        self._values_size += size

    def close(self) -> memoryview:
        """Compress the samples, and return the file. `reset` makes the view invalid.

        The values of a row group are freed when the row group is written.
        """
        if self._shard is None:
            if len(self._values[0]) != self.samples:
                raise RuntimeError("The shard was not finished, since an earlier call failed.")
            if self.size > len(self._buffer):
                self._buffer = map_anonymous(self.size)
            with pa.FixedSizeBufferWriter(pa.py_buffer(self._buffer)) as sink:
                self._write(sink)
                self._shard = memoryview(self._buffer)[: sink.tell()]
        return self._shard

    def reset(self) -> None:
        """Begin the next shard in the same buffer, and free the memory of a large sample."""
        self._shard = None
        if len(self._buffer) > self._capacity:
            self._buffer = map_anonymous(self._capacity)
        self._values = [[] for _ in self._schema.names]
        self._prepared = None
        self.samples = 0
        self._values_size = 0

    def _write(self, sink: pa.NativeFile) -> None:
        with pq.ParquetWriter(
            sink,
            self._schema,
            compression="zstd",
            compression_level=_COMPRESSION_LEVEL,
            use_dictionary=False,
            write_statistics=cast("Any", self._statistics or False),
            write_page_index=True,
            write_page_checksum=True,
            store_schema=False,
            max_rows_per_page=_compute_page_rows(self.samples, self._values_size),
            data_page_size=_MAX_VALUE,  # pages end at a number of rows
        ) as writer:
            for rows in _divide(self.samples):
                writer.write_table(self._take(rows), row_group_size=rows)

    def _take(self, rows: int) -> pa.Table:
        """Return the first rows as a table, and free their values."""
        arrays: list[Any] = []
        for values, field in zip(self._values, cast("Any", self._schema), strict=True):
            arrays.append(_make_array(values[:rows], field.type))
            del values[:rows]
        return pa.Table.from_arrays(arrays, schema=self._schema)

    def _compute_bound(self, samples: int, values_size: int) -> int:
        columns = len(self._schema.names)
        groups = _count_groups(samples)
        # The last row group has up to `groups` more rows than the others.
        page_rows = _compute_page_rows(samples, values_size)
        pages = samples // page_rows + 2 * groups + groups // page_rows
        return (
            _FILE_OVERHEAD
            + columns * _COLUMN_OVERHEAD
            + groups * columns * _CHUNK_OVERHEAD
            + (groups + 1) * self._names_size
            + pages * columns * _PAGE_OVERHEAD
            + values_size
            + values_size // 256  # zstd's own bound of what cannot be compressed
        )


def _make_schema(fields: Fields, columns: Mapping[str, str]) -> pa.Schema:
    for name, column in columns.items():
        if column == KEY or not column:
            raise ConfigurationError(
                f"No column can have the name of the field {name!r}: give it another name."
            )
    return pa.schema(
        [
            pa.field(KEY, pa.string(), nullable=False),
            *(pa.field(columns[name], _ARROW_TYPES[kind]) for name, kind in fields.items()),
        ]
    )


def _count_groups(samples: int) -> int:
    return -(-samples // _GROUP_ROWS)


def _divide(samples: int) -> list[int]:
    """Return the numbers of rows of the row groups.

    A reader that knows the numbers of rows and of row groups of a file, and no more, divides one by
    the other to find the row group of a row.
    """
    groups = _count_groups(samples)
    if not groups:
        return []
    rows = samples // groups
    return [*[rows] * (groups - 1), samples - rows * (groups - 1)]


def _compute_page_rows(samples: int, values_size: int) -> int:
    if not values_size:
        return _PAGE_ROWS
    return max(1, min(_PAGE_ROWS, samples * _PAGE_BYTES // values_size))


def _make_array(values: list[Value], kind: pa.DataType) -> Any:
    if pa.types.is_string(kind):
        return pa.array(values, pa.binary()).cast(pa.string())
    if not isinstance(kind, pa.ListType):
        return pa.array(values, kind)
    rows = cast("list[bytes | None]", values)
    dtype = np.dtype(cast("Any", kind).value_type.to_pandas_dtype()).newbyteorder("<")
    sizes = [len(row) // dtype.itemsize if row is not None else 0 for row in rows]
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    items = np.frombuffer(b"".join(row for row in rows if row is not None), dtype)
    return cast("Any", pa.ListArray).from_arrays(
        pa.array(offsets, pa.int32()),
        pa.array(items),
        type=kind,
        mask=pa.array([row is None for row in rows], pa.bool_()),
    )


def _check_uint16(data: bytes) -> bytes:
    check_array(len(data), 2)
    return data


def _check_uint32(data: bytes) -> bytes:
    check_array(len(data), 4)
    return data


def _keep(data: bytes) -> bytes:
    return data


_ARROW_TYPES: Mapping[FieldType, pa.DataType] = {
    FieldType.BYTES: pa.binary(),
    FieldType.STR: pa.string(),
    FieldType.JSON: pa.string(),
    FieldType.INT: pa.int64(),
    FieldType.FLOAT: pa.float64(),
    FieldType.UINT16_ARRAY: pa.list_(pa.uint16()),
    FieldType.UINT32_ARRAY: pa.list_(pa.uint32()),
}

_CHECKS: Mapping[FieldType, Callable[[bytes], Value]] = {
    FieldType.BYTES: _keep,
    FieldType.STR: check_text,
    FieldType.JSON: check_text,
    FieldType.INT: parse_int,
    FieldType.FLOAT: parse_float,
    FieldType.UINT16_ARRAY: _check_uint16,
    FieldType.UINT32_ARRAY: _check_uint32,
}


def _bound_text(size: int) -> int:
    return size + 5  # a length of 4 bytes, and at most one byte of levels


def _bound_number(size: int) -> int:
    del size
    return 9


def _bound_uint16(size: int) -> int:
    return size * 2 + size // 4 + 2  # parquet has no integers of 16 bits; 3 bits of levels


def _bound_uint32(size: int) -> int:
    return size + size // 8 + 2


_BOUNDS: Mapping[FieldType, Callable[[int], int]] = {
    FieldType.BYTES: _bound_text,
    FieldType.STR: _bound_text,
    FieldType.JSON: _bound_text,
    FieldType.INT: _bound_number,
    FieldType.FLOAT: _bound_number,
    FieldType.UINT16_ARRAY: _bound_uint16,
    FieldType.UINT32_ARRAY: _bound_uint32,
}
