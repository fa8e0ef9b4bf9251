"""Find and delete the garbage of a dataset: objects that no record of the dataset names."""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from millrace import errors
from millrace.dataset_ledger import fetch_plan, find_referenced_keys
from millrace.deletion import (
    DeletionResult,
    PlannedObject,
    StaleUploads,
    abort_uploads,
    delete_planned,
    find_stale_uploads,
)
from millrace.keys.datasets import DatasetKeys
from millrace.keys.leases import COLLECTOR, RUNS, LeaseKeys, make_lease_prefix
from millrace.lease import Census, Heartbeat, HeldLease, Holder, StoreClock, acquire
from millrace.progress import Progress, ignore_event
from millrace.schemas.dataset import DatasetPlan
from millrace.storage import ObjectFailure, Stat, Store, exists, list_objects

_LEASE_TIMEOUT = timedelta(seconds=30)
_LISTED_PER_BATCH = 1000  # leases of partitions: one request, as a batch has 1,000 objects
_NAMED = "a record of the dataset names it by now"


@dataclass(frozen=True, slots=True)
class GarbagePlan:
    """Objects of a dataset that no record names.

    Attributes:
        dataset: Name of the dataset.
        objects: Objects to delete.
        uploads: Unfinished uploads to abort.
    """

    dataset: str
    objects: tuple[PlannedObject, ...]
    uploads: StaleUploads

    @property
    def size(self) -> int:
        """Size of all objects in bytes."""
        return sum(one.size for one in self.objects)


@dataclass(frozen=True, slots=True)
class GarbageResult:
    """Result of a garbage plan.

    Attributes:
        deletion: Result of deleting the objects.
        uploads: Aborted uploads.
    """

    deletion: DeletionResult
    uploads: StaleUploads

    @property
    def failures(self) -> tuple[ObjectFailure, ...]:
        """Objects that could not be deleted, and uploads that could not be aborted."""
        return (*self.deletion.failures, *self.uploads.failures)


def plan_garbage(
    store: Store, dataset: str, *, min_age: timedelta = timedelta(hours=1)
) -> GarbagePlan:
    """Find the objects that no entry of the ledger names, and delete none.

    Garbage is: shards and quarantined rows without a commit, sample lists of a plan that was never
    committed, unfinished uploads, and the leases, seek points, indexes of tar files and digests of
    source files of a complete dataset.

    Args:
        store: Store of the dataset.
        dataset: Name of the dataset.
        min_age: Age below which objects stay, by the store's clock.

    Raises:
        NotFoundError: There is no plan under this name.
        ConfigurationError: The plan is that of a dataset with another name.
        ConflictError: A run works on the dataset.
    """
    with _hold_dataset(store, dataset) as held:
        horizon = held.clock.now() - min_age
        objects = tuple(
            PlannedObject(stat)
            for stat in held.iterate_unreferenced()
            if stat.last_modified < horizon
        )
        try:
            uploads = find_stale_uploads(
                store,
                horizon,
                prefix=f"{dataset}/",
                is_included=lambda one: held.keys.is_own(one.key),
            )
        except errors.DeniedError as error:
            failure = ObjectFailure("unfinished uploads", errors.format_error(error))
            uploads = StaleUploads((), 0, (failure,))
    return GarbagePlan(dataset, objects, uploads)


def delete_garbage(
    store: Store, plan: GarbagePlan, *, progress: Progress = ignore_event
) -> GarbageResult:
    """Delete the objects of a plan that are unchanged and that no record names by now.

    Args:
        store: Store of the dataset.
        plan: Plan of `plan_garbage`.
        progress: Callback. It receives `ObjectsDeleted` after each batch of 1,000.

    Raises:
        NotFoundError: The dataset has no plan by now.
        ConfigurationError: The plan is that of a dataset with another name.
        ConflictError: A run works on the dataset. The leases are checked before each batch.
    """
    with _hold_dataset(store, plan.dataset) as held:
        check = _GarbageCheck(held)
        # One batch at a time: leases that have ended meanwhile cost at most one batch.
        deletion = delete_planned(
            store, plan.objects, check=check, max_batches=1, progress=progress
        )
        return GarbageResult(deletion, abort_uploads(store, plan.uploads))


