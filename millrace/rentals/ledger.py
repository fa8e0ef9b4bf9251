"""Ledger of rentals: who is behind a label, and which machines have not come back yet."""

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeVar

from millrace import errors
from millrace.keys import INSTALLATION, RENTALS, RentalKeys, rental_of
from millrace.records import Record, commit_once, fetch
from millrace.rentals.vast.instances import Instance
from millrace.schemas.rental import Contract, Installation, Intent, ReturnRecord
from millrace.storage import Store, StoreSpec, list_objects, open_store

R = TypeVar("R", bound=Record)

_FASTEST = 10_000.0  # Mbit/s: more than any host has
_BURST = 4.0  # times the speed of its offer that a machine's counters are believed


def installation_of(store: Store) -> str:
    """Return this installation's identity among all that rent with the account: one a store."""
    mine = Installation(id=secrets.token_hex(6))
    try:
        return fetch(store, INSTALLATION, Installation).id
    except errors.NotFoundError:
        return commit_once(store, INSTALLATION, mine).record.id


@dataclass(frozen=True, slots=True)
class Attempt:
    """A machine that was to be rented, and what is known of it.

    Attributes:
        number: Which of the rental's.
        intent: What was meant.
        contract: What came of it; None while nobody knows.
        returned: That nothing is left of it.
        left: Whether it stays though nobody holds the rental.
    """

    number: int
    intent: Intent
    contract: Contract | None = None
    returned: ReturnRecord | None = None
    left: bool = False

    @property
    def instance(self) -> int | None:
        """The machine's number, where it is known."""
        return self.contract.instance if self.contract else None

    def cost(
        self, now: datetime, *, dph: float | None = None, received: int = 0, sent: int = 0
    ) -> float:
        """Dollars that it has come to: what it was, or what it is by now.

        Args:
            now: What time it is.
            dph: Dollars an hour; what was meant by default.
            received: Bytes that it says it has.
            sent: Likewise.
        """
        if self.returned is not None:
            return self.returned.cost
        hours = max(timedelta(0), now - self.intent.begun) / timedelta(hours=1)
        down, up = self.movable(now)
        traffic = min(received, down) * self.intent.down_cost + min(sent, up) * self.intent.up_cost
        return hours * (self.intent.dph if dph is None else dph) + traffic / 1e9

    def movable(self, now: datetime) -> tuple[float, float]:
        """Return the bytes that its line can have received, and sent, since it was rented."""
        seconds = max(timedelta(0), now - self.intent.begun).total_seconds()
        down, up = (
            min(mbits * _BURST, _FASTEST) if mbits else _FASTEST
            for mbits in (self.intent.down, self.intent.up)
        )
        return seconds * down * 1e6 / 8, seconds * up * 1e6 / 8

    def find(self, instances: Iterable[Instance]) -> Instance | None:
        """Find its machine in a listing: by its number, which nobody can change, if that is known.

        Another machine may bear the same label.
        """
        number = self.instance
        for one in instances:
            if one.id == number or (number is None and one.label == self.intent.label):
                return one
        return None


def attempts_of(store: Store, rental: str) -> list[Attempt]:
    """All attempts of a rental, in order. What cannot be read is as if it were not there."""
    return [attempt for _, attempt in _attempts(store, RentalKeys(rental).attempts)]


def attempt_of(store: Store, rental: str, number: int) -> Attempt | None:
    """One attempt of a rental; None if nothing is written down of it."""
    prefix = RentalKeys(rental).attempt(number)
    return next((attempt for _, attempt in _attempts(store, prefix)), None)


def open_attempts(store: Store) -> Iterator[tuple[str, Attempt]]:
    """Yield the attempts of all rentals that have not come back, each with its rental's name.

    Of those that have, however many there are, nothing but their names is read.
    """
    return _attempts(store, f"{RENTALS}/", returned=False)


def refuse_others(rental: str, machines: int) -> None:
    """Refuse to go on with machines that another account pays for.

    Raises:
        ConfigurationError: There are some: nobody can see or destroy them with this account.
    """
    if machines:
        count = "1 machine" if machines == 1 else f"{machines} machines"
        raise errors.ConfigurationError(
            f"{count} of {rental} were rented with another account of Vast.ai, and not given back: "
            "use that account's API key, or release the rental with it first."
        )


def is_rented(place: StoreSpec) -> bool:
    """Tell whether anything is rented, as far as is written down."""
    return any(True for _ in open_attempts(open_store(place)))


def _attempts(store: Store, prefix: str, *, returned: bool = True) -> Iterator[tuple[str, Attempt]]:
    there: dict[tuple[str, int], set[str]] = {}
    for stat in list_objects(store, prefix):
        rental = rental_of(stat.key)
        parsed = RentalKeys(rental).parse(stat.key) if rental else None
        if rental and parsed:
            there.setdefault((rental, parsed[0]), set()).add(parsed[1])
    for (rental, number), parts in sorted(there.items()):
        if "returned" in parts and not returned:
            continue
        keys = RentalKeys(rental)
        intent = _read(store, keys.intent(number), Intent) if "intent" in parts else None
        if intent is None:
            continue
        yield (
            rental,
            Attempt(
                number,
                intent,
                _read(store, keys.contract(number), Contract) if "contract" in parts else None,
                _read(store, keys.returned(number), ReturnRecord) if "returned" in parts else None,
                "left" in parts,
            ),
        )


def _read(store: Store, key: str, kind: type[R]) -> R | None:
    """Return a record.

    None if it is damaged: one must not keep all others from being given back.
    """
    try:
        return fetch(store, key, kind)
    except (errors.CorruptError, errors.NotFoundError):
        return None
