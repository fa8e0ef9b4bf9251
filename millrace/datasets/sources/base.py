"""Interface of a source, whose ranges can be read from any cursor, and of its division."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from millrace.datasets.sample import Row, RowBatch
from millrace.schemas.dataset import Partition, SourceRange, SourceRecord


class Source(Protocol):
    """Source of samples, as the sharding engine reads it."""

    def iterate_rows(self, source_range: SourceRange, cursor: int) -> Iterator[Row]:
        """Yield the rows of a source range from a cursor on; 0 is the beginning of the range.

        No byte of a file before the cursor is read, except for the rest of what the file only
        gives as a whole. A list of files may be read again.

        Raises:
            ChangedError: A file has changed since the plan was made.
        """
        ...


@runtime_checkable
class BatchSource(Source, Protocol):
    """Source that also gives its samples in batches, at a fraction of the cost."""

    def iterate_batches(self, source_range: SourceRange, cursor: int) -> Iterator[RowBatch | Row]:
        """Yield the rows of `iterate_rows`, with consecutive small samples in batches.

        Raises:
            ChangedError: A file has changed since the plan was made.
        """
        ...


@dataclass(frozen=True, slots=True)
class Division:
    """Settings of the division of a source into partitions.

    Attributes:
        partition_bytes: Approximate bytes of the source in a partition.
        partition_files: Approximate maximum of files in a partition, for a source of many files.
        seed: Seed of the shuffle. The samples of a source of files are shuffled; of other sources,
            the ranges. None keeps the source's order.
        holdout: Share of the bytes that becomes the split ``val``.
    """

    partition_bytes: int
    partition_files: int
    seed: int | None
    holdout: float


@dataclass(frozen=True, slots=True)
class PartitionedSource:
    """A source divided into partitions.

    Attributes:
        record: The source at its revision.
        partitions: Partitions in the order of their names.
        objects: Objects that must be stored before the plan, by their keys. Each body is made
            on access.
        largest_sample: Bytes of the largest sample; None if only a read of the files would show
            the size.
        notes: Sentences about the source that a person should read before the run.
        field_types: Types of the fields, by their names, if the source has a schema.
    """

    record: SourceRecord
    partitions: tuple[Partition, ...]
    objects: Mapping[str, bytes]
    largest_sample: int | None = None
    notes: tuple[str, ...] = ()
    field_types: Mapping[str, str] | None = None
