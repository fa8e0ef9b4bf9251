"""Transform that adds a row of a table to each sample, such as a caption to an image."""

from collections.abc import Iterator, Mapping, Sequence, Set
from functools import lru_cache
from itertools import chain

from millrace.datasets.field_names import BadFieldError, check_distinct
from millrace.datasets.formats.base import read_field
from millrace.datasets.sample import BadRow, LargeFile, Row, Sample
from millrace.datasets.sources.csv_rows import CsvSource
from millrace.datasets.sources.files import Patterns
from millrace.datasets.sources.jsonl import JsonLinesSource
from millrace.datasets.sources.sample_table import split_name
from millrace.datasets.sources.table import FileTable
from millrace.datasets.transforms.base import make_bad_row
from millrace.datasets.transforms.fields import NO_TYPES
from millrace.datasets.transforms.packed_rows import PackedRows
from millrace.datasets.transforms.settings import JoinSettings
from millrace.errors import ConfigurationError
from millrace.formatting import clean_text, format_size
from millrace.schemas.dataset import ByteRange, FileRef, SourceRange
from millrace.storage.answers import READ_BLOCK_SIZE

_NAME = "__name__"  # field of a table's row with the name of its sample; no sample can have it
_MAX_NAME = 4096  # bytes of a field that names a row
_MAX_HELD_BYTES = 512 << 20  # of a table in memory, since parquet is compressed
_SOURCE_SETTINGS = ("`columns", "`delimiter", "`encoding", "`header")
_ADVICE = (
    "Of these settings, `join` has `columns`, and `column` for the names of the samples. Its "
    "tables are UTF-8, with a header, and with commas (.csv) or tabs (.tsv) between the values."
)


class JoinTransform:
    """Transform that adds the fields of a table's row to each sample.

    Args:
        settings: Columns, and the treatment of a sample without a row.
        table: Bytes of the table.
        types: Declared types of the fields, by their names.

    Raises:
        ConfigurationError: The table cannot be read, or two of its rows have one name.
    """

    batch_rows = 256

    def __init__(
        self, settings: JoinSettings, table: bytes, types: Mapping[str, str] = NO_TYPES
    ) -> None:
        self._settings = settings
        columns = settings.columns or {}
        self._table = _load_table(
            table,
            settings.table,
            settings.column,
            tuple(columns.items()),
            tuple((name, types[name]) for name in columns if name in types),
            are_files=settings.field is None,
        )

    def apply(self, samples: Sequence[Sample]) -> list[list[Row]]:
        """Return each sample with the fields of its row."""
        return [self._join(sample) for sample in samples]

    def _join(self, sample: Sample) -> list[Row]:
        try:
            row = self._find_row(sample)
            if row is None:
                return [sample] if self._settings.missing == "keep" else []
            return [sample._replace(fields=_add_fields(sample.fields, row))]
        except BadFieldError as error:
            return [make_bad_row(sample, str(error))]

    def _find_row(self, sample: Sample) -> Mapping[str, bytes] | None:
        """Return the fields of a sample's row; None for a sample without a row.

        Raises:
            BadFieldError: The sample has no row, and is quarantined. Or it has several rows.
        """
        names = self._list_names(sample)
        found = [row for row in map(self._table.find, names) if row is not None]
        if not found and self._settings.missing == "quarantine":
            raise BadFieldError(f"the table has no row for {names[0]!r}")
        if len(found) > 1:
            raise BadFieldError(f"the table has several rows for {names[0]!r}")
        return found[0] if found else None

    def _list_names(self, sample: Sample) -> list[str]:
        """Return the names that the row of a sample can have.

        Raises:
            BadFieldError: The sample has no field that names the row.
        """
        field = self._settings.field
        if field is None:
            key = sample.key.removeprefix("./")
            return [key, *(f"{key}.{extension}" for extension in sample.fields)]
        data = sample.fields.get(field)
        if data is None:
            raise BadFieldError(f"no field {field!r} that names a row of the table")
        if isinstance(data, LargeFile) or len(data) > _MAX_NAME:
            raise BadFieldError(f"the field {field!r} is too long to name a row of the table")
        try:
            return [read_field(data).decode()]
        except UnicodeDecodeError:
            raise BadFieldError(f"the field {field!r} is not text in UTF-8") from None


def _add_fields(
    fields: Mapping[str, bytes | LargeFile], row: Mapping[str, bytes]
) -> dict[str, bytes | LargeFile]:
    for name in sorted(row.keys() & fields.keys()):
        raise BadFieldError(f"the field {name!r} is there already")
    added = {**fields, **row}
    check_distinct(added)
    return added


