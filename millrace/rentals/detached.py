"""Limits of detached rentals, which no owner enforces."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from millrace.keys.rentals import RentalKeys
from millrace.lease import StoreClock
from millrace.rentals.budget import check_price, check_traffic, compute_release_time
from millrace.rentals.ledger import Attempt, list_attempts
from millrace.rentals.life_signs import LifeSigns
from millrace.rentals.machines import Machine, make_machine
from millrace.rentals.reports import read_heartbeat
from millrace.rentals.vast.instances import Instance
from millrace.schemas.rental import MoneyLimits
from millrace.storage import Store

_REAP_INTERVAL = timedelta(minutes=15)  # between two runs of the reaper, as it is scheduled
_CLOCK_TOLERANCE = timedelta(minutes=1)  # by which the clocks of owner and store may differ


class DetachedBudget:
    """Limits of detached rentals, as their owners have recorded them.

    Args:
        store: Store of the ledger, and of the machines' reports.
        instances: Listing of the account.
        clock: Clock of the store, which dates the heartbeats.
        now: Current time.
    """

    def __init__(
        self, store: Store, instances: Sequence[Instance], clock: StoreClock, now: datetime
    ) -> None:
        self._store, self._instances = store, instances
        self._clock, self._now = clock, now
        self._excesses: dict[str, str] = {}

    def find_excess(self, rental: str, attempt: Attempt, instance: Instance) -> str:
        """Return the reason why a detached machine must end; empty if money is left.

        The limits are those that its owner enforced: of the machine's price and traffic, and of
        the cost of all machines. The ledger is read once for each rental.

        Args:
            rental: Name of the rental.
            attempt: Attempt that rented the machine.
            instance: Description of the machine in the listing.

        Raises:
            UnavailableError: The store does not answer.
        """
        limits = attempt.limits
        if limits is None:
            return ""
        machine = self._make_machine(attempt, limits)
        message = check_price(
            machine, instance.dollars_per_hour, limits, is_detached=True
        ) or check_traffic(machine, self._now, limits)
        if not message and rental not in self._excesses:
            self._excesses[rental] = self._find_total_excess(rental, limits)
        return message or self._excesses[rental]

    def _make_machine(self, attempt: Attempt, limits: MoneyLimits) -> Machine:
        """Return a machine with its last heartbeat, and its description in the listing."""
        machine = make_machine(self._store, attempt, 0.0, limits)
        machine.reports.heartbeat = read_heartbeat(self._store, machine.reports.keys)
        machine.instance = attempt.find_instance(self._instances)
        return machine

    def _find_total_excess(self, rental: str, limits: MoneyLimits) -> str:
        """Return the reason why all machines must end; empty if the money lasts.

        The cost until the next run of the reaper, and during the release of all machines, counts
        as spent, unless the money lasts until the deadlines of the machines.
        """
        cost = hourly = remaining_cost = 0.0
        listed = 0
        signs = LifeSigns(self._store, RentalKeys(rental), self._clock)
        for attempt in list_attempts(self._store, rental):
            if attempt.release_record is not None:
                cost += attempt.compute_cost(self._now, limits=limits)
                continue
            machine = self._make_machine(attempt, limits)
            if machine.instance is None:
                machine.estimated_end = signs.estimate_end(attempt, self._now)
            else:
                remaining_time = attempt.deadline - _CLOCK_TOLERANCE - self._now
                hours = max(timedelta(0), remaining_time) / timedelta(hours=1)
                listed += 1
                hourly += machine.dollars_per_hour
                remaining_cost += hours * machine.dollars_per_hour
            cost += machine.compute_cost(self._now)
        reserved_cost = (
            (_REAP_INTERVAL + compute_release_time(listed)) / timedelta(hours=1) * hourly
        )
        if cost + min(remaining_cost, reserved_cost) < limits.max_total:
            return ""
        return f"${cost:.2f} of ${limits.max_total:.2f} are spent"
