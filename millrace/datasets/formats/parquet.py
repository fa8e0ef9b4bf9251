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
from array import array
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
    check_texts,
    encode_key,
    encode_keys,
    parse_float,
    parse_int,
)
from millrace.datasets.sample import RowBatch, Sample
from millrace.errors import ConfigurationError
from millrace.keys.datasets import DatasetKeys
from millrace.memory import map_anonymous
from millrace.schemas.dataset import ManifestShard

_TEXT = "text"  # column that the loaders of pages read
_TEXT_FIELD = "txt"  # field that becomes this column if no field has its name

_GROUP_ROWS = 1000
_UNPACKED_BYTES = 2 << 20  # of values that are objects of Python
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

    The values of a shard are kept in columns, and `close` compresses them. So `close` takes most of
    the time. The same samples make the same bytes with the same version of pyarrow. The columns
    take about `size` of memory, and several times that of the last 2 MiB of values.

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
        self._columns = _PackedColumns(self._schema.types)
        self._prepared: tuple[list[Value], int] | None = None
        self._batch: list[Sequence[Value]] = []  # values of each column
        self._batch_sizes: Any = np.zeros(0, np.int64)  # of the values up to each sample
        self._shard: memoryview | None = None

    @property
    def size(self) -> int:
        """Upper bound of the shard's bytes if it were closed now.

        The bound is the bytes of the values before compression, and the most that zstd, the headers
        of the pages, the page index and the footer can add. So a shard is never larger than the
        limit. A shard of texts has about a quarter of the limit, since texts are compressed.
        """
        page_rows = _compute_page_rows(self.samples, self._values_size)
        return self._compute_bound(self.samples, self._values_size, page_rows)

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
        samples, size = self.samples + 1, self._values_size + size
        return self._compute_bound(samples, size, _compute_page_rows(samples, size))

    def append(self) -> None:
        """Append the sample that was prepared last."""
        if self._prepared is None:
            raise RuntimeError("No sample was prepared.")
        row, size = self._prepared
        self._prepared = None
        self._columns.append(row, size)
        self.samples += 1
        self._values_size += size

    def prepare_batch(self, batch: RowBatch) -> Sequence[int]:
        """Prepare samples, and return the largest size of the shard up to each of them.

        A shard can be smaller with a further sample, if pages then have more rows.

        Raises:
            BadSampleError: A field of a sample has no type or does not fit its type.
        """
        self._batch = []
        if not batch.columns.keys() <= self._fields.keys():
            raise BadSampleError("a field of a sample has no type")
        keys = encode_keys(batch.keys)
        columns: list[Sequence[Value]] = [keys]
        sizes: Any = np.fromiter(map(len, keys), np.int64, len(keys)) + 5
        for name, check, bound in self._rules:
            values = batch.columns.get(name)
            if values is None:
                columns.append([None] * len(batch))
                sizes += 1
                continue
            lengths: Any = np.fromiter(map(len, values), np.int64, len(values))
            if lengths.max(initial=0) > _MAX_VALUE:
                raise BadSampleError(f"the field {name!r} is too long for a parquet value")
            columns.append(_check_all(check, values))
            sizes += bound(lengths)
        self._batch = columns
        self._batch_sizes = np.cumsum(sizes)
        samples = np.arange(self.samples + 1, self.samples + 1 + len(batch))
        ends = self._values_size + self._batch_sizes
        page_rows = np.clip(samples * _PAGE_BYTES // ends, 1, _PAGE_ROWS)
        bounds: Any = self._compute_bound(samples, ends, page_rows)
        return np.maximum.accumulate(bounds).tolist()

    def append_batch(self, count: int) -> None:
        """Append the first samples of the prepared batch.

        Raises:
            ValueError: So many samples are not prepared.
        """
        if not self._batch or not 0 < count <= len(self._batch[0]):
            raise ValueError("Prepare a batch before its samples are appended.")
        size = int(self._batch_sizes[count - 1])
        self._columns.extend([values[:count] for values in self._batch], size)
        self._batch = []
        self.samples += count
        self._values_size += size

    def close(self) -> memoryview:
        """Compress the samples, and return the file. `reset` makes the view invalid.

        The values of a row group are freed when the row group is written.
        """
        if self._shard is None:
            if not self._columns.has_rows(self.samples):
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
        self._columns = _PackedColumns(self._schema.types)
        self._prepared = None
        self._batch = []
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
                arrays = self._columns.take(rows)
                writer.write_table(
                    pa.Table.from_arrays(arrays, schema=self._schema), row_group_size=rows
                )

    def _compute_bound(self, samples: Any, values_size: Any, page_rows: Any) -> Any:
        """Compute `size` of numbers, or of arrays of them."""
        columns = len(self._schema.names)
        groups = _count_groups(samples)
        # The last row group has up to `groups` more rows than the others.
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


class _PackedColumns:
    """Columns of a shard.

    Args:
        kinds: Types of the columns.
    """

    def __init__(self, kinds: Iterable[pa.DataType]) -> None:
        self._columns = [_PackedColumn(kind) for kind in kinds]
        self._unpacked = [column.unpacked for column in self._columns]
        self._unpacked_size = 0

    def append(self, row: Iterable[Value], size: int) -> None:
        """Append a row. Its values are packed once all of them have 2 MiB.

        Args:
            row: Value of each column.
            size: Bytes of the values.
        """
        for unpacked, value in zip(self._unpacked, row, strict=True):
            unpacked.append(value)
        self._note_unpacked(size)

    def extend(self, columns: Iterable[Sequence[Value]], size: int) -> None:
        """Append rows, as `append` does.

        Args:
            columns: Values of each column.
            size: Bytes of the values.
        """
        for unpacked, values in zip(self._unpacked, columns, strict=True):
            unpacked.extend(values)
        self._note_unpacked(size)

    def _note_unpacked(self, size: int) -> None:
        self._unpacked_size += size
        if self._unpacked_size >= _UNPACKED_BYTES:
            self._unpacked_size = 0
            for column in self._columns:
                column.pack()

    def has_rows(self, rows: int) -> bool:
        """Decide whether every column has this number of values."""
        return all(column.count() == rows for column in self._columns)

    def take(self, rows: int) -> list[Any]:
        """Return the first values of each column as an array, and free their memory."""
        return [column.take(rows) for column in self._columns]


class _PackedColumn:
    """Values of a column in few bytes, since an object of Python takes several times the memory.

    Args:
        kind: Type of the column.

    Attributes:
        unpacked: Values since the last call of `pack`.
    """

    def __init__(self, kind: pa.DataType) -> None:
        self._kind: Any = kind
        self._is_list = isinstance(kind, pa.ListType)
        self._number = _NUMBERS.get(kind)
        self._marks = bytearray()  # a byte for each value: 0 for null, or else 1
        self._sizes = bytearray()  # 4 bytes for each value that is a text or an array
        self._data = bytearray()
        self.unpacked: list[Value] = []

    def count(self) -> int:
        """Return the number of values."""
        return len(self._marks) + len(self.unpacked)

    def pack(self) -> None:
        """Append the unpacked values to the others."""
        present: Any = self.unpacked
        marks = b"\x01" * len(present)
        if None in present:
            marks = bytes([value is not None for value in present])
            present = [value for value in present if value is not None]
        # Until the unpacked values are removed, there are too many, so an error spoils the shard.
        self._marks += marks
        if self._number:
            self._data += array(self._number, present)
        else:
            self._sizes += array("i", [*map(len, present)])
            self._data += b"".join(present)
        self.unpacked.clear()

    def take(self, rows: int) -> Any:
        """Return the first values as an array, and free their memory."""
        self.pack()
        marks, self._marks = _split(self._marks, rows)
        present = np.frombuffer(marks, np.bool_)
        count = int(np.count_nonzero(present))
        bits = None
        if count < rows:
            packed: Any = np.packbits(present, bitorder="little")
            bits = pa.py_buffer(packed)
        make = cast("Any", pa.Array).from_buffers
        if self._number:
            data, self._data = _split(self._data, 8 * count)
            numbers: Any = np.zeros(rows, self._number)
            numbers[present] = np.frombuffer(data, self._number)
            return make(self._kind, rows, [bits, pa.py_buffer(numbers)])
        sizes, self._sizes = _split(self._sizes, 4 * count)
        # A shard has up to 1 GiB or one sample, so 32 bits are enough.
        offsets: Any = np.zeros(rows + 1, np.int32)
        offsets[1:][present] = np.frombuffer(sizes, np.int32)
        np.cumsum(offsets, out=offsets)
        data, self._data = _split(self._data, int(offsets[-1]))
        if not self._is_list:
            return make(self._kind, rows, [bits, pa.py_buffer(offsets), pa.py_buffer(data)])
        item = self._kind.value_type
        offsets //= item.bit_width // 8
        items = make(item, int(offsets[-1]), [None, pa.py_buffer(data)])
        return make(self._kind, rows, [bits, pa.py_buffer(offsets)], children=[items])


def _split(data: bytearray, size: int) -> tuple[bytes | bytearray, bytearray]:
    """Return the first bytes, and the others. They are copied only if there are others."""
    if size == len(data):
        return data, bytearray()
    first = bytes(memoryview(data)[:size])
    del data[:size]
    return first, data


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


def _check_uint16(data: bytes) -> bytes:
    check_array(len(data), 2)
    return data


def _check_uint32(data: bytes) -> bytes:
    check_array(len(data), 4)
    return data


def _keep(data: bytes) -> bytes:
    return data


def _check_all(check: Callable[[bytes], Value], values: Sequence[bytes]) -> Sequence[Value]:
    """Return the values of a column.

    Raises:
        BadSampleError: A value is not of the column's type.
    """
    if check is check_text:
        check_texts(values)
        return values
    return values if check is _keep else [check(value) for value in values]


_ARROW_TYPES: Mapping[FieldType, pa.DataType] = {
    FieldType.BYTES: pa.binary(),
    FieldType.STR: pa.string(),
    FieldType.JSON: pa.string(),
    FieldType.INT: pa.int64(),
    FieldType.FLOAT: pa.float64(),
    FieldType.UINT16_ARRAY: pa.list_(pa.uint16()),
    FieldType.UINT32_ARRAY: pa.list_(pa.uint32()),
}

# Codes of their types in `array` and NumPy.
_NUMBERS: Mapping[pa.DataType, str] = {pa.int64(): "q", pa.float64(): "d"}

_CHECKS: Mapping[FieldType, Callable[[bytes], Value]] = {
    FieldType.BYTES: _keep,
    FieldType.STR: check_text,
    FieldType.JSON: check_text,
    FieldType.INT: parse_int,
    FieldType.FLOAT: parse_float,
    FieldType.UINT16_ARRAY: _check_uint16,
    FieldType.UINT32_ARRAY: _check_uint32,
}


# Each computes the most bytes of a value, or of an array of values, by their lengths.


def _bound_text(size: Any) -> Any:
    return size + 5  # a length of 4 bytes, and at most one byte of levels


def _bound_number(size: Any) -> Any:
    del size
    return 9


def _bound_uint16(size: Any) -> Any:
    return size * 2 + size // 4 + 2  # parquet has no integers of 16 bits; 3 bits of levels


def _bound_uint32(size: Any) -> Any:
    return size + size // 8 + 2


_BOUNDS: Mapping[FieldType, Callable[[Any], Any]] = {
    FieldType.BYTES: _bound_text,
    FieldType.STR: _bound_text,
    FieldType.JSON: _bound_text,
    FieldType.INT: _bound_number,
    FieldType.FLOAT: _bound_number,
    FieldType.UINT16_ARRAY: _bound_uint16,
    FieldType.UINT32_ARRAY: _bound_uint32,
}
