"""Read the status of a dataset, from the bucket alone."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from millrace import errors
from millrace.dataset_ledger import describe_other_name
from millrace.keys.checkpoints import CHECKPOINT_KEY
from millrace.keys.datasets import DatasetKeys
from millrace.lease import Census, HeldLease, StoreClock
from millrace.records import fetch, iterate_records
from millrace.schemas.dataset import DatasetPlan, PartitionEnd, ShardCommit
from millrace.storage import Store, exists, list_folders


class PartitionState(StrEnum):
    """Progress of a partition."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """Status of one partition.

    Attributes:
        name: Name of the partition.
        state: Progress of the partition.
        shards: Number of committed shards.
        samples: Number of samples in these shards.
        size: Bytes of these shards.
        quarantined: Number of quarantined rows.
        host: Host that holds the partition, while it is running.
        until: End of the holder's lease without another heartbeat, by the store's clock.
    """

    name: str
    state: PartitionState
    shards: int
    samples: int
    size: int
    quarantined: int
    host: str = ""
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class DatasetStatus:
    """Progress of a dataset.

    Attributes:
        dataset: Name of the dataset.
        source: URL of the source.
        is_complete: Whether the dataset is complete.
        partitions: Progress of each partition. Damaged records are left out.
        damaged_records: A sentence for each damaged record of the ledger, with the key.
        other_name: A sentence if the records are those of a dataset with another name, which no
            other command reads under this name; empty otherwise.
    """

    dataset: str
    source: str
    is_complete: bool
    partitions: tuple[PartitionStatus, ...]
    damaged_records: tuple[str, ...] = ()
    other_name: str = ""

    @property
    def ended_partitions(self) -> int:
        """Number of partitions that have ended."""
        return sum(p.state is PartitionState.ENDED for p in self.partitions)


def find_datasets(store: Store) -> list[str]:
    """Return the datasets below a store's URL, also those below other datasets.

    One listing for each folder. The folders of a dataset's own objects, and those of a checkpoint,
    are not searched.
    """
    found: list[str] = []
    folders = list_folders(store)
    while folders:
        name = folders.pop(0)
        try:
            keys = DatasetKeys(name)
        except errors.ConfigurationError:
            continue  # not a name that a dataset can have
        if CHECKPOINT_KEY.fullmatch(keys.plan):
            continue  # a bucket may have thousands of checkpoints
        if exists(store, keys.plan):
            found.append(name)
        folders += [f"{name}/{below}" for below in list_folders(store, f"{name}/")]
    return found


def read_status(store: Store, dataset: str) -> DatasetStatus:
    """Return the progress of a dataset. Reads its ledger, and the leases of its open partitions.

    Raises:
        NotFoundError: There is no plan under this name.
    """
    keys = DatasetKeys(dataset)
    try:
        plan = fetch(store, keys.plan, DatasetPlan)
    except errors.NotFoundError:
        raise errors.NotFoundError(
            f"{store.make_url(dataset)} has no plan: no dataset was sharded under this name."
        ) from None
    damaged: list[str] = []
    ends: dict[str, PartitionEnd] = {}
    for _, end in iterate_records(
        store, keys.commits, PartitionEnd, wanted=lambda s: keys.parse_end(s.key) is not None
    ):
        if isinstance(end, errors.CorruptError):
            damaged.append(str(end))
        else:
            ends[end.partition] = end
    counts = {partition.name: _PartitionCounts() for partition in plan.partitions}
    url, other_name = plan.source.url, describe_other_name(store, keys, plan.dataset)
    del plan  # of many partitions, the counts are enough
    for _, entry in iterate_records(
        store, keys.commits, ShardCommit, wanted=lambda s: keys.parse_commit(s.key) is not None
    ):
        if isinstance(entry, errors.CorruptError):
            damaged.append(str(entry))
        elif (end := ends.get(entry.partition)) and entry.number >= end.commits:
            pass  # of a run over a list of URLs that another run has overtaken
        elif entry.partition in counts:  # otherwise the plan of the commit was replaced
            counts[entry.partition].add(entry)
    held: dict[str, HeldLease] = {}
    if counts.keys() - ends:
        # One listing of all leases, since a listing for each open partition takes hours for many.
        held = Census(
            store, dataset, "", StoreClock.read_if_permitted(store, dataset)
        ).find_holders()
    partitions = [
        _make_partition_status(
            name, own, ended=name in ends, held=None if name in ends else held.get(name)
        )
        for name, own in counts.items()
    ]
    is_complete = exists(store, keys.manifest)
    return DatasetStatus(dataset, url, is_complete, tuple(partitions), tuple(damaged), other_name)


@dataclass(slots=True)
class _PartitionCounts:
    """Sums of the commits of a partition."""

    shards: int = 0
    samples: int = 0
    size: int = 0
    quarantined: int = 0

    def add(self, entry: ShardCommit) -> None:
        self.shards += len(entry.shards)
        self.samples += entry.samples
        self.size += entry.size
        self.quarantined += entry.quarantined


def _make_partition_status(
    name: str, own: _PartitionCounts, *, ended: bool, held: HeldLease | None
) -> PartitionStatus:
    state = PartitionState.WAITING
    if ended:
        state = PartitionState.ENDED
    elif held:
        state = PartitionState.RUNNING
    return PartitionStatus(
        name=name,
        state=state,
        shards=own.shards,
        samples=own.samples,
        size=own.size,
        quarantined=own.quarantined,
        host=held.holder.host if held else "",
        until=held.until if held else None,
    )
