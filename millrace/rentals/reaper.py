"""Release machines of this installation that have no living owner, or have passed their deadline.

Detached machines are also released when they cost more than their owner has allowed, when their
program has ended, and when they have failed.

Only machines with this installation's label, or with the number of one of its open contracts, are
touched. If the list of machines cannot be read completely, the reaper fails and releases nothing.
While the reaper releases the machines of a rental without an owner, it owns the rental, so that no
next owner takes them over.
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime

from millrace import errors
from millrace.keys.rentals import RENTALS, MachineKeys, RentalKeys
from millrace.lease import Census, Holder, StoreClock
from millrace.progress import Progress, ignore_event, shield_progress
from millrace.rentals.clock import SystemClock
from millrace.rentals.destroy import LEDGER_LISTING_LAG, destroy_machines, record_release
from millrace.rentals.detached import DetachedBudget
from millrace.rentals.labels import Label, is_ours
from millrace.rentals.ledger import (
    Attempt,
    ensure_installation,
    find_attempt,
    iterate_open_attempts,
    record_price,
)
from millrace.rentals.life_signs import LifeSigns
from millrace.rentals.machines import compute_recorded_cost
from millrace.rentals.ownership import acquire_ownership
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
        attempt: Attempt in the ledger; None if there is none, or its intent cannot be read.
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
        ConfigurationError: The identity of the installation was copied from another store.
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

    Detached machines are also released when they cost more than their owner has allowed, when their
    program has ended, and when they have failed.

    Args:
        settings: Store of the ledger, and the account.
        dry_run: Whether machines are only listed, and not released.
        vast: Client of the account; by default that of the settings.
        progress: Receives `MachineReleased` for each machine. Its errors are logged.

    Raises:
        ConfigurationError: The identity of the installation was copied from another store. Nothing
            is released.
        CorruptError: The lease of a rental cannot be read, so the rental may have an owner. Its
            machines stay until their deadlines. All other machines were released.
        UnavailableError: The machines cannot be listed, or may still exist.
    """
    store, vast = open_store(settings.store), vast or open_account(settings.account)
    instances, owners = vast.list_instances(), _OwnerLookup(store)
    attempts = list(iterate_open_attempts(store))
    own_account = vast.identify_account()
    own_attempts = [(rental, one) for rental, one in attempts if one.intent.account == own_account]
    machines = _list_machines(store, vast, owners, instances, attempts)
    closed = 0
    if not dry_run:
        lost = _find_lost_attempts(vast, owners, instances, own_attempts)
        unowned = {one.rental for one in machines if one.release_reason and not one.owner}
        with ExitStack() as stack:
            for rental in sorted({*unowned, *(rental for rental, _ in lost)} - {""}):
                owners.take_over(rental, stack)
            # An owner may have come since, or have detached the machines.
            machines = _list_machines(store, vast, owners, instances, attempts)
            _record_prices(store, machines)
            _release_machines(store, vast, machines, shield_progress(progress))
            lost = _find_lost_attempts(vast, owners, instances, lost)
            closed = _close_lost_attempts(store, vast, owners, lost)
        owners.refuse_unreadable()
    released = tuple(one for one in machines if one.release_reason)
    kept = tuple(one for one in machines if not one.release_reason)
    return ReapResult(released, kept, closed, len(attempts) - len(own_attempts))


def _record_prices(store: Store, machines: list[MachineStatus]) -> None:
    """Record the raised prices of machines without an owner, which may be gone at the next run."""
    for one in machines:
        if one.attempt is not None and not one.owner and not one.is_mislabeled:
            record_price(store, one.rental, one.attempt, one.instance.dollars_per_hour)


