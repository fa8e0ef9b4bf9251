"""Release machines of this installation that have no living owner, or have passed their deadline.

Only machines with this installation's label are touched. If the list of machines cannot be read
completely, the reaper fails and releases nothing.
"""

from dataclasses import dataclass, replace
from datetime import datetime

from millrace.keys.rentals import RENTALS, MachineKeys, RentalKeys
from millrace.lease import Census, HeldLease, Holder, StoreClock
from millrace.progress import Progress, ignore_event
from millrace.rentals.clock import SystemClock
from millrace.rentals.destroy import LEDGER_LISTING_LAG, destroy_machines, record_release
from millrace.rentals.labels import Label, is_ours
from millrace.rentals.ledger import (
    Attempt,
    ensure_installation,
    find_attempt,
    iterate_open_attempts,
    record_price,
)
from millrace.rentals.machines import compute_unowned_cost
from millrace.rentals.progress_events import MachineReleased
from millrace.rentals.settings import LedgerSettings, open_account
from millrace.rentals.vast.api import VastClient
from millrace.rentals.vast.instances import Instance
from millrace.schemas.rental import ReleaseReason
from millrace.storage import Store, exists, open_store


@dataclass(frozen=True, slots=True)
class MachineStatus:
    """Machine with a label of this installation.

    Attributes:
        instance: Description by the provider.
        rental: Name of the rental; empty if the label cannot be read.
        attempt: Attempt in the ledger; None if there is none.
        owner: Owner of the rental; empty if there is none.
        cost: Dollars that the machine has cost, with the traffic that it has reported.
        release_reason: Reason to release the machine; empty if there is none.
        is_mislabeled: Whether the machine has the label of an attempt that rented another machine.
    """

    instance: Instance
    rental: str
    attempt: Attempt | None
    owner: str
    cost: float
    release_reason: str
    is_mislabeled: bool = False


@dataclass(frozen=True, slots=True)
class ReapResult:
    """Result of a reaper's run.

    Attributes:
        released: Machines that were released; in a dry run, machines that would be released.
        kept: Machines that stay.
        closed_attempts: Number of open attempts without a machine, which were closed.
        foreign_attempts: Number of open attempts of another account. Only the key of that account
            shows whether their machines exist.
    """

    released: tuple[MachineStatus, ...]
    kept: tuple[MachineStatus, ...]
    closed_attempts: int
    foreign_attempts: int = 0


def list_rentals(
    settings: LedgerSettings, *, vast: VastClient | None = None
) -> list[MachineStatus]:
    """List the machines that this installation rents.

    Args:
        settings: Store of the ledger, and the account.
        vast: Client of the account; by default that of the settings.

    Raises:
        UnavailableError: The provider's list, or a lease, cannot be read.
    """
    store, vast = open_store(settings.store), vast or open_account(settings.account)
    instances = vast.list_instances()
    return _list_machines(
        store, vast, _OwnerLookup(store), instances, list(iterate_open_attempts(store))
    )


def reap(
    settings: LedgerSettings,
    *,
    dry_run: bool = False,
    vast: VastClient | None = None,
    progress: Progress = ignore_event,
) -> ReapResult:
    """Release the machines that have no living owner, or have passed their deadline.

    Args:
        settings: Store of the ledger, and the account.
        dry_run: Whether machines are only listed, and not released.
        vast: Client of the account; by default that of the settings.
        progress: Receives `MachineReleased` for each machine.

    Raises:
        UnavailableError: The machines cannot be listed, or may still exist.
    """
    store, vast = open_store(settings.store), vast or open_account(settings.account)
    instances, owners = vast.list_instances(), _OwnerLookup(store)
    attempts = list(iterate_open_attempts(store))
    machines = _list_machines(store, vast, owners, instances, attempts)
    to_release = [one for one in machines if one.release_reason]
    if not dry_run:
        _record_prices(store, machines)
        _release_machines(store, vast, to_release, progress)
    own_account = vast.identify_account()
    own_attempts = [(rental, one) for rental, one in attempts if one.intent.account == own_account]
    closed = 0 if dry_run else _close_lost_attempts(store, vast, owners, instances, own_attempts)
    kept = tuple(one for one in machines if not one.release_reason)
    return ReapResult(tuple(to_release), kept, closed, len(attempts) - len(own_attempts))


def _record_prices(store: Store, machines: list[MachineStatus]) -> None:
    """Record the raised prices of machines without an owner, which may be gone at the next run."""
    for one in machines:
        if one.attempt is not None and not one.owner and not one.is_mislabeled:
            record_price(store, one.rental, one.attempt, one.instance.dollars_per_hour)


