"""Gathering of a window's gradients from the workers' buckets, by listings until a deadline.

The workers of a window are known before it begins. The buckets are listed, and new gradients are
read at once. Reserves are read before the deadline, when the first workers are late. A bad gradient
harms only its own worker, which is excluded with a reason. Until the end of the window, a valid
gradient may overwrite a refused one. At most three objects of a worker are read in a window, so
frequent overwrites do not keep readers busy.
"""

import time
from collections.abc import Container, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import replace
from datetime import datetime

from millrace import errors
from millrace.gradients.gather_window import GatherWindow, Sender, WaitLimit
from millrace.gradients.sync.bucket_lister import BucketLister, QuotaMonitor
from millrace.gradients.sync.gather_results import GatherOutcome, GatherResults, QuorumError
from millrace.gradients.sync.gradient_reader import GradientReader, ReadGradient, read_in_process
from millrace.lease import StoreClock
from millrace.progress import Progress, ignore_event
from millrace.schemas.chain import ExcludedWorker
from millrace.schemas.gradient import ExclusionReason
from millrace.schemas.window import GatherSettings

_WARM_UP = ExcludedWorker(
    reason=ExclusionReason.WARM_UP, sentence="Its gradient is valid, and it warms up."
)


def gather(
    gather_window: GatherWindow,
    workers: Sequence[Sender],
    settings: GatherSettings | None = None,
    *,
    reserves: Sequence[Sender] = (),
    observed: Sequence[Sender] = (),
    read_gradient: ReadGradient = read_in_process,
    clock: StoreClock | None = None,
    progress: Progress = ignore_event,
) -> GatherOutcome:
    """Gather the gradients of a window, until all have arrived or the window has ended.

    Memory: that of the gathered gradients, and of those that are being read.

    Args:
        gather_window: Window to gather.
        workers: Workers that are read first.
        settings: Settings of the gathering.
        reserves: Workers that replace missing ones, in this order.
        observed: Workers that warm up. Their gradients are read and checked, and are none of the
            gathered ones. A complete window waits for them until ``settings.reserves_after`` of its
            time.
        read_gradient: Function that reads a gradient. Several threads call it.
        clock: Clock of the stores; by default that of this machine.
        progress: Receives `GradientAccepted` or `GradientRefused` for each worker, and
            `QuotaExceeded` once for a worker that stores more than the settings allow. Its gradient
            still counts, since the gradients of a long run may exceed the quota.

    Raises:
        QuorumError: Fewer gradients than the quorum arrived in time.
        ConfigurationError: A worker is named twice, or the window needs more gradients than there
            are workers.
    """
    settings = settings or GatherSettings()
    wanted = count_wanted_gradients(settings, workers, reserves)
    gathering = _Gathering(
        gather_window, workers, reserves, observed, settings, wanted, read_gradient, progress
    )
    return gathering.run(clock or StoreClock.read_machine_clock())


def count_wanted_gradients(
    settings: GatherSettings, workers: Sequence[Sender], reserves: Sequence[Sender]
) -> int:
    """Return the number of gradients that complete a window.

    Raises:
        ConfigurationError: A worker is named twice, or the window needs more gradients than there
            are workers.
    """
    everybody = [*workers, *reserves]
    if len({worker.uid for worker in everybody}) < len(everybody):
        raise errors.ConfigurationError("A worker is named twice: name each once.")
    wanted = len(workers) if settings.wanted is None else settings.wanted
    wanted = max(wanted, settings.quorum)
    if wanted > len(everybody):
        raise errors.ConfigurationError(
            f"{wanted} gradients are needed from {len(everybody)} workers: lower `quorum` or "
            "`wanted`, or name more workers."
        )
    return wanted


