"""Samples from parquet files, which are divided at their row groups. Each row is a sample.

The cursor is the number of a row within its file. A run that continues reads the row group of that
row again, and no other.
"""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from types import MappingProxyType
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from millrace import errors
from millrace.datasets import thrift
from millrace.datasets.sample import Row, RowBatch, iterate_rows
from millrace.datasets.sources.arrow_rows import (
    check_columns,
    find_path,
    make_int96,
    make_rows,
)
from millrace.datasets.sources.files import SourceFiles, drop_etag
from millrace.datasets.sources.ranges import FileRange, iterate_unreadable
from millrace.datasets.sources.reader import SourceFileReader
from millrace.datasets.sources.table import FileTable, iterate_files
from millrace.schemas.dataset import FileRef, RowRange, SourceRange

_CONCURRENCY = 16  # concurrent reads of footers
_BATCH_BYTES = 512 << 10  # of the rows that are decoded at a time, which a processor's cache holds
_MAX_BATCH_ROWS = 1024
_MAX_HELD_BYTES = 128 << 20  # of a row group that is read as a whole, while another is decoded
_MAX_HELD_PART_BYTES = 16 << 20  # of a row group of which few rows are wanted
_FOOTER_BYTES = 64 << 10  # bytes at the end of a file that are read first
_SIGNATURE_BYTES = 28  # of a footer that is signed, since columns are encrypted
_PROBED_ROWS = 16  # rows by which the size of the rows of a group is estimated
_HEADER_BYTES = 64  # bytes of a page's header that are read
# Numbers of fields of a page's header (parquet.thrift), and of the header of a dictionary in it.
_PAGE_SIZE, _DICTIONARY_HEADER, _VALUE_COUNT = 2, 7, 1
_BUFFER_SIZE = 8 << 20  # bytes of a request for a column of a larger row group


