"""Garbage: what stands under a dataset's name and no record of it names."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from millrace import errors
from millrace.keys import DatasetKeys, LeaseKeys, leases
from millrace.lease import Held, Holder, StoreClock, held_by
from millrace.models.dataset import FileGroup, Plan
from millrace.records import fetch
from millrace.shards.split import ledger
from millrace.storage import (
    DeleteFailure,
    Stat,
    Store,
    abort_stale_uploads,
    delete,
    exists,
    list_objects,
)


@dataclass(frozen=True, slots=True)
class Garbage:
    """What nobody needs.

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
) -> Garbage:
    """Find, and by choice delete, what no entry of the ledger names.

    Shards and quarantines without a commit, listings of a plan that was never committed; the
    leases, once the dataset is sealed; uploads that were begun and never finished.

    Args:
        store: Where the dataset is.
        dataset: Its name.
        dry_run: Only find it.
        min_age: Younger objects are left, by the store's clock.

    Raises:
        ConflictError: A run works on it: nothing is garbage yet.
    """
    keys = DatasetKeys(dataset)
    clock = StoreClock.read(store, dataset, Holder.this_process())
    plan = fetch(store, keys.plan, Plan) if exists(store, keys.plan) else None
    for split in plan.splits if plan else ():
        held = held_by(store, LeaseKeys(dataset, split.name), clock)
        if isinstance(held, Held):
            raise errors.ConflictError(
                f"{dataset} is being worked on by {held.holder.host} (process {held.holder.pid}): "
                "collect its garbage when that has ended."
            )
    horizon = clock.now() - min_age
    found = [s for s in _unnamed(store, keys, plan) if s.last_modified < horizon]
    failures: list[DeleteFailure] = []
    aborted: list[str] = []
    if not dry_run:
        failures = delete(store, (stat.key for stat in found))
        aborted = abort_stale_uploads(store, horizon, prefix=f"{dataset}/")
    return Garbage(
        keys=tuple(stat.key for stat in found),
        size=sum(stat.size for stat in found),
        failures=tuple(failures),
        aborted=tuple(aborted),
        deleted=not dry_run,
    )


def _unnamed(store: Store, keys: DatasetKeys, plan: Plan | None) -> Iterator[Stat]:
    named: set[str] = set()
    for entry in ledger(store, keys):
        named.update(key for key in (entry.key, entry.quarantine) if key)
    for split in plan.splits if plan else ():
        if isinstance(split.piece, FileGroup):
            named.add(split.piece.listing)
    prefixes = [keys.shards, keys.quarantined, keys.listings]
    if exists(store, keys.manifest):
        prefixes.append(leases(keys.dataset))
    for prefix in prefixes:
        yield from (stat for stat in list_objects(store, prefix) if stat.key not in named)
