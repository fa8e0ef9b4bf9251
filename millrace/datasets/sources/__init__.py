"""Sources of samples, and their division into partitions."""

import random
from array import array
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from millrace import errors
from millrace.datasets.sample import BadRow, Row, Sample
from millrace.datasets.sources.base import Source
from millrace.datasets.sources.files import is_local, list_files
from millrace.datasets.sources.folder import (
    MAX_SAMPLE_LIST_BYTES,
    RESERVED,
    FolderSource,
    SampleTable,
    encode_sample_list,
)
from millrace.datasets.sources.jsonl import JsonLinesSource, divide_file, divide_range
from millrace.datasets.sources.table import (
    FileTable,
    decode_path,
    find_unreadable_reason,
    unpack_row,
)
from millrace.digest import compute_digest
from millrace.keys.datasets import DatasetKeys, make_partition_name
from millrace.schemas.dataset import ByteRange, Partition, SampleList, SourceRange, SourceRecord
from millrace.storage import Store

__all__ = [
    "BadRow",
    "PartitionedSource",
    "Row",
    "Sample",
    "Source",
    "SourceKind",
    "SourceSettings",
    "open_source",
    "partition_source",
]

MAX_SAMPLE_BYTES = 1 << 30
T = TypeVar("T")


class SourceKind(StrEnum):
    """Kind of a source."""

    JSONL = "jsonl"
    FILES = "files"


