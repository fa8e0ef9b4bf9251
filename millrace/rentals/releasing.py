"""Release of a rental's machines, with their records and their costs."""

import contextlib
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta

from millrace import errors
from millrace.rentals.budget import Budget
from millrace.rentals.context import RentalContext
from millrace.rentals.destroy import DESTROY_TIMEOUT, LISTING_LAG, destroy_machines, record_release
from millrace.rentals.labels import Label
from millrace.rentals.ledger import find_attempt, record_price
from millrace.rentals.machines import Machine, ReleaseDecision
from millrace.rentals.progress_events import MachineReleased
from millrace.rentals.reports import read_heartbeat
from millrace.rentals.state import RentalState
from millrace.rentals.vast.instances import Instance
from millrace.schemas.rental import ReleaseReason

_LOGGED_TRY = 3  # number of the try to release a machine whose error is logged
_REFUSED_TIMEOUT = timedelta(seconds=10)  # in which a machine of a refused request is destroyed
_BRIEF_RETRIES = timedelta(seconds=5)  # of requests to the store that delay a release

_log = logging.getLogger(__name__)


class MachineReleaser:
    """Releases machines of a rental.

    Args:
        context: Settings and connections of the rental.
        state: Machines of the rental.
    """

    def __init__(self, context: RentalContext, state: RentalState) -> None:
        self._context, self._state = context, state
        self._failed_tries = Counter[int]()

    def start_releases(self, decisions: Iterable[ReleaseDecision]) -> None:
        """Free the slots of machines, and try once to release them.

        A machine that may still exist counts, and each call tries again to release it. An error is
        logged after some tries: a listing may show a machine for some seconds.
        """
        for one in decisions:
            self._state.start_release(one)
        try:
            self._destroy(self._state.releasing.values(), timeout=timedelta(0))
        except errors.MillraceError as error:
            self._failed_tries.update(self._state.releasing.keys())
            if any(self._failed_tries[one] == _LOGGED_TRY for one in self._state.releasing):
                _log.warning("%s The rental goes on meanwhile.", errors.format_error(error))

    def release_refused(self, decision: ReleaseDecision) -> None:
        """Try for some seconds to release the machine of a refused create request.

        One listing without the machine is enough, even right after the request. A machine that may
        still exist counts, and the next calls of `start_releases` and `release` try again.

        Args:
            decision: Decision to release the machine.
        """
        self._state.start_release(decision)
        with contextlib.suppress(errors.MillraceError):  # the error of the request is raised
            self._destroy([decision], ignore_listing_lag=True, timeout=_REFUSED_TIMEOUT)

    def release(self, decisions: Iterable[ReleaseDecision]) -> None:
        """Destroy machines, wait until a listing shows none, and record their release.

        The machines whose release has started are included. A host can have raised its price since
        the last listing, so the costs are computed with the prices of one more.

        Args:
            decisions: Decisions about the machines.

        Raises:
            UnavailableError: Some machines may still exist. The reaper releases them.
        """
        decisions = [*self._state.releasing.values(), *decisions]
        self._update_prices([one.machine for one in decisions])
        self._destroy(decisions)

    def update_releasing(self, instances: Sequence[Instance]) -> None:
        """Update the descriptions and prices of the machines whose release has started.

        Args:
            instances: Listing of the account.
        """
        for one in self._state.releasing.values():
            if instance := one.machine.attempt.find_instance(instances):
                self._context.update_instance(one.machine, instance)

    def destroy_unrecorded(self, instances: Iterable[Instance], installation: str) -> None:
        """Send destroy requests for machines of this rental whose intents are damaged or missing.

        Nobody knows their slots, and another machine is rented for the work of each. Each poll
        calls this again, until a listing lacks them. Machines that a next owner has rented stay:
        their intents are intact.

        Args:
            instances: Listing of the account.
            installation: Identity of the installation.
        """
        context = self._context
        for one in instances:
            label = Label.parse(one.label, installation)
            if (
                label is None
                or label.rental != context.settings.name
                or self._state.has_attempt(label.attempt)
            ):
                continue
            with contextlib.suppress(errors.MillraceError):  # the next poll tries again
                if find_attempt(context.store, label.rental, label.attempt, strict=True) is None:
                    _log.warning(
                        "%s cannot be read: machine %d of this attempt is destroyed.",
                        context.store.make_url(context.keys.make_intent_key(label.attempt)),
                        one.id,
                    )
                    context.vast.destroy_instance(one.id)

    def _update_prices(self, machines: Collection[Machine]) -> None:
        """Update the prices of machines, if the API lists them soon.

        If the store does not answer soon, the prices are only recorded with the release.
        """
        if not machines:
            return
        try:
            instances = self._context.vast.list_instances(is_brief=True)
        except errors.MillraceError:
            return  # this must not prevent the release
        store, can_record = self._context.store.with_retry_timeout(_BRIEF_RETRIES), True
        for machine in machines:
            instance = machine.attempt.find_instance(instances)
            if instance is None:
                continue
            machine.note_listed(instance)
            if can_record:
                name, price = self._context.settings.name, instance.dollars_per_hour
                machine.attempt = record_price(store, name, machine.attempt, price)
                can_record = machine.attempt.dollars_per_hour >= price

    def _destroy(
        self,
        decisions: Iterable[ReleaseDecision],
        *,
        ignore_listing_lag: bool = False,
        timeout: timedelta = DESTROY_TIMEOUT,
    ) -> None:
        by_label = {one.machine.attempt.intent.label: one for one in decisions}
        now = self._context.clock.monotonic()

        def note_listed(label: str, instance: Instance) -> None:
            by_label[label].machine.note_listed(instance)

        def handle_destroyed(label: str) -> None:
            decision, machine = by_label[label], by_label[label].machine
            end = self._context.now()
            self._read_last_traffic(machine)
            is_billed = (
                decision.reason is not ReleaseReason.NEVER_RENTED
                or machine.reports.heartbeat is not None
                or machine.instance is not None
            )
            self.record(decision, cost=machine.compute_cost(end) if is_billed else 0.0)

        destroy_machines(
            self._context.vast,
            {label: one.machine.attempt.instance_id for label, one in by_label.items()},
            handle_destroyed,
            note_listed,
            past_listing_lag=[
                label
                for label, one in by_label.items()
                if ignore_listing_lag or now - one.machine.rented_at > LISTING_LAG
            ],
            timeout=timeout,
        )

    def _read_last_traffic(self, machine: Machine) -> None:
        """Read the last heartbeat of a machine that is gone, if its traffic costs money."""
        intent, reports = machine.attempt.intent, machine.reports
        if intent.download_dollars_per_gb or intent.upload_dollars_per_gb:
            store = self._context.store.with_retry_timeout(_BRIEF_RETRIES)
            with contextlib.suppress(errors.MillraceError):  # the one before counts
                reports.heartbeat = read_heartbeat(store, reports.keys) or reports.heartbeat

    def record(self, decision: ReleaseDecision, *, cost: float) -> None:
        """Record the release of a machine that is gone, free its slot, and report the release.

        Args:
            decision: Decision to release the machine.
            cost: Dollars that the machine has cost.
        """
        context, machine = self._context, decision.machine
        record_release(
            context.store,
            context.settings.name,
            machine.attempt,
            decision.reason,
            decision.message,
            cost,
            context.now(),
        )
        self._state.add_release(machine, cost)
        context.progress(
            MachineReleased(
                machine=machine.name,
                reason=decision.reason,
                message=decision.message,
                dollars=cost,
            )
        )

    def enforce_budget(self, budget: Budget) -> None:
        """Release all machines when the money or the time of a budget is nearly spent.

        Raises:
            BudgetError: The money or the time is spent.
        """
        message = budget.find_excess(self._state, self._context.now())
        if message:
            self.release(
                ReleaseDecision(one, ReleaseReason.OVER_BUDGET, message)
                for one in self._state.machines
            )
            raise errors.BudgetError(
                f"{message}: all machines of {self._context.settings.name} were released. Their "
                "data is in the store. Raise max_total or max_lifetime, and start again."
            )
