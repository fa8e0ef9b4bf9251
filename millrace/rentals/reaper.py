"""The net under all others: what is rented under our labels and has no living owner is given back.

Only what bears this installation's label is ever touched. A list that cannot be read whole is
unknown, not empty: then nothing is done, and the reaper fails, which is seen.
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from millrace import errors
from millrace.keys import RENTALS, MachineKeys, RentalKeys
from millrace.lease import Census, HeldLease, Holder, StoreClock
from millrace.progress import Event, Progress, silent
from millrace.rentals.clock import SystemClock
from millrace.rentals.destroy import give_back, write_off
from millrace.rentals.labels import Label, is_ours
from millrace.rentals.ledger import (
    Attempt,
    attempt_of,
    attempts_of,
    installation_of,
    open_attempts,
    refuse_others,
)
from millrace.rentals.ownership import own
from millrace.rentals.settings import StandSettings, account
from millrace.rentals.vast.api import Vast
from millrace.rentals.vast.instances import Instance
from millrace.schemas.rental import ReturnReason
from millrace.storage import Store, delete, exists, open_store

_YOUNG = timedelta(minutes=10)  # an attempt that may still be on its way


@dataclass(frozen=True, slots=True)
class Rented:
    """A machine under a label of ours.

    Attributes:
        instance: As the provider describes it.
        rental: What it is for; empty if nobody understands its label.
        attempt: What is written down of it; None if nothing is.
        owner: Who has it; empty if nobody does.
        cost: Dollars that it has come to, without its traffic.
        why: Why it should be given back; empty if it should not.
        stray: Whether it only bears the label of the attempt, whose machine is another.
    """

    instance: Instance
    rental: str
    attempt: Attempt | None
    owner: str
    cost: float
    why: str
    stray: bool = False


@dataclass(frozen=True, slots=True)
class Reaped:
    """Result of a reaper's run.

    Attributes:
        returned: Machines that were given back; in a dry run those that would be.
        kept: Those that have an owner, and time.
        closed: Attempts that were never ended, and of which nothing is left.
        elsewhere: Attempts that were not ended, and that another account pays for: only its key
            can tell what is left of them.
    """

    returned: tuple[Rented, ...]
    kept: tuple[Rented, ...]
    closed: int
    elsewhere: int = 0


def list_rentals(settings: StandSettings, *, vast: Vast | None = None) -> list[Rented]:
    """List what is rented by this installation.

    Args:
        settings: Where it is written down, and who pays.
        vast: The account; that of the settings by default.

    Raises:
        UnavailableError: The provider's list, or a lease, cannot be read.
    """
    store, vast = open_store(settings.store), vast or account(settings.account)
    instances = vast.instances()
    return _rented(store, vast, _Owners(store), instances, list(open_attempts(store)))


def reap(
    settings: StandSettings,
    *,
    dry_run: bool = False,
    vast: Vast | None = None,
    progress: Progress = silent,
) -> Reaped:
    """Give back what has no living owner, or is over its time.

    Args:
        settings: Where rentals are written down, and who pays.
        dry_run: Only say what would be given back.
        vast: The account; that of the settings by default.
        progress: Told ``rental.returned`` with ``why``, for each.

    Raises:
        UnavailableError: It is not known what is rented, or whether it is gone now.
    """
    store, vast = open_store(settings.store), vast or account(settings.account)
    instances, owners = vast.instances(), _Owners(store)
    attempts = list(open_attempts(store))
    found = _rented(store, vast, owners, instances, attempts)
    going = [one for one in found if one.why]
    if not dry_run:
        _give_back(store, vast, going, progress)
    mine = vast.identity()
    here = [(rental, one) for rental, one in attempts if one.intent.account == mine]
    closed = 0 if dry_run else _close(store, vast, owners, instances, here)
    kept = tuple(one for one in found if not one.why)
    return Reaped(tuple(going), kept, closed, len(attempts) - len(here))


def release(
    settings: StandSettings,
    rental: str,
    *,
    wait: bool = False,
    left: bool = True,
    vast: Vast | None = None,
    progress: Progress = silent,
) -> int:
    """Give back all machines of a rental; how many there were.

    Args:
        settings: Where rentals are written down, and who pays.
        rental: Its name.
        wait: Whether an owner that was perhaps killed is waited for, until it is heard of.
        left: Those too that an owner has left to work.
        vast: The account; that of the settings by default.
        progress: Told ``rental.returned``, for each.

    Raises:
        ConfigurationError: Another account pays for some of them: those of this one are given back.
        HeldError: It has an owner that lives, and gives them back itself: end that.
        NotFoundError: There is no such rental.
        UnavailableError: It is not known whether they are gone now.
    """
    store, vast = open_store(settings.store), vast or account(settings.account)
    with ExitStack() as stack:
        own(store, RentalKeys(rental), stack, wait=wait)
        attempts = attempts_of(store, rental)
        if not attempts:
            raise errors.NotFoundError(
                f"{store.url} knows no rental {rental!r}: `millrace rentals` lists them."
            )
        mine = vast.identity()
        all_out = [one for one in attempts if one.returned is None and (left or not one.left)]
        out = [one for one in all_out if one.intent.account == mine]
        going = {one.intent.label: one for one in out}
        keys = RentalKeys(rental)
        delete(store, [keys.detached(one.number) for one in out])  # should this be killed

        def gone(label: str) -> None:
            now, one = vast.clock.now(), going[label]
            write_off(
                store, rental, one, ReturnReason.RELEASED, "it was released", one.cost(now), now
            )
            progress(Event("rental.returned", label, {"why": "released", "dollars": one.cost(now)}))

        now = vast.clock.now()
        settled = [label for label, one in going.items() if now - one.intent.begun > _YOUNG]
        give_back(vast, {label: one.instance for label, one in going.items()}, gone,
                  settled=settled)  # fmt: skip
    refuse_others(rental, len(all_out) - len(out))
    return len(going)


def _give_back(store: Store, vast: Vast, going: list[Rented], progress: Progress) -> None:
    by_label = {f"{one.instance.id} {one.instance.label}": one for one in going}

    def gone(label: str) -> None:
        one = by_label[label]
        if one.attempt is not None and one.attempt.returned is None and not one.stray:
            now = vast.clock.now()
            write_off(store, one.rental, one.attempt, ReturnReason.REAPED, one.why, one.cost, now)
        figures = {"why": one.why, "dollars": one.cost}
        progress(Event("rental.returned", one.instance.label, figures))

    give_back(vast, {label: one.instance.id for label, one in by_label.items()}, gone)


class _Owners:
    """Owners of the rentals."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.clock = StoreClock.read(store, f"{RENTALS}/reaper", Holder.this_process())
        self._held: dict[str, HeldLease | None] = {}

    def of(self, rental: str) -> str:
        """Return the owner of a rental; empty if there is none."""
        if rental not in self._held:
            scope = RentalKeys(rental).scope
            holders = Census(self._store, scope, "", self.clock).find_holders()
            self._held[rental] = next(iter(holders.values()), None)
        held = self._held[rental]
        return f"{held.holder.host} (process {held.holder.pid})" if held else ""


