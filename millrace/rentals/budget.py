"""Budget of a rental: prices, traffic, deadlines, and the money that all machines may cost."""

from datetime import datetime, timedelta

from millrace.rentals.machines import Machine
from millrace.rentals.offers import MAX_LIFETIME, Offer
from millrace.rentals.settings import RentalSettings
from millrace.rentals.state import RentalState
from millrace.rentals.vast.api import BRIEF_LISTING_TIME, DESTROY_INTERVAL
from millrace.schemas.rental import MoneyLimits

PRICE_TOLERANCE = 1.1
"""Multiple of the offered price above which a price counts as raised."""
_TRAFFIC_PERIOD = timedelta(minutes=10)  # shortest time of an average, as machines begin with most
_TRAFFIC_ALLOWANCE = 10e9  # bytes that a machine of any age may claim to have transferred
_CONFIRMATION_TIME = timedelta(minutes=2)  # until a listing shows no machine any more
_MAX_HOURS = MAX_LIFETIME / timedelta(hours=1)
_MIN_PRICE = 1e-6  # dollars an hour, so that a free machine divides nothing by zero
_ROUNDING = 1e-6  # dollars by which sums of costs may differ


class Budget:
    """Limits of a rental in dollars and hours.

    The budget reads machines, and changes nothing.

    Args:
        settings: Settings of the rental.
        is_detached: Whether the machines stay without an owner when the rental ends.
    """

    def __init__(self, settings: RentalSettings, *, is_detached: bool = False) -> None:
        self._settings, self._request = settings, settings.request
        self._limits = settings.limits
        self._is_detached = is_detached

    def compute_deadline(self, offer: Offer, started_at: datetime, state: RentalState) -> datetime:
        """Return the deadline of a machine.

        Nobody supervises the cost of a detached machine. So its deadline is not later than the
        time at which the machine has cost its share of the money that is left, with the expected
        traffic.

        Args:
            offer: Offer of the machine.
            started_at: Time of the intent to rent the machine.
            state: Machines of the rental so far, and their costs.
        """
        lifetime = self._request.max_lifetime
        if self._is_detached:
            lifetime = min(lifetime, self._compute_affordable_time(offer, started_at, state))
        return started_at + lifetime

    def _compute_affordable_time(
        self, offer: Offer, now: datetime, state: RentalState
    ) -> timedelta:
        """Return the time after which a detached machine has cost its share of the money."""
        traffic = self._request.compute_traffic_cost(
            offer.download_dollars_per_gb, offer.upload_dollars_per_gb
        )
        money_left = self._request.max_total - state.compute_cost(now)
        share = min(self._limits.share, money_left / max(1, state.slot_count - len(state.done)))
        hours = max(0.0, share - traffic) / max(offer.dollars_per_hour, _MIN_PRICE)
        return timedelta(hours=min(hours, _MAX_HOURS))

    def compute_detached_end(self, state: RentalState, now: datetime) -> datetime | None:
        """Return when machines without an owner have to end, as the money is spent then.

        The expected traffic counts as spent, if the traffic so far has cost less.

        Args:
            state: Machines that are to be detached, and the costs of the others.
            now: Current time.

        Returns:
            The end of all machines; None if the money lasts until the deadline of each machine.
        """
        machines = sorted(state.machines, key=lambda one: one.attempt.intent.deadline)
        money_left = max(
            0.0,
            self._request.max_total
            - state.compute_cost(now)
            - sum(self._compute_remaining_traffic_cost(one, now) for one in machines),
        )
        dollars_per_hour, start = sum(one.dollars_per_hour for one in machines), now
        for machine in machines:
            end = max(start, machine.attempt.intent.deadline)
            cost = (end - start) / timedelta(hours=1) * dollars_per_hour
            if cost > money_left + _ROUNDING:
                return start + timedelta(hours=money_left / dollars_per_hour)
            money_left, start = money_left - cost, end
            dollars_per_hour -= machine.dollars_per_hour
        return None

    def _compute_remaining_traffic_cost(self, machine: Machine, now: datetime) -> float:
        """Compute the dollars of the expected traffic that a machine has not reported yet."""
        intent = machine.attempt.intent
        expected_cost = self._request.compute_traffic_cost(
            intent.download_dollars_per_gb, intent.upload_dollars_per_gb
        )
        return max(0.0, expected_cost - _compute_traffic_cost(machine, now))

    def find_excess(self, state: RentalState, now: datetime) -> str:
        """Return the reason why the rental must end; empty if money and time are left.

        The cost until the next check, during a listing of the last prices, and during the release
        of all machines, counts as spent.
        """
        machines = [*state.machines, *(one.machine for one in state.releasing.values())]
        traffic = sum(_compute_traffic_rate(one, now) for one in machines)
        hours = self._compute_reserved_time(len(machines)) / timedelta(hours=1)
        cost = state.compute_cost(now)
        if cost + hours * (state.dollars_per_hour + traffic) >= self._request.max_total:
            return f"${cost:.2f} of ${self._request.max_total:.2f} are spent"
        expired = [
            one
            for one in state.machines
            if now >= one.attempt.intent.deadline and one.estimated_end is None
        ]  # a machine that no listing has shown is released as lost, or counts as done
        return f"the deadline of machine {expired[0].name} has passed" if expired else ""

    def find_shortage(self, offer: Offer, state: RentalState, now: datetime) -> str:
        """Return the reason why the money is not enough for one more machine; empty if it is.

        It is not if the next check would release the machine.

        Args:
            offer: Offer of the machine.
            state: Machines of the rental so far, and their costs.
            now: Current time.
        """
        reserved_time = self._compute_reserved_time(len(state.machines) + len(state.releasing) + 1)
        dollars_per_hour = state.dollars_per_hour + offer.dollars_per_hour
        cost, max_total = state.compute_cost(now), self._request.max_total
        is_short = cost + reserved_time / timedelta(hours=1) * dollars_per_hour >= max_total
        if self._is_detached and not is_short:
            is_short = self._compute_affordable_time(offer, now, state) <= reserved_time
        if not is_short:
            return ""
        return (
            f"No machine is added to {self._settings.name}: ${cost:.2f} of ${max_total:.2f}"
            f" are spent, and the rest does not pay for one at ${offer.dollars_per_hour:.3f} an "
            "hour, with its traffic."
        )

    def _compute_reserved_time(self, machines: int) -> timedelta:
        """Return the time until the next check, and until the last machine is released then."""
        poll_interval = self._settings.timeouts.poll_interval
        return poll_interval + BRIEF_LISTING_TIME + compute_release_time(machines)

    def is_raised(self, machine: Machine, dollars_per_hour: float) -> bool:
        """Tell whether a price is within the limit, but above the offered and last reported price.

        Args:
            machine: Machine.
            dollars_per_hour: Current price of the machine.
        """
        known_price = max(machine.attempt.intent.dollars_per_hour, machine.reported_price)
        return known_price * PRICE_TOLERANCE < dollars_per_hour <= self._request.max_hourly

    def check_price(self, machine: Machine, dollars_per_hour: float) -> str:
        """Return the reason why a machine's price is too high; empty if the price is accepted.

        Args:
            machine: Machine.
            dollars_per_hour: Current price of the machine.
        """
        return check_price(machine, dollars_per_hour, self._limits, is_detached=self._is_detached)

    def check_traffic(self, machine: Machine, now: datetime) -> str:
        """Return the reason why a machine's reported traffic is refused; empty if it is accepted.

        Args:
            machine: Machine.
            now: Current time.
        """
        return check_traffic(machine, now, self._limits)


