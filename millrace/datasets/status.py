"""Status of a dataset, from the bucket alone."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from millrace import errors
from millrace.keys import DatasetKeys, LeaseKeys
from millrace.lease import HeldLease, Holder, StoreClock, find_holder
from millrace.records import fetch, iterate_records
from millrace.schemas.dataset import DatasetPlan, ShardCommit, SplitEnd
from millrace.storage import Store, exists, list_folders

_DEEPEST = 4


class SplitState(StrEnum):
    """Progress of a split."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class SplitStatus:
    """One split.

    Attributes:
        name: Its name.
        state: How far it is.
        shards: Committed.
        samples: In those.
        size: Bytes of those.
        quarantined: Rows put aside.
        host: Who holds it, while it is running.
        until: When the holder's lease ends unless it is heard of, by the store's clock.
    """

    name: str
    state: SplitState
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
        source: URL of its source.
        sealed: Whether it is complete.
        splits: Progress of each split, without what damaged records say.
        damaged: A sentence for each damaged record of the ledger; it names the key.
    """

    dataset: str
    source: str
    sealed: bool
    splits: tuple[SplitStatus, ...]
    damaged: tuple[str, ...] = ()

    @property
    def ended(self) -> int:
        """Number of splits that have ended."""
        return sum(split.state is SplitState.ENDED for split in self.splits)


def find_datasets(store: Store) -> list[str]:
    """Return the datasets below a store's URL, at most four folders deep. One listing a folder."""
    found: list[str] = []
    folders = [(name, 1) for name in list_folders(store)]
    while folders:
        name, depth = folders.pop(0)
        try:
            keys = DatasetKeys(name)
        except errors.ConfigurationError:
            continue  # not a name that a dataset can have
        if exists(store, keys.plan):
            found.append(name)
        elif depth < _DEEPEST:
            folders += [(f"{name}/{below}", depth + 1) for below in list_folders(store, f"{name}/")]
    return found


def status(store: Store, dataset: str) -> DatasetStatus:
    """Return the progress of a dataset. Reads its ledger, and the leases of what has not ended.

    Raises:
        NotFoundError: There is no plan under this name.
    """
    keys = DatasetKeys(dataset)
    try:
        plan = fetch(store, keys.plan, DatasetPlan)
    except errors.NotFoundError:
        raise errors.NotFoundError(
            f"{store.url_of(dataset)} has no plan: nothing was ever sharded under this name."
        ) from None
    damaged: list[str] = []
    ends: set[str] = set()
    for _, end in iterate_records(
        store, keys.commits, SplitEnd, wanted=lambda s: keys.parse_end(s.key) is not None
    ):
        if isinstance(end, errors.CorruptError):
            damaged.append(str(end))
        else:
            ends.add(end.split)
    entries: dict[str, list[ShardCommit]] = {split.name: [] for split in plan.splits}
    for _, entry in iterate_records(
        store, keys.commits, ShardCommit, wanted=lambda s: keys.parse_commit(s.key) is not None
    ):
        if isinstance(entry, errors.CorruptError):
            damaged.append(str(entry))
        elif entry.split in entries:  # else of a plan that was replaced, which a run refuses
            entries[entry.split].append(entry)
    clock: StoreClock | None = None
    splits: list[SplitStatus] = []
    for name, own in entries.items():
        held: HeldLease | None = None
        if name not in ends:
            clock = clock or _clock(store, dataset)
            held = find_holder(store, LeaseKeys(dataset, name), clock)
        splits.append(_split(name, own, ended=name in ends, held=held))
    sealed = exists(store, keys.manifest)
    return DatasetStatus(dataset, plan.source.url, sealed, tuple(splits), tuple(damaged))


def _split(
    name: str, own: list[ShardCommit], *, ended: bool, held: HeldLease | None
) -> SplitStatus:
    state = SplitState.WAITING
    if ended:
        state = SplitState.ENDED
    elif held:
        state = SplitState.RUNNING
    return SplitStatus(
        name=name,
        state=state,
        shards=sum(entry.key is not None for entry in own),
        samples=sum(entry.samples for entry in own),
        size=sum(entry.size for entry in own),
        quarantined=sum(entry.quarantined for entry in own),
        host=held.holder.host if held else "",
        until=held.until if held else None,
    )


def _clock(store: Store, dataset: str) -> StoreClock:
    """Return the store's clock; ours where the credentials may only read."""
    try:
        return StoreClock.read(store, dataset, Holder.this_process())
    except errors.DeniedError:
        return StoreClock.of_this_machine()