class _Gathering:
    """Schedule of the listings and the reads of a window."""

    def __init__(
        self,
        gather_window: GatherWindow,
        workers: Sequence[Sender],
        reserves: Sequence[Sender],
        observed: Sequence[Sender],
        settings: GatherSettings,
        wanted: int,
        read_gradient: ReadGradient,
        progress: Progress,
    ) -> None:
        self._gather_window, self._settings, self._wanted = gather_window, settings, wanted
        everybody = (*workers, *reserves, *observed)
        self._stores = {worker.uid: worker.store for worker in everybody}
        self._first = {worker.uid for worker in workers}
        self._observed = {worker.uid for worker in observed}
        self._limit = limit = WaitLimit(time.monotonic())
        self._lister = BucketLister(gather_window, self._stores, settings, limit)
        self._reader = GradientReader(gather_window, read_gradient, settings.concurrency, limit)
        self._quota = QuotaMonitor(settings, progress)
        self._results = GatherResults(tuple(self._stores), progress)
        self._is_over = False
        self._clock = StoreClock.read_machine_clock()
        self._begun: dict[str, datetime] = {}  # time at which the last read of a worker began

    def run(self, clock: StoreClock) -> GatherOutcome:
        """List and read until enough gradients are valid, or the window has ended."""
        began, self._clock = time.monotonic(), clock
        settings = self._settings
        opens, closes = self._gather_window.opens, self._gather_window.closes
        reserves_at = opens + settings.reserves_after * (closes - opens)
        try:
            while (now := clock.now()) <= closes:
                is_due = now >= reserves_at
                with_reserves = is_due or self._results.has_all(self._first)
                left = max((closes - now).total_seconds(), 0.0) + 0.01
                pause = min(settings.poll_interval.total_seconds(), left)
                asked = time.monotonic()
                self._limit.until = asked + left + settings.grace_period.total_seconds()
                self._begin_listings(with_reserves=with_reserves)
                wait(self._lister.pending, pause)
                self._begin_reads()
                self._collect_results()
                has_observed = is_due or self._results.has_all(self._observed)
                counting = set(self._results.select_valid()) - self._observed
                if has_observed and len(counting) >= self._wanted:
                    break
                time.sleep(max(0.0, asked + pause - time.monotonic()))
            else:
                self._is_over = True
            self._limit.until = time.monotonic() + settings.grace_period.total_seconds()
            self._finish()
        finally:  # stalled requests are not awaited
            self._reader.shutdown()
            self._lister.shutdown()
        return self._make_result(time.monotonic() - began)

    def _finish(self) -> None:
        """Wait for pending listings and reads, at most for the grace period.

        After the deadline, each bucket is listed once more for gradients of the last moment. The
        order of the workers does not depend on the speed of the reads.
        """
        listed = set[int]()
        while True:
            self._collect_results(is_last=True)
            if self._is_over:
                self._begin_reads()
                listed |= self._begin_listings(with_reserves=True, exclude=listed)
            pending = [*(self._lister.pending if self._is_over else ()), *self._reader.pending]
            left = self._limit.until - time.monotonic()
            if not pending or left <= 0:
                return
            wait(pending, left, return_when=FIRST_COMPLETED)

    def _begin_listings(
        self, *, with_reserves: bool, exclude: Container[int] = frozenset()
    ) -> set[int]:
        """Begin to list the buckets of workers without a valid gradient.

        Args:
            with_reserves: Whether to include reserves.
            exclude: Buckets to leave out.

        Returns:
            Identities of the buckets whose listing was begun.
        """
        valid = set(self._results.select_valid())
        asked = [
            uid
            for uid in self._stores
            if not self._reader.is_reading(uid)
            and uid not in valid
            and (with_reserves or uid in self._first or uid in self._observed)
        ]
        return self._lister.begin(asked, exclude)

    def _begin_reads(self) -> None:
        """Begin to read the new gradients of finished listings."""
        valid = set(self._results.select_valid())
        for listing in self._lister.take_finished():
            self._quota.check(listing, self._stores)
            self._results.note_listing(listing.asked, listing.failed)
            for uid, stat in listing.found.items():
                if self._reader.is_reading(uid) or uid in valid:
                    continue
                if self._results.should_read(uid, stat):
                    self._begun[uid] = self._clock.now()
                    self._reader.begin(uid, self._stores[uid], stat)

    def _collect_results(self, *, is_last: bool = False) -> None:
        for uid, result in self._reader.take_finished().items():
            written = result.written
            if written is not None and self._stores[uid].is_foreign:
                # Its endpoint may state any time, such as one before that of a copied gradient, and
                # any ETag, such as that of an earlier object.
                written = max(written, self._begun[uid])
            self._results.note(uid, replace(result, written=written), is_last=is_last)

    def _make_result(self, seconds: float) -> GatherOutcome:
        results = self._results
        every_valid = results.select_valid()
        warm = self._observed.intersection(every_valid)
        valid = [uid for uid in every_valid if uid not in warm]
        taken = valid[: self._wanted]
        is_complete = len(taken) >= self._wanted
        spare = valid[self._wanted :] + self._list_unread(is_complete=is_complete)
        excluded = self._explain_exclusions({*taken, *spare}, warm, is_complete=is_complete)
        seconds = round(seconds, 3)
        valid_ones = {uid: results.get_valid(uid) for uid in taken}
        gradients = {uid: gradient for uid, (gradient, _) in valid_ones.items()}
        size = sum(gradient.size for gradient in gradients.values())
        written = {uid: written for uid, (_, written) in valid_ones.items()}
        gathered = GatherOutcome(gradients, excluded, tuple(spare), size, seconds, written)
        if len(taken) < self._settings.quorum:
            raise QuorumError(
                f"{len(taken)} gradients of window {self._gather_window.number} arrived in time, "
                f"and {self._settings.quorum} are needed: make windows longer, or the quorum "
                "smaller.",
                gathered.exclude_all(),
            )
        return gathered

    def _list_unread(self, *, is_complete: bool) -> list[str]:
        """Return the workers whose gradients are being read, and are not needed if it is over."""
        unread = [
            uid
            for uid in self._stores
            if self._reader.is_reading(uid)
            and not self._results.has(uid)
            and uid not in self._observed
        ]
        if self._is_over:
            return [uid for uid in unread if is_complete and uid not in self._first]
        return unread

    def _explain_exclusions(
        self, used: Set[str], warm: Set[str], *, is_complete: bool
    ) -> dict[str, ExcludedWorker]:
        """Return the reason of each worker that is not used. Unneeded reserves are left out.

        Args:
            used: Workers whose gradients are taken or spare.
            warm: Workers that warm up, with a valid gradient.
            is_complete: Whether all wanted gradients are there.
        """
        needed, results = self._first | self._observed, self._results
        return {
            uid: _WARM_UP
            if uid in warm
            else results.explain_exclusion(
                uid, is_pending=self._reader.is_reading(uid) or self._lister.is_listing(uid)
            )
            for uid in self._stores
            if uid not in used and (not is_complete or uid in needed or results.has(uid))
        }
