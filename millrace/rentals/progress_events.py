"""Progress events of rentals, and of the machines that they rent."""

from dataclasses import dataclass
from typing import ClassVar

from millrace.progress import Event
from millrace.schemas.rental import ReleaseReason


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferTaken(Event):
    """Event before a machine is requested from the provider.

    Attributes:
        machine: Name of the rental and number of the machine's slot, such as ``fleet/0``.
        gpu: Name of the GPU.
        location: Location of the machine, as the provider gives it.
        dollars_per_hour: Price of the offer.
    """

    kind: ClassVar[str] = "rental.offer"

    machine: str
    gpu: str
    location: str
    dollars_per_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRented(Event):
    """Event after the provider has created or listed a machine of the rental.

    Attributes:
        machine: Name of the machine.
        instance: Number of the machine at the provider.
    """

    kind: ClassVar[str] = "rental.rented"

    machine: str
    instance: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceRaised(Event):
    """Event after the provider lists a machine at a higher price than before.

    Attributes:
        machine: Name of the machine.
        offered: Price of the offer in dollars per hour.
        dollars_per_hour: Price that the provider lists now.
    """

    kind: ClassVar[str] = "rental.raised"

    machine: str
    offered: float
    dollars_per_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReady(Event):
    """Event after the first heartbeat of a machine's program.

    Attributes:
        machine: Name of the machine.
        instance: Number of the machine at the provider.
    """

    kind: ClassVar[str] = "rental.ready"

    machine: str
    instance: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMissing(Event):
    """Event after each failure to rent a machine for a slot; a later poll tries again.

    Attributes:
        machine: Name of the rental and number of the slot, such as ``fleet/0``.
        message: Message of the error.
    """

    kind: ClassVar[str] = "rental.missing"

    machine: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReleased(Event):
    """Event after a machine is destroyed and its release is recorded.

    Attributes:
        machine: Name of the machine; its label at the provider if the owner is another process.
        reason: Reason of the release.
        message: Reason in words.
        dollars: Cost of the machine.
    """

    kind: ClassVar[str] = "rental.released"

    machine: str
    reason: ReleaseReason
    message: str
    dollars: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPrinted(Event):
    """Event of each line that the program of a machine has printed.

    Attributes:
        machine: Name of the machine.
        text: Line, from an untrusted machine.
    """

    kind: ClassVar[str] = "machine.printed"

    machine: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RentalCostUpdated(Event):
    """Event after each poll of the machines.

    Attributes:
        rental: Name of the rental.
        machines: Number of machines that the rental needs. It may be less than the settings of its
            program say: sharding rents at most one for each open partition.
        dollars: Cost of the rental so far.
    """

    kind: ClassVar[str] = "rental.cost"

    rental: str
    machines: int
    dollars: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RentalWaiting(Event):
    """Event after each failure to acquire a rental that an earlier owner still holds.

    Attributes:
        rental: Name of the rental.
        message: Message of the error.
    """

    kind: ClassVar[str] = "rental.waiting"

    rental: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RentalInterrupted(Event):
    """Event after an interrupt, while the machines of a supervised rental are released.

    Attributes:
        rental: Name of the rental.
    """

    kind: ClassVar[str] = "rental.interrupted"

    rental: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RentalFailed(Event):
    """Event after an error has ended a supervised rental.

    Attributes:
        rental: Name of the rental.
        message: Message of the error.
    """

    kind: ClassVar[str] = "rental.failed"

    rental: str
    message: str
