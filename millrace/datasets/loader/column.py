"""Read rows of one column of a parquet file: only the pages that hold them.

A file's offset indexes have the offset and the first row of each page. pyarrow writes them and does
not read them. So the wanted pages are fetched, and pyarrow decodes a file of one column that has
these pages alone. Where there is no offset index, and where a column has several parts, as a struct
has, the whole row group of the column is fetched instead.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from millrace import errors
from millrace.datasets import thrift
from millrace.datasets.loader.mirrored_files import RangeCheck, read_checked
from millrace.datasets.sources.files import SourceFiles
from millrace.datasets.sources.reader import SourceFileReader
from millrace.datasets.thrift import Value
from millrace.schemas.dataset import FileRef

Array = Any  # `pa.ChunkedArray`; its stubs do not type the elements
Fields = thrift.Fields
Numbers = npt.NDArray[np.int64]

_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
_TAIL_BYTES = 64 << 10  # bytes at the end of a file that are read first
_MAX_RAW_BYTES = 1 << 30  # decompressed bytes of one read
_PART_BYTES = 2000  # memory of a part of a column without its pages

# Fields of the structs of parquet, by their numbers.
_VERSION, _SCHEMA, _FILE_ROWS, _GROUPS = 1, 2, 3, 4  # of a file
_NAME, _CHILDREN = 4, 5  # of an element of the schema
_CHUNKS, _GROUP_BYTES, _GROUP_ROWS = 1, 2, 3  # of a row group
_FILE_OFFSET, _METADATA, _INDEX_OFFSET, _INDEX_SIZE = 2, 3, 4, 5  # of a column chunk
_TYPE, _ENCODINGS, _PATH, _CODEC, _VALUES, _RAW_BYTES, _BYTES = range(1, 8)  # of its metadata
_KEPT = (_TYPE, _ENCODINGS, _PATH, _CODEC)
_DATA_OFFSET, _DICTIONARY_OFFSET = 9, 11
_LOCATIONS = 1  # of an offset index
_OFFSET, _SIZE, _FIRST_ROW = 1, 2, 3  # of the location of a page
_PAGE_RAW_BYTES, _PAGE_BYTES, _PAGE_V1, _PAGE_V2 = 2, 3, 5, 8  # of its header
_PAGE_VALUES = 1  # of the part of the header for data pages

_PARSE_ERRORS = (ValueError, LookupError, TypeError, AttributeError, OverflowError)
_DAMAGE: tuple[type[Exception], ...] = (*_PARSE_ERRORS, OSError, pa.ArrowException)


@dataclass(frozen=True, slots=True)
class ColumnPart:
    """One stored part of a column in a row group. Most columns have one part.

    Attributes:
        metadata: Its metadata, without statistics. Without pages, it has the size of its values.
        bounds: Offsets in the file: of its dictionary, of each data page, and of the end. Without
            an offset index, all data pages together are as one.
        first_rows: First row of each data page in the row group; None without an offset index.
        checksums: CRC-32 of the bytes between each bound and the next; None if they are not known.
    """

    metadata: Fields
    bounds: Numbers
    first_rows: Numbers | None
    checksums: Numbers | None = None

    @property
    def memory(self) -> int:
        """Bytes of its values before compression, as far as they are known."""
        stated = self.metadata.get(_RAW_BYTES)
        known = stated.content if stated and stated.kind == thrift.I64 else 0
        return max(known, int(self.bounds[-1] - self.bounds[0]))


@dataclass(frozen=True, slots=True)
class ColumnLayout:
    """Places of the rows of a column in a file.

    Attributes:
        schema: Elements of the schema: a root, the column, and its parts.
        groups: Parts of the column in each row group.
        starts: Number of the first row of each row group, and the number of all rows.
        size: Approximate memory of the layout in bytes.
    """

    schema: list[Fields]
    groups: list[list[ColumnPart]]
    starts: Numbers
    size: int

    @property
    def rows(self) -> int:
        """Number of rows of the file."""
        return int(self.starts[-1])


class ReadRows(NamedTuple):
    """Rows that were read.

    Attributes:
        values: Values of the column.
        fetched: Number of bytes that were fetched.
        is_exact: Whether no row group was fetched whole.
    """

    values: Array
    fetched: int
    is_exact: bool


def read_layout(files: SourceFiles, file: FileRef, column: str) -> ColumnLayout:
    """Return the layout of a column. Reads the end of the file, in one request for most files.

    Args:
        files: Files that the file is one of.
        file: The file.
        column: Name of a column.

    Raises:
        NotFoundError: The file has no such column.
        CorruptError: The file is no parquet file, or is damaged.
        ConfigurationError: The file is encrypted.
        ChangedError: The file has changed or is gone.
    """
    url = files.make_url(file.path)
    reader = SourceFileReader(files, file)
    tail_start = max(0, file.size - _TAIL_BYTES)
    try:
        tail = reader.fetch([(tail_start, file.size)])
        reader.hold(tail)
        end = file.size - 8
        reader.seek(max(0, end))
        length, magic = int.from_bytes(reader.read(4), "little"), reader.read(4)
        if magic == _ENCRYPTED:
            raise errors.ConfigurationError(f"{url} is encrypted. Decrypt the file.")
        if magic != _MAGIC or length > end:
            raise thrift.ThriftError("it does not end as a parquet file does")
        reader.seek(end - length)
        footer, _ = thrift.decode_struct(reader.read(length))
        schema = _select_schema(footer[_SCHEMA].content, column)
        if schema is None:
            names = ", ".join(_list_columns(footer[_SCHEMA].content))
            raise errors.NotFoundError(f"{url} has no column {column!r}. Its columns are {names}.")
        return _make_layout(reader, tail, footer, schema)
    except (*_PARSE_ERRORS, OSError) as error:
        raise _make_damage_error(url, error) from error


def compute_checksums(files: SourceFiles, file: FileRef, layout: ColumnLayout) -> ColumnLayout:
    """Return a layout with the checksums of its pages. Reads the column once, block by block.

    Args:
        files: Files that the file is one of.
        file: The file.
        layout: Layout of the column in the file.

    Raises:
        ChangedError: The file has changed or is gone.
    """
    groups = [
        [replace(part, checksums=_compute_checksums(files, file, part)) for part in parts]
        for parts in layout.groups
    ]
    return ColumnLayout(layout.schema, groups, layout.starts, estimate_layout_size(groups))


def _compute_checksums(files: SourceFiles, file: FileRef, part: ColumnPart) -> Numbers:
    position, *ends = part.bounds.tolist()
    checksums, number = [0] * len(ends), 0
    for block in files.iterate_blocks(file, position, ends[-1]):
        view = memoryview(block)
        while view:
            while ends[number] == position:  # also where there is no dictionary
                number += 1
            data = view[: ends[number] - position]
            checksums[number] = crc32(data, checksums[number])
            position, view = position + len(data), view[len(data) :]
    return np.array(checksums, np.int64)


def measure_groups(layout: ColumnLayout, start: int, end: int) -> int:
    """Return about the memory of the largest row group that is fetched whole for some rows.

    Args:
        layout: Layout of the column in the file.
        start: Number of the first row.
        end: Number of the row after the last one.

    Raises:
        ValueError: There are no such rows.
    """
    groups = (layout.groups[number] for number in _find_groups(layout, start, end))
    return max((_measure_whole(parts) for parts in groups), default=0)


def _measure_whole(parts: Sequence[ColumnPart]) -> int:
    """Return about the memory of a row group; 0 if single pages of it are read."""
    if len(parts) == 1 and parts[0].first_rows is not None:
        return 0
    return sum(part.memory for part in parts)


def _find_groups(layout: ColumnLayout, start: int, end: int) -> range:
    """Return the numbers of the row groups that have some rows.

    Raises:
        ValueError: There are no such rows.
    """
    if not 0 <= start < end <= layout.rows:
        raise ValueError(f"there are no rows from {start} to {end} in {layout.rows} rows")
    first = int(np.searchsorted(layout.starts, start, "right")) - 1
    return range(first, int(np.searchsorted(layout.starts, end, "left")))


def read_rows(
    files: SourceFiles, file: FileRef, layout: ColumnLayout, start: int, end: int
) -> ReadRows:
    """Return the values of a column from one row of a file to another.

    Args:
        files: Files that the file is one of.
        file: The file.
        layout: Layout of the column in the file.
        start: Number of the first row.
        end: Number of the row after the last one.

    Raises:
        ConfigurationError: A row group that has to be fetched whole is too large.
        CorruptError: The pages are damaged, or are not those that the layout describes.
        ChangedError: The file has changed or is gone.
    """
    found: list[Any] = []
    fetched, is_exact = 0, True
    for number in _find_groups(layout, start, end):
        group_start, group_end = int(layout.starts[number]), int(layout.starts[number + 1])
        lower, upper = max(start, group_start), min(end, group_end)
        if lower == upper:  # the row group has no rows
            continue
        parts = layout.groups[number]
        if _measure_whole(parts) > _MAX_RAW_BYTES:
            raise _make_size_error(files.make_url(file.path), parts)
        try:
            wanted = _select_pages(
                parts, group_end - group_start, lower - group_start, upper - group_start
            )
            decode = partial(_fetch_column, schema=layout.schema, wanted=wanted)
            values = read_checked(files, file, decode, wanted.make_check(), _DAMAGE)
        except MemoryError:  # Arrow's is an `ArrowException`, too
            raise
        except _DAMAGE as error:
            where = files.make_url(file.path)
            reason = ValueError(f"rows {start} to {end - 1}: {error}")
            raise _make_damage_error(where, reason) from error
        chunks = values.slice(wanted.skipped, upper - lower).chunks
        if upper - lower < wanted.rows:  # a slice would keep the memory of all rows
            chunks = [cast("Any", pa).concat_arrays([chunk]) for chunk in chunks]
        found += chunks
        fetched += sum(end - start for start, end in wanted.ranges)
        is_exact &= wanted.is_exact
    return ReadRows(cast("Any", pa).chunked_array(found), fetched, is_exact)


class _Wanted(NamedTuple):
    """Parts of a column to fetch, and the rows that they hold.

    Attributes:
        parts: The parts, each with the numbers of the bounds of the first data page and of the end.
        rows: Number of rows.
        skipped: Number of rows before the first wanted row.
        is_exact: Whether the parts are single pages.
    """

    parts: list[tuple[ColumnPart, int, int]]
    rows: int
    skipped: int
    is_exact: bool

    @property
    def ranges(self) -> Iterator[tuple[int, int]]:
        """Ranges of the file: dictionaries and data pages."""
        for part, first, last in self.parts:
            start, data = map(int, part.bounds[:2])
            wanted, end = int(part.bounds[first]), int(part.bounds[last])
            if start < data < wanted:
                yield start, data
            yield (start if wanted == data else wanted), end

    def make_check(self) -> RangeCheck | None:
        """Return a function that checks the pages in fetched bytes; None without checksums."""
        if any(part.checksums is None for part, _, _ in self.parts):
            return None
        return self._check

    def _check(self, offset: int, data: bytes) -> None:
        """Compare the checksums of the wanted pages that are within fetched bytes.

        Raises:
            CorruptError: A page has another checksum.
        """
        view = memoryview(data)
        for part, first, last in self.parts:
            for number in (0, *range(first, last)):
                start, end = (part.bounds[number : number + 2] - offset).tolist()
                if (
                    part.checksums is not None
                    and 0 <= start <= end <= len(view)
                    and crc32(view[start:end]) != part.checksums[number]
                ):
                    raise errors.CorruptError(
                        f"its bytes {offset + start:,} to {offset + end:,} do not have the "
                        "checksum in the index of the pages"
                    )


def _select_pages(parts: list[ColumnPart], group_rows: int, lower: int, upper: int) -> _Wanted:
    """Return the pages with the rows from `lower` to `upper` of a row group."""
    first_rows = parts[0].first_rows
    if len(parts) > 1 or first_rows is None:
        whole = [(part, 1, len(part.bounds) - 1) for part in parts]
        return _Wanted(whole, group_rows, lower, is_exact=False)
    first = int(np.searchsorted(first_rows, lower, "right"))
    last = int(np.searchsorted(first_rows, upper, "left")) + 1
    before = int(first_rows[first - 1])
    after = int(first_rows[last - 1]) if last <= len(first_rows) else group_rows
    return _Wanted([(parts[0], first, last)], after - before, lower - before, is_exact=True)


def _fetch_column(reader: SourceFileReader, schema: list[Fields], wanted: _Wanted) -> Array:
    """Fetch pages, and decode them. Checksums in their headers are verified, where there are."""
    return _decode(_fetch_file(reader, schema, wanted), wanted.rows)


def _fetch_file(reader: SourceFileReader, schema: list[Fields], wanted: _Wanted) -> bytes:
    """Fetch pages, and return a parquet file of one row group that has them alone."""
    reader.hold(reader.fetch(wanted.ranges))
    body = [_MAGIC]
    position = len(_MAGIC)
    chunks: list[Fields] = []
    raw = 0
    for part, first, last in wanted.parts:
        dictionary = _read_range(reader, *part.bounds[:2].tolist())
        data = _read_range(reader, int(part.bounds[first]), int(part.bounds[last]))
        values, raw_bytes = _inspect_pages(data)
        raw += raw_bytes + _inspect_pages(dictionary)[1]
        if raw > _MAX_RAW_BYTES:
            raise OSError("its pages have more than 1 GiB of values")
        offset = position + len(dictionary)
        metadata = part.metadata | {
            _VALUES: Value(thrift.I64, values),
            _RAW_BYTES: Value(thrift.I64, raw_bytes),
            _BYTES: Value(thrift.I64, len(dictionary) + len(data)),
            _DATA_OFFSET: Value(thrift.I64, offset),
        }
        if dictionary:
            metadata[_DICTIONARY_OFFSET] = Value(thrift.I64, position)
        chunk = {_FILE_OFFSET: Value(thrift.I64, 0), _METADATA: Value(thrift.STRUCT, metadata)}
        chunks.append(chunk)
        body += [dictionary, data]
        position = offset + len(data)
    group = {
        _CHUNKS: Value(thrift.LIST, chunks, thrift.STRUCT),
        _GROUP_BYTES: Value(thrift.I64, raw),
        _GROUP_ROWS: Value(thrift.I64, wanted.rows),
    }
    footer = thrift.encode_struct(
        {
            _VERSION: Value(thrift.I32, 2),
            _SCHEMA: Value(thrift.LIST, schema, thrift.STRUCT),
            _FILE_ROWS: Value(thrift.I64, wanted.rows),
            _GROUPS: Value(thrift.LIST, [group], thrift.STRUCT),
        }
    )
    return b"".join([*body, footer, len(footer).to_bytes(4, "little"), _MAGIC])


def _decode(body: bytes, rows: int) -> Array:
    """Return the only column of a parquet file. Pages that have a checksum are verified."""
    parquet: Any = pq.ParquetFile(pa.BufferReader(body), page_checksum_verification=True)
    column = parquet.read(use_threads=False).column(0)
    if len(column) != rows:
        raise OSError(f"its pages have {len(column)} rows instead of {rows}")
    return column


def _inspect_pages(pages: bytes) -> tuple[int, int]:
    """Return the number of values of some pages, and their bytes before compression."""
    values = raw = position = 0
    while position < len(pages):
        header, after = thrift.decode_struct(pages, position)
        raw += after - position + header[_PAGE_RAW_BYTES].content
        for kind in (_PAGE_V1, _PAGE_V2):
            if kind in header:
                values += header[kind].content[_PAGE_VALUES].content
        position = after + header[_PAGE_BYTES].content
        if position <= after - 1 or position > len(pages):
            raise thrift.ThriftError("a page has another size than its header says")
    return values, raw


def _read_range(reader: SourceFileReader, start: int, end: int) -> bytes:
    reader.seek(start)
    return reader.read(end - start)


def _select_schema(elements: Sequence[Fields], column: str) -> list[Fields] | None:
    """Return the elements of a schema of one column; None if there is no such column."""
    for start, end in _divide_schema(elements):
        if elements[start][_NAME].content == column.encode():
            return [elements[0] | {_CHILDREN: Value(thrift.I32, 1)}, *elements[start:end]]
    return None


def _list_columns(elements: Sequence[Fields]) -> list[str]:
    """Return the names of the columns of a schema."""
    starts = (start for start, _ in _divide_schema(elements))
    return [elements[start][_NAME].content.decode(errors="replace") for start in starts]


def _divide_schema(elements: Sequence[Fields]) -> Iterator[tuple[int, int]]:
    """Yield the range of elements of each column. Elements are in the order of a tree."""
    start = 1
    while start < len(elements):
        end, missing = start, 1
        while missing:
            children = elements[end].get(_CHILDREN)
            missing += (children.content if children else 0) - 1
            end += 1
        yield start, end
        start = end


def _make_layout(
    reader: SourceFileReader, tail: list[tuple[int, bytes]], footer: Fields, schema: list[Fields]
) -> ColumnLayout:
    column = schema[1][_NAME].content
    found: list[list[tuple[ColumnPart, tuple[int, int] | None]]] = []
    rows = [0]
    described: list[Fields] = footer[_GROUPS].content if _GROUPS in footer else []
    for group in described:
        rows.append(group[_GROUP_ROWS].content)
        chunks = [
            chunk
            for chunk in group[_CHUNKS].content
            if chunk[_METADATA].content[_PATH].content[0] == column
        ]
        found.append([_make_part(chunk, rows[-1]) for chunk in chunks])
    starts = np.cumsum(np.array(rows, np.int64))
    if starts[-1] != footer[_FILE_ROWS].content or min(rows) < 0 or not all(found):
        raise thrift.ThriftError("its row groups do not have its rows")
    # All offset indexes are near each other, so they are fetched in few requests.
    indexes = [index for parts in found if len(parts) == 1 for _, index in parts if index]
    missing = [index for index in indexes if index[0] < tail[0][0]]
    reader.hold([*tail, *reader.fetch(missing)])
    groups: list[list[ColumnPart]] = []
    for parts, count in zip(found, rows[1:], strict=True):
        (part, index), *more = parts
        if index and not more:
            groups.append([_add_pages(part, _read_range(reader, *index), count)])
        else:
            groups.append([part for part, _ in parts])
    return ColumnLayout(schema, groups, starts, estimate_layout_size(groups))


def estimate_layout_size(groups: Sequence[Sequence[ColumnPart]]) -> int:
    """Return about the memory of the row groups of a layout in bytes."""
    parts = [part for group in groups for part in group]
    arrays = (one for part in parts for one in (part.bounds, part.first_rows, part.checksums))
    return _PART_BYTES * len(parts) + sum(one.nbytes for one in arrays if one is not None)


def _make_part(chunk: Fields, rows: int) -> tuple[ColumnPart, tuple[int, int] | None]:
    """Return a part of a column, and the range of its offset index."""
    metadata: Fields = chunk[_METADATA].content
    kept = {number: metadata[number] for number in (*_KEPT, _RAW_BYTES)}
    if rows == 0:  # it has no pages, and pyarrow writes no place
        return ColumnPart(kept, np.zeros(2, np.int64), np.zeros(0, np.int64)), None
    data = metadata[_DATA_OFFSET].content
    start = data
    if dictionary := metadata.get(_DICTIONARY_OFFSET):
        start = min(start, dictionary.content) if dictionary.content > 0 else start
    end = start + metadata[_BYTES].content
    if not 0 < start <= data <= end:
        raise thrift.ThriftError("a column has no place in the file")
    part = ColumnPart(kept, np.array([start, data, end], np.int64), None)
    if _INDEX_OFFSET not in chunk or not chunk[_INDEX_SIZE].content:
        return part, None
    offset = chunk[_INDEX_OFFSET].content
    return part, (offset, offset + chunk[_INDEX_SIZE].content)


def _add_pages(part: ColumnPart, index: bytes, rows: int) -> ColumnPart:
    """Return a part of a column with the pages of its offset index."""
    locations = thrift.decode_struct(index)[0][_LOCATIONS].content
    table = np.array(
        [[one[_OFFSET].content, one[_SIZE].content, one[_FIRST_ROW].content] for one in locations],
        np.int64,
    ).reshape(-1, 3)
    offsets, sizes, first_rows = table.T
    start, data, end = part.bounds
    # Some writers name the dictionary as the first data page.
    bounds = np.concatenate([[start], offsets, offsets[-1:] + sizes[-1:]])
    if (
        len(offsets) == 0
        or (sizes <= 0).any()
        or (np.diff(bounds[1:]) != sizes).any()
        or (np.diff(first_rows) <= 0).any()
        or not data <= bounds[1] <= bounds[-1] <= end
        or not 0 == first_rows[0] <= first_rows[-1] < rows
    ):
        raise thrift.ThriftError("its offset index does not fit its pages")
    metadata = {number: part.metadata[number] for number in _KEPT}
    return ColumnPart(metadata, bounds, np.ascontiguousarray(first_rows))


def _make_size_error(url: str, parts: Sequence[ColumnPart]) -> errors.ConfigurationError:
    reason, remedy = "the file has no index of its pages", ", or with `write_page_index=True`"
    if len(parts) > 1:
        reason, remedy = "the column has several parts", ""
    return errors.ConfigurationError(
        f"{url} has a row group with more than {_MAX_RAW_BYTES >> 20:,} MiB in the column, and it "
        f"is read as a whole, since {reason}. Write the file with smaller row groups{remedy}."
    )


def _make_damage_error(url: str, error: Exception) -> errors.CorruptError:
    return errors.CorruptError(
        f"{url} is no parquet file, or is damaged ({error}). Replace the file."
    )
