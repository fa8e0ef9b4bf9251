"""Read objects of which several stores have copies, from the copy that answers first.

Keys are relative to the URL of each store. Reads take turns by the measured rate of the stores. A
read that fails goes on elsewhere. A read that takes longer than nearly all before is also sent to
another store, within a budget of further requests. Copies with the ETag of the listing are equal.
Others are used only if the caller checks all bytes, and each range is checked.
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta

from millrace import errors
from millrace.storage.copy_reader import CopyReader, UnprovenCopyError, WantedRange
from millrace.storage.mirror_locations import CopyLocation, MirrorReport
from millrace.storage.mirror_policy import (
    CircuitBreaker,
    Clock,
    DurationWindow,
    HedgeBudget,
    MirrorPolicy,
    WeightedTurns,
)
from millrace.storage.mirrored_objects import (
    CopyStates,
    FetchedRange,
    MirroredObject,
    ObjectTable,
)
from millrace.storage.open import Store
from millrace.storage.retry import draw_backoff
from millrace.threads import DaemonThreadPool

logger = logging.getLogger(__name__)

Check = Callable[[bytes], object]
"""Function that receives the bytes of a range, and raises `CorruptError` if they are damaged."""

_PROBE_BYTES = 64 << 10
_MAX_KEYS = 10_000  # keys of missing objects that are counted
_SHORTEST_WAIT = 0.002  # seconds between two tries to take a further request from the budget
_OBJECT_ERRORS = (errors.NotFoundError, errors.ChangedError, errors.CorruptError)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Result of one attempt."""

    location: int
    is_hedge: bool
    fetched: FetchedRange | None = None
    error: errors.MillraceError | None = None


@dataclass(slots=True)
class _Race:
    """Attempts to read one range.

    Attributes:
        wanted: The range.
        is_over: Whether an attempt has won, so that others stop.
        outcomes: Outcomes of attempts.
        pending: Locations with an attempt.
        faults: Errors of the attempts.
    """

    wanted: WantedRange
    is_over: bool = False
    outcomes: "queue.SimpleQueue[_Outcome]" = field(default_factory=queue.SimpleQueue["_Outcome"])
    pending: set[int] = field(default_factory=set[int])
    faults: dict[int, errors.MillraceError] = field(default_factory=dict[int, errors.MillraceError])

    def wait(self, seconds: float) -> _Outcome | None:
        """Return the next outcome; None if there is none within some seconds."""
        try:
            return self.outcomes.get(timeout=None if seconds == math.inf else max(0.0, seconds))
        except queue.Empty:
            return None


