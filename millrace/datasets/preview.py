"""Read the first samples of a dataset, as a run would make them. Nothing is stored."""

import codecs
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, cast

from millrace import errors
from millrace.datasets.formats import BadSampleError, FieldType
from millrace.datasets.formats.base import guess_type
from millrace.datasets.formats.shard_set import ShardSet
from millrace.datasets.sample import BadRow, LargeFile, Row, Sample
from millrace.datasets.settings import PipelineSettings
from millrace.datasets.sources import MirroredFiles, Source, SourceFiles, SourceKind
from millrace.datasets.sources.tars import store_first_members
from millrace.datasets.transforms import TransformedSource, open_transformed_source
from millrace.datasets.transforms.source import RowCounts
from millrace.formatting import clean_text, format_count
from millrace.records import JsonObject
from millrace.schemas.dataset import (
    DatasetPlan,
    FileRef,
    MemberRange,
    Partition,
    RowRange,
    SampleList,
    SourceRange,
)
from millrace.storage import put
from millrace.storage.answers import READ_BLOCK_SIZE
from millrace.storage.open import open_scratch_store

_MAX_ROWS = 100  # rows of the source that are looked at
_MAX_ROW_BYTES = 16 << 20  # bytes of these rows
_MAX_READ_BYTES = 64 << 20  # bytes of files that are read for them
_SHOWN = 60  # characters of a field
_SHOWN_INTEGERS = 8  # of an array
_WIDTHS = {FieldType.UINT16_ARRAY: 2, FieldType.UINT32_ARRAY: 4}


@dataclass(frozen=True, slots=True)
class PreviewedField:
    """Beginning of a field of a sample.

    Attributes:
        size: Bytes of the field.
        beginning: First characters of a text, or first integers of an array; None for other bytes.
    """

    size: int
    beginning: str | None


@dataclass(frozen=True, slots=True)
class PreviewedRow:
    """A sample, or a row that makes none.

    Attributes:
        name: Key of the sample, or location of the row in the source.
        fields: Fields of the sample, by their names.
        reason: Reason why the row makes no sample; empty for a sample.
    """

    name: str
    fields: Mapping[str, PreviewedField] = field(default_factory=dict[str, PreviewedField])
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SamplePreview:
    """First rows of a dataset.

    Attributes:
        partition: Name of the partition that has the rows; empty if nothing was read.
        rows: Samples, and rows that make none, in their order.
        notes: Sentences about the rows.
        refusal: Reason why no run can read the rows; empty without one.
    """

    partition: str = ""
    rows: tuple[PreviewedRow, ...] = ()
    notes: tuple[str, ...] = ()
    refusal: str = ""


def preview_partition(
    settings: PipelineSettings,
    plan: DatasetPlan,
    objects: Mapping[str, bytes],
    files: SourceFiles,
    count: int,
) -> SamplePreview:
    """Read the first samples of the first partition of the split ``train``.

    At most 100 rows of the source are looked at, and 64 MiB of its files are read.

    Args:
        settings: Settings of the dataset.
        plan: Plan of the dataset.
        objects: Objects that the plan names, by their keys.
        files: Files of the source.
        count: Number of samples, and largest number of rows that make none.
    """
    if not count:
        return SamplePreview()
    partition = min(plan.partitions, key=lambda one: one.split != "train", default=None)
    if partition is None:
        return SamplePreview(notes=("The source has no rows.",))
    # Each row of a list of URLs is a request.
    first = _FirstRows(count if plan.source.kind == SourceKind.URLS else _MAX_ROWS)
    rows: list[PreviewedRow] = []
    notes: list[str] = []
    refusal, bad_rows = "", 0
    try:
        source = _open_source(settings, plan, partition, objects, files)
        source = source.wrap_source(first.read_from)
        for row in _iterate_rows(source, plan, partition):
            bad_rows += bool(row.reason)
            if not row.reason or bad_rows <= count:
                rows.append(row)
            if sum(not one.reason for one in rows) == count:
                break
        notes += _describe_rows(plan, partition, first, source.take_rows(), rows)
        if bad_rows > count:
            notes.append(f"{format_count(bad_rows - count, 'more row')} made no sample.")
    except _LimitError:
        most = f"{_MAX_READ_BYTES >> 20} MiB"
        notes.append(f"The next row takes more than {most} of files, and a plan reads no more.")
    except (errors.UnavailableError, errors.ChangedError) as error:  # a run may succeed
        notes.append(f"The first rows cannot be read: {errors.format_error(error)}")
    except Exception as error:  # noqa: BLE001 - libraries raise errors of many kinds
        refusal = f"The first rows cannot be read: {errors.format_error(error)}"
    return SamplePreview(partition.name, tuple(rows), tuple(notes), refusal)


def _list_steps(plan: DatasetPlan) -> list[JsonObject]:
    """Return the descriptions of the transforms of a plan."""
    return plan.source.settings.get("transforms", {}).get("steps", [])


def _open_source(
    settings: PipelineSettings,
    plan: DatasetPlan,
    partition: Partition,
    objects: Mapping[str, bytes],
    files: SourceFiles,
) -> TransformedSource:
    """Open the source with a store in memory, which has the objects that a partition needs."""
    if isinstance(files, MirroredFiles):  # a file of a mirror would first be compared as a whole
        files = files.get_planned_files()
    memory = open_scratch_store()
    keys: list[str] = [step["object"] for step in _list_steps(plan) if "object" in step]
    if isinstance(partition.source_range, SampleList):
        keys.append(partition.source_range.listing)
    for key in keys:
        put(memory, key, objects[key])
    if plan.source.kind != SourceKind.HUGGINGFACE:  # whose files a library reads
        files = cast("SourceFiles", _FirstBytes(files))
    if isinstance(partition.source_range, MemberRange):
        store_first_members(files, memory, partition.source_range)
    return open_transformed_source(
        plan.source,
        files,
        memory,
        types=plan.layout.fields,
        downloads=settings.execution.downloads.model_copy(update={"requests": 1}),
        allow_private=settings.source.allow_private,
    )


