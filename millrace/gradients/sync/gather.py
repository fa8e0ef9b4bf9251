"""Gathering of a window's gradients from the workers' buckets, by listings until a deadline.

The workers of a window are known before it begins. Each bucket is listed once for all of its
workers, and new gradients are read at once. Of a worker with thousands of objects, only the
gradient is looked for, so that the listing ends for the others. Reserves are read before the
deadline, when the first workers are late. A bad gradient harms only its own worker, which is
rejected with a reason. Until the end of the window, a valid gradient may overwrite a refused one.
At most three objects of a worker are read in a window, so frequent overwrites do not keep readers
busy.
"""

import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import islice
from pathlib import PurePosixPath
from typing import Any

from millrace import errors
from millrace.gradients.codec.payload import (
    ExpectedGradient,
    Payload,
    PayloadError,
    Shapes,
    explain_failure,
    is_torch_file,
    read_payload,
)
from millrace.gradients.settings import GatherSettings
from millrace.keys.gradients import GradientKeys
from millrace.lease import StoreClock
from millrace.progress import Event, Progress, ignore_event
from millrace.schemas.gradient import Codec, Refusal
from millrace.storage import Stat, Store, list_fairly, list_objects
from millrace.threads import DaemonThreadPool

_MAY_PASS = {Refusal.CHANGED, Refusal.UNAVAILABLE}
_NOT_READ = {Refusal.EARLY, Refusal.LATE, Refusal.TOO_LARGE, Refusal.UNAVAILABLE}
_MOST_READS = 3  # of one worker's gradient in a window
_MOST_LISTED = 10_000  # objects of one worker of many that share a bucket
_MOST_MEASURED = 100_000  # likewise, where the settings say how many bytes a worker should store
_MOST_NAMED = 1000  # objects of one worker whose names begin as its gradient's


@dataclass(frozen=True, slots=True)
class Sender:
    """Worker that may send a gradient.

    Attributes:
        uid: Name of the worker.
        store: Bucket that the worker writes to: its own, or a shared one.
    """

    uid: str
    store: Store


@dataclass(frozen=True, slots=True)
class GatherWindow:
    """Window whose gradients are gathered.

    Attributes:
        keys: Keys of the run's gradients.
        number: Number of the window.
        base: Step of the weights that the gradients change.
        codec: Settings of the compression.
        shapes: Shapes of the model's tensors by their names.
        opens: Begin by the stores' clock. Earlier objects are refused.
        closes: End by the stores' clock. Later objects are refused.
        norm: Largest L2 norm of a gradient; None for the limit of float32.
    """

    keys: GradientKeys
    number: int
    base: int
    codec: Codec
    shapes: Shapes = field(repr=False)
    opens: datetime
    closes: datetime
    norm: float | None = None

    def make_expected(self, uid: str) -> ExpectedGradient:
        """Return the conditions that a worker's gradient must meet."""
        return ExpectedGradient(
            run=self.keys.run,
            uid=uid,
            window=self.number,
            base=self.base,
            codec=self.codec,
            shapes=self.shapes,
            norm=self.norm,
        )


@dataclass(frozen=True, slots=True)
class RejectedWorker:
    """Rejection of a worker's gradient.

    Attributes:
        reason: Kind of the reason.
        sentence: Sentence with the reason.
    """

    reason: Refusal
    sentence: str


@dataclass(frozen=True, slots=True)
class GatheredWindow:
    """Gradients of a window.

    Attributes:
        taken: Gradients to merge, by the workers' names.
        out: Rejected workers with the reasons, without reserves that were not needed.
        spare: Workers whose gradients were not needed. Some were not read completely.
        size: Size of the gradients to merge, in bytes.
        seconds: Duration of the gathering.
    """

    taken: Mapping[str, Payload] = field(repr=False)
    out: Mapping[str, RejectedWorker]
    spare: tuple[str, ...]
    size: int
    seconds: float


class QuorumError(errors.UnavailableError):
    """Fewer gradients than the quorum arrived in time.

    Attributes:
        gathered: Result without any gradient to merge, and with a reason for each worker.
    """

    def __init__(self, sentence: str, gathered: GatheredWindow) -> None:
        super().__init__(sentence)
        self.gathered = gathered


