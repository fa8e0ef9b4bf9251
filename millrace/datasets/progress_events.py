"""Progress events of sharding, verification and repair, and their form on the pipe of a worker."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self, cast

import orjson
from pydantic import ConfigDict, TypeAdapter, ValidationError

from millrace.errors import WorkerError
from millrace.progress import Event
from millrace.schemas.dataset import Partition, PartitionEnd, ShardCommit, count_source_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCommitted(Event):
    """Event after the plan of a run is committed or found, before the partitions.

    Attributes:
        key: Key of the plan.
        partitions: Number of partitions.
        files: Number of files of the source.
        size: Bytes of the source.
    """

    kind: ClassVar[str] = "plan.committed"

    key: str
    partitions: int
    files: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReplacementStarted(Event):
    """Event before a plan without commits is removed, since the settings or the source differ.

    Attributes:
        key: Key of the plan.
    """

    kind: ClassVar[str] = "plan.replacing"

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRemoved(Event):
    """Event after a plan is removed, before its uncommitted shards are.

    Attributes:
        key: Key of the plan.
    """

    kind: ClassVar[str] = "plan.removed"

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardDeletionStarted(Event):
    """Event before the uncommitted shards of a removed plan are deleted.

    Attributes:
        prefix: Prefix of the dataset's shards.
    """

    kind: ClassVar[str] = "shards.deleting"

    prefix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionsPending(Event):
    """Event before the first partition, once in each run.

    Attributes:
        partitions: Number of partitions that have not ended.
    """

    kind: ClassVar[str] = "partitions.pending"

    partitions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionEvent(Event):
    """Event of a partition: base of the events that cross the pipe from a worker to its driver.

    Attributes:
        partition: Name of the partition.
        pid: Id of the process that works on the partition.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    partition: str
    pid: int = field(default_factory=os.getpid)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionOpened(PartitionEvent):
    """Event before a process reads a partition.

    Attributes:
        cursor: Cursor of the first row to read: 0, or the end of the last commit.
        commits: Number of commits that the partition has.
        fraction: Fraction of the partition that is committed, from 0 to 1.
    """

    kind: ClassVar[str] = "partition.opened"

    cursor: int
    commits: int
    fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHalfEncoded(PartitionEvent):
    """Event after a shard in memory has reached half of its largest size.

    Attributes:
        number: Number of the commit in the partition.
        samples: Number of samples so far.
    """

    kind: ClassVar[str] = "shard.halfway"

    number: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEncoded(PartitionEvent):
    """Event after a shard is encoded, before its upload.

    Attributes:
        number: Number of the commit in the partition.
        key: Key of the shard.
        samples: Number of samples.
        size: Bytes of the shard.
    """

    kind: ClassVar[str] = "shard.encoded"

    number: int
    key: str
    samples: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardUploaded(PartitionEvent):
    """Event after the shards and the quarantined rows of a commit are in the store.

    Attributes:
        number: Number of the commit in the partition.
        samples: Number of samples; 0 if all rows are quarantined.
        size: Bytes of the shards.
    """

    kind: ClassVar[str] = "shard.uploaded"

    number: int
    samples: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCommitted(PartitionEvent):
    """Event after the shards of a commit are in the ledger.

    Attributes:
        number: Number of the commit in the partition.
        keys: Keys of the shards, one of each format; empty if all rows are quarantined.
        samples: Number of samples in each shard.
        size: Bytes of the shards.
        quarantined: Number of quarantined rows.
        rows: Number of rows of the source.
        bad_rows: Quarantined rows of the source; may be a fraction, as in `ShardCommit`.
        fraction: Fraction of the partition that is committed, from 0 to 1.
    """

    kind: ClassVar[str] = "shard.committed"

    number: int
    keys: tuple[str, ...]
    samples: int
    size: int
    quarantined: int
    rows: int
    bad_rows: float
    fraction: float

    @classmethod
    def describe(cls, commit: ShardCommit, partition: Partition) -> Self:
        """Return the event of a commit of a partition."""
        rows, bad_rows = count_source_rows(commit)
        return cls(
            partition=commit.partition,
            number=commit.number,
            keys=tuple(shard.key for shard in commit.shards),
            samples=commit.samples,
            size=commit.size,
            quarantined=commit.quarantined,
            rows=rows,
            bad_rows=bad_rows,
            fraction=partition.source_range.compute_fraction_before(commit.next_cursor),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStalled(PartitionEvent):
    """Event after some minutes without a row of a partition, and again after as many more.

    Attributes:
        last_row: Key of the last sample, or location of the last bad row; empty before the first.
        seconds: Time without a row, at least.
    """

    kind: ClassVar[str] = "partition.stalled"

    last_row: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionEnding(PartitionEvent):
    """Event before the end of a partition is committed.

    Attributes:
        samples: Number of samples.
        size: Bytes of the shards.
    """

    kind: ClassVar[str] = "partition.ending"

    samples: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionEnded(PartitionEvent):
    """Event after the end of a partition is committed.

    Attributes:
        samples: Number of samples.
        size: Bytes of the shards.
        quarantined: Number of quarantined rows.
    """

    kind: ClassVar[str] = "partition.ended"

    samples: int
    size: int
    quarantined: int

    @classmethod
    def describe(cls, end: PartitionEnd) -> Self:
        """Return the event of the end of a partition."""
        return cls(
            partition=end.partition,
            samples=end.samples,
            size=end.size,
            quarantined=end.quarantined,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocationFailed(PartitionEvent):
    """Event after a location of a source with mirrors failed, or differed from the plan.

    Attributes:
        location: Name of the location.
        reason: Fault of the location, with the file.
        differs: Whether a file differs; otherwise the location could not be read.
    """

    kind: ClassVar[str] = "location.failed"

    location: str
    reason: str
    differs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRead(PartitionEvent):
    """Event after a worker has read a partition of a source with mirrors, or failed.

    Attributes:
        served: Bytes that the worker read from each location, by the location's name.
    """

    kind: ClassVar[str] = "source.read"

    served: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost(Event):
    """Event after a worker process died, and another one took its place.

    Attributes:
        pid: Id of the dead process.
        cause: End of the process, such as ``was killed by SIGKILL``.
    """

    kind: ClassVar[str] = "worker.lost"

    pid: int
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestComputed(Event):
    """Event after all partitions have ended, before the index and the manifest are written.

    Attributes:
        key: Key of the manifest.
        shards: Number of shards.
    """

    kind: ClassVar[str] = "manifest.computed"

    key: str
    shards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDigestsUploaded(Event):
    """Event after the digests of all blocks are written, before the index is written.

    Attributes:
        key: Key of the digests.
    """

    kind: ClassVar[str] = "blocks.uploaded"

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexUploaded(Event):
    """Event after the index of the shards is written, before the manifest is committed.

    Attributes:
        key: Key of the index.
    """

    kind: ClassVar[str] = "index.uploaded"

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestCommitted(Event):
    """Event after the manifest is committed: the dataset is complete.

    Attributes:
        key: Key of the manifest.
        shards: Number of shards.
        size: Bytes of the shards.
        samples: Number of samples by split.
    """

    kind: ClassVar[str] = "manifest.committed"

    key: str
    shards: int
    size: int
    samples: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CardUploaded(Event):
    """Event after the record of the dataset card, or the card, is written.

    Attributes:
        key: Key of the object.
    """

    kind: ClassVar[str] = "card.uploaded"

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRepairStarted(Event):
    """Event before a lost or damaged shard is made again.

    Attributes:
        key: Key of the shard.
        reason: Fault of the shard.
    """

    kind: ClassVar[str] = "shard.repairing"

    key: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRepaired(Event):
    """Event after a lost or damaged shard is in the store again.

    Attributes:
        key: Key of the shard.
        size: Bytes of the shard.
    """

    kind: ClassVar[str] = "shard.repaired"

    key: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardVerified(Event):
    """Event after a shard was compared with the manifest.

    Attributes:
        key: Key of the shard.
        size: Bytes of the shard by the manifest.
        is_intact: True if the shard has no fault.
    """

    kind: ClassVar[str] = "shard.verified"

    key: str
    size: int
    is_intact: bool


_PARTITION_EVENTS: dict[str, type[PartitionEvent]] = {
    event_class.kind: event_class
    for event_class in (
        PartitionOpened,
        ShardHalfEncoded,
        ShardEncoded,
        ShardUploaded,
        ShardCommitted,
        PartitionStalled,
        PartitionEnding,
        PartitionEnded,
        LocationFailed,
        SourceRead,
    )
}
_ADAPTERS = {kind: TypeAdapter(event_class) for kind, event_class in _PARTITION_EVENTS.items()}
_HINT = (
    "Millrace may have been updated during the run. Run it again: the run continues from the last "
    "commit."
)


def encode_partition_event(event: PartitionEvent) -> dict[str, Any]:
    """Return an event of a partition as JSON values: its fields and its ``kind``."""
    return {"kind": event.kind, **{one.name: getattr(event, one.name) for one in fields(event)}}


def decode_partition_event(data: object) -> PartitionEvent:
    """Return the event of a partition that JSON values describe.

    Args:
        data: Fields of the event, and its ``kind``.

    Raises:
        WorkerError: The values describe no such event: the kind is unknown, or a field is missing,
            unknown or of another type.
    """
    values = dict(cast("dict[str, Any]", data)) if isinstance(data, dict) else {}
    kind = str(values.pop("kind", ""))
    adapter = _ADAPTERS.get(kind)
    if adapter is None:
        raise WorkerError(f"A worker sent an event of an unknown kind, {kind!r}. {_HINT}")
    try:
        return adapter.validate_json(orjson.dumps(values), strict=True)
    except ValidationError as error:
        raise WorkerError(f"A worker sent an invalid event {kind!r}. {_HINT}\n\n{error}") from None
