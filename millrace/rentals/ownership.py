"""Ownership of a rental: a lease for other processes, and an object for its machines.

Who watches whom, by what, and what follows:

| watched | by what           | by whom                       | after               | then      |
| ------- | ----------------- | ----------------------------- | ------------------- | --------- |
| owner   | its lease         | the next owner, the reaper    | 3 minutes           | take over |
| owner   | its process       | `OwnerMonitor` on its host    | half a minute       | release   |
| owner   | its heartbeat     | the watchdog of each machine  | `heartbeat_timeout` | destroy   |
| machine | its heartbeat     | the owner: `MachineInspector` | the same            | replace   |
| run     | its Prefect state | hook of the deployment        | at once             | release   |
"""

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterable
from datetime import datetime, timedelta
from typing import NoReturn

from millrace import errors
from millrace.keys.rentals import RentalKeys
from millrace.lease import (
    Heartbeat,
    HeldLease,
    Holder,
    Lease,
    StoreClock,
    acquire,
    await_lease,
)
from millrace.rentals.guest.watchdog import DETACHED
from millrace.storage import Store, put

_TTL = timedelta(minutes=3)
_HEARTBEATS_PER_TIMEOUT = 6
_LOOK_TIMEOUT = timedelta(seconds=5)  # for a look at the lease before a heartbeat

_log = logging.getLogger(__name__)


def acquire_ownership(
    store: Store,
    keys: RentalKeys,
    stack: contextlib.ExitStack,
    *,
    wait: bool = False,
    is_alive: Callable[[], bool] = lambda: True,
) -> Lease:
    """Acquire the lease of a rental until a stack closes.

    Args:
        store: Store of the ledger.
        keys: Keys of the rental.
        stack: Stack that releases the lease when it closes.
        wait: Whether to wait if the rental seems to have an owner. The wait ends when the owner
            renews its lease, or the lease expires.
        is_alive: Function that decides whether the lease is renewed, as in `Heartbeat`.

    Raises:
        HeldError: The rental has another owner.
    """
    holder = Holder.describe_this_process()
    clock = StoreClock.read(store, keys.scope, holder)
    take_lease = await_lease if wait else acquire
    lease = take_lease(store, keys.lease, holder, _TTL, clock)
    if isinstance(lease, HeldLease):
        raise errors.HeldError(
            f"{keys.name} is held by {lease.holder.host} (process {lease.holder.pid}): end that "
            "process, or wait until its lease expires, three minutes after its last heartbeat."
        )
    heartbeat = stack.enter_context(Heartbeat(_TTL, is_alive))
    heartbeat.keep(lease)
    return lease


