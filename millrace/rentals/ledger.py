"""Ledger of rentals: identity of the installation, and records of all attempts."""

import logging
import math
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar

from millrace import errors
from millrace.keys.rentals import (
    INSTALLATION,
    RENTALS,
    RentalKeys,
    parse_attempt,
    parse_price_number,
)
from millrace.records import Record, commit_once, fetch
from millrace.rentals.labels import is_foreign
from millrace.rentals.vast.instances import Instance
from millrace.schemas.rental import (
    Contract,
    DetachRecord,
    Installation,
    Intent,
    MoneyLimits,
    PriceRaiseRecord,
    ReleaseReason,
    ReleaseRecord,
)
from millrace.storage import Backend, Store, StoreSpec, list_objects, open_store

R = TypeVar("R", bound=Record)

_log = logging.getLogger(__name__)

_MAX_SPEED = 10_000.0  # Mbit/s, more than any host has
_SPEED_TOLERANCE = 4.0  # a count of bytes is plausible up to this multiple of the offered speed
_OUTSIDE_REASONS = {
    ReleaseReason.REAPED,
    ReleaseReason.UNNEEDED,
}  # reasons that a process without the settings of the rental may record, too


def ensure_installation(store: Store) -> str:
    """Return the identity of this installation; create it if the store has none.

    Each store has one identity. It distinguishes installations that share an account.

    Raises:
        ConfigurationError: The identity was copied from another store, whose machines it names.
    """
    location = describe_location(store)
    try:
        record = fetch(store, INSTALLATION, Installation)
    except errors.NotFoundError:
        candidate = Installation(id=secrets.token_hex(6), location=location)
        record = commit_once(store, INSTALLATION, candidate).record
    if record.location not in {"", location}:
        raise errors.ConfigurationError(
            f"{store.make_url(INSTALLATION)} is the identity of {record.location}, and this store "
            f"is {location}. If this store is a copy, the machines belong to the other store: "
            "delete that object here, and the copy gets its own identity. If both are one store, "
            f"open it as {record.location}."
        )
    return record.id


def describe_location(store: Store) -> str:
    """Return the bucket and the prefix of a store, or the path of a folder without links.

    The result is equal for all URLs and endpoints by which one store is reached. So an account or
    an endpoint is no part of it.
    """
    location = store.location
    if location.backend is Backend.FILE:
        return str(Path(location.bucket).resolve())
    return f"{location.bucket}/{location.prefix}".rstrip("/")


