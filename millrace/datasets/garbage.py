"""Collect garbage: objects below a dataset's name that no record of the dataset names."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice

from millrace import errors
from millrace.keys.datasets import DatasetKeys
from millrace.keys.leases import LeaseKeys, make_lease_prefix
from millrace.lease import Census, Heartbeat, HeldLease, Holder, StoreClock, acquire
from millrace.progress import Event, Progress, ignore_event
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

_LEASE_TIMEOUT = timedelta(seconds=30)
_BATCH = 1000  # objects deleted between two checks of the leases


@dataclass(frozen=True, slots=True)
class Garbage:
    """Objects of a dataset that no record names.

    Attributes:
        keys: Keys of the objects.
        size: Bytes of all objects.
        failures: Objects that could not be deleted.
        aborted_uploads: Keys of unfinished uploads that were aborted.
        is_deleted: Whether the objects were deleted. False after a dry run.
    """

    keys: tuple[str, ...]
    size: int
    failures: tuple[DeleteFailure, ...]
    aborted_uploads: tuple[str, ...]
    is_deleted: bool


def collect_garbage(
    store: Store,
    dataset: str,
    *,
    dry_run: bool = True,
    min_age: timedelta = timedelta(hours=1),
    progress: Progress = ignore_event,
) -> Garbage:
    """Find, and without `dry_run` delete, the objects that no entry of the ledger names.

    Garbage is: shards and quarantines without a commit, listings of a plan that was never
    committed, unfinished uploads, and the leases of a complete dataset.

    Args:
        store: Store of the dataset.
        dataset: Name of the dataset.
        dry_run: Whether the garbage is only found.
        min_age: Age below which objects stay, by the store's clock.
        progress: Called with ``garbage.deleted`` after each batch of 1,000; its ``objects`` is
            the number deleted so far.

    Raises:
        NotFoundError: There is no plan under this name.
        ConflictError: A run works on the dataset. The leases are checked before each batch.
    """
    keys = DatasetKeys(dataset)
    try:
        plan = fetch(store, keys.plan, DatasetPlan)
    except errors.NotFoundError:
        raise errors.NotFoundError(
            f"{store.make_url(dataset)} has no plan, so garbage cannot be identified. Correct the "
            "name, or inspect the objects yourself."
        ) from None
    holder = Holder.this_process()
    clock = StoreClock.read(store, dataset, holder)
    horizon = clock.now() - min_age
    failures: list[DeleteFailure] = []
    aborted: list[str] = []
    claimed: set[str] = set()
    census = Census(store, dataset, "", clock)
    with Heartbeat(_LEASE_TIMEOUT) as heartbeat:
        # The leases are held to the end: a run that resumes could commit objects found here.
        for partition in _find_unfinished_partitions(store, keys, plan):
            lease = acquire(store, LeaseKeys(dataset, partition), holder, _LEASE_TIMEOUT, clock)
            if isinstance(lease, HeldLease):
                raise _make_conflict_error(dataset, lease.holder)
            heartbeat.keep(lease)
            claimed.add(partition)
        found = [s for s in _iterate_unreferenced(store, keys, plan) if s.last_modified < horizon]
        if not dry_run:
            for deleted, batch in _iterate_batches(found):
                _check_leases(census, dataset, holder, claimed)
                failures += delete(store, batch)
                progress(Event("garbage.deleted", dataset, {"objects": deleted + len(batch)}))
            aborted = abort_stale_uploads(store, horizon, prefix=f"{dataset}/")
    return Garbage(
        keys=tuple(stat.key for stat in found),
        size=sum(stat.size for stat in found),
        failures=tuple(failures),
        aborted_uploads=tuple(aborted),
        is_deleted=not dry_run,
    )


def _iterate_batches(found: Sequence[Stat]) -> Iterator[tuple[int, list[str]]]:
    """Yield each batch of keys with the number of keys before it."""
    keys = (stat.key for stat in found)
    done = 0
    while batch := list(islice(keys, _BATCH)):
        yield done, batch
        done += len(batch)


def _check_leases(census: Census, dataset: str, holder: Holder, claimed: set[str]) -> None:
    """Refuse to continue if another process holds a lease, or a lease of this one has ended.

    A lease ends when this process is suspended for longer than its timeout. Another run may have
    continued since, and committed objects that were garbage.

    Raises:
        ConflictError: Another process holds a lease, or a lease of this process has ended.
    """
    held = census.find_holders()
    for one in held.values():
        if one.holder.id != holder.id:
            raise _make_conflict_error(dataset, one.holder)
    if lost := claimed - held.keys():
        raise errors.ConflictError(
            f"The lease of {min(lost)} of {dataset} has ended: this process was suspended for too "
            "long. The remaining objects stay. Collect the garbage again."
        )


def _make_conflict_error(dataset: str, holder: Holder) -> errors.ConflictError:
    return errors.ConflictError(
        f"{holder.host} (process {holder.pid}) works on {dataset}. Collect its garbage when that "
        "process has ended."
    )


def _find_unfinished_partitions(store: Store, keys: DatasetKeys, plan: DatasetPlan) -> list[str]:
    if exists(store, keys.manifest):
        return []
    ended = {keys.parse_end(stat.key) for stat in list_objects(store, keys.commits)}
    return [p.name for p in plan.partitions if p.name not in ended]


def _iterate_unreferenced(store: Store, keys: DatasetKeys, plan: DatasetPlan) -> Iterator[Stat]:
    referenced = find_referenced_keys(store, keys, plan)
    prefixes = [keys.shards, keys.quarantined, keys.listings]
    if exists(store, keys.manifest):
        prefixes.append(make_lease_prefix(keys.dataset))
    for prefix in prefixes:
        yield from (stat for stat in list_objects(store, prefix) if stat.key not in referenced)
