"""Ownership of a rental: a lease for other processes, and an object for its machines."""

import contextlib
import secrets
import threading
from datetime import timedelta

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


def acquire_ownership(
    store: Store, keys: RentalKeys, stack: contextlib.ExitStack, *, wait: bool = False
) -> Lease:
    """Acquire the lease of a rental until a stack closes.

    Args:
        store: Store of the ledger.
        keys: Keys of the rental.
        stack: Stack that releases the lease when it closes.
        wait: Whether to wait, if there seems to be an owner, until that renews its lease or the
            lease expires.

    Raises:
        HeldError: The rental has another owner.
    """
    holder = Holder.this_process()
    clock = StoreClock.read(store, keys.scope, holder)
    take_lease = await_lease if wait else acquire
    lease = take_lease(store, keys.lease, holder, _TTL, clock)
    if isinstance(lease, HeldLease):
        raise errors.HeldError(
            f"{keys.name} is held by {lease.holder.host} (process {lease.holder.pid}): end that, "
            "or wait until it was not heard of for three minutes."
        )
    heartbeat = stack.enter_context(Heartbeat(_TTL))
    heartbeat.keep(lease)
    return lease


class OwnerHeartbeat:
    """Thread that writes the owner's heartbeat into the object that the machines read."""

    def __init__(self, store: Store, keys: RentalKeys, timeout: timedelta) -> None:
        self._store, self._keys = store, keys
        self._interval = timeout.total_seconds() / 6
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
        """Tell the machines that they stay without an owner."""
        self._stop.set()
        self._thread.join()
        put(self._store, self._keys.owner, DETACHED)

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            with contextlib.suppress(errors.MillraceError):  # the next heartbeat may succeed
                self._write_heartbeat()

    def _write_heartbeat(self) -> None:
        put(self._store.with_retry_timeout(timedelta(seconds=self._interval)), self._keys.owner,
            secrets.token_hex(8).encode())  # fmt: skip