@dataclass(frozen=True, slots=True)
class _HeldDataset:
    """Dataset without a run, which begins no partition while this process holds its lease.

    Attributes:
        store: Store of the dataset.
        keys: Keys of the dataset.
        plan: Plan of the dataset.
        clock: Clock of the store.
        holder: This process.
        census: Census of all leases of the dataset.
        runs: Census of the leases of runs and of the collector. One page at any number of
            partitions.
        is_leased: Whether this process holds a lease. A complete dataset needs none.
    """

    store: Store
    keys: DatasetKeys
    plan: DatasetPlan
    clock: StoreClock
    holder: Holder
    census: Census
    runs: Census
    is_leased: bool

    def iterate_unreferenced(self) -> Iterator[Stat]:
        """Yield the objects with names of the dataset that no record names."""
        keys = self.keys
        referenced = find_referenced_keys(self.store, keys, self.plan)
        prefixes = [keys.shards, keys.quarantined, keys.partition_notes, keys.transforms]
        is_complete = exists(self.store, keys.manifest)
        if is_complete:
            prefixes.append(make_lease_prefix(keys.dataset))
        for prefix in prefixes:
            for stat in list_objects(self.store, prefix, exact=True):
                # A run that continues needs seek points, indexes and digests. A repair does not.
                is_needed = (
                    stat.key in referenced
                    or keys.is_index(stat.key)
                    or (not is_complete and keys.is_seek_point_or_index(stat.key))
                    or (not is_complete and keys.is_file_digests(stat.key))
                )
                if not is_needed and keys.is_own(stat.key):
                    yield stat


@contextmanager
def _hold_dataset(store: Store, dataset: str) -> Generator[_HeldDataset]:
    """Hold the lease of the collector of an unfinished dataset, since a run could commit garbage.

    A run looks for this lease after it has taken its own one. One lease of the dataset is enough,
    at any number of partitions.

    Raises:
        NotFoundError: There is no plan under this name.
        ConfigurationError: The plan is that of a dataset with another name.
        ConflictError: A run works on the dataset.
    """
    keys = DatasetKeys(dataset)
    try:
        plan = fetch_plan(store, keys)
    except errors.NotFoundError:
        raise errors.NotFoundError(
            f"{store.make_url(dataset)} has no plan, so garbage cannot be identified. Correct the "
            "name of the dataset, or delete the objects by hand."
        ) from None
    holder = Holder.describe_this_process()
    clock = StoreClock.read(store, dataset, holder)
    census = Census(store, dataset, "", clock)
    with Heartbeat(_LEASE_TIMEOUT) as heartbeat:
        is_leased = not exists(store, keys.manifest)
        if is_leased:
            own = LeaseKeys(dataset, COLLECTOR)
            lease = acquire(store, own, holder, _LEASE_TIMEOUT, clock)
            if isinstance(lease, HeldLease):
                raise _make_conflict_error(dataset, lease.holder)
            heartbeat.keep(lease)
            _refuse_others(dataset, census.find_holders(), holder)
        runs = Census(store, dataset, RUNS, clock)
        yield _HeldDataset(store, keys, plan, clock, holder, census, runs, is_leased)


def _refuse_others(dataset: str, held: Mapping[str, HeldLease], holder: Holder) -> None:
    """Refuse to work beside another process.

    Raises:
        ConflictError: Another process holds a lease.
    """
    for one in held.values():
        if one.holder.id != holder.id:
            raise _make_conflict_error(dataset, one.holder)


class _GarbageCheck:
    """Check of planned garbage against the present records and leases of the dataset.

    Each run holds a lease in one small folder, which is listed before each batch. So a batch costs
    one request at any number of partitions. The leases of all partitions are listed, too, since
    another program may hold one without the lease of a run. That listing is repeated after as many
    batches as it had pages, so a batch costs one page of it on average.
    """

    def __init__(self, held: _HeldDataset) -> None:
        self._held = held
        self._dataset = held.keys.dataset
        self._batches = 0  # since the last listing of all leases
        self._unreferenced = {stat.key for stat in held.iterate_unreferenced()}

    def refresh_leases(self) -> None:
        """Refuse to continue if another process holds a lease, or a lease of this process ended.

        A lease ends if this process is suspended for longer than the lease's timeout. Another run
        may have continued since, and committed objects that were garbage.

        Raises:
            ConflictError: Another process holds a lease, or a lease of this process has ended.
        """
        held = self._held
        runs = held.runs.find_holders()
        _refuse_others(self._dataset, runs, held.holder)
        self._batches += 1
        if self._batches * _LISTED_PER_BATCH >= held.census.listed:
            _refuse_others(self._dataset, held.census.find_holders(), held.holder)
            self._batches = 0
        if held.is_leased and all(one.holder.id != held.holder.id for one in runs.values()):
            raise errors.ConflictError(
                f"The lease of this process on {self._dataset} has ended: the process was "
                "suspended for too long. The remaining objects stay. Collect the garbage again."
            )

    def __call__(self, planned: PlannedObject) -> str:
        return "" if planned.key in self._unreferenced else _NAMED


def _make_conflict_error(dataset: str, holder: Holder) -> errors.ConflictError:
    return errors.ConflictError(
        f"{holder.host} (process {holder.pid}) works on {dataset}. Collect its garbage when that "
        "process has ended."
    )
