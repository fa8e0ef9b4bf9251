"""Removal of checkpoints that no rule keeps: planned first, then executed.

Some checkpoints are kept whatever the rules are: the newest verified checkpoint, all newer ones,
and those that an epoch or a pin names. Files that a kept checkpoint refers to are kept too. If no
checkpoint is verified, or if metadata or the end of an epoch cannot be read, none is removed.
"""

import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime

from millrace import errors
from millrace.checkpoints.block_digests import list_block_list_keys
from millrace.checkpoints.cooldown.epoch_records import read_epoch
from millrace.checkpoints.cooldown.votes import derive_epoch
from millrace.checkpoints.find import VerifyDepth, read_checkpoint, survey, verify
from millrace.checkpoints.settings import RetentionSettings
from millrace.deletion import DeletionPhase, DeletionResult, PlannedObject, delete_planned
from millrace.formatting import format_count, format_size
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.kinds import classify_key
from millrace.records import commit_once, iterate_records, list_numbers, read_records
from millrace.schemas.checkpoint import Checkpoint, Pin
from millrace.storage import Stat, Store, delete_one, exists, list_objects

_log = logging.getLogger(__name__)
_CONCURRENCY = 32  # records


@dataclass(frozen=True, slots=True)
class Removal(PlannedObject):
    """Object to remove.

    Attributes:
        why: Reason for the removal.
        orphan: Whether the object belongs to no checkpoint, not even to a removed one.
    """

    why: str
    orphan: bool = False


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """Checkpoints of a job that are kept, and those that are removed.

    Attributes:
        job: Name of the job.
        rules: Rules of the plan.
        kept: Reason for each kept step.
        removed: Removed steps.
        removals: Objects to remove, in the order of removal.
        blocked: Reason for which none is removed, whatever the rules are; empty if there is none.
    """

    job: str
    rules: RetentionSettings
    kept: dict[int, str]
    removed: tuple[int, ...]
    removals: tuple[Removal, ...]
    blocked: str = ""

    @property
    def size(self) -> int:
        """Size of all objects to remove, in bytes."""
        return sum(removal.size for removal in self.removals)


def pin(store: Store, job: str, step: int, reason: str) -> Pin:
    """Protect a checkpoint from removal by any rule, until `unpin`.

    Returns:
        Pin of the checkpoint: an earlier one, if it has one.

    Raises:
        NotFoundError: There is no checkpoint of this step.
        ConfigurationError: The reason is no text that UTF-8 can hold.
    """
    keys = CheckpointKeys(job)
    try:
        reason.encode()
    except UnicodeEncodeError:
        raise errors.ConfigurationError(
            f"The reason {reason!a} of a pin has bytes that are no UTF-8: write another one."
        ) from None
    read_checkpoint(store, job, step)
    made = Pin(job=job, step=step, reason=reason)
    pinned = commit_once(store, keys.make_pin_key(step), made).record
    if not exists(store, keys.make_metadata_key(step)):
        with suppress(errors.DeniedError):
            unpin(store, job, step)
        raise errors.NotFoundError(
            f"{store.make_url(keys.make_metadata_key(step))} was removed before it was pinned: pin "
            "another step."
        )
    return pinned


def unpin(store: Store, job: str, step: int) -> None:
    """Remove the pin of a checkpoint, so that the rules decide again.

    Raises:
        DeniedError: The credentials may not delete the pin.
    """
    delete_one(store, CheckpointKeys(job).make_pin_key(step))


def read_pins(store: Store, job: str, steps: Iterable[int]) -> dict[int, str]:
    """Return the reason of each pinned step among these. An unreadable pin also counts."""
    keys = CheckpointKeys(job)
    pins = read_records(store, ((step, keys.make_pin_key(step), Pin) for step in steps))
    return {
        step: _UNREADABLE_PIN if isinstance(one, Exception) else one.reason for step, one in pins
    }


