"""Machines that a listing shows late: after their slot was freed, or after their release."""

from dataclasses import replace

from millrace.rentals.context import RentalContext
from millrace.rentals.machine_starter import MachineStarter
from millrace.rentals.machines import Machine, ReleaseDecision
from millrace.rentals.state import RentalState
from millrace.rentals.vast.instances import Instance
from millrace.schemas.rental import ReleaseReason


class LateMachineClaimer:
    """Claims late machines: records their numbers. Their slots take them if they are free.

    Args:
        context: Settings and connections of the rental.
        state: Machines of the rental.
        starter: Starter, which records the numbers of machines.
    """

    def __init__(self, context: RentalContext, state: RentalState, starter: MachineStarter) -> None:
        self._context, self._state, self._starter = context, state, starter

    def claim_listed(self, instances: list[Instance], *, fill_slots: bool) -> list[ReleaseDecision]:
        """Record the numbers of the late machines that a listing shows.

        A machine that is to be released stays late until its release starts.

        Args:
            instances: Listing of the account.
            fill_slots: Whether a machine whose create request got no answer is put into its slot,
                if the slot is free.

        Returns:
            Decisions to release the other late machines.
        """
        decisions: list[ReleaseDecision] = []
        for machine, instance_id in self._find_listed(self._state.unclaimed, instances):
            if fill_slots and self._state.needs_machine(machine.slot):
                now = self._context.clock.monotonic()
                machine.rented_at = machine.last_report_at = now
                self._starter.confirm_machine(machine, instance_id)
                del self._state.unclaimed[machine.attempt.number]
            else:
                self._starter.commit_contract(machine, instance_id)
                message = "the machine was listed after another machine was rented for its slot"
                decisions.append(ReleaseDecision(machine, ReleaseReason.UNNEEDED, message))
        for machine, instance_id in self._find_listed(self._state.released, instances):
            self._starter.commit_contract(machine, instance_id)
            message = "the machine was released before, and is listed again"
            decisions.append(ReleaseDecision(machine, ReleaseReason.UNNEEDED, message))
        return decisions

    def give_up_unclaimed(self, instances: list[Instance]) -> list[ReleaseDecision]:
        """Claim the late machines at the end of a rental, and decide to release all without a slot.

        Args:
            instances: Last listing of the account; empty if the listing could not be read.
        """
        listed = self.claim_listed(instances, fill_slots=False)
        listed_numbers = {one.machine.attempt.number for one in listed}
        message = "the create request got no answer, and no listing has shown the machine"
        return [
            *listed,
            *(
                ReleaseDecision(one, ReleaseReason.NEVER_RENTED, message)
                for number, one in self._state.unclaimed.items()
                if number not in listed_numbers
            ),
        ]

    def _find_listed(
        self, machines: dict[int, Machine], instances: list[Instance]
    ) -> list[tuple[Machine, int]]:
        """Return the machines that a listing shows, each with its number at the provider.

        Such a machine is billed again, so its release record is dropped.
        """
        found: list[tuple[Machine, int]] = []
        for machine in machines.values():
            instance = machine.attempt.find_instance(instances)
            if instance is not None:
                machine.attempt = replace(machine.attempt, release_record=None)
                self._context.update_instance(machine, instance)
                found.append((machine, instance.id))
        return found