Reading = Callable[[str, Store, Stat, ExpectedGradient], Payload]
"""Function that reads a worker's gradient, and raises the errors of `read_payload`.

A `WorkerError` or a `ConfigurationError` ends the gathering."""


def _read_here(_uid: str, store: Store, stat: Stat, expected: ExpectedGradient) -> Payload:
    return read_payload(store, stat, expected)


def gather(
    window: GatherWindow,
    workers: Sequence[Sender],
    settings: GatherSettings | None = None,
    *,
    reserves: Sequence[Sender] = (),
    reading: Reading = _read_here,
    clock: StoreClock | None = None,
    progress: Progress = ignore_event,
) -> GatheredWindow:
    """Gather the gradients of a window, until all have arrived or the window has ended.

    Memory: that of the gathered gradients, and of those that are being read.

    Args:
        window: Window to gather.
        workers: Workers that are read first.
        settings: Settings of the gathering.
        reserves: Workers that replace missing ones, in this order.
        reading: Function that reads a gradient. Several threads call it.
        clock: Clock of the stores; by default that of this machine.
        progress: Receives ``gradient.taken`` or ``gradient.refused`` for each worker, and
            ``quota.exceeded`` with ``objects`` and ``bytes`` once for a worker that stores more
            than the settings allow. Its gradient still counts, since the gradients of a long run
            may exceed the quota.

    Raises:
        QuorumError: Fewer gradients than the quorum arrived in time.
        ConfigurationError: A worker is named twice, or the window needs more gradients than there
            are workers.
    """
    settings = settings or GatherSettings()
    everybody = [*workers, *reserves]
    if len({worker.uid for worker in everybody}) < len(everybody):
        raise errors.ConfigurationError("A worker is named twice: name each once.")
    wanted = len(workers) if settings.wanted is None else settings.wanted
    wanted = max(wanted, settings.quorum)
    if wanted > len(everybody):
        raise errors.ConfigurationError(
            f"{wanted} gradients are needed from {len(everybody)} workers."
        )
    gathering = _Gathering(window, workers, reserves, settings, wanted, reading, progress)
    return gathering.run(clock or StoreClock.of_this_machine())


@dataclass(frozen=True, slots=True)
class _Read:
    """Result of reading a gradient, valid or not."""

    payload: Payload | None
    out: RejectedWorker | None
    size: int = 0
    written: datetime | None = None


@dataclass(frozen=True, slots=True)
class _Listing:
    """Objects of a bucket's workers.

    Attributes:
        found: Gradients of the window, by the workers' names.
        objects: Number of objects below each worker's prefix; empty if the listing failed.
        size: Bytes of these objects; empty if the listing failed.
    """

    found: dict[str, Stat] = field(default_factory=dict[str, Stat])
    objects: Counter[str] = field(default_factory=Counter[str])
    size: Counter[str] = field(default_factory=Counter[str])


