"""Execute a plan of cleaning: the very plan that was shown, and of it only what is still so.

Just before each batch is deleted its objects are listed and the leases are read again. What was
written since the plan, or is protected by now, stays, and is said. Between that listing and the
delete no store that we know can promise more. Killed at any time, the same plan can be executed
again: what is gone is gone.
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
from millrace.cleanup.planner import Judge
from millrace.cleanup.plans import Entry, Tally, WorkerJunk, open_plan
from millrace.cleanup.protection import Guard, clock_of
from millrace.cleanup.rules import CleanSettings
from millrace.keys import (
    ClassifiedKey,
    ObjectKind,
    classify_key,
    cleaning_outcome_key,
    find_common_prefix,
)
from millrace.progress import Event, Progress, silent
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
_AT_ONCE = 8
_WHOLE = {ObjectKind.CHECKPOINT, ObjectKind.DATASET}
_ENOUGH = 1000  # failures after which nothing more is tried
_CHANGED = "it was written since the plan was made"
_BEFORE = "what has to go before it is still there"
_NAMED = "Millrace names it by now"
_Unit = tuple[ObjectKind, str, int]


class Still(Protocol):
    """Decides of each object of a plan whether it still goes."""

    def look_again(self) -> None:
        """Read the leases anew from now on. Called before each batch."""
        ...

    def __call__(self, entry: Entry) -> str:
        """Say why an object stays by now; empty if it goes."""
        ...


@dataclass(frozen=True, slots=True)
class Cleaned:
    """Result of executing a plan.

    Attributes:
        plan: Its name.
        objects: That were deleted, by the place of the rule that took them.
        size: Their bytes, likewise.
        gone: Objects of the plan that were not there any more.
        skipped: Objects that stay, by why.
        failures: Those that could not be deleted.
        given_up: Whether so many could not that the rest was not tried.
        seconds: How long it took.
        junk: Junk of workers that was deleted, by the worker: the largest first.
        versions: After a wipe, older versions and delete markers that are left; None if the
            credentials may not list them, or nothing was wiped.
    """

    plan: str
    objects: dict[int, int]
    size: dict[int, int]
    gone: int
    skipped: dict[str, int]
    failures: tuple[DeleteFailure, ...]
    given_up: bool
    seconds: float
    versions: VersionCount | None = None
    junk: tuple[WorkerJunk, ...] = ()

    @property
    def deleted(self) -> int:
        """Number of deleted objects."""
        return sum(self.objects.values())

    @property
    def freed(self) -> int:
        """Bytes that were deleted."""
        return sum(self.size.values())


@dataclass(slots=True)
class _Sum:
    """Result of a plan so far."""

    tally: Tally = field(default_factory=Tally)
    gone: int = 0
    failures: list[DeleteFailure] = field(default_factory=list[DeleteFailure])

    @property
    def given_up(self) -> bool:
        return len(self.failures) >= _ENOUGH


@dataclass(frozen=True, slots=True)
class _Done:
    """Result of a batch."""

    deleted: list[Entry]
    gone: int
    changed: int
    failures: list[DeleteFailure]

    @property
    def whole(self) -> bool:
        return not (self.changed or self.failures)


def execute(settings: CleanSettings, plan: str, *, progress: Progress = silent) -> Cleaned:
    """Delete what a plan says, but for what is another by now, or protected.

    Args:
        settings: Where, and what is beside it. The rules are the plan's.
        plan: The plan's name.
        progress: Told ``cleaning.deleted`` with ``objects`` and ``bytes`` so far, each batch.

    Raises:
        NotFoundError: There is no such plan.
        CorruptError: It is damaged: what stood before the damage is deleted.
        DeniedError, UnavailableError: A lease cannot be read, or a listing.
    """
    store = open_store(settings.store, make_folder=False)
    with open_plan(store, plan) as (header, entries):
        if not header.rules:
            raise errors.ConfigurationError(
                f"{plan} is a plan of wiping all of {store.url}: that asks for its name."
            )
        beside = [open_store(spec, make_folder=False) for spec in settings.beside]
        if missing := set(header.beside) - {one.url for one in beside}:
            raise errors.ConfigurationError(
                f"{plan} was made with {', '.join(sorted(missing))} beside {store.url}: name it, "
                "as leases there protect what is here."
            )
        clock = clock_of(store)
        pinned = (*header.pinned, *settings.pinned)
        guard = Guard([store, *beside], pinned, VerifyDepth.SIZES, clock)
        judge = Judge(store, header.rules, guard, header.made, VerifyDepth.SIZES)
        return delete_entries(store, plan, entries, _Still(judge, beside), progress)


def delete_entries(
    store: Store,
    plan: str,
    entries: Iterator[Entry],
    still: Still,
    progress: Progress = silent,
    *,
    phases: bool = True,
) -> Cleaned:
    """Delete what is listed as it was planned, and write down what became of it.

    Args:
        store: Where.
        plan: The plan's name.
        entries: What is to go.
        still: Says why one stays by now. Called in the thread of the caller.
        progress: As of `execute`.
        phases: Whether what goes whole goes in its phases; not where all goes.
    """
    began = time.monotonic()
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="cleaning") as pool:
        work = _Work(store, pool, still, progress)
        for unit, group in groupby(entries, key=_unit if phases else lambda _: None):
            work.group(unit, group)
            if work.sum.given_up:
                break
        work.settle(0)
    total = work.sum
    cleaned = Cleaned(
        plan=plan,
        objects=dict(total.tally.objects),
        size=dict(total.tally.size),
        gone=total.gone,
        skipped=dict(total.tally.kept),
        failures=tuple(total.failures),
        given_up=total.given_up,
        seconds=time.monotonic() - began,
        junk=total.tally.junk(),
    )
    _write_down(store, cleaned)
    return cleaned


@dataclass(slots=True)
class _Work:
    """Batches on their way, and what has become of those before."""

    store: Store
    pool: ThreadPoolExecutor
    still: Still
    progress: Progress
    sum: _Sum = field(default_factory=_Sum)
    pending: deque[Future[_Done]] = field(default_factory=deque[Future[_Done]])
    broken: set[tuple[ObjectKind, str]] = field(default_factory=set[tuple[ObjectKind, str]])

    def group(self, unit: _Unit | None, entries: Iterable[Entry]) -> None:
        """Delete what goes by itself, or one phase of what goes whole."""
        if unit:
            self.settle(0)  # what comes of others is not its own
        whole = True
        for batch in _batches(entries):
            self.still.look_again()
            going = [entry for entry in batch if not self._stays(unit, entry)]
            whole &= len(going) == len(batch)
            if going:
                self.pending.append(self.pool.submit(_delete, self.store, going))
            whole &= self.settle(_AT_ONCE - 1)
            if self.sum.given_up:
                return
        if unit and not (self.settle(0) and whole):
            self.broken.add(unit[:2])

    def settle(self, most: int) -> bool:
        """Wait until so many batches are left; whether all of what came in is gone."""
        whole = True
        while len(self.pending) > most:
            whole &= _add(self.sum, self.pending.popleft().result())
            tally = self.sum.tally
            figures = {"objects": sum(tally.objects.values()), "bytes": sum(tally.size.values())}
            self.progress(Event("cleaning.deleted", self.store.url, figures))
        return whole

    def _stays(self, unit: _Unit | None, entry: Entry) -> bool:
        why = _BEFORE if unit and unit[:2] in self.broken else self.still(entry)
        if why:
            self.sum.tally.kept[why] += 1
        return bool(why)


def _write_down(store: Store, cleaned: Cleaned) -> None:
    body = {
        "objects": {f"{place}": count for place, count in cleaned.objects.items()},
        "size": {f"{place}": count for place, count in cleaned.size.items()},
        "gone": cleaned.gone,
        "skipped": cleaned.skipped,
        "junk": cleaned.junk,
        "failures": [{"key": one.key, "reason": one.reason} for one in cleaned.failures],
        "given_up": cleaned.given_up,
        "seconds": round(cleaned.seconds, 3),
    }
    put(store, cleaning_outcome_key(cleaned.plan), orjson.dumps(body, option=orjson.OPT_INDENT_2))


class _Still:
    """Says why an object of a plan stays by now."""

    def __init__(self, judge: Judge, beside: list[Store]) -> None:
        self._judge, self._beside = judge, beside
        self._looked = False
        self._unit: _Unit | None = None
        self._stays: Callable[[str], str] = lambda _: ""

    def look_again(self) -> None:
        self._judge.guard.look_again()

    def __call__(self, entry: Entry) -> str:
        what = classify_key(entry.stat.key)
        if entry.junk:
            self._look_around()
            # Another release may have made the plan.
            return _NAMED if what else self._judge.junk_stays(entry.stat.key, entry.junk)
        unit = _unit(entry)
        if unit is None or what is None:
            return self._judge.guard.why(entry.stat.key, what)
        if unit != self._unit:
            # Looked at anew before each phase: a checkpoint may have come that names its files.
            self._unit = unit
            of = self._of_job if what.kind is ObjectKind.CHECKPOINT else self._of_dataset
            self._stays = of(what.scope, entry.phase)
        return self._live(what, entry.phase) or self._stays(entry.stat.key)

    def _live(self, what: ClassifiedKey, phase: int) -> str:
        """Say who works on what an object is a part of."""
        guard = self._judge.guard
        if why := guard.live(what.scope):
            return why
        # Without a phase it is an orphan, which no manifest names and nobody trains on.
        return guard.needed_by(what.scope) if what.kind is ObjectKind.DATASET and phase else ""

    def _look_around(self) -> None:
        if not self._looked:
            self._judge.look_around(self._beside)
            self._looked = True

    def _of_job(self, job: str, phase: int) -> Callable[[str], str]:
        self._look_around()
        going = self._judge.unneeded(job) if phase else self._judge.removed(job)
        there = self._judge.keys_of(job)
        # What is not there any more went when this plan was executed before.
        return lambda key: "somebody needs it by now" if key in there - going else ""

    def _of_dataset(self, dataset: str, phase: int) -> Callable[[str], str]:
        if self._judge.guard.pins_below(f"{dataset}/"):
            return lambda _: "it is pinned"
        if phase:
            changed = self._judge.changed(dataset)
            return lambda _: changed
        try:
            names = self._judge.named_in(dataset)
        except errors.CorruptError as error:
            why = str(error)
            return lambda _: why
        return lambda key: "its dataset names it by now" if key in names else ""


def _unit(entry: Entry) -> _Unit | None:
    """Return the unit that an object is deleted with, as a whole."""
    what = classify_key(entry.stat.key)
    if what is None or what.kind not in _WHOLE:
        return None
    return what.kind, what.scope, entry.phase


def _batches(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    remaining = iter(entries)
    while batch := list(islice(remaining, _BATCH)):
        yield batch


def _delete(store: Store, entries: list[Entry]) -> _Done:
    there = _listed(store, sorted(entry.stat.key for entry in entries))
    found = [(entry, there.get(entry.stat.key)) for entry in entries]
    same = [entry for entry, stat in found if stat is not None and _is_same(entry.stat, stat)]
    gone = sum(stat is None for _, stat in found)
    failures = delete(store, [entry.stat.key for entry in same])
    failed = {failure.key for failure in failures}
    deleted = [entry for entry in same if entry.stat.key not in failed]
    return _Done(deleted, gone, len(entries) - gone - len(same), failures)


def _listed(store: Store, keys: list[str]) -> dict[str, Stat]:
    """Objects as they are now, by their keys, which are sorted."""
    if store.location.backend is Backend.FILE:  # whose listing has no order
        return dict(_heads(store, keys))
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


def _heads(store: Store, keys: list[str]) -> Iterator[tuple[str, Stat]]:
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


def _add(total: _Sum, done: _Done) -> bool:
    """Add a batch up; whether all of it is gone."""
    for entry in done.deleted:
        total.tally.add(entry)
    total.gone += done.gone
    if done.changed:
        total.tally.kept[_CHANGED] += done.changed
    total.failures += done.failures
    return done.whole
