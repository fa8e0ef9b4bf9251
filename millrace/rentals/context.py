"""Settings of a rental, and the connections that its parts share."""

from dataclasses import dataclass
from datetime import datetime

from millrace.keys.rentals import RentalKeys
from millrace.progress import Progress
from millrace.rentals.clock import Clock
from millrace.rentals.ledger import Attempt, record_price
from millrace.rentals.machines import Machine, make_machine
from millrace.rentals.settings import RentalSettings
from millrace.rentals.vast.api import VastClient
from millrace.rentals.vast.instances import Instance
from millrace.storage import Store


@dataclass(frozen=True, slots=True)
class RentalContext:
    """Settings of a rental, and the connections that its parts share.

    Attributes:
        settings: Settings of the rental.
        store: Store of the ledger.
        vast: Client of the account that pays.
        progress: Receiver of events.
        is_detached: Whether the machines stay without an owner when the rental ends.
    """

    settings: RentalSettings
    store: Store
    vast: VastClient
    progress: Progress
    is_detached: bool = False

    @property
    def keys(self) -> RentalKeys:
        """Keys of the rental."""
        return RentalKeys(self.settings.name)

    @property
    def clock(self) -> Clock:
        """Clock of the account's client."""
        return self.vast.clock

    def now(self) -> datetime:
        """Return the time of day."""
        return self.clock.now()

    def make_machine(self, attempt: Attempt) -> Machine:
        """Return the machine of an attempt, without reports yet."""
        return make_machine(self.store, attempt, self.clock.monotonic(), self.settings.limits)

    def update_instance(self, machine: Machine, instance: Instance | None) -> None:
        """Update the description of a machine, and record its price if the price was raised.

        Args:
            machine: Machine.
            instance: Description in a listing; None if the listing lacks the machine.
        """
        machine.instance = instance
        if instance is not None:
            machine.note_listed(instance)
            machine.attempt = record_price(
                self.store, self.settings.name, machine.attempt, instance.dollars_per_hour
            )