@dataclass(frozen=True, slots=True)
class Attempt:
    """Attempt to rent a machine, with its records.

    Attributes:
        number: Number of the attempt within its rental.
        intent: Record from before the create request.
        contract: Record of the rented machine; None while its number is unknown.
        release_record: Record of the release; None before the release.
        is_detached: Whether the machine was detached, and runs without an owner.
        detach_record: Record of a detached machine; None for other machines, or if it is damaged.
        raised_price: Highest recorded price in dollars an hour; 0 if none is above the intent's.
        next_price_number: Number of the next record of a raised price.
    """

    number: int
    intent: Intent
    contract: Contract | None = None
    release_record: ReleaseRecord | None = None
    is_detached: bool = False
    detach_record: DetachRecord | None = None
    raised_price: float = 0.0
    next_price_number: int = 0

    @property
    def detached_until(self) -> datetime | None:
        """Deadline that the owner set when it detached the machine; None for the intent's."""
        return self.detach_record.deadline if self.detach_record else None

    @property
    def limits(self) -> MoneyLimits | None:
        """Limits of the cost of a detached machine; None if the owner has recorded none."""
        return self.detach_record.limits if self.detach_record else None

    @property
    def deadline(self) -> datetime:
        """Time by which the machine has to be released, as long as it has no other owner."""
        return min(self.intent.deadline, self.detached_until or self.intent.deadline)

    @property
    def dollars_per_hour(self) -> float:
        """Highest known price of the machine: that of the intent, or a recorded raised price."""
        return max(self.intent.dollars_per_hour, self.raised_price)

    @property
    def instance_id(self) -> int | None:
        """Number of the machine; None while it is unknown."""
        return self.contract.instance_id if self.contract else None

    def compute_cost(
        self,
        now: datetime,
        *,
        dollars_per_hour: float = 0.0,
        received_bytes: int = 0,
        sent_bytes: int = 0,
        limits: MoneyLimits | None = None,
    ) -> float:
        """Compute the dollars that the machine has cost: until its release, or until now.

        A process without the settings of the rental records the cost of a release with all traffic
        that the machine has reported. The limits hold for such a record, too.

        Args:
            now: Current time.
            dollars_per_hour: Current price in dollars an hour; 0 if it is unknown. The highest
                known price counts if it is higher, for the whole time.
            received_bytes: Bytes that the machine reports as received.
            sent_bytes: Bytes that the machine reports as sent.
            limits: Limits of the rental; by default those of a detached machine.
        """
        limits = limits or self.limits
        record = self.release_record
        if record is not None:
            if record.reason not in _OUTSIDE_REASONS or limits is None:
                return record.cost
            most = replace(self, release_record=None).compute_cost(
                record.released_at,
                dollars_per_hour=limits.max_hourly,
                received_bytes=sys.maxsize,
                sent_bytes=sys.maxsize,
                limits=limits,
            )
            return min(record.cost, most)
        hours = max(timedelta(0), now - self.intent.started_at) / timedelta(hours=1)
        down, up = self.compute_max_traffic(now)
        traffic = (
            min(received_bytes, down) * self.intent.download_dollars_per_gb
            + min(sent_bytes, up) * self.intent.upload_dollars_per_gb
        )
        price = max(self.dollars_per_hour, dollars_per_hour)
        most = limits.max_traffic_cost if limits else math.inf
        return hours * price + min(traffic / 1e9, most)

    def compute_max_traffic(self, now: datetime) -> tuple[float, float]:
        """Return the most bytes that the machine can have received, and sent, since its rental."""
        seconds = max(timedelta(0), now - self.intent.started_at).total_seconds()
        down, up = (
            min(mbits * _SPEED_TOLERANCE, _MAX_SPEED) if mbits else _MAX_SPEED
            for mbits in (self.intent.download_mbps, self.intent.upload_mbps)
        )
        return seconds * down * 1e6 / 8, seconds * up * 1e6 / 8

    def find_instance(self, instances: Iterable[Instance]) -> Instance | None:
        """Find the machine in a listing: by its number if a number is known, else by its label.

        Another machine may have the same label.
        """
        number = self.instance_id
        for one in instances:
            if one.id == number or (number is None and one.label == self.intent.label):
                return one
        return None


def list_attempts(store: Store, rental: str, *, strict: bool = False) -> list[Attempt]:
    """Return all attempts of a rental, in order. Damaged records count as missing.

    Args:
        store: Store of the ledger.
        rental: Name of the rental.
        strict: Whether a record of another version of Millrace is an error. Otherwise it counts as
            missing, too.

    Raises:
        VersionError: Another version of Millrace wrote a record, and ``strict`` is true.
    """
    prefix = RentalKeys(rental).attempts
    return [attempt for _, attempt in _iterate_attempts(store, prefix, strict=strict)]


def find_attempt(store: Store, rental: str, number: int, *, strict: bool = False) -> Attempt | None:
    """Return an attempt of a rental; None if it has no intent.

    The arguments and errors are those of `list_attempts`.
    """
    prefix = RentalKeys(rental).make_attempt_prefix(number)
    return next((attempt for _, attempt in _iterate_attempts(store, prefix, strict=strict)), None)


def iterate_open_attempts(store: Store) -> Iterator[tuple[str, Attempt]]:
    """Yield the attempts of all rentals without a release record, each with its rental's name.

    Of released attempts, only the names of the objects are read.
    """
    return _iterate_attempts(store, f"{RENTALS}/", include_released=False)


def record_price(store: Store, rental: str, attempt: Attempt, dollars_per_hour: float) -> Attempt:
    """Record the current price of a machine, if it is above the highest known price.

    Callers record a price before they act on it. So the cost of the machine is known also if the
    caller is killed before it records the release. An error of the store is only logged, since it
    must not prevent the release of the machine: the next listing shows the price again.

    Args:
        store: Store of the ledger.
        rental: Name of the rental.
        attempt: Attempt that rented the machine.
        dollars_per_hour: Current price in dollars an hour; 0 if it is unknown.

    Returns:
        The attempt with the highest recorded price.
    """
    keys = RentalKeys(rental)
    record = PriceRaiseRecord(dollars_per_hour=max(0.0, dollars_per_hour))
    try:
        while record.dollars_per_hour > attempt.dollars_per_hour:
            number = attempt.next_price_number
            recorded_price = _commit_price(
                store, keys.make_raised_key(attempt.number, number), record
            )
            attempt = replace(
                attempt,
                raised_price=max(attempt.raised_price, recorded_price),
                next_price_number=number + 1,
            )
    except errors.MillraceError as error:
        _log.warning(
            "The price of machine %s/%d, $%.3f an hour, is not recorded: %s",
            rental,
            attempt.intent.slot,
            dollars_per_hour,
            errors.format_error(error),
        )
    return attempt


