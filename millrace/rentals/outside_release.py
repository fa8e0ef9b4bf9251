"""Release of a rental from outside: a detached one, or one whose owner is gone."""

from collections.abc import Sequence
from contextlib import ExitStack

from millrace import errors
from millrace.keys.rentals import RentalKeys
from millrace.progress import Progress, ignore_event, shield_progress
from millrace.rentals.destroy import LEDGER_LISTING_LAG, destroy_machines, record_release
from millrace.rentals.labels import Label
from millrace.rentals.ledger import (
    Attempt,
    ensure_installation,
    list_attempts,
    record_price,
    refuse_copied_attempts,
    refuse_foreign_machines,
)
from millrace.rentals.life_signs import LifeSigns
from millrace.rentals.machines import compute_recorded_cost
from millrace.rentals.ownership import acquire_ownership
from millrace.rentals.progress_events import MachineReleased
from millrace.rentals.settings import LedgerSettings, open_account
from millrace.rentals.vast.api import VastClient
from millrace.rentals.vast.instances import Instance
from millrace.schemas.rental import ReleaseReason
from millrace.storage import Store, delete, exists, open_store


def release_rental(
    settings: LedgerSettings,
    rental: str,
    *,
    wait: bool = False,
    include_detached: bool = True,
    vast: VastClient | None = None,
    progress: Progress = ignore_event,
) -> int:
    """Release all machines of a rental that this process does not own; return their number.

    Among them are machines of which the ledger has no open attempt: their intents are damaged, or
    they were listed after their release.

    Args:
        settings: Store of the ledger, and the account.
        rental: Name of the rental.
        wait: Whether to wait if the rental seems to have an owner. The wait ends when the owner
            renews its lease, or the lease expires.
        include_detached: Whether detached machines are released, too; else they stay.
        vast: Client of the account; by default that of the settings.
        progress: Receives `MachineReleased` for each machine. Its errors are logged.

    Raises:
        ConfigurationError: Another account pays for some machines. The machines of this account
            were released. Or another store has rented the machines.
        HeldError: The rental has a living owner, which releases its machines when it ends.
        NotFoundError: There is no such rental.
        UnavailableError: Some machines may still exist.
        VersionError: Another version of Millrace wrote records of the rental.
    """
    store, vast = open_store(settings.store), vast or open_account(settings.account)
    progress = shield_progress(progress)
    with ExitStack() as stack:
        acquire_ownership(store, RentalKeys(rental), stack, wait=wait)
        attempts = list_attempts(store, rental, strict=True)
        refuse_copied_attempts(store, rental, attempts)
        own_account = vast.identify_account()
        unreleased = [
            one
            for one in attempts
            if one.release_record is None and (include_detached or not one.is_detached)
        ]
        own_unreleased = [one for one in unreleased if one.intent.account == own_account]
        keys = RentalKeys(rental)
        # The reaper releases the rest if this process is killed.
        delete(store, [keys.make_detached_key(one.number) for one in own_unreleased])
        instances = vast.list_instances()
        # An account whose keys may not read its number has another identity after a new key.
        own_unreleased += [
            one
            for one in unreleased
            if one not in own_unreleased and one.find_instance(instances) is not None
        ]
        delete(store, [keys.make_detached_key(one.number) for one in own_unreleased])
        by_label = {one.intent.label: one for one in own_unreleased}
        strays = _find_strays(store, rental, attempts, instances, include_detached=include_detached)
        if not (attempts or strays):
            raise errors.NotFoundError(
                f"{store.url} has no rental {rental!r}: see the names with `millrace machine list`."
            )
        signs = LifeSigns(store, keys)
        for label, one in by_label.items():
            if instance := one.find_instance(instances):
                by_label[label] = record_price(store, rental, one, instance.dollars_per_hour)

        def record(one: Attempt) -> float:
            now, instance = vast.clock.now(), one.find_instance(instances)
            end = now if instance else signs.estimate_end(one, now)
            cost = compute_recorded_cost(store, one, instance, end)
            record_release(
                store,
                rental,
                one,
                ReleaseReason.UNNEEDED,
                "the rental was released",
                cost,
                now,
            )
            return cost

        def handle_destroyed(label: str) -> None:
            cost = 0.0 if label in strays else record(by_label[label])
            progress(
                MachineReleased(
                    machine=label,
                    reason=ReleaseReason.UNNEEDED,
                    message="the rental was released",
                    dollars=cost,
                )
            )

        now = vast.clock.now()
        past_listing_lag = [
            label
            for label, one in by_label.items()
            if now - one.intent.started_at > LEDGER_LISTING_LAG
        ]
        numbers = {label: one.instance_id for label, one in by_label.items()} | strays
        destroy_machines(vast, numbers, handle_destroyed, past_listing_lag=past_listing_lag)
    refuse_foreign_machines(rental, len(unreleased) - len(own_unreleased))
    return len(by_label) + len(strays)


def _find_strays(
    store: Store,
    rental: str,
    attempts: Sequence[Attempt],
    instances: Sequence[Instance],
    *,
    include_detached: bool,
) -> dict[str, int]:
    """Return the listed machines of a rental that have no open attempt, by unique names.

    The label of such a machine has the name of the rental.
    """
    installation, keys = ensure_installation(store), RentalKeys(rental)
    open_attempts = [one for one in attempts if one.release_record is None]
    strays: dict[str, int] = {}
    for one in instances:
        label = Label.parse(one.label, installation)
        if label is None or label.rental != rental:
            continue
        if any(attempt.find_instance([one]) for attempt in open_attempts):
            continue
        if include_detached or not exists(store, keys.make_detached_key(label.attempt)):
            strays[f"{one.id} {one.label}"] = one.id
    return strays
