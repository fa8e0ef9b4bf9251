"""Delete planned objects, and abort planned uploads that are unfinished.

Just before each batch is deleted, its objects are checked and listed again. An object stays if the
check keeps it, or if it was written since the plan. Missing objects are counted. A write between
the listing and the delete is not noticed: no known store can exclude such a write.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from itertools import groupby, islice
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from millrace import errors
from millrace.keys.names import find_common_prefix
from millrace.progress import Event, Progress, ignore_event
from millrace.storage import (
    Backend,
    ObjectFailure,
    Stat,
    Store,
    UnfinishedUpload,
    abort_upload,
    delete,
    head,
    list_objects,
    list_uploads,
    measure_upload,
)

_BATCH = 1000
_MAX_BATCHES = 8
_MAX_FAILURES = 1000  # failures that end the deletion
_CHANGED = "it was written since the plan was made"
_BEFORE = "objects that have to be deleted before it are still there"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectsDeleted(Event):
    """Event after each batch of a deletion.

    Attributes:
        store: URL of the store.
        objects: Number of objects that were deleted so far.
        size: Bytes of these objects.
    """

    kind: ClassVar[str] = "cleaning.deleted"

    store: str
    objects: int
    size: int


@dataclass(frozen=True, slots=True)
class PlannedObject:
    """Object to delete.

    Attributes:
        stat: Description of the object when the plan was made.
    """

    stat: Stat

    @property
    def key(self) -> str:
        """Key of the object."""
        return self.stat.key

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.stat.size


PlannedT = TypeVar("PlannedT", bound=PlannedObject)
_CheckedT_contra = TypeVar("_CheckedT_contra", bound=PlannedObject, contravariant=True)


class DeletionPhase(NamedTuple):
    """Phase in which an object of a checkpoint or dataset is deleted.

    Attributes:
        unit: Checkpoint or dataset.
        number: Number of the phase. If an object of a phase stays, all objects of later phases
            stay, too.
    """

    unit: Hashable
    number: int


class DeletionCheck(Protocol[_CheckedT_contra]):
    """Check whether an object of a plan may still be deleted."""

    def refresh_leases(self) -> None:
        """Forget cached leases, so that the next check reads the leases again.

        The deletion calls this method before each batch.
        """
        ...

    def __call__(self, planned: _CheckedT_contra, /) -> str:
        """Return the reason to keep an object; empty if it can be deleted."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionResult:
    """Result of deleting planned objects.

    Attributes:
        deleted_objects: Number of deleted objects.
        deleted_bytes: Bytes of the deleted objects.
        missing: Number of planned objects that were already missing.
        skipped: Number of kept objects, by the reason.
        failures: Objects that could not be deleted.
        has_given_up: Whether too many failures ended the deletion.
    """

    deleted_objects: int
    deleted_bytes: int
    missing: int
    skipped: dict[str, int]
    failures: tuple[ObjectFailure, ...]
    has_given_up: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes of this class by name, without those of a derived class."""
        return {one.name: getattr(self, one.name) for one in fields(DeletionResult)}


def delete_planned(
    store: Store,
    planned: Iterable[PlannedT],
    *,
    check: DeletionCheck[PlannedT] | None = None,
    find_phase: Callable[[PlannedT], DeletionPhase | None] = lambda _: None,
    count: Callable[[PlannedT], None] = lambda _: None,
    max_batches: int | None = None,
    progress: Progress = ignore_event,
) -> DeletionResult:
    """Delete planned objects in batches of 1,000.

    Args:
        store: Store of the objects.
        planned: Objects in the order in which they are deleted.
        check: Check of each object, called in the thread of the caller. Its exceptions end the
            deletion; batches that have begun are completed.
        find_phase: Function that returns the phase of an object; None for a single object.
        count: Function that is called with each deleted object, in the thread of the caller.
        max_batches: Number of batches that are deleted at once; by default eight.
        progress: Callback. It receives `ObjectsDeleted` after each batch.

    Raises:
        DeniedError, UnavailableError: A listing cannot be read.
    """
    max_batches = max_batches or _MAX_BATCHES
    with ThreadPoolExecutor(max_batches, thread_name_prefix="cleaning") as pool:
        deleter = _BatchDeleter(store, pool, max_batches, check, count, progress, deque())
        for phase, group in groupby(planned, key=find_phase):
            deleter.delete_group(phase, group)
            if deleter.has_given_up:
                break
        deleter.await_batches(0)
    return deleter.make_result()


@dataclass(frozen=True, slots=True)
class _BatchResult(Generic[PlannedT]):
    """Result of a batch."""

    deleted: list[PlannedT]
    missing: int
    changed: int
    failures: list[ObjectFailure]

    @property
    def is_complete(self) -> bool:
        return not (self.changed or self.failures)


@dataclass(slots=True)
class _BatchDeleter(Generic[PlannedT]):
    """Deleter of batches in threads, which counts the results."""

    store: Store
    pool: ThreadPoolExecutor
    max_batches: int
    check: DeletionCheck[PlannedT] | None
    count: Callable[[PlannedT], None]
    progress: Progress
    pending: deque[Future[_BatchResult[PlannedT]]]
    objects: int = 0
    size: int = 0
    missing: int = 0
    skipped: Counter[str] = field(default_factory=Counter[str])
    failures: list[ObjectFailure] = field(default_factory=list[ObjectFailure])
    incomplete_units: set[Hashable] = field(default_factory=set[Hashable])

    @property
    def has_given_up(self) -> bool:
        return len(self.failures) >= _MAX_FAILURES

    def delete_group(self, phase: DeletionPhase | None, planned: Iterable[PlannedT]) -> None:
        """Delete single objects, or one phase of a checkpoint or dataset."""
        if phase:
            self.await_batches(0)  # results of other batches do not count for this unit
        is_complete = True
        for batch in _iterate_batches(planned):
            if self.check:
                self.check.refresh_leases()
            deletable = [one for one in batch if not self._is_kept(phase, one)]
            is_complete &= len(deletable) == len(batch)
            if deletable:
                self.pending.append(self.pool.submit(_delete_batch, self.store, deletable))
            is_complete &= self.await_batches(self.max_batches - 1)
            if self.has_given_up:
                return
        if phase and not (self.await_batches(0) and is_complete):
            self.incomplete_units.add(phase.unit)

    def await_batches(self, max_pending: int) -> bool:
        """Wait until few batches are pending; return whether all that ended are complete."""
        is_complete = True
        while len(self.pending) > max_pending:
            result = self.pending.popleft().result()
            self._add_result(result)
            is_complete &= result.is_complete
            self.progress(
                ObjectsDeleted(store=self.store.url, objects=self.objects, size=self.size)
            )
        return is_complete

    def make_result(self) -> DeletionResult:
        """Return the result of all batches so far."""
        return DeletionResult(
            deleted_objects=self.objects,
            deleted_bytes=self.size,
            missing=self.missing,
            skipped=dict(self.skipped),
            failures=tuple(self.failures),
            has_given_up=self.has_given_up,
        )

    def _is_kept(self, phase: DeletionPhase | None, planned: PlannedT) -> bool:
        if phase and phase.unit in self.incomplete_units:
            reason = _BEFORE
        else:
            reason = self.check(planned) if self.check else ""
        if reason:
            self.skipped[reason] += 1
        return bool(reason)

    def _add_result(self, result: _BatchResult[PlannedT]) -> None:
        for one in result.deleted:
            self.objects += 1
            self.size += one.size
            self.count(one)
        self.missing += result.missing
        if result.changed:
            self.skipped[_CHANGED] += result.changed
        self.failures += result.failures


def _iterate_batches(planned: Iterable[PlannedT]) -> Iterator[list[PlannedT]]:
    remaining = iter(planned)
    while batch := list(islice(remaining, _BATCH)):
        yield batch


def _delete_batch(store: Store, planned: list[PlannedT]) -> _BatchResult[PlannedT]:
    present = _list_present(store, sorted(one.key for one in planned))
    found = [(one, present.get(one.key)) for one in planned]
    same = [one for one, stat in found if stat is not None and _is_same(one.stat, stat)]
    missing = sum(stat is None for _, stat in found)
    failures = delete(store, [one.key for one in same])
    failed = {failure.key for failure in failures}
    deleted = [one for one in same if one.key not in failed]
    return _BatchResult(deleted, missing, len(planned) - missing - len(same), failures)


def _list_present(store: Store, keys: list[str]) -> dict[str, Stat]:
    """Return the objects that exist, by key. The keys are sorted."""
    if store.location.backend is Backend.FILE:  # the listing of a folder has no order
        return dict(_iterate_heads(store, keys))
    wanted, last = set(keys), keys[-1]
    found: dict[str, Stat] = {}
    prefix = find_common_prefix((keys[0], last))
    exact = any(key.endswith("/") for key in keys)
    for stat in list_objects(store, prefix, after=keys[0][:-1], exact=exact):
        if stat.key in wanted:
            found[stat.key] = stat
        if stat.key >= last:
            break
    return found


def _iterate_heads(store: Store, keys: list[str]) -> Iterator[tuple[str, Stat]]:
    for key in keys:
        try:
            yield key, head(store, key)
        except errors.NotFoundError:
            continue


def _is_same(planned: Stat, now: Stat) -> bool:
    return (planned.etag, planned.size, planned.last_modified) == (
        now.etag,
        now.size,
        now.last_modified,
    )


@dataclass(frozen=True, slots=True)
class StaleUpload(UnfinishedUpload):
    """Unfinished upload to abort.

    Attributes:
        size: Billed bytes when the upload was found.
    """

    size: int


@dataclass(frozen=True, slots=True)
class StaleUploads:
    """Unfinished uploads that are old enough to be aborted.

    Attributes:
        uploads: Uploads to abort.
        recent: Number of younger uploads.
        failures: Uploads that could not be measured or aborted.
        is_aborted: Whether the uploads were aborted, or only found.
    """

    uploads: tuple[StaleUpload, ...]
    recent: int
    failures: tuple[ObjectFailure, ...]
    is_aborted: bool = False

    @property
    def successes(self) -> tuple[StaleUpload, ...]:
        """Uploads without a failure."""
        failed = {failure.key for failure in self.failures}
        return tuple(one for one in self.uploads if one.key not in failed)

    @property
    def size(self) -> int:
        """Bytes of the uploads without a failure."""
        return sum(one.size for one in self.successes)


def find_stale_uploads(
    store: Store,
    before: datetime,
    *,
    prefix: str = "",
    is_included: Callable[[UnfinishedUpload], bool] = lambda _: True,
) -> StaleUploads:
    """Find the unfinished uploads that began before a time, and abort none.

    Args:
        store: Store of the uploads, with credentials to write.
        before: Time by the store's clock.
        prefix: Text that the keys start with.
        is_included: Function that selects the uploads.

    Raises:
        DeniedError: The credentials may not list uploads.
    """
    uploads: list[StaleUpload] = []
    failures: list[ObjectFailure] = []
    recent = 0
    for one in list_uploads(store, prefix):
        if not is_included(one):
            continue
        if one.started_at >= before:
            recent += 1
            continue
        size = 0
        try:
            size = measure_upload(store, one)
        except errors.MillraceError as error:
            failures.append(ObjectFailure(one.key, errors.format_error(error)))
        uploads.append(StaleUpload(one.key, one.id, one.started_at, size))
    return StaleUploads(tuple(uploads), recent, tuple(failures))


def abort_uploads(store: Store, found: StaleUploads) -> StaleUploads:
    """Abort the uploads that `find_stale_uploads` found, and no others.

    Returns:
        The same uploads, with those that could not be aborted as failures.
    """
    failures = list(found.failures)
    for one in found.successes:
        try:
            abort_upload(store, one)
        except errors.MillraceError as error:
            failures.append(ObjectFailure(one.key, errors.format_error(error)))
    return replace(found, failures=tuple(failures), is_aborted=True)
