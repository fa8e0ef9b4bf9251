"""Reads of the gradients of a window, each of which ends with a valid gradient or with a reason."""

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any

from millrace import errors
from millrace.gradients.codec.gradient_object import (
    CheckedGradient,
    ExpectedGradient,
    GradientError,
    explain_failure,
    read_gradient,
)
from millrace.gradients.gather_window import GatherWindow, WaitLimit
from millrace.schemas.chain import ExcludedWorker
from millrace.schemas.gradient import ExclusionReason
from millrace.storage import Stat, Store
from millrace.threads import DaemonThreadPool

ReadGradient = Callable[[str, Store, Stat, ExpectedGradient], CheckedGradient]
"""Function that reads a worker's gradient, and raises the errors of `read_gradient`.

A `WorkerError` or a `ConfigurationError` ends the gathering."""

_SLOW_READ = 10.0  # seconds after which a read does not count among the concurrent ones


def read_in_process(
    _uid: str, store: Store, stat: Stat, expected: ExpectedGradient
) -> CheckedGradient:
    """Read all tensors of a gradient into this process: a `ReadGradient`."""
    return read_gradient(store, stat, expected)


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Result of reading an object of a worker.

    Attributes:
        gradient: Gradient, if it is valid.
        exclusion: Reason why it is not. It excludes the worker, unless a valid gradient follows.
        size: Size of a valid gradient in bytes.
        written: Time of the upload of a valid gradient, by the store's clock.
    """

    gradient: CheckedGradient | None = field(repr=False)
    exclusion: ExcludedWorker | None = None
    size: int = 0
    written: datetime | None = None


class GradientReader:
    """Reader of the gradients of a window, in several threads.

    A read of a slow bucket does not hold up the others: after a while, another read begins.

    Args:
        gather_window: Window of the gradients.
        read_gradient: Function that reads a gradient. Several threads call it.
        concurrency: Largest number of concurrent reads.
        limit: End of the retries.
    """

    def __init__(
        self,
        gather_window: GatherWindow,
        read_gradient: ReadGradient,
        concurrency: int,
        limit: WaitLimit,
    ) -> None:
        self._gather_window, self._read_gradient, self._limit = gather_window, read_gradient, limit
        self._concurrency = concurrency
        self._pool = DaemonThreadPool(concurrency, "gradient")
        self._pending: dict[str, Future[ReadResult]] = {}
        self._begun: dict[str, float] = {}  # times by the monotonic clock

    @property
    def pending(self) -> Collection[Future[Any]]:
        """Reads that were begun and not taken."""
        return self._pending.values()

    def is_reading(self, uid: str) -> bool:
        """Decide whether the read of a worker's gradient was begun and not taken."""
        return uid in self._pending

    def begin(self, uid: str, store: Store, stat: Stat) -> None:
        """Begin to read an object of a worker that has no other read."""
        self._begun.pop(uid, None)
        self._pending[uid] = self._pool.submit(self._read_timed, uid, store, stat)

    def take_finished(self) -> dict[str, ReadResult]:
        """Return the results since the last call, by the workers' names.

        Raises:
            WorkerError, ConfigurationError: A read failed by a fault of the aggregator.
        """
        finished = [uid for uid, read in self._pending.items() if read.done()]
        results = {uid: self._pending.pop(uid) for uid in finished}
        now = time.monotonic()
        slow = sum(now - self._begun.get(uid, now) > _SLOW_READ for uid in self._pending)
        self._pool.set_max_threads(self._concurrency + slow)
        return {uid: read.result() for uid, read in results.items()}

    def shutdown(self) -> None:
        """Cancel the reads that have not begun, without waiting for the others."""
        self._pool.shutdown()

    def _read_timed(self, uid: str, store: Store, stat: Stat) -> ReadResult:
        self._begun[uid] = time.monotonic()
        return self.read(uid, store, stat)

    def read(self, uid: str, store: Store, stat: Stat, *, again: bool = True) -> ReadResult:
        """Read an object of a worker, and check it, in the calling thread.

        Args:
            uid: Name of the worker.
            store: Bucket of the worker.
            stat: Description of the object from a listing.
            again: Whether to read a second time after an unexpected error.

        Raises:
            WorkerError, ConfigurationError: The read failed by a fault of the aggregator.
        """
        if untimely := self._check_time(stat):
            return untimely
        try:
            hurried = self._limit.limit_retries(store)
            gradient = self._read_gradient(
                uid, hurried, stat, self._gather_window.make_expected(uid)
            )
        except GradientError as error:
            return _refuse(error.reason, str(error))
        except (errors.WorkerError, errors.ConfigurationError):
            raise  # an error of the aggregator, not of the worker
        except errors.MillraceError as error:
            return _refuse(ExclusionReason.UNAVAILABLE, explain_failure(error))
        except Exception as error:  # noqa: BLE001 - bytes that cause an error harm only their worker
            if again:  # the bytes may not have caused the error
                return self.read(uid, store, stat, again=False)
            name = PurePosixPath(stat.key).name
            return _refuse(
                ExclusionReason.FORMAT, f"{name} cannot be read ({type(error).__name__})."
            )
        return ReadResult(gradient, None, stat.size, stat.last_modified)

    def _check_time(self, stat: Stat) -> ReadResult | None:
        name = PurePosixPath(stat.key).name
        if stat.last_modified < self._gather_window.opens:
            return _refuse(ExclusionReason.EARLY, f"{name} was written before the window began.")
        if stat.last_modified > self._gather_window.closes:
            return _refuse(ExclusionReason.LATE, f"{name} was written after the deadline.")
        return None


def _refuse(reason: ExclusionReason, sentence: str) -> ReadResult:
    return ReadResult(None, ExcludedWorker(reason=reason, sentence=sentence))
