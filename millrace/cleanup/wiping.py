"""Wipe a store: delete all objects below its URL after a person has typed its name."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import PurePosixPath

from millrace import errors
from millrace.checkpoints import VerifyDepth
from millrace.cleanup.executor import CleanupResult, delete_entries
from millrace.cleanup.planner import list_with_progress, make_plan_name, refuse_root
from millrace.cleanup.plans import (
    CleanupPlan,
    PlanEntry,
    PlanHeader,
    PlanTally,
    open_plan,
    write_plan,
)
from millrace.cleanup.protection import ProtectionPolicy, find_path, read_store_clock
from millrace.cleanup.stale_uploads import abort_uploads, find_stale_uploads
from millrace.cleanup.usage import ObjectFilter
from millrace.keys.cleanup import CLEANING
from millrace.keys.kinds import ObjectKind, WorkerPrefixes, classify_nested_key
from millrace.keys.rentals import (
    MACHINES,
    RENTALS,
    AttemptSurvey,
    RentalKeys,
    split_nested_key,
)
from millrace.lease import StoreClock
from millrace.progress import Progress, ignore_event
from millrace.storage import (
    Backend,
    Location,
    ObjectFailure,
    Store,
    StoreSpec,
    VersionCount,
    count_versions,
    delete,
    delete_versions,
    list_objects,
    list_versions,
    open_store,
)
from millrace.storage.folders import UnlistedEntry


def make_confirmation(location: Location) -> str:
    """Return the text that confirms a wipe: the bucket, and the prefix if there is one."""
    if location.backend is Backend.FILE:
        return PurePosixPath(location.bucket).name
    return f"{location.bucket}/{location.prefix}" if location.prefix else location.bucket


@dataclass(frozen=True, slots=True)
class StoreContents:
    """Objects, older versions and delete markers below a store's URL.

    Attributes:
        url: URL of the store.
        objects: Number of objects.
        size: Bytes of the objects.
        versions: Older versions and delete markers; None if the credentials may not list them.
        unlisted: Entries of a folder that are no objects of it, and that no wipe deletes.
    """

    url: str
    objects: int
    size: int
    versions: VersionCount | None
    unlisted: tuple[UnlistedEntry, ...] = ()


def survey_wipe(spec: StoreSpec, *, progress: Progress = ignore_event) -> StoreContents:
    """Count what a wipe would delete. Writes nothing.

    Args:
        spec: Store to survey.
        progress: Receives `ObjectsListed` after each 10,000 objects.

    Raises:
        ConfigurationError: The store is the root of the file system.
        HeldError: A process holds a lease in the store: end the process first.
    """
    store = open_store(spec, make_folder=False)
    refuse_root(store)
    # The clock of this machine is used, because reading that of the store needs a write.
    protection = ProtectionPolicy([store], (), VerifyDepth.SIZES, StoreClock.read_machine_clock())
    objects = size = 0
    for entry in _iterate_entries(store, protection, progress):
        objects += 1
        size += entry.size
    unlisted = tuple(ObjectFilter().list_unlisted(store))
    return StoreContents(store.url, objects, size, count_older_versions(store), unlisted)


def count_older_versions(store: Store) -> VersionCount | None:
    """Count the older versions and delete markers; None if the credentials may not list them."""
    try:
        return count_versions(store)
    except errors.DeniedError:
        return None


def plan_wipe(spec: StoreSpec, *, progress: Progress = ignore_event) -> CleanupPlan:
    """Write a plan of all objects of a store. Deletes nothing.

    Args:
        spec: Store to wipe, with credentials to write.
        progress: Receives `ObjectsListed` after each 10,000 objects.

    Raises:
        ConfigurationError: The store is the root of the file system.
        HeldError: A process holds a lease in the store: end the process first.
    """
    store = open_store(spec, make_folder=False)
    refuse_root(store)
    clock = read_store_clock(store)
    protection = ProtectionPolicy([store], (), VerifyDepth.SIZES, clock)
    now = clock.now()
    header = PlanHeader(store=store.url, created_at=now, rules=(), pins=(), check=VerifyDepth.SIZES)
    tally = PlanTally()
    return write_plan(
        store, make_plan_name(now), header, _iterate_entries(store, protection, progress), tally
    )


def wipe(
    spec: StoreSpec,
    plan: str,
    *,
    confirm: str,
    versions: bool = False,
    progress: Progress = ignore_event,
) -> CleanupResult:
    """Delete the objects of a plan, then the plan, and abort unfinished uploads.

    Args:
        spec: Store to wipe, with credentials to write.
        plan: Name of the plan of `plan_wipe`.
        confirm: Text that a person has typed, which must equal `make_confirmation`.
        versions: Delete the older versions and delete markers of a versioned bucket, too. They
            are counted in any case.
        progress: As of `millrace.cleanup.execute`.

    Raises:
        ConfigurationError: The typed name is another. Nothing was deleted.
        HeldError: A process holds a lease in the store. If its work began during the wipe, the
            message gives the number of deleted objects; the others stay.
    """
    store = open_store(spec, make_folder=False)
    check_confirmation(store.location, confirm)
    with open_plan(store, plan) as (header, entries):
        if header.rules:
            raise errors.ConfigurationError(
                f"{plan} is a plan by rules, not a wipe: execute it as a cleanup."
            )
        protection = ProtectionPolicy([store], (), VerifyDepth.SIZES, read_store_clock(store))
        lease_check = _LeaseCheck(protection)
        for entry in _iterate_entries(store, protection, ignore_event):
            lease_check.add_scopes(entry.key)
        result = delete_entries(store, plan, entries, lease_check, progress, in_phases=False)
    if lease_check.reason:
        raise errors.HeldError(
            f"{lease_check.reason}: {result.deleted_objects} objects of {store.url} were deleted "
            "before that was seen, and the others stay. End it, then plan and wipe again."
        )
    if result.failures:
        delete_plan(store, plan)
    else:
        delete(store, [stat.key for stat in list_objects(store, f"{CLEANING}/")])
    try:
        stale_uploads = find_stale_uploads(spec, older_than=timedelta(0))
        failures = abort_uploads(spec, stale_uploads).failures
    except errors.DeniedError as error:
        failures = (ObjectFailure("unfinished uploads", errors.format_error(error)),)
    if versions:  # last, because the deletes above have left versions too
        failures = (*failures, *_delete_all_versions(store))
    return replace(
        result, failures=(*result.failures, *failures), versions=count_older_versions(store)
    )


def delete_plan(store: Store, plan: str) -> None:
    """Delete a plan that will not be executed again, and its outcome."""
    delete(store, [stat.key for stat in list_objects(store, f"{CLEANING}/{plan}/")])


class _LeaseCheck:
    """Check that stops a wipe when a process holds a lease in the store.

    Attributes:
        reason: Description of the process; empty while there is none.
    """

    def __init__(self, protection: ProtectionPolicy) -> None:
        self.reason = ""
        self._protection = protection
        self._scopes: set[str] = set()

    def add_scopes(self, key: str) -> None:
        """Record the scopes of a key, for objects of other kinds that lie below them."""
        if classified := classify_nested_key(key):
            self._scopes |= {classified.scope, classified.lease_scope}

    def refresh_leases(self) -> None:
        self._protection.refresh_leases()

    def __call__(self, entry: PlanEntry) -> str:
        self.reason = self.reason or self._explain_use(entry.key)
        return self.reason

    def _explain_use(self, key: str) -> str:
        classified = classify_nested_key(key)
        if classified is not None and classified.scope:
            reason = self._protection.describe_holder(classified.lease_scope)
            if reason or classified.kind is not ObjectKind.DATASET:
                return reason
            return self._protection.describe_training_campaign(classified.scope)
        folders = (str(folder) for folder in PurePosixPath(key).parents)
        scope = next((folder for folder in folders if folder in self._scopes), "")
        return self._protection.describe_holder(scope)


def _delete_all_versions(store: Store) -> list[ObjectFailure]:
    try:
        # A version without its delete marker would be an object again, so markers are deleted last.
        versions = (one for one in list_versions(store) if not one.is_delete_marker)
        if failures := delete_versions(store, versions):
            return failures
        return delete_versions(store, list_versions(store))
    except errors.DeniedError as error:
        return [ObjectFailure("older versions", errors.format_error(error))]


def check_confirmation(location: Location, typed: str) -> None:
    """Check that the typed text is the name of the store.

    Raises:
        ConfigurationError: The text is another, or the store has no name.
    """
    wanted = make_confirmation(location)
    if not wanted:
        raise errors.ConfigurationError(f"{location} has no name, so it cannot be wiped.")
    if typed != wanted:
        raise errors.ConfigurationError(
            f"{typed!r} is not the name of {location}: nothing was deleted. To wipe it, type "
            f"{wanted}"
        )


def _iterate_entries(
    store: Store, protection: ProtectionPolicy, progress: Progress
) -> Iterator[PlanEntry]:
    """Yield all that is to be deleted.

    Raises:
        HeldError: A process holds a lease in the store, or the store holds the ledger of rented
            machines, which could not be released without it.
    """
    seen = {""}  # the scope of the URL itself
    if holder := protection.describe_holder(""):
        raise errors.HeldError(f"{holder}: end it before {store.url} is wiped.")
    attempts, workers, ledger = AttemptSurvey(), WorkerPrefixes(), _find_ledger(store)
    for stat in list_with_progress(store, "", progress):
        attempts.note_key(f"{ledger}{stat.key}")
        workers.learn(stat.key)
        classified = classify_nested_key(stat.key)
        if (
            classified is not None
            and classified.kind is ObjectKind.RECORD
            and classified.scope not in seen
        ):
            seen.add(classified.scope)
            if holder := protection.describe_holder(classified.scope):
                raise errors.HeldError(f"{holder}: end it before {store.url} is wiped.")
        if not stat.key.startswith(f"{CLEANING}/"):
            yield PlanEntry(stat, 0)
    if rented := _list_unreleased(attempts, workers):
        raise errors.HeldError(
            f"{store.url} holds the ledger of {', '.join(rented)}, whose machines are not "
            "released: release them, or let `millrace machine reap` close destroyed ones; then "
            "wipe."
        )


def _find_ledger(store: Store) -> str:
    """Return the folders of a URL from the ledger of rentals on; empty for a URL beside it."""
    path = split_nested_key(find_path(store))[1]
    return path if path.startswith((f"{RENTALS}/", f"{MACHINES}/")) else ""


def _list_unreleased(attempts: AttemptSurvey, workers: WorkerPrefixes) -> list[str]:
    """Return the rentals with a machine that is not released.

    A ledger below a worker's own prefix does not count, since the worker can write any name.
    """
    rentals = sorted({(prefix, keys.name) for prefix, keys, _ in attempts.find_open()})
    return [
        f"{rental} below {prefix}" if prefix else rental
        for prefix, rental in rentals
        if workers.find(f"{prefix}{RentalKeys(rental).attempts}") is None
    ]
