"""Inspection of rented machines: which machines can stay, and which are to be released."""

from collections.abc import Sequence

from millrace import errors
from millrace.rentals.budget import Budget
from millrace.rentals.context import RentalContext
from millrace.rentals.destroy import LISTING_LAG
from millrace.rentals.machines import Machine, ReleaseDecision
from millrace.rentals.progress_events import MachineReady, OutputPrinted, PriceRaised
from millrace.rentals.replacement import ReplacementPolicy
from millrace.rentals.reports import extract_error
from millrace.rentals.vast.instances import Instance
from millrace.schemas.rental import ReleaseReason

_TAIL_LINES = 10  # lines of the log in the message of a failed program


class MachineInspector:
    """Checks of machines, by the listing of the provider and by the machines' own reports.

    Args:
        context: Settings and connections of the rental.
        budget: Limits of prices and traffic.
        policy: Receiver of the slots whose program runs.
    """

    def __init__(self, context: RentalContext, budget: Budget, policy: ReplacementPolicy) -> None:
        self._context, self._budget, self._policy = context, budget, policy
        self._timeouts = context.settings.timeouts

    def inspect(
        self, machine: Machine, instances: Sequence[Instance] | None
    ) -> ReleaseDecision | None:
        """Read the reports of a machine, and decide whether to release it.

        Args:
            machine: Machine. Its reports, its description, its readiness and its price in the
                ledger are updated.
            instances: Listing of the account; None if the listing could not be read.

        Returns:
            Decision to release the machine; None if the machine can stay.
        """
        now = self._context.clock.monotonic()
        age = now - machine.rented_at
        if instances is not None:
            self._context.update_instance(machine, machine.attempt.find_instance(instances))
        is_missing = instances is not None and machine.instance is None and age > LISTING_LAG
        if machine.is_unconfirmed and is_missing:
            return ReleaseDecision(
                machine, ReleaseReason.NEVER_RENTED, "the create request got no answer"
            )
        self._read_reports(machine, now)
        if message := self._budget.check_traffic(machine, self._context.now()):
            return ReleaseDecision(machine, ReleaseReason.TOO_EXPENSIVE, message)
        if machine.reports.program_exit is not None:
            return _judge_exit(machine, machine.reports.program_exit.code)
        if is_missing:
            return ReleaseDecision(
                machine, ReleaseReason.DEAD, "the provider does not list the machine any more"
            )
        return self._check_instance(machine) or (
            self._check_heartbeat(machine, now)
            if machine.is_ready
            else self._check_startup(machine, age)
        )

    def _read_reports(self, machine: Machine, now: float) -> None:
        try:
            if machine.reports.refresh():
                machine.last_report_at = now
        except errors.ConfigurationError:
            return  # the machine wrote a name into its folder that cannot be listed
        except errors.MillraceError:
            machine.last_report_at = now  # a failed read does not count as silence
            return
        for line in machine.reports.new_lines:
            self._context.progress(OutputPrinted(machine=machine.name, text=line))

    def _check_instance(self, machine: Machine) -> ReleaseDecision | None:
        """Decide by the description of the provider."""
        instance = machine.instance
        if instance is None:
            return None
        if instance.is_outbid:
            return ReleaseDecision(machine, ReleaseReason.OUTBID, "another client pays more")
        if self._budget.is_raised(machine, instance.dollars_per_hour):
            machine.reported_price = instance.dollars_per_hour
            self._context.progress(
                PriceRaised(
                    machine=machine.name,
                    offered=machine.attempt.intent.dollars_per_hour,
                    dollars_per_hour=instance.dollars_per_hour,
                )
            )
        if message := self._budget.check_price(machine, instance.dollars_per_hour):
            return ReleaseDecision(machine, ReleaseReason.TOO_EXPENSIVE, message)
        # The program of a machine may run while the provider hears nothing of its host.
        has_run = machine.is_ready or machine.reports.heartbeat is not None
        if instance.failure and not (has_run and instance.status == "unknown"):
            return ReleaseDecision(machine, ReleaseReason.DEAD, instance.failure)
        return None

    def _check_heartbeat(self, machine: Machine, now: float) -> ReleaseDecision | None:
        timeout = self._timeouts.heartbeat_timeout
        if now - machine.last_report_at <= timeout.total_seconds():
            return None
        return ReleaseDecision(
            machine, ReleaseReason.DEAD, f"the machine sent no heartbeat for {timeout}"
        )

    def _check_startup(self, machine: Machine, age: float) -> ReleaseDecision | None:
        setup, instance = machine.reports.setup, machine.instance
        if setup is not None and setup.state == "failed":
            error = extract_error(setup.detail)
            return ReleaseDecision(
                machine,
                ReleaseReason.DEAD,
                f"the machine could not install the program: {error}",
                error,
            )
        if (
            machine.reports.heartbeat is not None
            and instance is not None
            and (instance.is_running or instance.status == "unknown")
        ):
            machine.is_ready = True
            self._policy.note_ready(machine.slot)
            self._context.progress(MachineReady(machine=machine.name, instance=instance.id))
        elif age > self._timeouts.startup_timeout.total_seconds():
            state = setup.state if setup else instance.status if instance else "unknown"
            return ReleaseDecision(
                machine,
                ReleaseReason.DEAD,
                f"the machine did not start within {self._timeouts.startup_timeout}; its last "
                f"state was {state}",
            )
        return None


def _judge_exit(machine: Machine, code: int) -> ReleaseDecision:
    if code == 0:
        return ReleaseDecision(machine, ReleaseReason.DONE, "the program ended with exit code 0")
    tail = "\n".join(machine.reports.tail[-_TAIL_LINES:])
    return ReleaseDecision(
        machine,
        ReleaseReason.FAILED,
        f"The program on machine {machine.name} ended with exit code {code}. Its last output:\n"
        f"{tail}",
    )
