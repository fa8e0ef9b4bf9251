"""Execute a cleanup plan: delete the planned objects that are unchanged and unprotected.

Just before each batch is deleted, its objects are listed and the leases are read again. Objects
that were written since the plan, or are protected by now, stay and are reported. A write
between that listing and the delete is not seen: no known store can exclude it. A plan whose
execution was killed can be executed again: missing objects are counted and skipped.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Protocol

import orjson

from millrace import errors
from millrace.checkpoints import VerifyDepth
from millrace.cleanup.planner import Planner
from millrace.cleanup.plans import PlanEntry, PlanTally, WorkerJunk, open_plan
from millrace.cleanup.protection import ProtectionPolicy, read_store_clock
from millrace.cleanup.rules import CleanupSettings
from millrace.keys.cleanup import make_cleaning_outcome_key
from millrace.keys.kinds import ClassifiedKey, ObjectKind, classify_key
from millrace.keys.names import find_common_prefix
from millrace.progress import Event, Progress, ignore_event
from millrace.storage import (
    Backend,
    DeleteFailure,
    Stat,
    Store,
    VersionCount,
    delete,
    head,
    list_objects,
    open_store,
    put,
)

_BATCH = 1000
_MAX_BATCHES = 8
_UNIT_KINDS = {ObjectKind.CHECKPOINT, ObjectKind.DATASET}
_MAX_FAILURES = 1000  # failures after which nothing more is tried
_CHANGED = "it was written since the plan was made"
_BEFORE = "objects that have to be deleted before it are still there"
_NAMED = "Millrace names it by now"
_Unit = tuple[ObjectKind, str, int]


class DeletionCheck(Protocol):
    """Check that decides whether an object of a plan is still deleted."""

    def refresh_leases(self) -> None:
        """Forget cached leases, so that the next check reads them. Called before each batch."""
        ...

    def __call__(self, entry: PlanEntry) -> str:
        """Return why an object stays by now; empty if it can be deleted."""
        ...


@dataclass(frozen=True, slots=True)
class CleanupResult:
    """Result of executing a plan.

    Attributes:
        plan: Name of the plan.
        objects: Number of deleted objects, by the index of the rule.
        size: Bytes of the deleted objects, by the index of the rule.
        missing: Number of planned objects that were already missing.
        skipped: Number of objects that stay, by the reason.
        failures: Objects that could not be deleted.
        has_given_up: Whether the rest was not tried after too many failures.
        seconds: Duration in seconds.
        junk: Deleted junk of each worker, the largest first.
        versions: After a wipe, older versions and delete markers that are left; None if the
            credentials may not list them, or nothing was wiped.
    """

    plan: str
    objects: dict[int, int]
    size: dict[int, int]
    missing: int
    skipped: dict[str, int]
    failures: tuple[DeleteFailure, ...]
    has_given_up: bool
    seconds: float
    versions: VersionCount | None = None
    junk: tuple[WorkerJunk, ...] = ()

    @property
    def deleted_objects(self) -> int:
        """Number of deleted objects."""
        return sum(self.objects.values())

    @property
    def deleted_bytes(self) -> int:
        """Bytes that were deleted."""
        return sum(self.size.values())


@dataclass(slots=True)
class _ResultTally:
    """Running totals of an execution."""

    tally: PlanTally = field(default_factory=PlanTally)
    missing: int = 0
    failures: list[DeleteFailure] = field(default_factory=list[DeleteFailure])

    @property
    def has_given_up(self) -> bool:
        return len(self.failures) >= _MAX_FAILURES


@dataclass(frozen=True, slots=True)
class _BatchResult:
    """Result of a batch."""

    deleted_entries: list[PlanEntry]
    missing: int
    changed: int
    failures: list[DeleteFailure]

    @property
    def is_complete(self) -> bool:
        return not (self.changed or self.failures)


def execute(
    settings: CleanupSettings, plan: str, *, progress: Progress = ignore_event
) -> CleanupResult:
    """Delete the objects of a plan, except objects that have changed or are protected by now.

    Args:
        settings: The store and its related stores. The rules are those of the plan.
        plan: Name of the plan.
        progress: Told ``cleaning.deleted`` with ``objects`` and ``bytes`` so far, each batch.

    Raises:
        NotFoundError: There is no such plan.
        CorruptError: The plan is damaged. Objects before the damage are deleted.
        DeniedError, UnavailableError: A lease or a listing cannot be read.
    """
    store = open_store(settings.store, make_folder=False)
    with open_plan(store, plan) as (header, entries):
        if not header.rules:
            raise errors.ConfigurationError(
                f"{plan} is a plan to wipe all of {store.url}: wipe the store, "
                "which asks for its name."
            )
        related_stores = [open_store(spec, make_folder=False) for spec in settings.related_stores]
        if missing := set(header.related_stores) - {one.url for one in related_stores}:
            raise errors.ConfigurationError(
                f"{plan} was made with the related stores {', '.join(sorted(missing))}, whose "
                f"leases protect objects of {store.url}: name them in related_stores."
            )
        clock = read_store_clock(store)
        pins = (*header.pins, *settings.pins)
        protection = ProtectionPolicy([store, *related_stores], pins, VerifyDepth.SIZES, clock)
        planner = Planner(store, header.rules, protection, header.created_at, VerifyDepth.SIZES)
        return delete_entries(
            store, plan, entries, _FreshnessCheck(planner, related_stores), progress
        )


def delete_entries(
    store: Store,
    plan: str,
    entries: Iterator[PlanEntry],
    check: DeletionCheck,
    progress: Progress = ignore_event,
    *,
    in_phases: bool = True,
) -> CleanupResult:
    """Delete the objects of a plan that are unchanged, and write the outcome beside the plan.

    Args:
        store: Store of the objects.
        plan: Name of the plan.
        entries: Objects to delete.
        check: Check of each object. Called in the thread of the caller.
        progress: As of `execute`.
        in_phases: Whether checkpoints and datasets are deleted phase by phase. A wipe needs none.
    """
    began = time.monotonic()
    with ThreadPoolExecutor(_MAX_BATCHES, thread_name_prefix="cleaning") as pool:
        deleter = _BatchDeleter(store, pool, check, progress)
        for unit, group in groupby(entries, key=_find_unit if in_phases else lambda _: None):
            deleter.delete_group(unit, group)
            if deleter.totals.has_given_up:
                break
        deleter.await_batches(0)
    total = deleter.totals
    result = CleanupResult(
        plan=plan,
        objects=dict(total.tally.objects),
        size=dict(total.tally.size),
        missing=total.missing,
        skipped=dict(total.tally.kept),
        failures=tuple(total.failures),
        has_given_up=total.has_given_up,
        seconds=time.monotonic() - began,
        junk=total.tally.summarize_junk(),
    )
    _write_outcome(store, result)
    return result


@dataclass(slots=True)
class _BatchDeleter:
    """Deletes batches in threads, and counts the results."""

    store: Store
    pool: ThreadPoolExecutor
    check: DeletionCheck
    progress: Progress
    totals: _ResultTally = field(default_factory=_ResultTally)
    pending: deque[Future[_BatchResult]] = field(default_factory=deque[Future[_BatchResult]])
    incomplete_units: set[tuple[ObjectKind, str]] = field(
        default_factory=set[tuple[ObjectKind, str]]
    )

    def delete_group(self, unit: _Unit | None, entries: Iterable[PlanEntry]) -> None:
        """Delete single objects, or one phase of a checkpoint or dataset."""
        if unit:
            self.await_batches(0)  # results of other batches do not count for this unit
        is_complete = True
        for batch in _iterate_batches(entries):
            self.check.refresh_leases()
            deletable = [entry for entry in batch if not self._is_kept(unit, entry)]
            is_complete &= len(deletable) == len(batch)
            if deletable:
                self.pending.append(self.pool.submit(_delete_batch, self.store, deletable))
            is_complete &= self.await_batches(_MAX_BATCHES - 1)
            if self.totals.has_given_up:
                return
        if unit and not (self.await_batches(0) and is_complete):
            self.incomplete_units.add(unit[:2])

    def await_batches(self, max_pending: int) -> bool:
        """Wait until few enough batches are pending; tell whether the ended ones are complete."""
        is_complete = True
        while len(self.pending) > max_pending:
            is_complete &= _add_result(self.totals, self.pending.popleft().result())
            tally = self.totals.tally
            figures = {"objects": sum(tally.objects.values()), "bytes": sum(tally.size.values())}
            self.progress(Event("cleaning.deleted", self.store.url, figures))
        return is_complete

    def _is_kept(self, unit: _Unit | None, entry: PlanEntry) -> bool:
        reason = _BEFORE if unit and unit[:2] in self.incomplete_units else self.check(entry)
        if reason:
            self.totals.tally.kept[reason] += 1
        return bool(reason)


def _write_outcome(store: Store, result: CleanupResult) -> None:
    body = {
        "objects": {f"{index}": count for index, count in result.objects.items()},
        "size": {f"{index}": count for index, count in result.size.items()},
        "missing": result.missing,
        "skipped": result.skipped,
        "junk": result.junk,
        "failures": [{"key": one.key, "reason": one.reason} for one in result.failures],
        "has_given_up": result.has_given_up,
        "seconds": round(result.seconds, 3),
    }
    put(
        store,
        make_cleaning_outcome_key(result.plan),
        orjson.dumps(body, option=orjson.OPT_INDENT_2),
    )


class _FreshnessCheck:
    """Check of the objects of a plan against the present state of the store."""

    def __init__(self, planner: Planner, related_stores: list[Store]) -> None:
        self._planner, self._related_stores = planner, related_stores
        self._has_survey = False
        self._unit: _Unit | None = None
        self._explain_unit: Callable[[str], str] = lambda _: ""

    def refresh_leases(self) -> None:
        self._planner.protection.refresh_leases()

    def __call__(self, entry: PlanEntry) -> str:
        classified = classify_key(entry.stat.key)
        if entry.junk:
            self._survey_once()
            # A release that knows fewer names may have made the plan.
            return (
                _NAMED
                if classified
                else self._planner.explain_junk_protection(entry.stat.key, entry.junk)
            )
        unit = _find_unit(entry)
        if unit is None or classified is None:
            return self._planner.protection.explain_protection(entry.stat.key, classified)
        if unit != self._unit:
            # Checked before each phase: a new checkpoint may name the files.
            self._unit = unit
            make_check = (
                self._make_job_check
                if classified.kind is ObjectKind.CHECKPOINT
                else self._make_dataset_check
            )
            self._explain_unit = make_check(classified.scope, entry.phase)
        return self._explain_use(classified, entry.phase) or self._explain_unit(entry.stat.key)

    def _explain_use(self, classified: ClassifiedKey, phase: int) -> str:
        """Return who uses the checkpoint or dataset of an object; empty if nobody does."""
        protection = self._planner.protection
        if reason := protection.describe_holder(classified.scope):
            return reason
        # An object without a phase is an orphan: no manifest names it, so nobody trains on it.
        return (
            protection.describe_training_campaign(classified.scope)
            if classified.kind is ObjectKind.DATASET and phase
            else ""
        )

    def _survey_once(self) -> None:
        if not self._has_survey:
            self._planner.survey_stores(self._related_stores)
            self._has_survey = True

    def _make_job_check(self, job: str, phase: int) -> Callable[[str], str]:
        self._survey_once()
        deletable = (
            self._planner.find_unreferenced_keys(job)
            if phase
            else self._planner.list_deletable_keys(job)
        )
        present = self._planner.list_keys(job)
        # Missing objects were deleted by an earlier execution of this plan.
        return lambda key: (
            "a checkpoint or a run needs it by now" if key in present - deletable else ""
        )

    def _make_dataset_check(self, dataset: str, phase: int) -> Callable[[str], str]:
        if self._planner.protection.has_pins_below(f"{dataset}/"):
            return lambda _: "it is pinned"
        if phase:
            changed = self._planner.explain_change(dataset)
            return lambda _: changed
        try:
            names = self._planner.list_referenced_keys(dataset)
        except errors.CorruptError as error:
            reason = str(error)
            return lambda _: reason
        return lambda key: "its dataset names it by now" if key in names else ""


def _find_unit(entry: PlanEntry) -> _Unit | None:
    """Return the checkpoint or dataset, and the phase, that an object is deleted with."""
    classified = classify_key(entry.stat.key)
    if classified is None or classified.kind not in _UNIT_KINDS:
        return None
    return classified.kind, classified.scope, entry.phase


def _iterate_batches(entries: Iterable[PlanEntry]) -> Iterator[list[PlanEntry]]:
    remaining = iter(entries)
    while batch := list(islice(remaining, _BATCH)):
        yield batch


def _delete_batch(store: Store, entries: list[PlanEntry]) -> _BatchResult:
    present = _list_present(store, sorted(entry.stat.key for entry in entries))
    found = [(entry, present.get(entry.stat.key)) for entry in entries]
    same = [entry for entry, stat in found if stat is not None and _is_same(entry.stat, stat)]
    missing = sum(stat is None for _, stat in found)
    failures = delete(store, [entry.stat.key for entry in same])
    failed = {failure.key for failure in failures}
    deleted = [entry for entry in same if entry.stat.key not in failed]
    return _BatchResult(deleted, missing, len(entries) - missing - len(same), failures)


def _list_present(store: Store, keys: list[str]) -> dict[str, Stat]:
    """Return the objects that exist, by key. The keys are sorted."""
    if store.location.backend is Backend.FILE:  # its listing has no order
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


def _add_result(totals: _ResultTally, result: _BatchResult) -> bool:
    """Add the result of a batch to the totals; tell whether all of the batch is deleted."""
    for entry in result.deleted_entries:
        totals.tally.add_entry(entry)
    totals.missing += result.missing
    if result.changed:
        totals.tally.kept[_CHANGED] += result.changed
    totals.failures += result.failures
    return result.is_complete
