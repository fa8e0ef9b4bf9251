"""Samples of parquet files, as `millrace.datasets.formats.parquet` writes them.

A row group is decoded page by page. A reader that begins within a row group decodes the row group
from its beginning.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from millrace.datasets.field_names import KEY
from millrace.datasets.formats import Fields, FieldType
from millrace.datasets.formats.parquet import name_page_columns
from millrace.datasets.loader.fetch import OpenShard
from millrace.datasets.loader.readers.base import (
    DecodeRows,
    LoadedSample,
    decode_json,
    raise_damage,
)

_TAIL = 64 << 10  # bytes at the end of a file with the footer of most files
_BATCH_ROWS = 256
_BUFFER = 256 << 10  # bytes of a column that are read at once

Column = Any  # `pa.Array`; its stubs do not type the elements


def _list_values(column: Column) -> list[Any]:
    return column.to_pylist()


def _parse_values(column: Column) -> list[Any]:
    texts = column.cast(pa.binary()).to_pylist()
    return [None if text is None else decode_json(text) for text in texts]


def _slice_arrays(column: Column) -> list[Any]:
    """Return the lists of a column as arrays, which are parts of one copy."""
    offsets: list[int] = column.offsets.to_pylist()
    items = np.array(column.values.slice(offsets[0], offsets[-1] - offsets[0]))
    first = offsets[0]
    return [items[at - first : end - first] for at, end in pairwise(offsets)]


_CONVERTERS: Mapping[FieldType, Callable[[Column], list[Any]]] = {
    **dict.fromkeys(FieldType, _list_values),
    FieldType.JSON: _parse_values,
    FieldType.UINT16_ARRAY: _slice_arrays,
    FieldType.UINT32_ARRAY: _slice_arrays,
}


class _SeekableShard:
    """An open shard as a file, for pyarrow."""

    closed = False

    def __init__(self, shard: OpenShard) -> None:
        self._shard, self._at = shard, 0
        self._tail_start = max(0, shard.size - _TAIL)
        self._tail = shard.read_once(self._tail_start, shard.size)

    def read(self, size: int = -1) -> memoryview:
        start = self._at
        end = self._shard.size if size < 0 else min(start + size, self._shard.size)
        self._at = end
        if start >= self._tail_start:
            return self._tail[start - self._tail_start : end - self._tail_start]
        return self._shard.read(start, end)

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._at, self._shard.size)[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True


class ParquetSampleReader:
    """Reader of the samples of a parquet file.

    Args:
        shard: Bytes of the shard.
        fields: Types of the fields.
        samples: Number of samples of the shard.

    Raises:
        CorruptError: The shard is no parquet file, has another number of rows, or lacks a column.
    """

    def __init__(self, shard: OpenShard, fields: Fields, samples: int) -> None:
        self._shard = shard
        try:
            self._file = pq.ParquetFile(
                cast("Any", pa).PythonFile(_SeekableShard(shard), mode="r"), buffer_size=_BUFFER
            )
        except (pa.ArrowException, OSError) as error:
            raise_damage(shard, f"it is no parquet file ({error})")
        metadata = self._file.metadata
        if metadata.num_rows != samples:
            raise_damage(shard, f"it has {metadata.num_rows} rows, not {samples}")
        names = set(self._file.schema_arrow.names)
        columns = {name: name for name in fields}
        if not names.issuperset(columns):
            columns = name_page_columns(fields)
        if lacking := sorted(set(columns.values()) - names):
            raise_damage(shard, f"it has no column {lacking[0]!r}")
        self._names = [KEY, *columns]
        self._columns = [KEY, *columns.values()]
        self._converters = [_list_values, *(_CONVERTERS[fields[name]] for name in columns)]
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        self._starts = np.cumsum([0, *(group.num_rows for group in groups)])
        self._offsets = [
            min(group.column(n).data_page_offset for n in range(group.num_columns))
            for group in groups
        ]
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._batch: pa.RecordBatch | None = None
        self._batch_start = 0

    def load(self, start: int, end: int) -> DecodeRows:
        """Decompress the pages of the samples."""
        batches: list[pa.RecordBatch] = []
        at = start
        while at < end:
            batch, first = self._find_batch(at)
            stop = min(end, first + batch.num_rows)
            batches.append(batch.slice(at - first, stop - at))
            at = stop
        return partial(self._decode, batches)

    def close(self) -> None:
        """Close the shard."""
        self._batches, self._batch = iter(()), None
        self._shard.close()

    def _find_batch(self, row: int) -> tuple[pa.RecordBatch, int]:
        """Return the decoded batch of a row, and the number of its first row."""
        group = int(np.searchsorted(self._starts, row, "right")) - 1
        first = int(self._starts[group])
        if self._batch is None or not max(first, self._batch_start) <= row:
            self._batch = None
        elif self._batch_start + self._batch.num_rows <= first:
            self._batch = None  # of an earlier row group
        try:
            if self._batch is None:
                self._shard.release(self._offsets[group])
                self._batch_start = first
                self._batches = cast("Any", self._file).iter_batches(
                    _BATCH_ROWS, row_groups=[group], columns=self._columns, use_threads=False
                )
                self._batch = next(self._batches)
            while self._batch_start + self._batch.num_rows <= row:
                self._batch_start += self._batch.num_rows
                self._batch = next(self._batches)
        except (pa.ArrowException, OSError, StopIteration) as error:
            raise_damage(self._shard, f"its row group {group} cannot be decoded ({error})")
        return self._batch, self._batch_start

    def _decode(self, batches: Sequence[pa.RecordBatch]) -> list[LoadedSample]:
        samples: list[LoadedSample] = []
        names = self._names
        for batch in batches:
            columns: list[Column] = [cast("Any", batch).column(name) for name in self._columns]
            try:
                values = [
                    convert(column)
                    for convert, column in zip(self._converters, columns, strict=True)
                ]
            except ValueError as error:
                raise_damage(self._shard, f"a field has a bad value ({error})")
            rows = [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]
            for name, column in zip(names, columns, strict=True):
                if column.null_count:  # samples without the field, unlike those with a JSON null
                    for number in np.flatnonzero(column.is_null()).tolist():
                        del rows[number][name]
            samples += rows
        return samples