def plan_retention(
    store: Store,
    job: str,
    rules: RetentionSettings | None = None,
    *,
    check: VerifyDepth = VerifyDepth.DIGESTS,
    also: Mapping[int, str] | None = None,
    now: datetime | None = None,
) -> RetentionPlan:
    """Plan the removal of checkpoints and orphans, and change nothing.

    Memory: the metadata of one checkpoint, and the keys of the files of all.

    Args:
        store: Store of the job.
        job: Name of the job.
        rules: Rules; by default `RetentionSettings()`.
        check: Depth of the verification of the newest checkpoint.
        also: Further steps to keep, with the reasons.
        now: Time by the store's clock; by default that of the newest object.
    """
    rules = rules or RetentionSettings()
    keys = CheckpointKeys(job)
    stats = list(list_objects(store, keys.prefix))
    files, unreadable, newest_reasons = _read_checkpoints(store, keys, check)
    epochs, unreadable_epochs = _read_epoch_steps(store, keys)
    kept = dict.fromkeys(unreadable, "its metadata cannot be read") | newest_reasons
    for step, why in _iterate_kept(store, keys, files, epochs, rules):
        kept.setdefault(step, why)
    kept |= {step: why for step, why in (also or {}).items() if step in files.keys() - kept}
    removed = tuple(sorted(step for step in files if step not in kept))
    reason = _UNREADABLE_REASON if unreadable else ""
    if unreadable_epochs:
        reason = (
            f"the end of epoch {unreadable_epochs[0]} cannot be read, and may name it: pin the "
            "checkpoint of that epoch, and delete its record"
        )
    if reason:
        every = kept | dict.fromkeys(removed, reason)
        return RetentionPlan(job, rules, every, (), (), blocked=reason)
    named = set[str]().union(*files.values())
    needed = set[str]().union(*(files[step] for step in kept))
    unneeded = named - needed
    metadata = {keys.make_metadata_key(step): step for step in removed}
    youngest = find_youngest_times(stats)
    newest = now or max((stat.last_modified for stat in stats), default=None)
    horizon = newest and newest - rules.grace
    first: list[Removal] = []
    then: list[Removal] = []
    for stat in stats:
        if stat.key in metadata:
            first.append(Removal(stat, f"no rule keeps step {metadata[stat.key]}"))
        elif stat.key in unneeded:
            then.append(Removal(stat, "only removed checkpoints name it"))
        elif horizon is None or apply_youngest_time(stat, youngest).last_modified >= horizon:
            continue
        elif keys.is_share(stat.key):
            then.append(Removal(stat, "no rank needs this share any more", orphan=True))
        elif stat.key not in named and (keys.parse_part(stat.key) or keys.is_block_list(stat.key)):
            then.append(Removal(stat, "no checkpoint names it", orphan=True))
    # Metadata goes first, so that an interrupted removal leaves no incomplete checkpoint.
    return RetentionPlan(job, rules, kept, removed, (*first, *then))


def apply_retention(store: Store, plan: RetentionPlan) -> DeletionResult:
    """Remove the objects of a plan, except for those that became needed or were rewritten since.

    After an interruption, call this function again with the same plan or a new one.

    Args:
        store: Store of the job.
        plan: Plan from `plan_retention`.
    """
    now = plan_retention(store, plan.job, plan.rules, check=VerifyDepth.SIZES)
    deletable = {removal.key for removal in now.removals}
    keys = CheckpointKeys(plan.job)
    metadata = {keys.make_metadata_key(step) for step in plan.removed}
    done = delete_planned(
        store,
        [removal for removal in plan.removals if removal.key in deletable],
        check=NewCheckpointCheck(store, keys, metadata),
        # Files stay while their metadata may exist.
        find_phase=lambda one: DeletionPhase(plan.job, 0 if one.key in metadata else 1),
    )
    skipped = Counter(done.skipped)
    skipped.update(_NEEDED for removal in plan.removals if removal.key not in deletable)
    return replace(done, skipped=dict(skipped))


