"""Release of a rental's machines, with their records and their costs."""

import contextlib
import logging
from collections import Counter
from collections.abc import Collection, Iterable
from datetime import timedelta

from millrace import errors
from millrace.rentals.budget import Budget
from millrace.rentals.context import RentalContext
from millrace.rentals.destroy import DESTROY_TIMEOUT, LISTING_LAG, destroy_machines, record_release
from millrace.rentals.labels import Label
from millrace.rentals.ledger import find_attempt
from millrace.rentals.machines import Machine, ReleaseDecision
from millrace.rentals.progress_events import MachineReleased
from millrace.rentals.state import RentalState
from millrace.rentals.vast.instances import Instance
from millrace.schemas.rental import ReleaseReason

_LOGGED_TRY = 3  # number of the try to release a machine whose error is logged

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

    def release(
        self, decisions: Iterable[ReleaseDecision], *, ignore_listing_lag: bool = False
    ) -> None:
        """Destroy machines, wait until a listing shows none, and record their release.

        The machines whose release has started are included. A host can have raised its price since
        the last listing, so the costs are computed with the prices of one more.

        Args:
            decisions: Decisions about the machines.
            ignore_listing_lag: Whether one listing without a machine is enough, even right after
                its create request.

        Raises:
            UnavailableError: Some machines may still exist. The reaper releases them.
        """
        decisions = [*self._state.releasing.values(), *decisions]
        self._update_prices([one.machine for one in decisions])
        self._destroy(decisions, ignore_listing_lag=ignore_listing_lag)

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
        """Update the prices of machines, if the API lists them soon."""
        if not machines:
            return
        with contextlib.suppress(errors.MillraceError):  # it must not prevent the release
            instances = self._context.vast.list_instances(is_brief=True)
            for machine in machines:
                if instance := machine.attempt.find_instance(instances):
                    self._context.update_instance(machine, instance)

    def _destroy(
        self,
        decisions: Iterable[ReleaseDecision],
        *,
        ignore_listing_lag: bool = False,
        timeout: timedelta = DESTROY_TIMEOUT,
    ) -> None:
        by_label = {one.machine.attempt.intent.label: one for one in decisions}
        now = self._context.clock.monotonic()

        def handle_destroyed(label: str) -> None:
            decision, machine = by_label[label], by_label[label].machine
            is_billed = (
                decision.reason is not ReleaseReason.NEVER_RENTED
                or machine.reports.heartbeat is not None
            )
            cost = machine.compute_cost(self._context.now()) if is_billed else 0.0
            self.record(decision, cost=cost)

        destroy_machines(
            self._context.vast,
            {label: one.machine.attempt.instance_id for label, one in by_label.items()},
            handle_destroyed,
            past_listing_lag=[
                label
                for label, one in by_label.items()
                if ignore_listing_lag or now - one.machine.rented_at > LISTING_LAG
            ],
            timeout=timeout,
        )

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