class StepTimer:
    """Timer of an owner's steps, such as a poll of its machines.

    An owner in a step that does not end checks neither machines nor budgets. Such an owner counts
    as stalled, and its heartbeats stop. Between two waits for its machines no step is expected: the
    caller can work with the machines for any time.

    Args:
        timeout: Longest time of a step.
        clock: Function that returns the current time in seconds.
    """

    def __init__(self, timeout: timedelta, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout = timeout
        self._clock = clock
        self._step_started_at: float | None = None

    @contextlib.contextmanager
    def expect_steps(self) -> Generator[None]:
        """Expect that steps complete, until the block ends."""
        self.note_step()
        try:
            yield
        finally:
            self._step_started_at = None

    def note_step(self) -> None:
        """Note that a step is complete, and that the next one starts."""
        self._step_started_at = self._clock()

    def is_stalled(self) -> bool:
        """Decide whether the current step takes too long."""
        started_at = self._step_started_at
        return started_at is not None and self._clock() - started_at > self.timeout.total_seconds()


class OwnerHeartbeat:
    """Thread that writes the owner's heartbeat into the object that the machines read.

    Args:
        store: Store of the ledger.
        keys: Keys of the rental.
        timeout: Time without a heartbeat after which the machines destroy themselves.
        timer: Timer of the owner's steps. A stalled owner sends no heartbeat.
        is_superseded: Function that decides whether another owner has the rental. It may have
            detached the machines, which a heartbeat would undo.
    """

    def __init__(
        self,
        store: Store,
        keys: RentalKeys,
        timeout: timedelta,
        timer: StepTimer,
        is_superseded: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store, self._keys = store, keys
        self._timeout, self._timer = timeout, timer
        self._is_superseded = is_superseded
        self._was_stalled = False
        self._interval = timeout.total_seconds() / _HEARTBEATS_PER_TIMEOUT
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="owner", daemon=True)

    def __enter__(self) -> "OwnerHeartbeat":
        self._write_heartbeat()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(self._interval)

    def limit_timeout(self, timeout: timedelta) -> None:
        """Send heartbeats as often as machines with this timeout need. Call this before the start.

        Args:
            timeout: Timeout of machines that an earlier owner has rented.
        """
        self._timeout = min(self._timeout, timeout)
        self._interval = self._timeout.total_seconds() / _HEARTBEATS_PER_TIMEOUT

    def detach(self, until: datetime | None = None) -> None:
        """Stop, and tell the machines that they stay without an owner.

        Args:
            until: Time at which all machines have to end; None for the deadline of each machine.
        """
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        content = DETACHED if until is None else b"%s %d" % (DETACHED, until.timestamp())
        put(self._store, self._keys.owner, content)

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            with contextlib.suppress(errors.MillraceError):  # the next heartbeat may succeed
                self._renew_heartbeat()

    def _renew_heartbeat(self) -> None:
        """Write a heartbeat, unless the owner is stalled or superseded."""
        is_stalled = self._timer.is_stalled()
        if is_stalled and not self._was_stalled:
            _log.error(
                "The owner of %s has not checked its machines for %s. Its heartbeats stop, and the "
                "machines destroy themselves after %s. End this process, and start it again.",
                self._keys.name,
                self._timer.timeout,
                self._timeout,
            )
        elif self._was_stalled and not is_stalled:
            _log.warning("The owner of %s sends heartbeats again.", self._keys.name)
        self._was_stalled = is_stalled
        if not is_stalled and not self._is_superseded():
            self._write_heartbeat()

    def _write_heartbeat(self) -> None:
        put(self._store.with_retry_timeout(timedelta(seconds=self._interval)), self._keys.owner,
            secrets.token_hex(8).encode())  # fmt: skip


class Ownership:
    """Ownership of a rental, from `acquire` until a stack closes.

    Args:
        store: Store of the ledger.
        keys: Keys of the rental.
        heartbeat_timeout: Time without a heartbeat after which the machines destroy themselves.
        timer: Timer of the owner's steps. While the owner is stalled, neither the lease nor the
            heartbeat is renewed.
    """

    def __init__(
        self, store: Store, keys: RentalKeys, heartbeat_timeout: timedelta, timer: StepTimer
    ) -> None:
        self._store, self._keys, self._timer = store, keys, timer
        self._heartbeat = OwnerHeartbeat(
            store, keys, heartbeat_timeout, timer, self._has_next_owner
        )
        self._lease: Lease | None = None
        self.is_superseded = False
        """True if another owner has taken over the rental."""

    def acquire(self, stack: contextlib.ExitStack, *, wait: bool = False) -> None:
        """Acquire the rental.

        Args:
            stack: Stack that releases the lease when it closes.
            wait: As in `acquire_ownership`.

        Raises:
            HeldError: The rental has another owner.
        """
        self._lease = acquire_ownership(
            self._store,
            self._keys,
            stack,
            wait=wait,
            is_alive=lambda: not self._timer.is_stalled(),
        )

    def start_heartbeat(
        self, stack: contextlib.ExitStack, machine_timeouts: Iterable[timedelta] = ()
    ) -> None:
        """Start the heartbeat for the machines, which from then on do not outlive it by long.

        Args:
            stack: Stack that stops the heartbeat when it closes.
            machine_timeouts: Timeouts of the machines of earlier owners, which may be shorter.
        """
        for timeout in machine_timeouts:
            self._heartbeat.limit_timeout(timeout)
        stack.enter_context(self._heartbeat)

    def detach(self, until: datetime | None = None) -> None:
        """Tell the machines that they stay without an owner.

        Args:
            until: Time at which all machines have to end; None for the deadline of each machine.
        """
        self._heartbeat.detach(until)

    def refuse_if_superseded(self) -> None:
        """Refuse to continue after another owner has taken over the rental.

        This happens if this process was suspended, or could not renew its lease.

        Raises:
            HeldError: Another owner has the rental and its machines.
            UnavailableError: The lease cannot be read.
        """
        if self._lease is not None and self._lease.is_superseded():
            self.raise_superseded()

    def _has_next_owner(self) -> bool:
        """Tell whether another owner is known to have taken over the rental. One listing."""
        try:
            lease = self._lease and self._lease.with_timeout(_LOOK_TIMEOUT)
            return lease is not None and lease.is_superseded()
        except errors.MillraceError:
            return False  # an unreadable lease is not a lost one

    def raise_superseded(self) -> NoReturn:
        """Raise the error that another owner has taken over the rental, and remember it.

        Raises:
            HeldError: Always.
        """
        self.is_superseded = True
        raise errors.HeldError(
            f"Another process has taken over {self._keys.name} and its machines: this process "
            "stops, and leaves the machines to the new owner."
        )