def _release_machines(
    store: Store, vast: VastClient, machines: list[MachineStatus], progress: Progress
) -> None:
    by_label = {
        f"{one.instance.id} {one.instance.label}": one for one in machines if one.release_reason
    }

    def handle_destroyed(label: str) -> None:
        one = by_label[label]
        cost = one.cost
        if one.attempt is not None and one.attempt.release_record is None and not one.is_mislabeled:
            now = vast.clock.now()
            # The machine was billed while the destroy requests were repeated, too.
            cost = compute_recorded_cost(store, one.attempt, one.instance, now)
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
    """Lookup of the owners of rentals, apart from this process. Each lease is read once.

    A rental whose lease cannot be read may have an owner. It stops the release of no other rental.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.clock = StoreClock.read(store, f"{RENTALS}/reaper", Holder.describe_this_process())
        self._owners: dict[str, str] = {}
        self._unreadable: dict[str, errors.CorruptError] = {}

    def find_owner(self, rental: str) -> str:
        """Return the owner of a rental; empty if there is none."""
        if rental not in self._owners:
            scope = RentalKeys(rental).scope
            try:
                holders = Census(self._store, scope, "", self.clock).find_holders()
            except errors.CorruptError as error:
                self._note_unreadable(rental, error)
            else:
                lease = next(iter(holders.values()), None)
                self._owners[rental] = (
                    f"{lease.holder.host} (process {lease.holder.pid})" if lease else ""
                )
        return self._owners[rental]

    def take_over(self, rental: str, stack: ExitStack) -> None:
        """Acquire a rental without an owner until a stack closes, unless another process has it."""
        try:
            acquire_ownership(self._store, RentalKeys(rental), stack)
        except errors.HeldError:
            self._owners[rental] = "another process"
        except errors.CorruptError as error:
            self._note_unreadable(rental, error)

    def refuse_unreadable(self) -> None:
        """Refuse to end without an error if leases could not be read.

        Raises:
            CorruptError: Leases could not be read.
        """
        if self._unreadable:
            first = next(iter(self._unreadable.values()))
            raise errors.CorruptError(
                f"The leases of {', '.join(sorted(self._unreadable))} cannot be read. So the "
                "rentals may have owners, and their machines stay: until their deadlines, or an "
                f"hour after the last heartbeat. All other machines were handled. {first}"
            )

    def _note_unreadable(self, rental: str, error: errors.CorruptError) -> None:
        self._owners[rental] = "an unknown process"
        self._unreadable[rental] = error


def _list_machines(
    store: Store,
    vast: VastClient,
    owners: _OwnerLookup,
    instances: list[Instance],
    attempts: list[tuple[str, Attempt]],
) -> list[MachineStatus]:
    installation, now = ensure_installation(store), _read_time(vast, owners)
    budget = DetachedBudget(store, instances, owners.clock, now)
    labels = {
        attempt.instance_id: Label.parse(attempt.intent.label, installation)
        for _, attempt in attempts
    }  # users can change a label, but not a number
    return [
        _assess_machine(
            store,
            one,
            labels.get(one.id) or Label.parse(one.label, installation),
            owners,
            budget,
            now,
        )
        for one in instances
        if is_ours(one.label, installation) or one.id in labels
    ]


def _read_time(vast: VastClient, owners: _OwnerLookup) -> datetime:
    """Return the time by the store's clock, which also dates the leases."""
    return owners.clock.now() if isinstance(vast.clock, SystemClock) else vast.clock.now()


def _assess_machine(
    store: Store,
    instance: Instance,
    label: Label | None,
    owners: _OwnerLookup,
    budget: DetachedBudget,
    now: datetime,
) -> MachineStatus:
    if label is None:
        return MachineStatus(instance, "", None, "", 0.0, "")  # listed, but never released
    owner = owners.find_owner(label.rental)
    # Read after the lease: an owner commits the record of a detached machine before it ends.
    attempt = find_attempt(store, label.rental, label.attempt)
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
    elif owner:
        reason = ""
    elif not (attempt.is_detached if attempt else _has_detach_record(store, label)):
        reason = "the machine has no living owner"
    elif _has_program_ended(store, label):
        reason = "the program has ended"
    elif attempt is not None:  # without a readable intent, the deadline is the only limit
        signs = LifeSigns(store, RentalKeys(label.rental), owners.clock)
        reason = signs.find_failure(attempt, instance, now) or budget.find_excess(
            label.rental, attempt, instance
        )
    else:
        reason = ""
    cost = compute_recorded_cost(store, attempt, instance, now) if attempt else 0.0
    return MachineStatus(instance, label.rental, attempt, owner, cost, reason)


def _has_detach_record(store: Store, label: Label) -> bool:
    """Tell whether a machine whose intent is damaged, or of another version, is detached."""
    return exists(store, RentalKeys(label.rental).make_detached_key(label.attempt))


def _has_program_ended(store: Store, label: Label) -> bool:
    """Tell whether a machine has reported the end of its program."""
    keys = RentalKeys(label.rental)
    return exists(store, MachineKeys(keys.make_machine_prefix(label.attempt)).program_exit)


def _find_lost_attempts(
    vast: VastClient,
    owners: _OwnerLookup,
    instances: list[Instance],
    attempts: list[tuple[str, Attempt]],
) -> list[tuple[str, Attempt]]:
    """Return the open attempts without an owner whose machine is not listed."""
    now = vast.clock.now()
    return [
        (rental, one)
        for rental, one in attempts
        if now - one.intent.started_at > LEDGER_LISTING_LAG
        and one.find_instance(instances) is None
        and not owners.find_owner(rental)
    ]


def _close_lost_attempts(
    store: Store, vast: VastClient, owners: _OwnerLookup, attempts: list[tuple[str, Attempt]]
) -> int:
    """Record the release of lost attempts; return their number."""
    now = vast.clock.now()
    for rental, attempt in attempts:
        signs = LifeSigns(store, RentalKeys(rental), owners.clock)
        end = signs.estimate_end(attempt, now)
        record_release(
            store,
            rental,
            attempt,
            ReleaseReason.REAPED,
            "the owner was lost, and the provider does not list the machine",
            compute_recorded_cost(store, attempt, None, end),
            now,
        )
    return len(attempts)