def _release_machines(
    store: Store, vast: VastClient, machines: list[MachineStatus], progress: Progress
) -> None:
    by_label = {f"{one.instance.id} {one.instance.label}": one for one in machines}

    def handle_destroyed(label: str) -> None:
        one = by_label[label]
        cost = one.cost
        if one.attempt is not None and one.attempt.release_record is None and not one.is_mislabeled:
            now = vast.clock.now()
            # The machine was billed while the destroy requests were repeated, too.
            cost = compute_unowned_cost(store, one.attempt, one.instance, now)
            record_release(
                store,
                one.rental,
                one.attempt,
                ReleaseReason.REAPED,
                one.release_reason,
                cost,
                now,
            )
        progress(
            MachineReleased(
                machine=one.instance.label,
                reason=ReleaseReason.REAPED,
                message=one.release_reason,
                dollars=cost,
            )
        )

    destroy_machines(
        vast, {label: one.instance.id for label, one in by_label.items()}, handle_destroyed
    )


class _OwnerLookup:
    """Lookup of the owners of rentals. Each lease is read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.clock = StoreClock.read(store, f"{RENTALS}/reaper", Holder.describe_this_process())
        self._leases: dict[str, HeldLease | None] = {}

    def find_owner(self, rental: str) -> str:
        """Return the owner of a rental; empty if there is none."""
        if rental not in self._leases:
            scope = RentalKeys(rental).scope
            holders = Census(self._store, scope, "", self.clock).find_holders()
            self._leases[rental] = next(iter(holders.values()), None)
        lease = self._leases[rental]
        return f"{lease.holder.host} (process {lease.holder.pid})" if lease else ""


def _list_machines(
    store: Store,
    vast: VastClient,
    owners: _OwnerLookup,
    instances: list[Instance],
    attempts: list[tuple[str, Attempt]],
) -> list[MachineStatus]:
    installation, now = ensure_installation(store), _read_time(vast, owners)
    labels = {
        attempt.instance_id: Label.parse(attempt.intent.label, installation)
        for _, attempt in attempts
    }  # users can change a label, but not a number
    return [
        _assess_machine(
            store, one, labels.get(one.id) or Label.parse(one.label, installation), owners, now
        )
        for one in instances
        if is_ours(one.label, installation) or one.id in labels
    ]


def _read_time(vast: VastClient, owners: _OwnerLookup) -> datetime:
    """Return the time by the store's clock, which also dates the leases."""
    return owners.clock.now() if isinstance(vast.clock, SystemClock) else vast.clock.now()


def _assess_machine(
    store: Store, instance: Instance, label: Label | None, owners: _OwnerLookup, now: datetime
) -> MachineStatus:
    if label is None:
        return MachineStatus(instance, "", None, "", 0.0, "")  # listed, but never released
    owner = owners.find_owner(label.rental)
    # Read after the lease: an owner commits the record of a detached machine before it ends.
    attempt = find_attempt(store, label.rental, label.attempt)
    is_detached = attempt is not None and attempt.is_detached
    if attempt is not None and attempt.instance_id not in {None, instance.id}:
        reason = f"the machine has the label of machine {attempt.instance_id}, but another number"
        cost = replace(attempt, release_record=None).compute_cost(
            now, dollars_per_hour=instance.dollars_per_hour
        )
        return MachineStatus(
            instance, label.rental, attempt, owner, cost, reason, is_mislabeled=True
        )
    deadline = min(attempt.deadline, label.deadline) if attempt else label.deadline
    if now >= deadline:
        reason = f"the deadline was {deadline:%Y-%m-%d %H:%M} UTC"
    elif attempt is not None and attempt.release_record is not None:
        reason = (
            f"the machine was released before ({attempt.release_record.reason}), but still exists"
        )
    elif not owner and is_detached and _has_program_ended(store, label):
        reason = "the program has ended"
    elif owner or is_detached:
        reason = ""
    else:
        reason = "the machine has no living owner"
    cost = compute_unowned_cost(store, attempt, instance, now) if attempt else 0.0
    return MachineStatus(instance, label.rental, attempt, owner, cost, reason)


def _has_program_ended(store: Store, label: Label) -> bool:
    """Tell whether a machine has reported the end of its program."""
    keys = RentalKeys(label.rental)
    return exists(store, MachineKeys(keys.make_machine_prefix(label.attempt)).program_exit)


def _close_lost_attempts(
    store: Store,
    vast: VastClient,
    owners: _OwnerLookup,
    instances: list[Instance],
    attempts: list[tuple[str, Attempt]],
) -> int:
    """Record the release of open attempts whose machine is not listed; return their number."""
    now = vast.clock.now()
    closed = 0
    for rental, attempt in attempts:
        if now - attempt.intent.started_at <= LEDGER_LISTING_LAG:
            continue
        if attempt.find_instance(instances) is None and not owners.find_owner(rental):
            message = "the owner was lost, and the provider does not list the machine"
            record_release(
                store,
                rental,
                attempt,
                ReleaseReason.REAPED,
                message,
                compute_unowned_cost(store, attempt, None, now),
                now,
            )
            closed += 1
    return closed
