"""Lease of a campaign: one process leads it at a time."""

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta

from millrace.errors import HeldError
from millrace.keys.campaigns import CampaignKeys
from millrace.lease import Heartbeat, HeldLease, Holder, StoreClock, await_lease
from millrace.storage import StoreSpec, open_store

_TTL = timedelta(minutes=1)


@contextmanager
def hold_campaign_lease(spec: StoreSpec, name: str) -> Generator[None]:
    """Hold the lease of a campaign while the block lasts, or take over that of a dead process.

    Raises:
        HeldError: A living process holds the lease.
    """
    store, keys, holder = open_store(spec), CampaignKeys(name), Holder.describe_this_process()
    clock = StoreClock.read(store, name, holder)
    held = await_lease(store, keys.lease, holder, _TTL, clock)
    if isinstance(held, HeldLease):
        raise HeldError(
            f"The campaign {name} is led by process {held.holder.pid} on {held.holder.host}, which "
            "lives: leave it to that, or cancel it first."
        )
    with Heartbeat(_TTL) as heart:
        heart.keep(held)
        yield
