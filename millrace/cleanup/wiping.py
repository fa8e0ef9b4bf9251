"""Wipe a store: all that is below its URL, after a person has typed its name."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import PurePosixPath

from millrace import errors
from millrace.checkpoints import VerifyDepth
from millrace.cleanup.executor import Cleaned, delete_entries
from millrace.cleanup.planner import listed, new_name
from millrace.cleanup.plans import (
    CleaningPlan,
    Entry,
    PlanHeader,
    Tally,
    open_plan,
    write_plan,
)
from millrace.cleanup.protection import Guard, clock_of
from millrace.cleanup.stale_uploads import abort_uploads
from millrace.keys import CLEANING, ObjectKind, RentalKeys, classify_key, rental_of
from millrace.lease import StoreClock
from millrace.progress import Progress, silent
from millrace.storage import (
    Backend,
    DeleteFailure,
    Location,
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


def name_to_type(location: Location) -> str:
    """Return the text that a person types to have a store wiped: the bucket, and a prefix."""
    if location.backend is Backend.FILE:
        return PurePosixPath(location.bucket).name
    return f"{location.bucket}/{location.prefix}" if location.prefix else location.bucket


@dataclass(frozen=True, slots=True)
class Contents:
    """Objects, older versions and delete markers below a store's URL.

    Attributes:
        url: URL of the store.
        objects: Number of objects.
        size: Bytes of the objects.
        versions: Older versions and delete markers; None if the credentials may not list them.
    """

    url: str
    objects: int
    size: int
    versions: VersionCount | None


def survey_wiping(spec: StoreSpec, *, progress: Progress = silent) -> Contents:
    """Count what a wipe would delete. Writes nothing.

    Args:
        spec: Store to look at.
        progress: Told ``cleaning.seen`` with ``objects``, now and then.

    Raises:
        HeldError: Somebody works with what is there: end that first.
    """
    store = open_store(spec, make_folder=False)
    # This machine's clock: to read the store's takes a write.
    guard = Guard([store], (), VerifyDepth.SIZES, StoreClock.of_this_machine())
    objects = size = 0
    for entry in _all(store, guard, progress):
        objects += 1
        size += entry.stat.size
    return Contents(store.url, objects, size, _versions_of(store))


def _versions_of(store: Store) -> VersionCount | None:
    try:
        return count_versions(store)
    except errors.DeniedError:
        return None


def plan_wiping(spec: StoreSpec, *, progress: Progress = silent) -> CleaningPlan:
    """Write down all that a store holds. Deletes nothing.

    Args:
        spec: Which, with credentials to write.
        progress: Told ``cleaning.seen`` with ``objects``, now and then.

    Raises:
        HeldError: Somebody works with what is there: end that first.
    """
    store = open_store(spec, make_folder=False)
    clock = clock_of(store)
    guard = Guard([store], (), VerifyDepth.SIZES, clock)
    now = clock.now()
    header = PlanHeader(store=store.url, made=now, rules=(), pinned=(), check=VerifyDepth.SIZES)
    tally = Tally()
    return write_plan(store, new_name(now), header, _all(store, guard, progress), tally)


def wipe(
    spec: StoreSpec,
    plan: str,
    *,
    confirm: str,
    versions: bool = False,
    progress: Progress = silent,
) -> Cleaned:
    """Delete all that was written down, the plan last, and abort what is being uploaded.

    Args:
        spec: Which, with credentials to write.
        plan: Of `plan_wiping`.
        confirm: As a person has typed it: `name_to_type`.
        versions: Delete the older versions and delete markers of a versioned bucket, too. They
            are counted in any case.
        progress: As of `millrace.cleanup.executor`.

    Raises:
        ConfigurationError: It is another name: nothing has happened.
        HeldError: Somebody works with what is there. Where that began while objects were deleted,
            the message says how many were; the others stay.
    """
    store = open_store(spec, make_folder=False)
    check_name(store.location, confirm)
    with open_plan(store, plan) as (header, entries):
        if header.rules:
            raise errors.ConfigurationError(
                f"{plan} is a plan by rules, not one of wiping: execute it as that."
            )
        guard = Guard([store], (), VerifyDepth.SIZES, clock_of(store))
        still = _Unheld(guard)
        for entry in _all(store, guard, silent):
            still.note(entry.stat.key)
        cleaned = delete_entries(store, plan, entries, still, progress, phases=False)
    if still.why:
        raise errors.HeldError(
            f"{still.why}: {cleaned.deleted} objects of {store.url} were deleted before that was "
            "seen, and the others stay. End it, then plan and wipe again."
        )
    if not cleaned.failures:
        delete(store, [stat.key for stat in list_objects(store, f"{CLEANING}/")])
    try:
        failures = abort_uploads(spec, older_than=timedelta(0), dry_run=False).failures
    except errors.DeniedError as error:
        failures = (DeleteFailure("unfinished uploads", errors.one_line(error)),)
    if versions:  # last: what was done before has left versions, too
        failures = (*failures, *_without_versions(store))
    return replace(cleaned, failures=(*cleaned.failures, *failures), versions=_versions_of(store))


class _Unheld:
    """Lets objects go as long as nobody works with what is left.

    Attributes:
        why: Who does; empty while nobody was seen.
    """

    def __init__(self, guard: Guard) -> None:
        self.why = ""
        self._guard = guard
        self._scopes: set[str] = set()

    def note(self, key: str) -> None:
        """Remember the scopes that there are, which objects of other kinds may lie below."""
        if what := classify_key(key):
            self._scopes |= {what.scope, what.lease_scope}

    def look_again(self) -> None:
        self._guard.look_again()

    def __call__(self, entry: Entry) -> str:
        self.why = self.why or self._held(entry.stat.key)
        return self.why

    def _held(self, key: str) -> str:
        what = classify_key(key)
        if what is not None and what.scope:
            if (why := self._guard.live(what.lease_scope)) or what.kind is not ObjectKind.DATASET:
                return why
            return self._guard.needed_by(what.scope)
        folders = (str(folder) for folder in PurePosixPath(key).parents)
        scope = next((folder for folder in folders if folder in self._scopes), "")
        return self._guard.live(scope) if scope else ""


def _without_versions(store: Store) -> list[DeleteFailure]:
    try:
        # A version without the delete marker above it would be an object again: markers go last.
        versions = (one for one in list_versions(store) if not one.is_marker)
        if failures := delete_versions(store, versions):
            return failures
        return delete_versions(store, list_versions(store))
    except errors.DeniedError as error:
        return [DeleteFailure("older versions", errors.one_line(error))]


def check_name(location: Location, typed: str) -> None:
    """Refuse another name than the store's.

    Raises:
        ConfigurationError: It is another.
    """
    wanted = name_to_type(location)
    if typed != wanted:
        raise errors.ConfigurationError(
            f"{typed!r} is not the name of {location}: nothing was deleted. To wipe it, type "
            f"{wanted}"
        )


def _all(store: Store, guard: Guard, progress: Progress) -> Iterator[Entry]:
    """Yield all that is to be deleted.

    Raises:
        HeldError: Somebody works there, or a machine that was rented is not given back: without
            what is written down of it, nobody could.
    """
    seen: set[str] = set()
    out: dict[str, set[int]] = {}
    for stat in listed(store, "", progress):
        _note(stat.key, out)
        what = classify_key(stat.key)
        if what is not None and what.kind is ObjectKind.RECORD and what.scope not in seen:
            seen.add(what.scope)
            if why := guard.live(what.scope):
                raise errors.HeldError(f"{why}: end it before {store.url} is wiped.")
        if not stat.key.startswith(f"{CLEANING}/"):
            yield Entry(stat, 0)
    if rented := [name for name, numbers in sorted(out.items()) if numbers]:
        raise errors.HeldError(
            f"{store.url} is where the machines of {', '.join(rented)} are written down, "
            "which are not given back: release them, or let `millrace reap` close what is gone; "
            "then wipe."
        )


def _note(key: str, out: dict[str, set[int]]) -> None:
    """Note of a rental's attempt whether it is out; an attempt's keys are listed in this order."""
    rental = rental_of(key)
    parsed = RentalKeys(rental).parse(key) if rental else None
    if rental is not None and parsed is not None:
        number, part = parsed
        if part == "intent":
            out.setdefault(rental, set()).add(number)
        elif part == "returned":
            out.setdefault(rental, set()).discard(number)
