"""Rented machines as their owner knows them, and decisions to release them."""

from dataclasses import dataclass
from datetime import datetime

from millrace.keys.rentals import MachineKeys, RentalKeys
from millrace.rentals.ledger import Attempt
from millrace.rentals.reports import MachineReports, read_heartbeat
from millrace.rentals.vast.instances import Instance
from millrace.schemas.rental import MoneyLimits, ReleaseReason
from millrace.storage import Store


@dataclass(slots=True)
class Machine:
    """Rented machine.

    Attributes:
        attempt: Attempt that rented the machine.
        reports: Reports of the machine.
        rented_at: Time by `Clock.monotonic` when the machine was rented, or taken over.
        last_report_at: Time by `Clock.monotonic` of the last report.
        limits: Limits of the rental, if they are known.
        instance: Description in the last listing; None before the first listing.
        is_ready: Whether the program runs.
        reported_price: Raised price that was last reported, in dollars an hour.
        estimated_end: End of a machine of an earlier owner, until a listing shows the machine.
    """

    attempt: Attempt
    reports: MachineReports
    rented_at: float
    last_report_at: float
    limits: MoneyLimits | None = None
    instance: Instance | None = None
    is_ready: bool = False
    reported_price: float = 0.0
    estimated_end: datetime | None = None

    @property
    def slot(self) -> int:
        """Number of the machine within its rental."""
        return self.attempt.intent.slot

    @property
    def name(self) -> str:
        """Name of the rental and number of the machine, such as ``wiki/0``."""
        return f"{self.attempt.intent.rental}/{self.slot}"

    @property
    def is_unconfirmed(self) -> bool:
        """True if the create request got no answer, and no listing has shown the machine."""
        return self.attempt.contract is None

    @property
    def dollars_per_hour(self) -> float:
        """Highest known price, or the current price if that is higher."""
        listed_price = self.instance.dollars_per_hour if self.instance else 0.0
        return max(self.attempt.dollars_per_hour, listed_price)

    def note_listed(self, instance: Instance) -> None:
        """Remember the description of a listing. The machine is billed until now."""
        self.instance, self.estimated_end = instance, None

    def compute_cost(self, now: datetime) -> float:
        """Compute the dollars that the machine has cost, with its traffic."""
        heartbeat = self.reports.heartbeat
        received, sent = (heartbeat.received, heartbeat.sent) if heartbeat else (0, 0)
        return self.attempt.compute_cost(
            min(now, self.estimated_end or now),
            dollars_per_hour=self.dollars_per_hour,
            received_bytes=received,
            sent_bytes=sent,
            limits=self.limits,
        )


def make_machine(
    store: Store, attempt: Attempt, now: float, limits: MoneyLimits | None = None
) -> Machine:
    """Return the machine of an attempt, without reports yet.

    Args:
        store: Store of the ledger, and of the machine's reports.
        attempt: Attempt that rented the machine.
        now: Current time by `Clock.monotonic`.
        limits: Limits of the rental, if they are known.
    """
    keys = MachineKeys(RentalKeys(attempt.intent.rental).make_machine_prefix(attempt.number))
    return Machine(
        attempt,
        MachineReports(store, keys),
        rented_at=now,
        last_report_at=now,
        limits=limits,
    )


def compute_recorded_cost(
    store: Store,
    attempt: Attempt,
    instance: Instance | None,
    end: datetime,
    limits: MoneyLimits | None = None,
) -> float:
    """Compute the dollars that a machine of the ledger has cost, with its reported traffic.

    The owner of the machine computes the same from its memory: `Machine.compute_cost`.

    Args:
        store: Store of the ledger, and of the machine's reports.
        attempt: Attempt that rented the machine.
        instance: Description in a listing; None if no listing shows the machine.
        end: Current time; the time of `LifeSigns.estimate_end` if no listing shows the machine.
        limits: Limits of the rental, if they are known.

    Raises:
        UnavailableError: The store does not answer.
    """
    intent, heartbeat = attempt.intent, None
    is_running = attempt.release_record is None
    if is_running and (intent.download_dollars_per_gb or intent.upload_dollars_per_gb):
        prefix = RentalKeys(intent.rental).make_machine_prefix(attempt.number)
        heartbeat = read_heartbeat(store, MachineKeys(prefix))
    return attempt.compute_cost(
        end,
        dollars_per_hour=instance.dollars_per_hour if instance else 0.0,
        received_bytes=heartbeat.received if heartbeat else 0,
        sent_bytes=heartbeat.sent if heartbeat else 0,
        limits=limits,
    )


@dataclass(frozen=True, slots=True)
class ReleaseDecision:
    """Decision to release a machine.

    Attributes:
        machine: Machine to release.
        reason: Kind of the reason.
        message: Reason in words.
        setup_error: Error of the installation; empty unless the installation failed.
    """

    machine: Machine
    reason: ReleaseReason
    message: str
    setup_error: str = ""