class _Gathering:
    def __init__(
        self,
        window: GatherWindow,
        workers: Sequence[Sender],
        reserves: Sequence[Sender],
        settings: GatherSettings,
        wanted: int,
        reading: Reading,
        progress: Progress,
    ) -> None:
        self._window, self._settings, self._wanted = window, settings, wanted
        self._read_one, self._progress = reading, progress
        self._order = [worker.uid for worker in (*workers, *reserves)]
        self._stores = {worker.uid: worker.store for worker in (*workers, *reserves)}
        self._first = {worker.uid for worker in workers}
        self._seen: dict[str, Stat] = {}  # last object of each worker
        self._reading: dict[str, Future[_Read]] = {}
        self._until = time.monotonic()  # end of all waits, by the monotonic clock
        self._read: dict[str, _Read] = {}
        self._reads = Counter[str]()  # number of read objects of each worker
        self._listings: dict[int, Future[_Listing]] = {}
        self._named: set[str] = set()  # workers that were reported to exceed the quota
        self._over = False
        self._said: dict[str, RejectedWorker] = {}  # of workers without a readable gradient so far

    def run(self, clock: StoreClock) -> GatheredWindow:
        began = time.monotonic()
        window, settings = self._window, self._settings
        hedged_at = window.opens + settings.hedge * (window.closes - window.opens)
        reading = DaemonThreadPool(settings.concurrency, "gradient")
        # Each bucket has a thread, since some buckets may stall.
        listing = DaemonThreadPool(max(1, len(self._group_by_bucket(self._order))), "listing")
        try:
            while (now := clock.now()) <= window.closes:
                hedged = now >= hedged_at or self._first <= self._read.keys()
                left = max((window.closes - now).total_seconds(), 0.0) + 0.01
                pause = min(settings.poll_interval.total_seconds(), left)
                looked = time.monotonic()
                self._until = looked + left + settings.grace_period.total_seconds()
                self._ask(listing, everybody=hedged)
                wait(self._listings.values(), pause)
                self._read_listings(reading)
                self._collect()
                if len(self._select_valid()) >= self._wanted:
                    break
                time.sleep(max(0.0, looked + pause - time.monotonic()))
            else:
                self._over = True
            self._until = time.monotonic() + settings.grace_period.total_seconds()
            self._finish(listing, reading)
        finally:  # stalled requests are not awaited
            reading.shutdown()
            listing.shutdown()
        return self._make_result(time.monotonic() - began)

    def _finish(self, listing: DaemonThreadPool, reading: DaemonThreadPool) -> None:
        """Wait for pending listings and reads, at most for the grace period.

        After the deadline, each bucket is listed once more for gradients of the last moment. The
        order of the workers does not depend on the speed of the reads.
        """
        looked = set[int]()
        while True:
            self._collect(last=True)
            under_way: list[Future[Any]] = []
            if self._over:
                self._read_listings(reading)
                before = set(self._listings)
                self._ask(listing, everybody=True, besides=looked)
                looked |= self._listings.keys() - before
                under_way += self._listings.values()
            under_way += self._reading.values()
            left = self._until - time.monotonic()
            if not under_way or left <= 0:
                return
            wait(under_way, left, return_when=FIRST_COMPLETED)

    # -- listings and reads

    def _ask(
        self, listing: DaemonThreadPool, *, everybody: bool, besides: Container[int] = frozenset()
    ) -> None:
        """Begin to list the buckets of workers without a valid gradient, each bucket once.

        Args:
            listing: Threads of the listings.
            everybody: Whether to include reserves.
            besides: Buckets to leave out.
        """
        right = set(self._select_valid())
        asked = [
            uid
            for uid in self._order
            if uid not in self._reading and uid not in right and (everybody or uid in self._first)
        ]
        for uids in self._group_by_bucket(asked):
            bucket = id(self._stores[uids[0]])
            if bucket not in self._listings and bucket not in besides:
                self._listings[bucket] = listing.submit(self._list_bucket, uids)

    def _read_listings(self, reading: DaemonThreadPool) -> None:
        """Begin to read the new gradients of finished listings."""
        right = set(self._select_valid())
        for bucket, listed in list(self._listings.items()):
            if not listed.done():
                continue
            del self._listings[bucket]
            listing = listed.result()
            self._check_quota(listing)
            for uid, stat in listing.found.items():
                # A refused gradient may be overwritten until the end of the window.
                if uid in self._reading or uid in right or self._seen.get(uid) == stat:
                    continue
                self._said.pop(uid, None)
                self._seen[uid] = stat
                if self._reads[uid] >= _MOST_READS:
                    self._refuse_more(uid, stat)
                    continue
                self._reading[uid] = reading.submit(self._read_worker, uid, stat)

    def _check_quota(self, listing: _Listing) -> None:
        """Report each worker that exceeds the quota, once in a window."""
        most, most_objects = self._settings.max_stored, self._settings.max_objects
        for uid in self._order:
            objects, size = listing.objects[uid], listing.size[uid]
            over = (most is not None and size > most) or (
                most_objects is not None and objects > most_objects
            )
            if over and uid not in self._named:
                self._named.add(uid)
                figures = {"objects": objects, "bytes": size}
                self._progress(Event("quota.exceeded", uid, figures))

    def _refuse_more(self, uid: str, stat: Stat) -> None:
        """Reject a worker that overwrote its gradient too often."""
        before = self._read.get(uid)
        if before is not None and before.out and before.out.reason is Refusal.OVERWRITTEN:
            return
        name = PurePosixPath(stat.key).name
        sentence = f"{name} was overwritten after it was read {_MOST_READS} times in this window."
        self._read[uid] = _Read(None, RejectedWorker(Refusal.OVERWRITTEN, sentence))
        self._progress(Event("gradient.refused", uid, {"reason": Refusal.OVERWRITTEN}))

    def _open_hurried(self, uid: str) -> Store:
        """Return a worker's store, with retries until the end of the window only."""
        left = max(1.0, self._until - time.monotonic())
        store = self._stores[uid]
        return store.with_retry_timeout(min(store.spec.retry_timeout, timedelta(seconds=left)))

    def _group_by_bucket(self, asked: Sequence[str]) -> list[list[str]]:
        """Group the workers by bucket, so that a shared bucket is listed once."""
        groups: dict[int, list[str]] = {}
        for uid in asked:
            groups.setdefault(id(self._stores[uid]), []).append(uid)
        return list(groups.values())

    def _list_bucket(self, uids: list[str]) -> _Listing:
        keys = self._window.keys
        prefix = f"{keys.run}/" if len(uids) > 1 else keys.worker(uids[0])
        store = self._stores[uids[0]]
        counted = {uid for uid in self._order if self._stores[uid] is store}
        asked, listing = set(uids), _Listing()
        hurried, limit = self._open_hurried(uids[0]), self._compute_listing_limit()
        shared = len(uids) > 1
        try:
            for stat in (
                list_fairly(hurried, prefix, depth=1, limit=limit)
                if shared
                else list_objects(hurried, prefix)
            ):
                whose = stat.key.removeprefix(f"{keys.run}/").partition("/")[0]
                if whose in counted:
                    listing.objects[whose] += 1
                    listing.size[whose] += stat.size
                self._note_gradient(listing, asked, stat)
            for uid in sorted(asked):
                if shared and listing.objects[uid] >= limit:  # the rest of its objects is not known
                    name = f"{keys.worker(uid)}gradient-{self._window.number:09d}-"
                    for stat in islice(list_objects(hurried, name), _MOST_NAMED):
                        self._note_gradient(listing, asked, stat)
        except errors.MillraceError as error:  # its next listing may be better
            for uid in uids:
                self._said[uid] = RejectedWorker(Refusal.UNAVAILABLE, explain_failure(error))
            listing.objects.clear()
            listing.size.clear()
        return listing

    def _note_gradient(self, listing: _Listing, asked: Container[str], stat: Stat) -> None:
        """Note an object if it is the gradient of this window of a worker that is asked."""
        found = listing.found
        uid, number = self._window.keys.parse(stat.key) or ("", -1)
        if (
            number == self._window.number
            and uid in asked
            and (uid not in found or is_torch_file(found[uid].key))  # of two, the other counts
        ):
            found[uid] = stat

    def _compute_listing_limit(self) -> int:
        """Return how many objects of a worker are listed: as many as the quota needs."""
        settings = self._settings
        least = _MOST_LISTED if settings.max_stored is None else _MOST_MEASURED
        return max(least, (settings.max_objects or 0) + 1)

    def _read_worker(self, uid: str, stat: Stat, *, again: bool = True) -> _Read:
        window = self._window
        name = PurePosixPath(stat.key).name
        if stat.last_modified < window.opens:
            sentence = f"{name} was written before the window began."
            return _Read(None, RejectedWorker(Refusal.EARLY, sentence))
        if stat.last_modified > window.closes:
            return _Read(
                None, RejectedWorker(Refusal.LATE, f"{name} was written after the deadline.")
            )
        try:
            payload = self._read_one(uid, self._open_hurried(uid), stat, window.make_expected(uid))
        except PayloadError as error:
            return _Read(None, RejectedWorker(error.reason, str(error)))
        except (errors.WorkerError, errors.ConfigurationError):
            raise  # an error of the aggregator, not of the worker
        except errors.MillraceError as error:
            return _Read(None, RejectedWorker(Refusal.UNAVAILABLE, explain_failure(error)))
        except Exception as error:  # noqa: BLE001 - bytes that cause an error harm only their worker
            odd = RejectedWorker(Refusal.FORMAT, f"{name} cannot be read ({type(error).__name__}).")
            # One retry, in case the bytes did not cause the error.
            return self._read_worker(uid, stat, again=False) if again else _Read(None, odd)
        return _Read(payload, None, stat.size, stat.last_modified)

    # -- results

    def _collect(self, *, last: bool = False) -> None:
        for uid, future in list(self._reading.items()):
            if not future.done():
                continue
            del self._reading[uid]
            read = future.result()
            if read.out is None or read.out.reason not in _NOT_READ:
                self._reads[uid] += 1
            if read.out is not None and read.out.reason in _MAY_PASS and not last:
                self._said[uid] = read.out
                del self._seen[uid]  # it is read again
                continue
            self._read[uid] = read
            if read.payload is not None:
                figures = {"bytes": read.size, "norm": read.payload.norm}
                self._progress(Event("gradient.taken", uid, figures))
            elif read.out is not None:
                self._progress(Event("gradient.refused", uid, {"reason": read.out.reason}))

    def _select_valid(self) -> list[str]:
        """Return the workers with valid gradients, in their order.

        Of equal contents only the earliest counts.
        """
        right = [uid for uid in self._order if uid in self._read and self._read[uid].payload]
        by_content: dict[str, str] = {}
        for uid in sorted(right, key=lambda uid: (str(self._read[uid].written), uid)):
            payload = self._read[uid].payload
            assert payload is not None
            by_content.setdefault(payload.header.body, uid)
        first = set(by_content.values())
        return [uid for uid in right if uid in first]

    def _make_result(self, seconds: float) -> GatheredWindow:
        right = self._select_valid()
        taken = right[: self._wanted]
        whole = len(taken) >= self._wanted
        unread = [uid for uid in self._order if uid in self._reading and uid not in self._read]
        if self._over:
            unread = [uid for uid in unread if whole and uid not in self._first]
        spare = right[self._wanted :] + unread
        out = {uid: self._reject(uid) for uid in self._order if uid not in {*taken, *spare}}
        if whole:  # unneeded reserves are not rejected
            out = {uid: one for uid, one in out.items() if uid in self._first or uid in self._read}
        seconds = round(seconds, 3)
        if len(taken) < self._settings.quorum:
            alone = RejectedWorker(Refusal.QUORUM, "It is valid, but too few others arrived.")
            nobody = GatheredWindow({}, {**out, **dict.fromkeys(right, alone)}, (), 0, seconds)
            raise QuorumError(
                f"{len(taken)} gradients of window {self._window.number} arrived in time, and "
                f"{self._settings.quorum} are needed: make windows longer, or the quorum smaller.",
                nobody,
            )
        size = sum(self._read[uid].size for uid in taken)
        return GatheredWindow(dict(self._iterate_payloads(taken)), out, tuple(spare), size, seconds)

    def _iterate_payloads(self, uids: Sequence[str]) -> Iterator[tuple[str, Payload]]:
        for uid in uids:
            payload = self._read[uid].payload
            assert payload is not None
            yield uid, payload

    def _reject(self, uid: str) -> RejectedWorker:
        read = self._read.get(uid)
        if read is None and (uid in self._reading or id(self._stores[uid]) in self._listings):
            return RejectedWorker(
                Refusal.UNAVAILABLE, "Its bucket had not answered by the deadline."
            )
        if read is None:
            missing = RejectedWorker(
                Refusal.MISSING, "No gradient of it arrived before the deadline."
            )
            return self._said.get(uid, missing)
        return read.out or RejectedWorker(
            Refusal.DUPLICATE, "Another worker had sent the same gradient before."
        )