def compute_release_time(machines: int) -> timedelta:
    """Return the time to release machines, for which the cost of all of them is reserved.

    Destroy requests are sent one after another. The machines that are destroyed first cost less
    than their reserve, which is left for requests whose answers take long.
    """
    return _CONFIRMATION_TIME + machines * DESTROY_INTERVAL


def check_price(
    machine: Machine, dollars_per_hour: float, limits: MoneyLimits, *, is_detached: bool
) -> str:
    """Return the reason why a machine's price is too high; empty if the price is accepted.

    A host can raise its price between search and create, and later.

    Args:
        machine: Machine.
        dollars_per_hour: Current price of the machine.
        limits: Limits of the rental.
        is_detached: Whether the machine is, or will be, detached until its deadline.
    """
    intent = machine.attempt.intent
    message = (
        f"the machine costs ${dollars_per_hour:.3f} an hour, and was offered for "
        f"${intent.dollars_per_hour:.3f}"
    )
    if dollars_per_hour > limits.max_hourly:
        return message
    lifetime_hours = (intent.deadline - intent.started_at) / timedelta(hours=1)
    if (
        is_detached
        and dollars_per_hour > intent.dollars_per_hour * PRICE_TOLERANCE
        and dollars_per_hour * lifetime_hours > limits.share
    ):
        return f"{message}: detached until its deadline, it would cost more than its share"
    return ""


def check_traffic(machine: Machine, now: datetime, limits: MoneyLimits) -> str:
    """Return the reason why a machine's reported traffic is refused; empty if it is accepted.

    Traffic is refused if the network of the machine cannot have transferred as much, or if the
    traffic of one of several machines has cost more than the machine's share.

    Args:
        machine: Machine.
        now: Current time.
        limits: Limits of the rental.
    """
    heartbeat, attempt = machine.reports.heartbeat, machine.attempt
    if heartbeat is None:
        return ""
    max_received, max_sent = attempt.compute_max_traffic(now)
    if (
        heartbeat.received > max_received + _TRAFFIC_ALLOWANCE
        or heartbeat.sent > max_sent + _TRAFFIC_ALLOWANCE
    ):
        return (
            f"the machine reports {heartbeat.received / 1e9:.0f} GB received and "
            f"{heartbeat.sent / 1e9:.0f} GB sent, more than its network can transfer"
        )
    traffic_cost = _compute_traffic_cost(machine, now)
    if limits.machines > 1 and traffic_cost > limits.share:
        return f"the traffic of the machine has cost ${traffic_cost:.2f}, more than its share"
    return ""


def _compute_traffic_rate(machine: Machine, now: datetime) -> float:
    """Compute the dollars an hour that the reported traffic of a machine has cost on average."""
    age = max(_TRAFFIC_PERIOD, now - machine.attempt.intent.started_at)
    return _compute_traffic_cost(machine, now) / (age / timedelta(hours=1))


def _compute_traffic_cost(machine: Machine, now: datetime) -> float:
    """Compute the dollars that the reported traffic of a machine has cost."""
    rent_cost = machine.attempt.compute_cost(now, dollars_per_hour=machine.dollars_per_hour)
    return machine.compute_cost(now) - rent_cost