class BackgroundRetention:
    """Retention of a job's checkpoints in another thread, after each save.

    Failures are logged, and the next retention tries again. Saves go on meanwhile. Only a save of a
    step whose objects are being removed waits, since it may find a checkpoint that goes.

    Args:
        store: Store of the job.
        job: Name of the job.
        rules: Rules of the retention.
    """

    def __init__(self, store: Store, job: str, rules: RetentionSettings) -> None:
        self._store, self._job, self._rules = store, job, rules
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="retention")
        self._last: Future[None] | None = None
        self._lock = threading.Lock()  # of the attributes below
        self._saved = self._saving = -1  # steps; -1 for none
        self._removing: Set[int] = frozenset()

    def start(self, step: int) -> None:
        """Begin to remove the checkpoints that no rule keeps.

        Args:
            step: Step that was just saved. It stays, even if later steps are there already.
        """
        with self._lock:
            self._saved = step
        if self._last is not None:
            self._last.cancel()  # unless it has begun: this one removes as much
        with suppress(RuntimeError):  # the interpreter ends: the next process removes them
            self._last = self._pool.submit(self._retain)

    def protect(self, step: int) -> None:
        """Keep the objects of a step that is being saved.

        If objects of the step are being removed, wait until the last retention has ended.
        """
        with self._lock:
            self._saving = step
            is_going = step in self._removing
        if is_going and self._last is not None:
            wait([self._last])

    def close(self) -> None:
        """Wait until the last retention has ended, and end the thread."""
        self._pool.shutdown()

    # -- in the other thread

    def _retain(self) -> None:
        try:
            self._remove()
        except Exception as error:  # noqa: BLE001 - a retention fails no save
            _log.warning(
                "Old checkpoints of %s could not be removed: %s The next save tries again.",
                self._store.make_url(self._job),
                errors.format_error(error),
            )
        finally:
            with self._lock:
                self._removing = frozenset()

    def _plan(self) -> RetentionPlan:
        """Plan the removal, and note its steps. The step that is being saved is none of them."""
        also: dict[int, str] = {}
        while True:
            also |= self._list_own_steps()
            # The saver has verified the files of its own checkpoint, which stays: sizes are enough.
            plan = plan_retention(
                self._store, self._job, self._rules, check=VerifyDepth.SIZES, also=also
            )
            with self._lock:
                # Another save may have begun meanwhile. If its step is complete already, a new plan
                # keeps its files in the folders of other steps.
                if {self._saved, self._saving}.isdisjoint(plan.removed):
                    steps = [_find_step(removal.key) for removal in plan.removals]
                    pairs = zip(steps, plan.removals, strict=True)
                    removals = tuple(one for step, one in pairs if step != self._saving)
                    self._removing = {*plan.removed, *steps} - {self._saving}
                    return replace(plan, removals=removals)

    def _list_own_steps(self) -> dict[int, str]:
        """Return the steps that are being saved or were just saved, with the reasons."""
        with self._lock:
            return {self._saving: "it is being saved", self._saved: "it was just saved"}

    def _remove(self) -> None:
        url = self._store.make_url(self._job)
        plan = self._plan()
        if plan.blocked:
            _log.warning("No old checkpoint of %s was removed: %s.", url, plan.blocked)
        if not plan.removals:
            return
        done = apply_retention(self._store, plan)
        if done.failures:
            _log.warning(
                "%s of old checkpoints of %s could not be deleted, such as %s: %s. The next save "
                "tries again.",
                format_count(len(done.failures), "object"),
                url,
                done.failures[0].key,
                done.failures[0].reason,
            )
        _log.info(
            "Removed old checkpoints of %s, steps %s: %s, %s.",
            url,
            ", ".join(map(str, plan.removed)) or "none",
            format_count(done.deleted_objects, "object"),
            format_size(done.deleted_bytes),
        )


class NewCheckpointCheck:
    """Check that keeps the files of a checkpoint that was committed since the plan.

    Before each batch, the metadata of the steps of its files is read again.

    Args:
        store: Store of the job.
        keys: Keys of the job.
        metadata: Keys of the metadata to remove.
    """

    def __init__(self, store: Store, keys: CheckpointKeys, metadata: Collection[str] = ()) -> None:
        self._store, self._keys, self._metadata = store, keys, metadata
        self._named: dict[int, set[str] | None] = {}

    def refresh_leases(self) -> None:
        """Forget the metadata, so that the next check reads it again."""
        self._named.clear()

    def __call__(self, planned: PlannedObject, /) -> str:
        """Return the reason to keep an object; empty if it can be deleted."""
        classified = classify_key(planned.key)
        if classified is None or planned.key in self._metadata:
            return ""
        step = classified.number
        if step not in self._named:
            self._named[step] = self._read_named(step)
        named = self._named[step]
        return _NEEDED if named is None or planned.key in named else ""

    def _read_named(self, step: int) -> set[str] | None:
        """Return the keys of the files that a step's metadata names; None if it is unreadable."""
        try:
            found = read_checkpoint(self._store, self._keys.job, step)
        except errors.NotFoundError:
            return set()
        except errors.CorruptError:
            return None
        return _list_file_keys(self._keys, found)


def find_youngest_times(stats: Iterable[Stat]) -> dict[int, datetime]:
    """Return when the youngest object of each step of a job was written."""
    found: dict[int, datetime] = {}
    for stat in stats:
        classified = classify_key(stat.key)
        if classified is not None and classified.number >= 0:
            found[classified.number] = max(
                stat.last_modified, found.get(classified.number, stat.last_modified)
            )
    return found