@lru_cache(maxsize=4)
def _load_table(
    body: bytes,
    location: str,
    column: str,
    columns: tuple[tuple[str, str], ...],
    types: tuple[tuple[str, str], ...],
    *,
    are_files: bool,
) -> PackedRows:
    """Return the fields of each row of a table, by the name of its sample.

    Args:
        body: Bytes of the table.
        location: Path, URL or key of the table, whose extension decides how it is read.
        column: Column with the names.
        columns: Column of each field; none takes the whole row as ``json``.
        types: Declared types of these fields.
        are_files: Whether the names are those of files.

    Raises:
        ConfigurationError: The table cannot be read, or two of its rows have one name.
    """
    rows = PackedRows()
    for named, values in _iterate_named(body, location, column, dict(columns), dict(types)):
        name = named.decode(errors="surrogateescape")
        if are_files:
            name = name.removeprefix("./")
            # The extension is in lower case, as samples have it.
            name = ".".join(split_name(name) or [name])
        rows.add(name, values)
        if rows.size > _MAX_HELD_BYTES:
            raise ConfigurationError(
                f"{location} has more than {format_size(_MAX_HELD_BYTES)} in its rows, which each "
                "worker holds. Name the needed columns with `columns`, or divide the table."
            )
    if not rows:
        raise ConfigurationError(f"{location} has no rows: name another table.")
    if (twice := rows.finish()) is not None:
        raise ConfigurationError(
            f"{location} has several rows with the name {clean_text(twice)!r} in the column "
            f"{column!r}. Remove all but one of them, or name another column."
        )
    return rows


def _iterate_named(
    body: bytes, location: str, column: str, columns: Mapping[str, str], types: Mapping[str, str]
) -> Iterator[tuple[bytes, Mapping[str, bytes]]]:
    """Yield the name and the fields of each row of a table.

    Raises:
        ConfigurationError: The table or one of its rows cannot be read.
    """
    if columns:
        for row in _iterate_rows(body, location, {_NAME: column, **columns}, types):
            yield row.pop(_NAME), row
        return
    names = _iterate_rows(body, location, {_NAME: column}, {})
    for named, row in zip(names, _iterate_rows(body, location, None, types), strict=True):
        yield named[_NAME], row


def _iterate_rows(
    body: bytes, location: str, columns: dict[str, str] | None, types: Mapping[str, str]
) -> Iterator[dict[str, bytes]]:
    """Yield the fields of the rows of a table, which is read like a source.

    Raises:
        ConfigurationError: The table or one of its rows cannot be read. Where the message names
            settings of a source, it also has those of the transform.
    """
    try:
        yield from _read_rows(body, location, columns, types)
    except ConfigurationError as error:
        if not any(name in str(error) for name in _SOURCE_SETTINGS):
            raise
        raise ConfigurationError(f"{error} {_ADVICE}") from None


def _read_rows(
    body: bytes, location: str, columns: dict[str, str] | None, types: Mapping[str, str]
) -> Iterator[dict[str, bytes]]:
    """Yield the fields of the rows of a table.

    Raises:
        ConfigurationError: The table or one of its rows cannot be read.
    """
    files = _TableBytes(body)
    file = FileRef(path=location, size=len(body), etag="table")
    ranges: Sequence[SourceRange] = [ByteRange(file=file, file_index=0, start=0, end=file.size)]
    name = location.lower()
    if name.endswith(".parquet"):
        from millrace.datasets.sources.parquet import (  # noqa: PLC0415 - imports pyarrow
            ParquetSource,
            divide_row_groups,
        )

        source = ParquetSource(files, columns, types=types)
        table = FileTable.collect([(location, file.size, file.etag)])
        ranges = divide_row_groups(files, table, file.size, columns)
    elif name.endswith(".jsonl"):
        source = JsonLinesSource(files, None, columns, types=types)
    else:
        source = CsvSource(files, None, columns, None, None, types=types)
    for row in chain.from_iterable(source.iterate_rows(one, 0) for one in ranges):
        if isinstance(row, BadRow):
            raise ConfigurationError(
                f"{location}: a row of the table cannot be read ({row.reason}): "
                f"{clean_text(row.data[:200].decode(errors='replace'))}. Correct the table."
            )
        yield {name: read_field(data) for name, data in row.fields.items()}


class _TableBytes:
    """Files of a source that are one table in memory, whatever its path."""

    is_local = True  # so that its path may be any, such as ./m.parquet or a URL
    unseekable: Set[str] = frozenset()
    url = "memory"

    def __init__(self, body: bytes) -> None:
        self._body = body

    def make_url(self, path: str) -> str:
        """Return the path."""
        return path

    def collect(self, patterns: Patterns) -> FileTable:
        """Return no files: the caller knows the path."""
        del patterns
        return FileTable.collect(())

    def read(self, file: FileRef) -> bytes:
        """Return the table."""
        del file
        return self._body

    def iterate_blocks(
        self, file: FileRef, start: int, end: int, *, block: int = READ_BLOCK_SIZE
    ) -> Iterator[bytes]:
        """Yield the blocks of the table between two offsets."""
        del file
        for begin in range(start, end, block):
            yield self._body[begin : min(begin + block, end)]
