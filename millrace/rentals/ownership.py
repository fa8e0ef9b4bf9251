"""Ownership of a rental: by a lease for other processes, and by an object for its machines."""

import contextlib
import secrets
import threading
from datetime import timedelta

from millrace import errors
from millrace.keys import RentalKeys
from millrace.lease import (
    Heartbeat,
    HeldLease,
    Holder,
    Lease,
    StoreClock,
    acquire,
    await_lease,
)
from millrace.rentals.guest.watchdog import LEFT
from millrace.storage import Store, put

_TTL = timedelta(minutes=3)


def own(
    store: Store, keys: RentalKeys, stack: contextlib.ExitStack, *, wait: bool = False
) -> Lease:
    """Hold a rental for as long as a stack is.

    Args:
        store: Where it is written down.
        keys: The rental's.
        stack: Its end gives the rental up.
        wait: Whether one that seems to have an owner is waited for, until that is heard of.

    Raises:
        HeldError: Somebody has it.
    """
    holder = Holder.this_process()
    clock = StoreClock.read(store, keys.scope, holder)
    seek = await_lease if wait else acquire
    lease = seek(store, keys.lease, holder, _TTL, clock)
    if isinstance(lease, HeldLease):
        raise errors.HeldError(
            f"{keys.name} is held by {lease.holder.host} (process {lease.holder.pid}): end that, "
            "or wait until it was not heard of for three minutes."
        )
    heartbeat = stack.enter_context(Heartbeat(_TTL))
    heartbeat.keep(lease)
    return lease


class Owner:
    """A thread that writes down that the owner lives, where its machines look."""

    def __init__(self, store: Store, keys: RentalKeys, silence: timedelta) -> None:
        self._store, self._keys = store, keys
        self._pause = silence.total_seconds() / 6
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="owner", daemon=True)

    def __enter__(self) -> "Owner":
        self._say()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(self._pause)

    def leave(self) -> None:
        """Tell the machines that they are to stay without an owner."""
        self._stop.set()
        self._thread.join()
        put(self._store, self._keys.owner, LEFT)

    def _run(self) -> None:
        while not self._stop.wait(self._pause):
            with contextlib.suppress(errors.MillraceError):  # the next one may come through
                self._say()

    def _say(self) -> None:
        put(self._store.hurried(timedelta(seconds=self._pause)), self._keys.owner,
            secrets.token_hex(8).encode())  # fmt: skip