class MirroredReader:
    """Reads objects from several stores that have copies of them. Threads may share a reader.

    A folder is read first, since its bytes are there. After a fork, make a new reader.

    Args:
        stores: Stores, in the order in which they are listed.
        concurrency: Largest number of requests to one store at a time.
        policy: Limits.
        clock: Clock of pauses and durations, in seconds.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        *,
        concurrency: int = 16,
        policy: MirrorPolicy | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        if not stores:
            raise errors.ConfigurationError("Name at least one location.")
        self._policy = policy or MirrorPolicy()
        self._clock = clock
        self._retry_seconds = max(one.spec.retry_timeout for one in stores).total_seconds()
        self._locations = [
            CopyLocation(
                number,
                store.with_retry_timeout(timedelta(0)),
                f"{store.url} ({store.endpoint})" if store.endpoint else store.url,
                CircuitBreaker(self._policy, clock),
                DaemonThreadPool(concurrency, f"mirror-{number}"),
            )
            for number, store in enumerate(stores)
        ]
        self.stores = tuple(stores)
        self._budget, self._turns = HedgeBudget(self._policy), WeightedTurns()
        self._durations, self._objects = DurationWindow(), ObjectTable()
        self._copies = CopyReader(self._locations, self._budget, self._durations, clock)
        self._lock = threading.Lock()
        self._reads = 0
        self._is_closed = False

    def make_report(self) -> MirrorReport:
        """Return the work of each location so far."""
        return MirrorReport(self._reads, tuple(one.make_report() for one in self._locations))

    def get_name(self, location: int) -> str:
        """Return the name of a location for messages."""
        return self._locations[location].name

    def close(self) -> None:
        """Start no further requests. Those under way end by themselves, and others fail."""
        self._is_closed = True
        for location in self._locations:
            location.pool.shutdown()

    def read_range(
        self, item: MirroredObject, start: int, end: int, *, check: Check | None = None
    ) -> bytes:
        """Return the bytes of an object between two offsets.

        Args:
            item: The object.
            start: Offset of the first byte.
            end: Offset after the last byte.
            check: Function that checks the bytes. With it, any copy is used whose bytes pass the
                check. Without it, copies with the ETag of the listing are used only.

        Raises:
            MillraceError: No location has the bytes. The message has the reason of each.
        """
        while True:
            fetched = self.fetch(item, start, end, is_checked=check is not None)
            try:
                if check is not None:
                    check(fetched.data)
            except errors.CorruptError as error:
                self.reject(item, fetched, str(error))
                continue
            return fetched.data

    def fetch(
        self,
        item: MirroredObject,
        start: int,
        end: int,
        *,
        is_checked: bool = False,
        avoid: Collection[int] = (),
    ) -> FetchedRange:
        """Return the bytes of an object between two offsets, with the copy that they are from.

        Args:
            item: The object.
            start: Offset of the first byte.
            end: Offset after the last byte.
            is_checked: Whether the caller checks the bytes, and calls `reject` if they differ. Any
                copy is read then, and otherwise those with the ETag of the listing.
            avoid: Numbers of locations that are not read.

        Raises:
            MillraceError: No location has the bytes. The message has the reason of each.
        """
        state = self._objects.get(item)
        if start >= end:
            return FetchedRange(b"", 0)
        with self._lock:
            self._reads += 1
        self._budget.add_read()
        deadline = self._clock() + self._retry_seconds
        failures = 0
        while True:
            race = _Race(WantedRange(item, state, start, end, is_checked))
            fetched = self._run_race(race, avoid)
            if fetched is not None:
                return fetched
            pause = draw_backoff(failures)
            failures += 1
            is_transient = any(
                isinstance(error, errors.UnavailableError) for error in race.faults.values()
            )
            if self._is_closed or not is_transient or self._clock() + pause >= deadline:
                error = self._make_error(race)
                state.faults.clear()  # a later read tries again
                raise error
            time.sleep(pause)

    def name_unproven(self, item: MirroredObject) -> list[str]:
        """Return the locations whose copy is read only if its bytes are checked, as is known."""
        wanted = WantedRange(item, self._objects.get(item), 0, item.size, is_checked=False)
        return [self._locations[number].name for number in self._list_unproven(wanted)]

    def reject(self, item: MirroredObject, fetched: FetchedRange, reason: str) -> None:
        """Leave out the copy that a range is from, whose bytes the caller does not use."""
        location = self._locations[fetched.location]
        with location.lock:
            location.served -= len(fetched.data)
        self._leave_out(location, item, self._objects.get(item), errors.CorruptError(reason))

    # Race of the locations for one range.

    def _run_race(self, race: _Race, avoid: Collection[int]) -> FetchedRange | None:
        """Ask locations until one has answered; return None if all have failed."""
        if not self._start_next(race, avoid):
            return None
        self._probe(race.wanted.item)
        began = self._clock()
        usual = self._durations.find_quantile(
            race.wanted.end - race.wanted.start, self._policy.hedge_quantile
        )
        slow = max(self._policy.slow_seconds, self._policy.slow_ratio * (usual or 0))
        hedge_at = math.inf if usual is None else began + usual
        slow_at = began + slow
        while True:
            outcome = race.wait(min(hedge_at, slow_at) - self._clock())
            if outcome is None:
                if self._clock() >= slow_at:
                    self._blame(race)
                    self._start_next(race, avoid, is_necessary=True)
                    slow_at += slow
                elif self._clock() >= hedge_at:
                    step = max((usual or 0) / 2, _SHORTEST_WAIT)
                    hedge_at = self._try_hedge(race, avoid, self._clock() + step)
                continue
            race.pending.discard(outcome.location)
            if outcome.fetched is not None:
                race.is_over = True
                self._count_winner(outcome, outcome.fetched)
                return outcome.fetched
            if outcome.error is not None:
                race.faults[outcome.location] = outcome.error
            if race.pending or self._start_next(race, avoid, is_necessary=True):
                continue
            return None

    def _start_next(
        self, race: _Race, avoid: Collection[int], *, is_necessary: bool = False
    ) -> bool:
        """Start an attempt at the location whose turn it is; return False if none is left."""
        allowed = self._list_allowed(race, avoid)
        if not allowed:
            return False
        available = [location for location in allowed if location.is_available]
        if available:
            chosen = self._take_turn(available)
        else:
            chosen = min(allowed, key=lambda one: one.breaker.resumes_at)
        if is_necessary:
            self._budget.spend()
        self._start(race, chosen, is_hedge=False)
        return True

    def _try_hedge(self, race: _Race, avoid: Collection[int], next_try: float) -> float:
        """Ask another location too, if the budget allows it; return the time of the next try."""
        available = [one for one in self._list_allowed(race, avoid) if one.is_available]
        if not available:
            return math.inf
        if not self._budget.try_spend():
            return next_try
        chosen = self._take_turn(available)
        with chosen.lock:
            chosen.hedges += 1
        self._start(race, chosen, is_hedge=True)
        return math.inf

    def _start(self, race: _Race, location: CopyLocation, *, is_hedge: bool) -> None:
        race.pending.add(location.number)
        if location.is_local:
            self._attempt(race, location, is_hedge=is_hedge)
            return
        attempt = location.pool.submit(self._attempt, race, location, is_hedge=is_hedge)

        def handle_end(ended: "Future[None]") -> None:
            if ended.cancelled():  # `close` has ended the wait for a thread
                race.outcomes.put(_Outcome(location.number, is_hedge))

        attempt.add_done_callback(handle_end)
        if self._is_closed:
            attempt.cancel()

    def _list_allowed(self, race: _Race, avoid: Collection[int]) -> list[CopyLocation]:
        """Return the locations that may be asked, and were not asked in this race."""
        if self._is_closed:
            return []
        tried = {*avoid, *race.pending, *race.faults, *race.wanted.state.faults}
        return [
            location
            for location in self._locations
            if location.number not in tried
            and not location.is_dropped
            and self._copies.can_use(race.wanted, location)
        ]

    def _take_turn(self, available: Sequence[CopyLocation]) -> CopyLocation:
        """Return the location to ask next: a folder, or else by the measured rates."""
        for location in available:
            if location.is_local:
                return location
        weights = {one.number: one.rate.weight for one in available}
        return self._locations[self._turns.choose(weights, list(weights))]

    def _blame(self, race: _Race) -> None:
        """Count the attempts that have not ended as failures of their locations."""
        for number in race.pending:
            error = errors.UnavailableError("It does not answer in time.")
            self._count_failure(self._locations[number], error)

    def _probe(self, item: MirroredObject) -> None:
        """Ask locations that rest, in the background, whether they answer again."""
        for location in self._locations:
            if location.is_dropped or not location.breaker.take_probe():
                continue
            self._budget.spend()
            location.pool.submit(self._run_probe, location, item)

    def _run_probe(self, location: CopyLocation, item: MirroredObject) -> None:
        size = min(item.size, _PROBE_BYTES)
        try:
            self._copies.request(location, item, 0, size, etag=None)
        except _OBJECT_ERRORS:
            location.breaker.note_success()
        except errors.MillraceError as error:
            self._count_failure(location, error, is_probe=True)
        else:
            location.breaker.note_success()

    # One attempt, in a thread of its location.

    def _attempt(self, race: _Race, location: CopyLocation, *, is_hedge: bool) -> None:
        number = location.number
        try:
            if race.is_over:
                return
            data = self._copies.read(race.wanted, location, lambda: race.is_over)
            location.breaker.note_success()
            fetched = FetchedRange(data, number)
            race.outcomes.put(_Outcome(number, is_hedge, fetched=fetched))
        except errors.StoppedError:
            race.outcomes.put(_Outcome(number, is_hedge))
        except errors.MillraceError as error:
            self._handle_error(race, location, error)
            race.outcomes.put(_Outcome(number, is_hedge, error=error))
        except BaseException as error:
            fault = errors.MillraceError(f"{location.name}: {errors.format_error(error)}")
            race.outcomes.put(_Outcome(number, is_hedge, error=fault))
            raise

    def _handle_error(
        self, race: _Race, location: CopyLocation, error: errors.MillraceError
    ) -> None:
        if isinstance(error, UnprovenCopyError):
            return
        if not isinstance(error, _OBJECT_ERRORS):
            self._count_failure(location, error)
            return
        self._leave_out(location, race.wanted.item, race.wanted.state, error)

    def _list_unproven(self, wanted: WantedRange) -> list[int]:
        """Return the numbers of the locations whose copies can only be read if they are checked."""
        return [one.number for one in self._locations if not self._copies.can_use(wanted, one)]

    # Counts and messages.

    def _count_winner(self, outcome: _Outcome, fetched: FetchedRange) -> None:
        location = self._locations[outcome.location]
        with location.lock:
            location.served += len(fetched.data)
            location.won_hedges += outcome.is_hedge

    def _count_failure(
        self, location: CopyLocation, error: errors.MillraceError, *, is_probe: bool = False
    ) -> None:
        with location.lock:
            location.failures += 1
        if location.breaker.note_failure(is_probe=is_probe):
            logger.warning("%s is not read for a while: %s", location.name, error)

    def _leave_out(
        self,
        location: CopyLocation,
        item: MirroredObject,
        state: CopyStates,
        error: errors.MillraceError,
    ) -> None:
        """Read no more of the copy of an object, and say why."""
        is_missing = isinstance(error, errors.NotFoundError)
        is_last = all(one.is_dropped for one in self._locations if one is not location)
        with location.lock:
            if location.number in state.faults:
                return
            state.faults[location.number] = error
            kind = location.missing if is_missing else location.differing
            is_new = item.key not in kind
            if is_new and len(kind) < _MAX_KEYS:
                kind.add(item.key)
            is_first_missing = is_missing and is_new and len(kind) == 1
            drops = (
                not is_missing
                and not is_last
                and not location.is_dropped
                and len(kind) >= self._policy.differing_objects
            )
            location.is_dropped |= drops
        if is_missing and location.served == 0:
            location.breaker.note_failure()  # the bucket may be missing
        if not is_missing or is_first_missing:
            reason = "it has no such object" if is_missing else str(error).rstrip(".")
            logger.warning("%s is not used for %s: %s.", location.name, item.key, reason)
        if drops:
            logger.warning(
                "%s is not used any more: %d of its objects differ.",
                location.name, len(location.differing),
            )  # fmt: skip

    def _make_error(self, race: _Race) -> errors.MillraceError:
        """Return the error for bytes that no location has, with the reason of each."""
        wanted = race.wanted
        faults = {**wanted.state.faults, **race.faults}
        faults |= {number: UnprovenCopyError() for number in self._list_unproven(wanted)}
        order = (errors.UnavailableError, errors.DeniedError, errors.CorruptError,
                 errors.ChangedError, errors.NotFoundError)  # fmt: skip
        kind = next(
            (one for one in order if any(isinstance(error, one) for error in faults.values())),
            errors.UnavailableError,
        )
        reasons = [f"{self._locations[n].name}: {faults[n]}" for n in sorted(faults)]
        left_out = [one.name for one in self._locations if one.is_dropped]
        if self._is_closed:
            reasons.append("The reader was closed.")
        if left_out:
            reasons.append(f"Left out, since their objects differ: {', '.join(left_out)}.")
        return kind(
            f"{wanted.item.key} cannot be read from any of {len(self._locations)} locations. "
            "Read it again when one answers, or restore the object.\n" + "\n".join(reasons)
        )