def divide_row_groups(
    files: SourceFiles,
    table: FileTable,
    partition_bytes: int,
    *columns: Mapping[str, str] | None,
) -> list[FileRange]:
    """Divide the files of a source at their row groups. Reads the footer of every file.

    Args:
        files: Files of the source.
        table: Table of these files.
        partition_bytes: Approximate bytes of a range. A row group is not divided.
        columns: Column of each field, by the field's extension; None for whole rows. Each file must
            be fit for all that are given.

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
        return _divide_file(files, file, number, partition_bytes, *columns)

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
    *columns: Mapping[str, str] | None,
) -> list[FileRange]:
    parquet = _open_file(files, file, SourceFileReader(files, file))
    for selected in columns:
        check_columns(files.make_url(file.path), parquet.schema_arrow, selected)
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


def read_schema(files: SourceFiles, file: FileRef) -> pa.Schema:
    """Return the schema of a parquet file. Reads its footer.

    Raises:
        ConfigurationError: The file is no parquet file, or is damaged.
    """
    return _open_file(files, file, SourceFileReader(files, file)).schema_arrow


def refuse_int96(files: SourceFiles, described: Iterable[FileRef]) -> None:
    """Check that files have no times of the type INT96, which other readers read as other times.

    Reads the footer of every file.

    Raises:
        ConfigurationError: A file has such times, or is no parquet file.
    """

    def check(file: FileRef) -> None:
        parquet = _open_file(files, file, SourceFileReader(files, file))
        schema = parquet.schema
        for column in (schema.column(index) for index in range(len(schema))):
            if column.physical_type == "INT96":
                raise errors.ConfigurationError(
                    f"{files.make_url(file.path)}: the column {column.path!r} has times of the "
                    "type INT96, which the library `datasets` reads as other times. Use `kind: "
                    "parquet`, or remove `columns` and `filters` from `load_kwargs`."
                )

    with ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="footers") as pool:
        list(pool.map(check, described))


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
            cast("Any", reader),
            buffer_size=buffer_size,
            pre_buffer=False,  # which would read a whole row group at once
            page_checksum_verification=True,
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
        types: Types of fields, by their names. Others have the types of their extensions.
        any_version: Whether a file is also read if it was written again after the plan was made.
    """

    def __init__(
        self,
        files: SourceFiles,
        columns: Mapping[str, str] | None = None,
        *,
        types: Mapping[str, str] = MappingProxyType({}),
        any_version: bool = False,
    ) -> None:
        self._files, self._columns, self._any_version = files, columns, any_version
        self._types = types

    def iterate_rows(self, source_range: SourceRange, cursor: int) -> Iterator[Row]:
        """Yield the rows of a range, from a row of the file on."""
        return iterate_rows(self.iterate_batches(source_range, cursor))

    def iterate_batches(self, source_range: SourceRange, cursor: int) -> Iterator[RowBatch | Row]:
        """Yield the same rows in batches, where all of them make samples."""
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
                yield from make_rows(
                    batch, self._columns, file_index=source_range.file_index,
                    first=position, cursor=position, where=file.path,
                    types=self._types,
                )  # fmt: skip
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

        def fetch(group: int, first: int) -> list[tuple[int, bytes]]:
            described = parquet.metadata.row_group(group)
            chunks = _select_chunks(described, names)
            ranges = [(begin, begin + chunk.total_compressed_size) for begin, chunk in chunks]
            is_part = 8 * (end - first) < described.num_rows
            most = _MAX_HELD_PART_BYTES if is_part else _MAX_HELD_BYTES
            whole = sum(stop - begin for begin, stop in ranges) <= most
            return reader.fetch(ranges) if whole else []

        with ThreadPoolExecutor(1, thread_name_prefix="row-groups") as pool:
            pending = pool.submit(fetch, *groups[0]) if groups else None
            for index, (group, first) in enumerate(groups):
                assert pending is not None
                reader.hold(pending.result())
                following = groups[index + 1] if index + 1 < len(groups) else None
                pending = pool.submit(fetch, *following) if following else None
                at = first
                for batch in self._decode_group(reader, parquet, group, names):
                    lower, upper = max(start - at, 0), min(end - at, batch.num_rows)
                    at += batch.num_rows
                    if lower < upper:
                        yield batch.slice(lower, upper - lower)
                if at - first != parquet.metadata.row_group(group).num_rows:
                    raise OSError(f"its row group {group} has another number of rows than it says")

    def _decode_group(
        self, reader: SourceFileReader, parquet: pq.ParquetFile, group: int, names: list[str] | None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a row group in batches of about 512 KiB."""

        def decode(
            rows: int, file: pq.ParquetFile = parquet, columns: list[str] | None = names
        ) -> Iterator[pa.RecordBatch]:
            return cast("Any", file).iter_batches(
                rows, row_groups=[group], columns=columns, use_threads=False
            )

        described = parquet.metadata.row_group(group)
        size = _estimate_size(reader, _select_chunks(described, names))
        row_bytes = size // max(1, described.num_rows)
        if size < 0:
            # The first rows show the size. For this, their pages are decoded twice.
            probed = next(decode(_PROBED_ROWS), None)
            row_bytes = probed.nbytes // max(1, probed.num_rows) if probed else 0
        rows = min(_MAX_BATCH_ROWS, max(1, _BATCH_BYTES // max(1, row_bytes)))
        if times := _list_int96(parquet, names):
            coarse = pq.ParquetFile(
                cast("Any", reader),
                metadata=parquet.metadata,
                buffer_size=_BUFFER_SIZE,
                pre_buffer=False,
                page_checksum_verification=True,
                coerce_int96_timestamp_unit="ms",
            )
            return _join_times(decode(rows), decode(_MAX_BATCH_ROWS, coarse, times), times)
        return decode(rows)

    def _select_names(self, schema: pa.Schema) -> list[str] | None:
        """Return the paths of the columns to read; None for all."""
        if self._columns is None:
            return None
        return sorted({".".join(find_path(schema, name)) for name in self._columns.values()})


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


def _select_chunks(
    group: pq.RowGroupMetaData, names: list[str] | None
) -> list[tuple[int, pq.ColumnChunkMetaData]]:
    """Return the chunks of a row group's columns, each with its offset in the file."""
    chunks: list[tuple[int, pq.ColumnChunkMetaData]] = []
    for index in range(group.num_columns):
        chunk = group.column(index)
        path = chunk.path_in_schema
        if names is None or any(path == name or path.startswith(f"{name}.") for name in names):
            offsets = (chunk.dictionary_page_offset, chunk.data_page_offset)
            chunks.append((min(one for one in offsets if one is not None), chunk))
    return chunks


def _list_int96(parquet: pq.ParquetFile, names: list[str] | None) -> list[str]:
    """Return the columns of the type INT96 to read. Those within other columns are refused."""
    columns = (parquet.schema.column(index) for index in range(len(parquet.schema)))
    paths = {one.path for one in columns if one.physical_type == "INT96"}
    return sorted(paths.intersection(parquet.schema_arrow.names if names is None else names))


def _join_times(
    batches: Iterator[pa.RecordBatch], coarse: Iterator[pa.RecordBatch], names: list[str]
) -> Iterator[pa.RecordBatch]:
    """Yield batches whose columns of INT96 hold their times in both units.

    Args:
        batches: Rows of a row group, with these times in nanoseconds.
        coarse: The same times of the row group in milliseconds, in batches of other sizes.
        names: Names of these columns.
    """
    held: Any = pa.schema([(name, pa.timestamp("ms")) for name in names]).empty_table()
    for batch in batches:
        while held.num_rows < batch.num_rows and (more := next(coarse, None)) is not None:
            held = pa.concat_tables([held, pa.Table.from_batches([more])])
        joined: Any = batch
        for name in names:
            index = joined.schema.get_field_index(name)
            times = held[name].slice(0, batch.num_rows).combine_chunks()
            joined = joined.set_column(index, name, make_int96(times, joined.column(index)))
        held = held.slice(batch.num_rows)
        yield joined


def _estimate_size(
    reader: SourceFileReader, chunks: list[tuple[int, pq.ColumnChunkMetaData]]
) -> int:
    """Return the approximate bytes of the decoded values of chunks; -1 if they are not known.

    A dictionary has a repeated value once. Its header has the number of the different values.
    """
    total = 0
    for begin, chunk in chunks:
        if any("DELTA" in encoding for encoding in chunk.encodings):
            return -1  # a value may be stored as its difference to the one before
        size = chunk.total_uncompressed_size
        reader.seek(begin)
        with suppress(thrift.ThriftError):  # a header of a page of values may be longer
            header, _ = thrift.decode_struct(reader.read(_HEADER_BYTES))
            if _DICTIONARY_HEADER in header:
                values = header[_DICTIONARY_HEADER].content[_VALUE_COUNT].content
                size = max(size, chunk.num_values * header[_PAGE_SIZE].content // max(1, values))
        total += size
    return total
