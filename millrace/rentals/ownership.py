"""Ownership of a rental: a lease for other processes, and an object for its machines."""

import contextlib
import secrets
import threading
from datetime import timedelta
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


def acquire_ownership(
    store: Store, keys: RentalKeys, stack: contextlib.ExitStack, *, wait: bool = False
) -> Lease:
    """Acquire the lease of a rental until a stack closes.

    Args:
        store: Store of the ledger.
        keys: Keys of the rental.
        stack: Stack that releases the lease when it closes.
        wait: Whether to wait if the rental seems to have an owner. The wait ends when the owner
            renews its lease, or the lease expires.

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
    heartbeat = stack.enter_context(Heartbeat(_TTL))
    heartbeat.keep(lease)
    return lease


class OwnerHeartbeat:
    """Thread that writes the owner's heartbeat into the object that the machines read.

    Args:
        store: Store of the ledger.
        keys: Keys of the rental.
        timeout: Time without a heartbeat after which the machines destroy themselves.
    """

    def __init__(self, store: Store, keys: RentalKeys, timeout: timedelta) -> None:
        self._store, self._keys = store, keys
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

    def detach(self) -> None:
        """Stop, and tell the machines that they stay without an owner."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        put(self._store, self._keys.owner, DETACHED)

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            with contextlib.suppress(errors.MillraceError):  # the next heartbeat may succeed
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
    """

    def __init__(self, store: Store, keys: RentalKeys, heartbeat_timeout: timedelta) -> None:
        self._store, self._keys = store, keys
        self._heartbeat = OwnerHeartbeat(store, keys, heartbeat_timeout)
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
        self._lease = acquire_ownership(self._store, self._keys, stack, wait=wait)

    def start_heartbeat(self, stack: contextlib.ExitStack) -> None:
        """Start the heartbeat for the machines, which from then on do not outlive it by long.

        Args:
            stack: Stack that stops the heartbeat when it closes.
        """
        stack.enter_context(self._heartbeat)

    def detach(self) -> None:
        """Tell the machines that they stay without an owner."""
        self._heartbeat.detach()

    def refuse_if_superseded(self) -> None:
        """Refuse to continue after another owner has taken over the rental.

        This happens if this process was suspended, or could not renew its lease.

        Raises:
            HeldError: Another owner has the rental and its machines.
            UnavailableError: The lease cannot be read.
        """
        if self._lease is not None and self._lease.is_superseded():
            self.raise_superseded()

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
