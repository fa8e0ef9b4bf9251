"""Garbage: what stands under a dataset's name and no record of it names."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice

from millrace import errors
from millrace.keys import DatasetKeys, LeaseKeys, lease_prefix
from millrace.lease import Census, Heartbeat, HeldLease, Holder, StoreClock, acquire
from millrace.progress import Event, Progress, silent
from millrace.records import fetch
from millrace.schemas.dataset import DatasetPlan
from millrace.schemas.ledger import find_referenced_keys
from millrace.storage import (
    DeleteFailure,
    Stat,
    Store,
    abort_stale_uploads,
    delete,
    exists,
    list_objects,
)

_CLAIM = timedelta(seconds=30)
_BATCH = 1000  # objects that are deleted between two looks at the leases


@dataclass(frozen=True, slots=True)
class Garbage:
    """Objects of a dataset that no record names.

    Attributes:
        keys: Of the objects.
        size: Bytes of all of them.
        failures: Those that could not be deleted.
        aborted: Keys of unfinished uploads that were aborted.
        deleted: Whether they were deleted, or only found.
    """

    keys: tuple[str, ...]
    size: int
    failures: tuple[DeleteFailure, ...]
    aborted: tuple[str, ...]
    deleted: bool


def collect_garbage(
    store: Store,
    dataset: str,
    *,
    dry_run: bool = True,
    min_age: timedelta = timedelta(hours=1),
    progress: Progress = silent,
) -> Garbage:
    """Find, and by choice delete, what no entry of the ledger names.

    Shards and quarantines without a commit, listings of a plan that was never committed; the
    leases, once the dataset is sealed; uploads that were begun and never finished.

    Args:
        store: Where the dataset is.
        dataset: Its name.
        dry_run: Only find it.
        min_age: Younger objects are left, by the store's clock.
        progress: Told ``garbage.deleted`` with ``objects`` so far, after each batch of 1,000.

    Raises:
        NotFoundError: There is no plan under this name.
        ConflictError: A run works on it. The leases are looked at again before each batch.
    """
    keys = DatasetKeys(dataset)
    try:
        plan = fetch(store, keys.plan, DatasetPlan)
    except errors.NotFoundError:
        raise errors.NotFoundError(
            f"{store.url_of(dataset)} has no plan, so nothing can be told from garbage: correct "
            "the name, or look at what is there yourself."
        ) from None
    holder = Holder.this_process()
    clock = StoreClock.read(store, dataset, holder)
    horizon = clock.now() - min_age
    failures: list[DeleteFailure] = []
    aborted: list[str] = []
    claimed: set[str] = set()
    census = Census(store, dataset, "", clock)
    with Heartbeat(_CLAIM) as heartbeat:
        # Held until all is deleted: a run that resumed meanwhile could commit what is found here.
        for split in _unended(store, keys, plan):
            lease = acquire(store, LeaseKeys(dataset, split), holder, _CLAIM, clock)
            if isinstance(lease, HeldLease):
                raise _conflict(dataset, lease.holder)
            heartbeat.keep(lease)
            claimed.add(split)
        found = [s for s in _unnamed(store, keys, plan) if s.last_modified < horizon]
        if not dry_run:
            for deleted, batch in _batches(found):
                _refuse_others(census, dataset, holder, claimed)
                failures += delete(store, batch)
                progress(Event("garbage.deleted", dataset, {"objects": deleted + len(batch)}))
            aborted = abort_stale_uploads(store, horizon, prefix=f"{dataset}/")
    return Garbage(
        keys=tuple(stat.key for stat in found),
        size=sum(stat.size for stat in found),
        failures=tuple(failures),
        aborted=tuple(aborted),
        deleted=not dry_run,
    )


def _batches(found: Sequence[Stat]) -> Iterator[tuple[int, list[str]]]:
    """Yield the keys of each batch, and how many come before it."""
    keys = (stat.key for stat in found)
    done = 0
    while batch := list(islice(keys, _BATCH)):
        yield done, batch
        done += len(batch)


def _refuse_others(census: Census, dataset: str, holder: Holder, claimed: set[str]) -> None:
    """Refuse to go on once somebody else holds a lease, or one of ours has ended.

    Ours end when this process is suspended for longer than they last: a run may have gone on since,
    and committed what was garbage.

    Raises:
        ConflictError: It is so.
    """
    held = census.find_holders()
    for one in held.values():
        if one.holder.id != holder.id:
            raise _conflict(dataset, one.holder)
    if lost := claimed - held.keys():
        raise errors.ConflictError(
            f"The lease of {min(lost)} of {dataset} has ended meanwhile, as of a process that was "
            "suspended: what is left stays. Collect the garbage again."
        )


def _conflict(dataset: str, holder: Holder) -> errors.ConflictError:
    return errors.ConflictError(
        f"{dataset} is being worked on by {holder.host} (process {holder.pid}): collect its "
        "garbage when that has ended."
    )


def _unended(store: Store, keys: DatasetKeys, plan: DatasetPlan) -> list[str]:
    if exists(store, keys.manifest):
        return []
    ended = {keys.parse_end(stat.key) for stat in list_objects(store, keys.commits)}
    return [split.name for split in plan.splits if split.name not in ended]


def _unnamed(store: Store, keys: DatasetKeys, plan: DatasetPlan) -> Iterator[Stat]:
    named = find_referenced_keys(store, keys, plan)
    prefixes = [keys.shards, keys.quarantined, keys.listings]
    if exists(store, keys.manifest):
        prefixes.append(lease_prefix(keys.dataset))
    for prefix in prefixes:
        yield from (stat for stat in list_objects(store, prefix) if stat.key not in named)
