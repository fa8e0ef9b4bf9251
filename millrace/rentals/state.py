"""State of a rental in its owner's memory: machines by slot, and costs by attempt."""

from dataclasses import dataclass, field
from datetime import datetime

from millrace.rentals.machines import Machine, ReleaseDecision


@dataclass(slots=True)
class RentalState:
    """Machines of a rental, and their costs.

    Attributes:
        slot_count: Number of machines that the rental needs.
        active: Rented machines, by slot.
        done: Machines whose program ended with exit code 0, by slot.
        unclaimed: Machines without a slot whose create requests got no answer, by attempt. A
            later listing may show them.
        releasing: Decisions to release machines that may still exist, by attempt.
        released: Machines with a release record, by attempt.
        costs: Dollars of released machines, by attempt; 0 for the attempts of other machines.
        excluded_host_ids: Numbers of hosts that are not rented again.
    """

    slot_count: int
    active: dict[int, Machine] = field(default_factory=dict[int, Machine])
    done: dict[int, Machine] = field(default_factory=dict[int, Machine])
    unclaimed: dict[int, Machine] = field(default_factory=dict[int, Machine])
    releasing: dict[int, ReleaseDecision] = field(default_factory=dict[int, ReleaseDecision])
    released: dict[int, Machine] = field(default_factory=dict[int, Machine])
    costs: dict[int, float] = field(default_factory=dict[int, float])
    excluded_host_ids: set[int] = field(default_factory=set[int])

    @property
    def machines(self) -> tuple[Machine, ...]:
        """Rented machines in the order of their slots."""
        return tuple(self.active[slot] for slot in sorted(self.active))

    @property
    def _billed(self) -> tuple[Machine, ...]:
        """Machines that are not known to be gone; of those without a slot, the proven ones."""
        return (
            *self.active.values(),
            *(one.machine for one in self.releasing.values()),
            *(one for one in self.unclaimed.values() if one.reports.heartbeat is not None),
        )

    @property
    def dollars_per_hour(self) -> float:
        """Current price of all machines together that are not known to be gone."""
        return sum(one.dollars_per_hour for one in self._billed)

    @property
    def next_attempt(self) -> int:
        """Number of the next attempt."""
        return max(self.costs, default=-1) + 1

    @property
    def unavailable_host_ids(self) -> set[int]:
        """Numbers of the hosts that are excluded, or have a machine of this rental."""
        return self.excluded_host_ids | {one.attempt.intent.machine_id for one in self._billed}

    def compute_cost(self, now: datetime) -> float:
        """Compute the dollars that all machines have cost, including released machines."""
        return sum(self.costs.values()) + sum(one.compute_cost(now) for one in self._billed)

    def find_missing_slots(self) -> list[int]:
        """Return the slots that need a machine: they have none, and their program has not ended."""
        return [slot for slot in range(self.slot_count) if self.needs_machine(slot)]

    def needs_machine(self, slot: int) -> bool:
        """Tell whether a slot of the rental has no machine, and its program has not ended."""
        return slot < self.slot_count and slot not in self.active and slot not in self.done

    def has_attempt(self, number: int) -> bool:
        """Tell whether the machine of an attempt is known, also after its release."""
        others = (self.unclaimed, self.releasing, self.released)
        return any(number in one for one in others) or any(
            one.attempt.number == number for one in self.active.values()
        )

    def free_slot(self, machine: Machine) -> None:
        """Free the slot of an unconfirmed machine, which a later listing may still show."""
        del self.active[machine.slot]
        self.unclaimed[machine.attempt.number] = machine

    def start_release(self, decision: ReleaseDecision) -> None:
        """Count a machine that is to be released, and may exist for some time; free its slot."""
        machine = decision.machine
        self.releasing[machine.attempt.number] = decision
        self.costs[machine.attempt.number] = 0.0
        self.unclaimed.pop(machine.attempt.number, None)
        self.released.pop(machine.attempt.number, None)
        self._remove_active(machine)

    def add_release(self, machine: Machine, cost: float) -> None:
        """Remember that a machine was released, and free its slot.

        Args:
            machine: Released machine.
            cost: Dollars that the machine has cost.
        """
        number = machine.attempt.number
        self.costs[number] = cost
        self.unclaimed.pop(number, None)
        self.releasing.pop(number, None)
        self.released[number] = machine
        self._remove_active(machine)

    def _remove_active(self, machine: Machine) -> None:
        if self.active.get(machine.slot) is machine:
            del self.active[machine.slot]