def _rented(
    store: Store,
    vast: Vast,
    owners: _Owners,
    instances: list[Instance],
    attempts: list[tuple[str, Attempt]],
) -> list[Rented]:
    installation, now = installation_of(store), _now(vast, owners)
    ours = {
        attempt.instance: Label.parse(attempt.intent.label, installation) for _, attempt in attempts
    }  # a label can be changed, a number cannot
    return [
        _judged(store, one, ours.get(one.id) or Label.parse(one.label, installation), owners, now)
        for one in instances
        if is_ours(one.label, installation) or one.id in ours
    ]


def _now(vast: Vast, owners: _Owners) -> datetime:
    """Return the time by the store's clock, which all who hold something here go by."""
    return owners.clock.now() if isinstance(vast.clock, SystemClock) else vast.clock.now()


def _judged(
    store: Store, instance: Instance, label: Label | None, owners: _Owners, now: datetime
) -> Rented:
    if label is None:
        return Rented(instance, "", None, "", 0.0, "")  # shown, and left to a person
    owner = owners.of(label.rental)
    # Read after it was seen that nobody has it: who leaves a machine says so before.
    attempt = attempt_of(store, label.rental, label.attempt)
    left = attempt is not None and attempt.left
    if attempt is not None and attempt.instance not in {None, instance.id}:
        why = f"it bears the label of machine {attempt.instance}, and is another"
        cost = replace(attempt, returned=None).cost(now, dph=instance.dph)
        return Rented(instance, label.rental, attempt, owner, cost, why, stray=True)
    until = min(attempt.intent.until, label.until) if attempt else label.until
    if now >= until:
        why = f"its time was over at {until:%Y-%m-%d %H:%M} UTC"
    elif attempt is not None and attempt.returned is not None:
        why = f"it was given back before ({attempt.returned.why}), and is there"
    elif not owner and left and _has_ended(store, label):
        why = "its program has ended"
    elif owner or left:
        why = ""
    else:
        why = "nobody has it any more"
    cost = attempt.cost(now, dph=instance.dph) if attempt else 0.0
    return Rented(instance, label.rental, attempt, owner, cost, why)


def _has_ended(store: Store, label: Label) -> bool:
    """Tell whether a machine says that its program has ended."""
    keys = RentalKeys(label.rental)
    return exists(store, MachineKeys(keys.machine(label.attempt)).ended)


def _close(
    store: Store,
    vast: Vast,
    owners: _Owners,
    instances: list[Instance],
    attempts: list[tuple[str, Attempt]],
) -> int:
    """Write down what was never ended, though nothing is left of it; how many there were."""
    now = vast.clock.now()
    closed = 0
    for rental, attempt in attempts:
        if now - attempt.intent.begun <= _YOUNG:
            continue
        if attempt.find(instances) is None and not owners.of(rental):
            said = "its owner was lost, and the provider has it no more"
            write_off(store, rental, attempt, ReturnReason.REAPED, said, attempt.cost(now), now)
            closed += 1
    return closed