def _iterate_rows(
    source: TransformedSource, plan: DatasetPlan, partition: Partition
) -> Iterator[PreviewedRow]:
    """Yield rows as a run would encode them."""
    shards = ShardSet(plan.layout)
    rows = source.iterate_rows(partition.source_range, 0)
    with closing(cast("Generator[Row]", rows)):  # ends downloads
        for row in rows:
            if isinstance(row, Sample):
                try:
                    shards.check(row)
                except BadSampleError as error:
                    row = BadRow(row.key, str(error), b"", row.next_cursor)  # noqa: PLW2901
            if isinstance(row, BadRow):
                yield PreviewedRow(clean_text(row.where), reason=clean_text(row.reason))
                continue
            fields = {
                clean_text(name): _describe_field(name, data, plan.layout.fields)
                for name, data in sorted(row.fields.items())
            }
            yield PreviewedRow(clean_text(row.key), fields)


def _describe_rows(
    plan: DatasetPlan,
    partition: Partition,
    first: "_FirstRows",
    counts: RowCounts,
    rows: list[PreviewedRow],
) -> Iterator[str]:
    """Yield sentences about the rows that are not shown."""
    if not first.count:
        yield f"The first partition, {partition.name}, has no rows."
    elif all(row.reason for row in rows):
        looked_at = format_count(first.count, "row")
        yield f"There is no sample in the first {looked_at} of {partition.name}."
    if counts.dropped:
        yield f"The transforms dropped {counts.dropped} of {format_count(counts.rows, 'row')}."
    steps = _list_steps(plan)
    if first.is_cut and steps and "pack" in steps[-1] and rows:
        packed = steps[-1]["pack"] * _WIDTHS[FieldType(f"{steps[-1]['dtype']}[]")]
        if any(field.size < packed for field in rows[-1].fields.values()):
            yield f"The last sample ends with the first {first.count} rows. In a run, it goes on."


def _describe_field(name: str, data: bytes | LargeFile, types: Mapping[str, str]) -> PreviewedField:
    if isinstance(data, LargeFile):
        return PreviewedField(data.size, None)
    kind = types.get(name, guess_type(name))
    if width := _WIDTHS.get(FieldType(kind)):
        shown = range(0, min(len(data), _SHOWN_INTEGERS * width), width)
        integers = [str(int.from_bytes(data[at : at + width], "little")) for at in shown]
        more = [] if len(integers) * width >= len(data) else ["…"]
        count = format_count(len(data) // width, "integer")
        return PreviewedField(len(data), f"{count}: {', '.join(integers + more)}")
    begin = data[: 8 * _SHOWN]
    is_bytes = kind == FieldType.BYTES
    try:
        # A character at the end of the beginning may be cut.
        text, _ = codecs.utf_8_decode(
            begin, "strict" if is_bytes else "backslashreplace", begin == data
        )
    except UnicodeDecodeError:
        return PreviewedField(len(data), None)
    if is_bytes and min("".join(text.split()), default=" ") < " ":  # control characters
        return PreviewedField(len(data), None)
    return PreviewedField(len(data), clean_text(text if begin == data else f"{text}…", _SHOWN))


class _FirstRows:
    """The first rows of a source.

    Args:
        most: Largest number of rows.

    Attributes:
        count: Number of rows that were read.
        is_cut: Whether more rows may follow.
    """

    def __init__(self, most: int) -> None:
        self._most, self.count, self.is_cut = most, 0, False

    def read_from(self, source: Source) -> Source:
        """Set the source; return its first rows as a source."""
        self._source = source
        return self

    def iterate_rows(self, source_range: SourceRange, cursor: int) -> Iterator[Row]:
        """Yield the first rows, of at most 16 MiB before the last one."""
        if isinstance(source_range, RowRange):  # no further row group is read ahead
            end = min(source_range.end, source_range.start + self._most)
            source_range = replace(source_range, end=end)
        size = 0
        for row in self._source.iterate_rows(source_range, cursor):
            self.count += 1
            if isinstance(row, Sample):
                size += sum(len(one) for one in row.fields.values() if isinstance(one, bytes))
            yield row
            self.is_cut = self.count >= self._most or size >= _MAX_ROW_BYTES
            if self.is_cut:
                return


class _LimitError(Exception):
    """More bytes of files are needed than may be read."""


class _FirstBytes:
    """Files of a source, of which a number of bytes can be read, and none ahead of their use."""

    is_local = True  # so nothing is read ahead

    def __init__(self, files: SourceFiles) -> None:
        self._files, self._left = files, _MAX_READ_BYTES

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def read(self, file: FileRef) -> bytes:
        """Return the content of a file."""
        self._take(file.size)
        return self._files.read(file)

    def iterate_blocks(
        self, file: FileRef, start: int, end: int, *, block: int = READ_BLOCK_SIZE
    ) -> Iterator[bytes]:
        """Yield the blocks of a file between two offsets."""
        for data in self._files.iterate_blocks(file, start, end, block=block):
            self._take(len(data))
            yield data

    def _take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise _LimitError
