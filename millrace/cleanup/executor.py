"""Execute a cleanup plan: delete the planned objects that are unchanged and unprotected.

Just before each batch is deleted, its objects are listed and the leases are read again. Objects
that were written since the plan, or are protected by now, stay and are reported. A plan whose
execution was killed can be executed again: missing objects are counted and skipped.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import orjson

from millrace import errors
from millrace.checkpoints import VerifyDepth
from millrace.checkpoints.retention import NewCheckpointCheck
from millrace.cleanup.planner import Planner
from millrace.cleanup.plans import PlanEntry, PlanTally, WorkerJunk, open_plan
from millrace.cleanup.protection import ProtectionPolicy, read_store_clock
from millrace.cleanup.rules import CleanupSettings
from millrace.deletion import DeletionCheck, DeletionPhase, DeletionResult, delete_planned
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.cleanup import make_cleaning_outcome_key
from millrace.keys.kinds import ClassifiedKey, ObjectKind, classify_key
from millrace.progress import Progress, ignore_event
from millrace.storage import Store, VersionCount, open_store, put

_UNIT_KINDS = {ObjectKind.CHECKPOINT, ObjectKind.DATASET}
_NAMED = "Millrace names it by now"


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanupResult(DeletionResult):
    """Result of executing a plan.

    Attributes:
        plan: Name of the plan.
        objects: Number of deleted objects, by the index of the rule.
        size: Bytes of the deleted objects, by the index of the rule.
        seconds: Duration in seconds.
        versions: After a wipe, older versions and delete markers that are left; None if the
            credentials may not list them, or nothing was wiped.
        junk: Deleted junk of each worker, the largest first.
    """

    plan: str
    objects: dict[int, int]
    size: dict[int, int]
    seconds: float
    versions: VersionCount | None = None
    junk: tuple[WorkerJunk, ...] = ()


def execute(
    settings: CleanupSettings, plan: str, *, progress: Progress = ignore_event
) -> CleanupResult:
    """Delete the objects of a plan, except objects that have changed or are protected by now.

    Args:
        settings: The store and its related stores. The rules are those of the plan.
        plan: Name of the plan.
        progress: Receives `ObjectsDeleted` after each batch.

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
    check: DeletionCheck[PlanEntry],
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
    tally = PlanTally()
    deletion = delete_planned(
        store,
        entries,
        check=check,
        find_phase=_find_phase if in_phases else lambda _: None,
        count=tally.add_entry,
        progress=progress,
    )
    result = CleanupResult(
        **deletion.to_dict(),
        plan=plan,
        objects=dict(tally.objects),
        size=dict(tally.size),
        seconds=time.monotonic() - began,
        junk=tally.summarize_junk(),
    )
    _write_outcome(store, result)
    return result


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
        self._phase: DeletionPhase | None = None
        self._explain_unit: Callable[[str], str] = lambda _: ""
        self._new_checkpoints: NewCheckpointCheck | None = None

    def refresh_leases(self) -> None:
        self._planner.protection.refresh_leases()
        if self._new_checkpoints is not None:
            self._new_checkpoints.refresh_leases()

    def __call__(self, entry: PlanEntry) -> str:
        classified = classify_key(entry.key)
        if entry.junk:
            self._survey_once()
            # A release that knows fewer names may have made the plan.
            return (
                _NAMED
                if classified
                else self._planner.explain_junk_protection(entry.key, entry.junk)
            )
        phase = _find_phase(entry)
        if phase is None or classified is None:
            return self._planner.explain_object_protection(entry.key, classified)
        if phase != self._phase:
            # Checked before each phase: a new checkpoint may name the files.
            self._phase, self._new_checkpoints = phase, None
            make_check = (
                self._make_job_check
                if classified.kind is ObjectKind.CHECKPOINT
                else self._make_dataset_check
            )
            self._explain_unit = make_check(classified.scope, entry.phase)
        reason = self._explain_use(classified, entry.phase) or self._explain_unit(entry.key)
        if not reason and self._new_checkpoints is not None:
            reason = self._new_checkpoints(entry)
        return reason

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
            self._planner.checkpoints.find_unreferenced_keys(job)
            if phase
            else self._planner.checkpoints.list_deletable_keys(job)
        )
        if phase:  # a step may be saved again between two batches of its files
            store = self._planner.checkpoints.store
            self._new_checkpoints = NewCheckpointCheck(store, CheckpointKeys(job))
        present = self._planner.checkpoints.list_keys(job)
        # Missing objects were deleted by an earlier execution of this plan.
        return lambda key: (
            "a checkpoint or a run needs it by now" if key in present - deletable else ""
        )

    def _make_dataset_check(self, dataset: str, phase: int) -> Callable[[str], str]:
        if self._planner.protection.has_pins_below(f"{dataset}/"):
            return lambda _: "it is pinned"
        if phase:
            changed = self._planner.datasets.explain_change(dataset)
            return lambda _: changed
        try:
            names = self._planner.datasets.list_referenced_keys(dataset)
        except errors.CorruptError as error:
            reason = str(error)
            return lambda _: reason
        return lambda key: "its dataset names it by now" if key in names else ""


def _find_phase(entry: PlanEntry) -> DeletionPhase | None:
    """Return the checkpoint or dataset, and the phase, that an object is deleted with."""
    classified = classify_key(entry.key)
    if classified is None or classified.kind not in _UNIT_KINDS:
        return None
    return DeletionPhase((classified.kind, classified.scope), entry.phase)