def refuse_foreign_machines(rental: str, machines: int) -> None:
    """Refuse to continue with machines that another account pays for.

    Raises:
        ConfigurationError: There are such machines, which this account cannot list or destroy.
    """
    if machines:
        count = "1 machine" if machines == 1 else f"{machines} machines"
        raise errors.ConfigurationError(
            f"{count} of {rental} were rented with another account of Vast.ai, and are not "
            "released: use the API key of that account, or release the rental with that key first."
        )


def refuse_copied_attempts(store: Store, rental: str, attempts: Iterable[Attempt]) -> None:
    """Refuse to continue with machines of another store, from which the ledger was copied.

    Args:
        store: Store of the ledger.
        rental: Name of the rental.
        attempts: Attempts of the rental.

    Raises:
        ConfigurationError: Machines that are not released have the label of another installation.
    """
    installation = ensure_installation(store)
    copied = [
        one
        for one in attempts
        if one.release_record is None and is_foreign(one.intent.label, installation)
    ]
    if copied:
        count = "1 machine" if len(copied) == 1 else f"{len(copied)} machines"
        raise errors.ConfigurationError(
            f"{store.url} has the records of {count} of {rental} that another store has rented: it "
            "is a copy of that store. Release the rental with the other store, and run `millrace "
            "machine reap` with this one; or choose another name."
        )


def has_open_attempts(spec: StoreSpec) -> bool:
    """Tell whether the ledger has attempts without a release record."""
    return any(True for _ in iterate_open_attempts(open_store(spec)))


def _iterate_attempts(
    store: Store, prefix: str, *, include_released: bool = True, strict: bool = False
) -> Iterator[tuple[str, Attempt]]:
    def read_part(key: str, kind: type[R]) -> R | None:
        return _read_intact(store, key, kind, strict=strict)

    parts_by_attempt: dict[tuple[str, int], set[str]] = {}
    for stat in list_objects(store, prefix):
        if parsed := parse_attempt(stat.key):
            keys, number, part = parsed
            parts_by_attempt.setdefault((keys.name, number), set()).add(part)
    for (rental, number), parts in sorted(parts_by_attempt.items()):
        if "released" in parts and not include_released:
            continue
        keys = RentalKeys(rental)
        intent = read_part(keys.make_intent_key(number), Intent) if "intent" in parts else None
        if intent is None:
            continue
        yield (
            rental,
            Attempt(
                number,
                intent,
                read_part(keys.make_contract_key(number), Contract)
                if "contract" in parts
                else None,
                read_part(keys.make_released_key(number), ReleaseRecord)
                if "released" in parts
                else None,
                "detached" in parts,
                read_part(keys.make_detached_key(number), DetachRecord)
                if "detached" in parts
                else None,
                *_read_highest_price(read_part, keys, number, parts),
            ),
        )


def _commit_price(store: Store, key: str, record: PriceRaiseRecord) -> float:
    """Commit a raised price; return the price under the key, 0 for a damaged record.

    Another process may have committed a price under the same key.
    """
    try:
        return commit_once(store, key, record).record.dollars_per_hour
    except errors.CorruptError:
        return 0.0


def _read_highest_price(
    read_part: Callable[[str, type[PriceRaiseRecord]], PriceRaiseRecord | None],
    keys: RentalKeys,
    number: int,
    parts: Iterable[str],
) -> tuple[float, int]:
    """Return the highest recorded price of a machine, and the number of the next record.

    Each intact record has a higher price than the records before it. So the last one is enough.
    """
    numbers = sorted(
        (one for part in parts if (one := parse_price_number(part)) is not None), reverse=True
    )
    records = (read_part(keys.make_raised_key(number, one), PriceRaiseRecord) for one in numbers)
    highest = next((one.dollars_per_hour for one in records if one is not None), 0.0)
    return highest, max(numbers, default=-1) + 1


def _read_intact(store: Store, key: str, kind: type[R], *, strict: bool) -> R | None:
    """Return a record; None if it is damaged, so that other machines can be released.

    Raises:
        VersionError: Another version of Millrace wrote the record, and ``strict`` is true.
    """
    try:
        return fetch(store, key, kind)
    except errors.NotFoundError:
        return None
    except errors.CorruptError as error:
        if strict and isinstance(error, errors.VersionError):
            raise
        return None