class SourceSettings(BaseModel):
    """Settings that choose the samples of a source."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: SourceKind = Field(
        default=SourceKind.JSONL,
        description="`jsonl` makes a sample of each line. `files` makes a sample of each file, or "
        "of each group of files that share their name up to the first dot.",
    )
    include: list[str] = Field(
        default=["*"], description="Patterns of the files to take, such as `*.jsonl`."
    )
    exclude: list[str] = Field(default=[], description="Patterns of the files to leave out.")
    columns: dict[str, str] | None = Field(
        default=None,
        description='Column of each field of a sample, such as `{"txt": "text"}` (`jsonl` only). '
        "By default each row is kept whole as `json`.",
    )

    @field_validator("columns")
    @classmethod
    def _check_columns(cls, columns: dict[str, str] | None) -> dict[str, str] | None:
        for name in columns or {}:
            if not name or "/" in name or RESERVED.search(name) or not name.isprintable():
                raise ValueError(
                    f"webdataset could not read the field {name!r} back: write an extension such "
                    "as txt, without '/' and not like __this__"
                )
        if len({name.lower() for name in columns or {}}) < len(columns or {}):
            raise ValueError("two fields differ in upper and lower case only: readers see one")
        return columns


@dataclass(frozen=True, slots=True)
class PartitionedSource:
    """A source divided into partitions.

    Attributes:
        record: The source at its revision.
        partitions: Partitions in the order of their names.
        sample_lists: Objects that must be stored before the plan, by their keys. Each body is made
            on access.
        largest_sample: Bytes of the largest sample; None if only a read of the files would show
            the size.
    """

    record: SourceRecord
    partitions: tuple[Partition, ...]
    sample_lists: Mapping[str, bytes]
    largest_sample: int | None = None


class _LazySampleLists(Mapping[str, bytes]):
    """Sample lists of the partitions of a source of many files, each made on access.

    Args:
        samples: Samples of the source.
        indices: Indices of each list's samples, by the key of the list.
    """

    def __init__(self, samples: SampleTable, indices: Mapping[str, Sequence[int]]) -> None:
        self._samples, self._indices = samples, indices

    def __getitem__(self, key: str) -> bytes:
        return encode_sample_list(self._samples[index] for index in self._indices[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)


def partition_source(
    settings: SourceSettings,
    store: Store,
    keys: DatasetKeys,
    *,
    partition_bytes: int,
    partition_files: int,
    seed: int | None,
    holdout: float,
) -> PartitionedSource:
    """Divide a source into partitions. The result depends only on its files and the arguments.

    Args:
        settings: Settings that choose the samples.
        store: Store of the source.
        keys: Names of the dataset.
        partition_bytes: Approximate bytes of the source in a partition.
        partition_files: Approximate maximum of files in a partition, for a source of many files.
        seed: Seed of the shuffle. For JSON lines, byte ranges are shuffled; for files, the
            samples. None keeps the source's order.
        holdout: Share of the bytes that becomes the split ``val``.

    Raises:
        NotFoundError: The source has no files.
        ConfigurationError: A file cannot be divided.
    """
    files = list_files(store, include=settings.include, exclude=settings.exclude)
    record = SourceRecord(
        kind=settings.kind.value,
        url=store.url,
        settings={"columns": settings.columns} if settings.kind is SourceKind.JSONL else {},
        files=len(files),
        size=files.size,
        digest=files.compute_digest(),
        markers=files.markers,
    )
    local = is_local(store)
    partitions: list[Partition] = []
    match settings.kind:
        case SourceKind.JSONL:
            ranges = _make_ranges(files, partition_bytes, local=local)
            for split, split_ranges in _assign_ranges(ranges, seed, holdout).items():
                partitions += [
                    _make_partition(split, i, source_range)
                    for i, source_range in enumerate(split_ranges)
                ]
            return PartitionedSource(record, tuple(partitions), {})
        case SourceKind.FILES:
            samples = SampleTable(files, local=local)
            indices_by_key: dict[str, Sequence[int]] = {}
            for split, order in _assign_samples(samples, seed, holdout).items():
                for i, indices in enumerate(
                    _divide_samples(samples, order, partition_bytes, partition_files)
                ):
                    sample_list = encode_sample_list(samples[index] for index in indices)
                    if len(sample_list) > MAX_SAMPLE_LIST_BYTES:
                        raise errors.ConfigurationError(
                            f"The names of {len(indices)} samples of {split} take "
                            f"{len(sample_list):,} bytes. The limit for a partition is "
                            f"{MAX_SAMPLE_LIST_BYTES:,}. Choose a smaller `partition_files`."
                        )
                    digest = compute_digest(sample_list)
                    key = keys.make_sample_list_key(make_partition_name(split, i), digest)
                    size = sum(samples.sizes[index] for index in indices)
                    source_range = SampleList(
                        listing=key, digest=digest, samples=len(indices), size=size
                    )
                    indices_by_key[key] = indices
                    partitions.append(_make_partition(split, i, source_range))
            largest = max(samples.sizes, default=0)
            return PartitionedSource(
                record, tuple(partitions), _LazySampleLists(samples, indices_by_key), largest
            )


def open_source(
    record: SourceRecord, store: Store, dataset_store: Store, *, any_version: bool = False
) -> Source:
    """Return the source that a plan names.

    Args:
        record: Source of the plan.
        store: Store of the source.
        dataset_store: Store of the dataset.
        any_version: Whether a file is also read if it was written again after the plan was made.
            The caller must then compare the bytes with a digest.
    """
    match SourceKind(record.kind):
        case SourceKind.JSONL:
            return JsonLinesSource(store, record.settings.get("columns"), any_version=any_version)
        case SourceKind.FILES:
            return FolderSource(store, dataset_store, any_version=any_version)


def _make_partition(split: str, number: int, source_range: SourceRange) -> Partition:
    return Partition(
        name=make_partition_name(split, number), split=split, source_range=source_range
    )


def _make_ranges(files: FileTable, partition_bytes: int, *, local: bool) -> list[ByteRange]:
    ranges: list[ByteRange] = []
    for number, row in enumerate(files.rows):
        reason = find_unreadable_reason(decode_path(row.partition(b"\0")[0]), local=local)
        ranges += divide_file(unpack_row(row), number, partition_bytes, reason=reason)
    return ranges


def _assign_ranges(
    ranges: list[ByteRange], seed: int | None, holdout: float
) -> dict[str, list[ByteRange]]:
    _shuffle(ranges, seed)
    wanted = round(sum(source_range.size for source_range in ranges) * holdout)
    held_out: list[ByteRange] = []
    while wanted > 0:
        last = ranges.pop()
        if last.size > wanted and not last.reason:
            first, last = divide_range(last, last.size - wanted)
            ranges.append(first)
        held_out.append(last)
        wanted -= last.size
    return {"train": ranges, "val": held_out}


def _assign_samples(
    samples: SampleTable, seed: int | None, holdout: float
) -> dict[str, "array[int]"]:
    for index, size in enumerate(samples.sizes):
        if size > MAX_SAMPLE_BYTES:
            raise errors.ConfigurationError(
                f"{samples[index].files[0].path}: a sample of {size} bytes is larger than a shard "
                f"can be ({MAX_SAMPLE_BYTES} bytes). Leave it out with exclude, or divide it."
            )
    order = array("I", range(len(samples)))
    _shuffle(order, seed)
    wanted = round(sum(samples.sizes) * holdout)
    held_out = array("I")
    while wanted > 0:
        held_out.append(order.pop())
        wanted -= samples.sizes[held_out[-1]]
    return {"train": order, "val": held_out}


def _divide_samples(
    samples: SampleTable, order: "array[int]", size: int, files: int
) -> Iterator["array[int]"]:
    """Yield the samples of each partition, in order: about `size` bytes or `files` files."""
    begin = bytes_left = files_left = 0
    for position, index in enumerate(order):
        if bytes_left <= 0 or files_left <= 0:
            if position:
                yield order[begin:position]
            begin, bytes_left, files_left = position, size, files
        bytes_left -= samples.sizes[index]
        files_left -= samples.count_files(index)
    if order:
        yield order[begin:]


def _shuffle(items: MutableSequence[T], seed: int | None) -> None:
    if seed is not None:
        random.Random(seed).shuffle(items)
