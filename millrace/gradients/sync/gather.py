"""Gather the gradients of a window from the workers' buckets: by listing, until a deadline.

Who takes part is known before it begins. A bucket is listed as a whole, once for all workers in it,
and what appears is read at once, so that nothing that came is lost when time is up. Of a worker
with thousands of objects, only its gradient is looked for, so that the listing ends for the others.
Reserves are read before the deadline, as soon as those who were asked first are late. One bad
worker costs its own gradient and nothing else: it is out, with a reason. Until the window is over a
refusal is not final: a right gradient that overwrites what was refused counts. At most three
objects of a worker are read in a window, so that a worker which overwrites its gradient at every
look keeps no reader busy.
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
    Expected,
    Payload,
    PayloadError,
    Shapes,
    explain_failure,
    is_torch_file,
    read_payload,
)
from millrace.gradients.settings import GatherSettings
from millrace.keys import GradientKeys
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
    """Somebody who may send a gradient.

    Attributes:
        uid: Its name.
        store: Where it writes: its own bucket, or one that it shares.
    """

    uid: str
    store: Store


@dataclass(frozen=True, slots=True)
class Window:
    """Window whose gradients are gathered.

    Attributes:
        keys: Of the run.
        number: Of the window.
        base: The step of the weights that its gradients change.
        codec: How they are compressed.
        shapes: Of the model's tensors, by their names.
        opens: By the stores' clock: what was written before is not of this window.
        closes: What is written later is not taken.
        norm: The L2 norm that nobody honest exceeds; None for what float32 can bear.
    """

    keys: GradientKeys
    number: int
    base: int
    codec: Codec
    shapes: Shapes = field(repr=False)
    opens: datetime
    closes: datetime
    norm: float | None = None

    def expected(self, uid: str) -> Expected:
        """Return the conditions that a worker's gradient must meet."""
        return Expected(
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
    """A worker whose gradient was not taken.

    Attributes:
        reason: Why, in a word.
        sentence: Why, in a sentence.
    """

    reason: Refusal
    sentence: str


@dataclass(frozen=True, slots=True)
class GatheredWindow:
    """The gradients of a window.

    Attributes:
        taken: By the workers' names.
        out: Who is out, and why. A reserve that was not needed and has sent nothing is not in it.
        spare: Who had sent, and was not needed; some were not even read to the end.
        size: Bytes of what was taken.
        seconds: How long it took.
    """

    taken: Mapping[str, Payload] = field(repr=False)
    out: Mapping[str, RejectedWorker]
    spare: tuple[str, ...]
    size: int
    seconds: float


class QuorumError(errors.UnavailableError):
    """Fewer gradients came in time than are needed.

    Attributes:
        gathered: Nobody's is taken, and everybody is out with a reason.
    """

    def __init__(self, sentence: str, gathered: GatheredWindow) -> None:
        super().__init__(sentence)
        self.gathered = gathered


Reading = Callable[[str, Store, Stat, Expected], Payload]
"""Reads a worker's gradient, by the worker's name, and raises as `read_payload` does.

A `WorkerError` or a `ConfigurationError` ends the gathering."""


def _read_here(_uid: str, store: Store, stat: Stat, expected: Expected) -> Payload:
    return read_payload(store, stat, expected)


def gather(
    window: Window,
    workers: Sequence[Sender],
    settings: GatherSettings | None = None,
    *,
    reserves: Sequence[Sender] = (),
    reading: Reading = _read_here,
    clock: StoreClock | None = None,
    progress: Progress = ignore_event,
) -> GatheredWindow:
    """Gather the gradients of a window: returns when it is whole, or its time is up.

    Memory: that of what is taken, and of those that are being read.

    Args:
        window: Which.
        workers: Who is asked first.
        settings: How.
        reserves: Who stands in, in this order.
        reading: How a gradient is read; several at once, in threads.
        clock: Of the stores; by default this machine's.
        progress: Told ``gradient.taken`` and ``gradient.refused`` of each worker; and once
            ``quota.exceeded`` with ``objects`` and ``bytes`` of one that stores more than the
            settings say. Its gradient counts all the same: a long run's own gradients may be what
            exceeds the quota.

    Raises:
        QuorumError: Fewer than the quorum came in time.
        ConfigurationError: A worker is named twice, or more are wanted than there are.
    """
    settings = settings or GatherSettings()
    everybody = [*workers, *reserves]
    if len({worker.uid for worker in everybody}) < len(everybody):
        raise errors.ConfigurationError("A worker is named twice: name each once.")
    wanted = len(workers) if settings.wanted is None else settings.wanted
    wanted = max(wanted, settings.quorum)
    if wanted > len(everybody):
        raise errors.ConfigurationError(
            f"{wanted} gradients are wanted of {len(everybody)} workers."
        )
    gathering = _Gathering(window, workers, reserves, settings, wanted, reading, progress)
    return gathering.run(clock or StoreClock.of_this_machine())


@dataclass(frozen=True, slots=True)
class _Read:
    """A gradient that was read, right or not."""

    payload: Payload | None
    out: RejectedWorker | None
    size: int = 0
    written: datetime | None = None


@dataclass(frozen=True, slots=True)
class _Listing:
    """Objects of a bucket's workers.

    Attributes:
        found: Gradient of the window, by the worker's name.
        objects: Number of all objects below a worker's prefix; empty if the listing is not whole.
        size: Bytes of these, likewise.
    """

    found: dict[str, Stat] = field(default_factory=dict[str, Stat])
    objects: Counter[str] = field(default_factory=Counter[str])
    size: Counter[str] = field(default_factory=Counter[str])


class _Gathering:
    def __init__(
        self,
        window: Window,
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
        self._seen: dict[str, Stat] = {}  # what was read of each worker, or is
        self._reading: dict[str, Future[_Read]] = {}
        self._until = time.monotonic()  # when nothing is waited for any more
        self._read: dict[str, _Read] = {}
        self._reads = Counter[str]()  # of each worker, how many objects were read
        self._listings: dict[int, Future[_Listing]] = {}
        self._named: set[str] = set()  # workers that are said to store too much
        self._over = False
        self._said: dict[str, RejectedWorker] = {}  # of who has sent nothing that is read yet

    def run(self, clock: StoreClock) -> GatheredWindow:
        began = time.monotonic()
        window, settings = self._window, self._settings
        hedged_at = window.opens + settings.hedge * (window.closes - window.opens)
        reading = DaemonThreadPool(settings.concurrency, "gradient")
        # A thread for each, as some buckets may hang.
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
        finally:  # nobody waits for those that hang
            reading.shutdown()
            listing.shutdown()
        return self._make_result(time.monotonic() - began)

    def _finish(self, listing: DaemonThreadPool, reading: DaemonThreadPool) -> None:
        """Wait for what is on its way, all of it together for the grace and no longer.

        When time is up each bucket is listed once more: an earlier listing may not have seen the
        last moment. Who was asked first counts first, however slowly it is read.
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

    # -- looking

    def _ask(
        self, listing: DaemonThreadPool, *, everybody: bool, besides: Container[int] = frozenset()
    ) -> None:
        """Have the buckets listed of who has sent nothing right yet; not twice at once.

        Args:
            listing: Where it is done.
            everybody: Reserves, too.
            besides: The buckets that are not.
        """
        right = set(self._select_valid())
        asked = [
            uid
            for uid in self._order
            if uid not in self._reading and uid not in right and (everybody or uid in self._first)
        ]
        for uids in self._group_by_bucket(asked):
            place = id(self._stores[uids[0]])
            if place not in self._listings and place not in besides:
                self._listings[place] = listing.submit(self._list_bucket, uids)

    def _read_listings(self, reading: DaemonThreadPool) -> None:
        """Have read what is new in the listings that are there."""
        right = set(self._select_valid())
        for place, listed in list(self._listings.items()):
            if not listed.done():
                continue
            del self._listings[place]
            listing = listed.result()
            self._check_quota(listing)
            for uid, stat in listing.found.items():
                # What was refused may be overwritten until the window is over: then it is new.
                if uid in self._reading or uid in right or self._seen.get(uid) == stat:
                    continue
                self._said.pop(uid, None)
                self._seen[uid] = stat
                if self._reads[uid] >= _MOST_READS:
                    self._refuse_more(uid, stat)
                    continue
                self._reading[uid] = reading.submit(self._read_worker, uid, stat)

    def _check_quota(self, listing: _Listing) -> None:
        """Name each worker, once in a window, that stores more than the settings say."""
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
        """Record that a worker's gradient was overwritten too often to be read again."""
        before = self._read.get(uid)
        if before is not None and before.out and before.out.reason is Refusal.OVERWRITTEN:
            return
        name = PurePosixPath(stat.key).name
        sentence = f"{name} was overwritten after it was read {_MOST_READS} times in this window."
        self._read[uid] = _Read(None, RejectedWorker(Refusal.OVERWRITTEN, sentence))
        self._progress(Event("gradient.refused", uid, {"reason": Refusal.OVERWRITTEN}))

    def _open_hurried(self, uid: str) -> Store:
        """Return a worker's store, whose requests are not tried again when the window is over."""
        left = max(1.0, self._until - time.monotonic())
        store = self._stores[uid]
        return store.with_retry_timeout(min(store.spec.retry_timeout, timedelta(seconds=left)))

    def _group_by_bucket(self, asked: Sequence[str]) -> list[list[str]]:
        """Group the workers by bucket: a bucket that many share is listed once."""
        places: dict[int, list[str]] = {}
        for uid in asked:
            places.setdefault(id(self._stores[uid]), []).append(uid)
        return list(places.values())

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
            payload = self._read_one(uid, self._open_hurried(uid), stat, window.expected(uid))
        except PayloadError as error:
            return _Read(None, RejectedWorker(error.reason, str(error)))
        except (errors.WorkerError, errors.ConfigurationError):
            raise  # it is ours, and no fault of whoever sent this
        except errors.MillraceError as error:
            return _Read(None, RejectedWorker(Refusal.UNAVAILABLE, explain_failure(error)))
        except Exception as error:  # noqa: BLE001 - what its bytes have done costs its own worker
            odd = RejectedWorker(Refusal.FORMAT, f"{name} cannot be read ({type(error).__name__}).")
            # Or was it not its bytes? What happens once costs nobody a gradient.
            return self._read_worker(uid, stat, again=False) if again else _Read(None, odd)
        return _Read(payload, None, stat.size, stat.last_modified)

    # -- what has come

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
                del self._seen[uid]  # it is tried again
                continue
            self._read[uid] = read
            if read.payload is not None:
                figures = {"bytes": read.size, "norm": read.payload.norm}
                self._progress(Event("gradient.taken", uid, figures))
            elif read.out is not None:
                self._progress(Event("gradient.refused", uid, {"reason": read.out.reason}))

    def _select_valid(self) -> list[str]:
        """Return the workers whose gradients are right, in the order in which they count.

        No content twice.
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
        if whole:  # a reserve that was not needed is not missed
            out = {uid: one for uid, one in out.items() if uid in self._first or uid in self._read}
        seconds = round(seconds, 3)
        if len(taken) < self._settings.quorum:
            alone = RejectedWorker(Refusal.QUORUM, "It is right, and too few others came.")
            nobody = GatheredWindow({}, {**out, **dict.fromkeys(right, alone)}, (), 0, seconds)
            raise QuorumError(
                f"{len(taken)} gradients of window {self._window.number} came in time, and "
                f"{self._settings.quorum} are needed: let it last longer, or ask for fewer.",
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
                Refusal.UNAVAILABLE, "Its bucket had not answered when time was up."
            )
        if read is None:
            missing = RejectedWorker(
                Refusal.MISSING, "Nothing of it came before the window was over."
            )
            return self._said.get(uid, missing)
        return read.out or RejectedWorker(
            Refusal.DUPLICATE, "Another worker had sent the same before."
        )