def apply_youngest_time(stat: Stat, youngest: Mapping[int, datetime]) -> Stat:
    """Return a file with the time of the youngest object of its step, which may be in use."""
    classified = classify_key(stat.key)
    when = youngest.get(classified.number, stat.last_modified) if classified else stat.last_modified
    return replace(stat, last_modified=when)


def _find_step(key: str) -> int:
    """Return the step of an object of a checkpoint; -1 for other objects."""
    classified = classify_key(key)
    return classified.number if classified else -1


_UNREADABLE_PIN = "it has a pin that cannot be read"
_NEEDED = "a rule or a checkpoint needs it by now"
_UNREADABLE_REASON = "another checkpoint cannot be read, and may refer to its files"


def _read_checkpoints(
    store: Store, keys: CheckpointKeys, check: VerifyDepth
) -> tuple[dict[int, set[str]], list[int], dict[int, str]]:
    """Read the metadata of all checkpoints, and verify the newest ones until one is right.

    Returns:
        Keys of the files of each complete checkpoint by the step, the steps with unreadable
        metadata, and the reason for each of the newest steps, up to the verified one.
    """
    files: dict[int, set[str]] = {}
    unreadable: list[int] = []
    reasons: dict[int, str] = {}
    is_verified = False
    for step, found in survey(store, keys.job):
        if not isinstance(found, Checkpoint):
            unreadable.append(step)
            continue
        files[step] = _list_file_keys(keys, found)
        if not is_verified:
            is_verified = not verify(store, found, check=check)
            which = "the newest verified checkpoint"
            reasons[step] = which if is_verified else "newer than every verified checkpoint"
    return files, unreadable, reasons


def _iterate_kept(
    store: Store,
    keys: CheckpointKeys,
    steps: Collection[int],
    epochs: Mapping[int, int],
    rules: RetentionSettings,
) -> Iterator[tuple[int, str]]:
    """Yield the steps that are kept with each reason. A step may have several."""
    for number, step in epochs.items():
        if step in steps:
            yield step, f"epoch {number} names it"
    yield from _iterate_pinned(store, keys, steps)
    newest_first = sorted(steps, reverse=True)
    for step in newest_first[: rules.last]:
        yield step, f"one of the last {rules.last}"
    for step in newest_first:
        if rules.every and step % rules.every == 0:
            yield step, f"every {rules.every} steps"


def _read_epoch_steps(store: Store, keys: CheckpointKeys) -> tuple[dict[int, int], list[int]]:
    """Return the steps of the ended epochs' checkpoints by the epochs, and the unreadable epochs.

    If the record of an epoch cannot be read, the step follows from the members' votes. An epoch is
    unreadable if nothing follows from these either.
    """

    def read_step(number: int) -> int | None:
        try:
            return read_epoch(store, keys.job, number).step
        except errors.NotFoundError:
            return -1  # deleted since the listing
        except errors.CorruptError:
            derived = derive_epoch(store, keys.job, number)
            return None if derived is None else derived.step

    numbers = list_numbers(store, keys.epochs, keys.parse_epoch)
    with ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="epochs") as pool:
        steps = dict(zip(numbers, pool.map(read_step, numbers), strict=True))
    found = {number: step for number, step in steps.items() if step is not None}
    return found, [number for number in numbers if number not in found]


def _iterate_pinned(
    store: Store, keys: CheckpointKeys, complete: Iterable[int]
) -> Iterator[tuple[int, str]]:
    """Yield the pinned steps with the reasons. An unreadable pin also counts."""
    by_key = {keys.make_pin_key(step): step for step in complete}
    for stat, pin in iterate_records(
        store, keys.prefix, Pin, wanted=lambda stat: stat.key in by_key
    ):
        step = by_key[stat.key]
        if isinstance(pin, errors.CorruptError):
            yield step, _UNREADABLE_PIN
        else:
            yield step, f"pinned: {pin.reason}"


def _list_file_keys(keys: CheckpointKeys, checkpoint: Checkpoint) -> set[str]:
    """Return the keys of all files that a checkpoint names, and of the lists of their blocks."""
    found = {keys.make_part_key(part.step, part.digest) for part in checkpoint.parts}
    return found.union(list_block_list_keys(keys, checkpoint))
