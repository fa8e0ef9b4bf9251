"""Lease of a campaign: one process leads it at a time."""

from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import timedelta

from millrace.errors import HeldError, UnavailableError
from millrace.keys.campaigns import CampaignKeys
from millrace.lease import Heartbeat, HeldLease, Holder, Lease, StoreClock, await_lease
from millrace.storage import StoreSpec, open_store

_TTL = timedelta(minutes=1)


class CampaignLease:
    """Lease by which this process leads a campaign.

    Args:
        name: Name of the campaign.
        lease: Lease that this process has acquired, and may have lost since.
    """

    def __init__(self, name: str, lease: Lease) -> None:
        self._name, self._lease = name, lease

    def is_lost(self) -> bool:
        """Decide whether another process has taken over the campaign. One listing.

        This happens if this process was suspended, or could not renew its lease. While the store
        does not answer, the lease counts as held.
        """
        with suppress(UnavailableError):
            return self._lease.is_superseded()
        return False

    def refuse_if_lost(self) -> None:
        """Refuse to lead the campaign after another process has taken it over. One listing.

        Raises:
            HeldError: Another process leads the campaign.
        """
        if self.is_lost():
            raise HeldError(
                f"Another process has taken over the campaign {self._name}: this one stops, "
                "and leaves the campaign and its machines to that."
            )


@contextmanager
def hold_campaign_lease(spec: StoreSpec, name: str) -> Generator[CampaignLease]:
    """Hold the lease of a campaign while the block lasts, or take over that of a dead process.

    Yields:
        The lease, which the leader asks before each step that another leader must not take, too.

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
        yield CampaignLease(name, held)
