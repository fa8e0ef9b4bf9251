"""Supervise a rental in a thread, while the caller works with its machines."""

import contextvars
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from time import monotonic
from typing import ClassVar, Self

from millrace.errors import HeldError, MachineError, MillraceError, format_error
from millrace.progress import Event, Progress, ignore_event, shield_progress
from millrace.rentals.owner_monitor import OwnerMonitor
from millrace.rentals.progress_events import (
    MachineReleased,
    RentalFailed,
    RentalInterrupted,
    RentalWaiting,
)
from millrace.rentals.rental import Rental
from millrace.rentals.settings import RentalSettings
from millrace.schemas.rental import ReleaseReason

_TAKEOVER_TIMEOUT = 600.0  # seconds that another owner may hold the rental
_POLL_INTERVAL = 10.0
_MAX_FAILURES = 2  # failed programs before any has worked: the next would fail, too


class RentalSupervisor:
    """Handle of a rental whose machines a thread rents, replaces, counts and releases.

    A context manager. The exit releases all machines, and returns when a listing shows none.

    Args:
        settings: Settings of the rental; machines of an owner that was killed are taken over.
        is_proven: Whether a program is known to work. Until then, the second failure ends the
            rental: the command is wrong on any machine.
        repeat: Whether programs that ended under an earlier owner run again, as for `Rental`.
        quorum: Number of machines that are enough, as for `Rental`; by default all.
        ready_timeout: Longest wait of `wait_until_ready` for more machines than the quorum; by
            default there is no limit.
        progress: Context, entered in the thread, whose value receives the events of `Rental`. The
            value also receives `RentalWaiting`, `RentalFailed`, and `RentalInterrupted` when the
            exit is interrupted.
    """

    # Without `__dict__`, Prefect cannot store the attributes of a flow's parameter: they hold keys.
    __slots__ = (
        "_ended",
        "_error",
        "_failures",
        "_is_proven",
        "_progress",
        "_quorum",
        "_ready",
        "_ready_timeout",
        "_rental",
        "_repeat",
        "_report",
        "_stop_requested",
        "_thread",
        "settings",
    )

    _unreleased: ClassVar[set["RentalSupervisor"]] = set()

    def __init__(
        self,
        settings: RentalSettings,
        is_proven: Callable[[], bool] = lambda: True,
        *,
        repeat: bool = False,
        quorum: int | None = None,
        ready_timeout: timedelta | None = None,
        progress: AbstractContextManager[Progress] | None = None,
    ) -> None:
        self.settings = settings
        self._repeat, self._quorum, self._ready_timeout = repeat, quorum, ready_timeout
        self._is_proven = is_proven
        self._failures: list[str] = []
        self._progress: AbstractContextManager[Progress] = progress or nullcontext(ignore_event)
        self._report: Progress = ignore_event
        self._stop_requested, self._ready = threading.Event(), threading.Event()
        self._ended = threading.Event()
        self._rental: Rental | None = None
        self._error: BaseException | None = None
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            name="rental-supervisor", target=context.run, args=(self._run,), daemon=True
        )

    @classmethod
    def has_any_machines(cls) -> bool:
        """Decide whether this process owns a rental that is not released yet."""
        return bool(cls._unreleased)

    @property
    def name(self) -> str:
        """Name of the rental."""
        return self.settings.name

    def __enter__(self) -> Self:
        """Begin to own and to rent."""
        self._unreleased.add(self)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop_requested.set()
        interrupt: BaseException | None = None
        while not self._ended.is_set():
            try:
                self._ended.wait()  # after an interrupt, `join` may take a living thread for ended
            except BaseException as error:  # noqa: BLE001 - a second Ctrl-C, or SIGTERM
                interrupt = error
                self._report(RentalInterrupted(rental=self.name))
        if interrupt is not None and kind is None:
            raise interrupt

    def wait_until_ready(self) -> None:
        """Wait until all programs run or have ended, or those of the quorum, as in `Rental`.

        Raises:
            HeldError: Another owner holds the rental.
            BudgetError, MachineError, NotFoundError: As of `Rental.wait_until_ready`.
        """
        self._ready.wait()
        self.raise_failure()

    @property
    def cost(self) -> float:
        """Dollars that all machines have cost so far, including released machines."""
        return self._rental.cost if self._rental else 0.0

    @property
    def is_over(self) -> bool:
        """True if all programs, or the rental, have ended."""
        return not self._thread.is_alive()

    def describe_end(self) -> str:
        """Return how the programs ended, as far as it is known."""
        if self._failures:
            return self._failures[-1]
        if self._error is not None:
            return format_error(self._error)
        return "The programs ended with exit code 0."

    def raise_failure(self) -> None:
        """Raise the error that has ended the rental, if any."""
        if self._error is not None:
            raise self._error

    def wait_until_done(self, timeout: timedelta) -> None:
        """Wait until all programs have ended, and their machines are released.

        An error of the rental is only reported: the machines have done their work.

        Args:
            timeout: Longest wait; the exit then releases the other machines.
        """
        self._ended.wait(timeout.total_seconds())

    def _acquire_rental(self, stack: ExitStack) -> Rental:
        """Acquire the rental; an earlier owner may still be releasing its machines."""
        deadline = monotonic() + _TAKEOVER_TIMEOUT
        while True:
            rental = Rental(
                self.settings,
                wait=True,
                repeat=self._repeat,
                quorum=self._quorum,
                progress=self._handle_event,
            )
            try:
                return stack.enter_context(rental)
            except HeldError as error:
                if monotonic() > deadline or self._stop_requested.wait(_POLL_INTERVAL):
                    raise
                self._report(RentalWaiting(rental=self.name, message=format_error(error)))

    def _handle_event(self, event: Event) -> None:
        """Handle an event: end the rental after failures of programs that never worked."""
        self._report(event)
        if not isinstance(event, MachineReleased) or event.reason is not ReleaseReason.FAILED:
            return
        self._failures.append(event.message)
        if len(self._failures) < _MAX_FAILURES or self._error is not None:
            return
        try:
            proven = self._is_proven()
        except MillraceError:
            return  # unknown: the next failure decides
        if not proven:
            self._error = MachineError(
                f"The program failed on {len(self._failures)} machines, and has joined the run on "
                f"none. {self._failures[-1]}"
            )
            self._stop_requested.set()

    def _run(self) -> None:
        try:
            with (
                self._progress as progress,
                OwnerMonitor(self.settings.ledger, self.name),
                ExitStack() as stack,
            ):
                self._report = shield_progress(progress)
                self._rental = rental = self._acquire_rental(stack)
                rental.wait_until_ready(self._stop_requested, self._ready_timeout)
                self._ready.set()
                rental.wait_until_done(self._stop_requested)
        except BaseException as error:  # noqa: BLE001 - raised by `raise_failure`
            self._error = self._error or error
            self._report(RentalFailed(rental=self.name, message=format_error(error)))
        finally:
            self._unreleased.discard(self)
            self._ready.set()
            self._ended.set()
