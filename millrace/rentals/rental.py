"""Rent machines, supervise them, and release them, also after crashes.

The order of the steps makes renting safe. An intent with a unique label is committed before a
create request is sent, and a create request is sent once. After a lost answer, every poll searches
the listing for the label. A machine that appears gets its slot, or is released if the slot is
taken. A machine counts as released once a listing of all machines lacks its label. From the records
of a killed owner, the next owner or the reaper continues.
"""

import contextlib
import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType

from millrace import errors
from millrace.progress import Progress, ignore_event, shield_progress
from millrace.records import commit_once
from millrace.rentals.budget import Budget
from millrace.rentals.context import RentalContext
from millrace.rentals.grants import GoogleTokenRenewer, needs_tokens
from millrace.rentals.inspection import MachineInspector
from millrace.rentals.late_machines import LateMachineClaimer
from millrace.rentals.life_signs import LifeSigns
from millrace.rentals.machine_starter import MachineStarter
from millrace.rentals.machines import Machine, ReleaseDecision
from millrace.rentals.ownership import Ownership, StepTimer
from millrace.rentals.progress_events import MachineMissing, RentalCostUpdated
from millrace.rentals.releasing import MachineReleaser
from millrace.rentals.replacement import ReplacementPolicy
from millrace.rentals.settings import RentalSettings, open_account
from millrace.rentals.state import RentalState
from millrace.rentals.takeover import (
    delete_detach_records,
    list_own_attempts,
    take_over_machines,
)
from millrace.rentals.vast.api import VastClient
from millrace.rentals.vast.instances import Instance
from millrace.schemas.rental import DetachRecord, ReleaseReason
from millrace.storage import open_store

_log = logging.getLogger(__name__)

_STEP_TIMEOUT = timedelta(hours=1)  # for a listing, and a release that is retried for 15 minutes
_STEP_TIMEOUT_PER_MACHINE = timedelta(minutes=1)  # for reports, and destroys without an answer
_LONGEST_PAUSE = 10.0  # seconds between two looks at whether the wait for the machines is to end


class Rental:
    """Machines that are rented for one purpose. A context manager.

    Entering acquires the rental, and takes over the machines of a lost owner. Leaving releases all
    machines.

    Args:
        settings: Settings of the rental.
        detached: Whether leaving detaches the machines. Each machine then stays until its
            deadline, until the money is spent, or until `release`.
        wait: Whether to wait if the rental seems to have an owner. The wait ends when the owner
            renews its lease, or the lease expires.
        repeat: Whether programs that ended under an earlier owner run again, on other machines.
        quorum: Number of machines that are enough; by default all. Once the program has run on so
            many, a machine that cannot be had does not end the rental, and is tried again.
        vast: Client of the account; by default that of the settings.
        progress: Receives `OfferTaken`, `MachineRented`, `MachineReady`, `MachineReleased`,
            `MachineMissing`, `PriceRaised`, `OutputPrinted` and `RentalCostUpdated`. Its errors
            are logged.
    """

    def __init__(
        self,
        settings: RentalSettings,
        *,
        detached: bool = False,
        wait: bool = False,
        repeat: bool = False,
        quorum: int | None = None,
        vast: VastClient | None = None,
        progress: Progress = ignore_event,
    ) -> None:
        if detached and needs_tokens(settings):
            raise errors.ConfigurationError(
                f"The machines of {settings.name} use gs://, whose tokens their owner renews every "
                "hour, so they cannot be detached: keep this process running, or use R2 or S3."
            )
        self.settings = settings
        self._wait, self._repeat = wait, repeat
        self._context = RentalContext(
            settings,
            open_store(settings.store),
            vast or open_account(settings.account),
            shield_progress(progress),
            is_detached=detached,
        )
        self._state = RentalState(settings.machines)
        self._budget = Budget(settings, is_detached=detached)
        self._quorum = settings.machines if quorum is None else quorum
        self._policy = ReplacementPolicy(settings, self._quorum)
        self._timer = StepTimer(
            settings.timeouts.poll_interval
            + _STEP_TIMEOUT
            + _STEP_TIMEOUT_PER_MACHINE * settings.machines
        )
        self._ownership = Ownership(
            self._context.store,
            self._context.keys,
            settings.timeouts.heartbeat_timeout,
            self._timer,
        )
        self._releaser = MachineReleaser(self._context, self._state)
        self._starter = MachineStarter(
            self._context,
            state=self._state,
            budget=self._budget,
            policy=self._policy,
            ownership=self._ownership,
            releaser=self._releaser,
        )
        self._inspector = MachineInspector(self._context, self._budget, self._policy)
        self._late_machines = LateMachineClaimer(self._context, self._state, self._starter)
        self._token_renewer = GoogleTokenRenewer(
            self._context.store,
            settings,
            lambda: [machine.attempt for machine in list(self._state.active.values())],
        )
        self._stack = contextlib.ExitStack()
        self._is_listed = True  # by the last poll

    def __enter__(self) -> "Rental":
        """Acquire the rental, and take over its machines.

        Raises:
            ConfigurationError: Another account pays for machines of this rental, or another store
                has rented them.
            HeldError: The rental has another owner.
            VersionError: Another version of Millrace wrote records of the rental.
        """
        with contextlib.ExitStack() as stack:
            self._ownership.acquire(stack, wait=self._wait)
            self._starter.prepare()
            attempts = list_own_attempts(self._context)
            unreleased = [one for one in attempts if one.release_record is None]
            signs = LifeSigns(self._context.store, self._context.keys)
            instances: list[Instance] | None = []
            try:
                self._ownership.start_heartbeat(
                    stack, [one.intent.heartbeat_timeout for one in unreleased]
                )
                with self._timer.expect_steps():
                    if unreleased:
                        instances = self._list_instances()
                    decisions = take_over_machines(
                        self._context, self._state, attempts, instances or [], signs
                    )
                    self._releaser.start_releases(decisions)
                delete_detach_records(self._context, attempts)
                if self._repeat:
                    self._state.done.clear()
                stack.enter_context(self._token_renewer)
            except BaseException:
                detached = [one for one in unreleased if one.is_detached]
                if detached:  # they stay without this owner
                    with contextlib.suppress(errors.MillraceError):
                        ends = [one.detached_until for one in detached if one.detached_until]
                        self._ownership.detach(min(ends, default=None))
                raise
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        with self._stack:
            with contextlib.suppress(errors.MillraceError):  # an unreadable lease is not a lost one
                self._ownership.refuse_if_superseded()
            if self._ownership.is_superseded:
                return  # the new owner has the machines
            if self._context.is_detached and kind is None:
                self._detach()
            else:
                self.release()

    @property
    def machines(self) -> tuple[Machine, ...]:
        """Machines that are rented now, in the order of their slots."""
        return self._state.machines

    @property
    def cost(self) -> float:
        """Dollars that all machines have cost, including released machines."""
        return self._state.compute_cost(self._context.now())

    def wait_until_ready(
        self, stop: threading.Event | None = None, timeout: timedelta | None = None
    ) -> None:
        """Rent the missing machines, and wait until every program runs or has ended.

        If the programs of the quorum run, machines that cannot be had now are not waited for, and
        after the timeout no other machine is.

        Args:
            stop: Event that ends the wait, as in `wait_until_done`.
            timeout: Longest wait for more machines than the quorum; by default there is no limit.

        Raises:
            BudgetError: The money or the time is spent. All machines were released.
            MachineError: Too many machines did not start, or a program failed.
            NotFoundError: No offer fits.
        """
        clock, began = self._context.clock, self._context.clock.monotonic()

        def is_complete() -> bool:
            pending = [one for one in self.machines if not one.is_ready]
            if not pending and not self._state.find_missing_slots():
                return True
            ready = len(self.machines) - len(pending) + len(self._state.done)
            is_late = timeout and clock.monotonic() - began > timeout.total_seconds()
            return ready >= self._quorum and (not pending or bool(is_late))

        self._poll_until(is_complete, stop)

    def wait_until_done(self, stop: threading.Event | None = None) -> None:
        """Rent the missing machines, and wait until every program has ended with exit code 0.

        Args:
            stop: Event that ends the wait, when another thread sets it.

        Raises:
            BudgetError, MachineError, NotFoundError: As in `wait_until_ready`.
        """
        self._poll_until(lambda: not self.machines and not self._state.find_missing_slots(), stop)

    def release(self) -> None:
        """Release all machines, and wait until a listing shows none.

        Raises:
            UnavailableError: Some machines may still exist. The reaper releases them.
        """
        decisions = [
            ReleaseDecision(one, ReleaseReason.UNNEEDED, "the rental ended")
            for one in self.machines
        ]
        with self._timer.expect_steps():
            self._releaser.release([*decisions, *self._give_up_unclaimed()])

    def _detach(self) -> None:
        """Detach the machines, and release the machines without a slot.

        The machines end when the money is spent, if their deadlines are later.

        Raises:
            BudgetError: The money or the time is spent. All machines were released.
        """
        if self.machines:
            with self._timer.expect_steps():
                self._releaser.enforce_budget(self._budget)
        now = self._context.now()
        until = self._budget.compute_detached_end(self._state, now)
        if until is not None:
            _log.warning(
                "The detached machines of %s end at %s UTC, when max_total is spent.",
                self.settings.name,
                f"{until:%Y-%m-%d %H:%M}",
            )
        self._ownership.detach(until)
        record = DetachRecord(since=now, deadline=until, limits=self.settings.limits)
        for machine in self.machines:
            key = self._context.keys.make_detached_key(machine.attempt.number)
            commit_once(self._context.store, key, record)
        with self._timer.expect_steps():
            self._releaser.release(self._give_up_unclaimed())

    def _give_up_unclaimed(self) -> list[ReleaseDecision]:
        """Decide to release the machines without a slot, after one more listing."""
        if not self._state.unclaimed:
            return []
        instances = self._list_instances(is_brief=True)  # the other machines are billed meanwhile
        return self._late_machines.give_up_unclaimed(instances or [])

    def _poll_until(
        self, is_complete: Callable[[], bool], stop: threading.Event | None = None
    ) -> None:
        """Poll and replace machines until a condition is met, or an event is set."""
        stop = stop or threading.Event()
        with self._timer.expect_steps():
            while not stop.is_set():
                self._poll_machines()
                self._timer.note_step()
                self._fill_slots(stop)
                if is_complete():
                    return
                self._pause(stop)

    def _pause(self, stop: threading.Event) -> None:
        """Wait until the next poll is due, or a moment after an event is set.

        Machines are billed until their release, so a long interval of polls must not delay it.
        """
        clock = self._context.clock
        end = clock.monotonic() + self.settings.timeouts.poll_interval.total_seconds()
        while not stop.is_set() and (remaining := end - clock.monotonic()) > 0:
            clock.sleep(min(remaining, _LONGEST_PAUSE))

    def _fill_slots(self, stop: threading.Event) -> None:
        """Rent the missing machines, until an event is set, or the API does not answer.

        Without an answer, the machines are checked before the other slots are tried. None is rented
        beside machines that are released as long as no listing can show whether they exist.
        """
        if self._state.releasing and not self._is_listed:
            return
        for slot in self._state.find_missing_slots():
            if stop.is_set() or not self._fill_slot(slot):
                return
            self._timer.note_step()

    def _fill_slot(self, slot: int) -> bool:
        """Rent a machine for a slot. A failure is only reported while other machines run.

        Returns:
            Whether other slots can be tried now.
        """
        now, has_machines = self._context.clock.monotonic(), bool(self.machines)
        if not self._policy.can_try(slot, now, has_machines=has_machines):
            return True
        try:
            self._starter.rent_machine(slot)
        except (
            errors.UnavailableError,
            errors.NotFoundError,
            errors.MachineError,
            errors.DeniedError,
            errors.ConfigurationError,
        ) as error:
            self._policy.postpone_or_raise(
                slot,
                error,
                self._context.clock.monotonic(),
                resume_at=self._starter.pacer.resume_at,
                has_machines=bool(self.machines),
            )
            self._context.progress(
                MachineMissing(
                    machine=f"{self.settings.name}/{slot}", message=errors.format_error(error)
                )
            )
            return not isinstance(error, errors.UnavailableError)
        return True

    def _poll_machines(self) -> None:
        """Check all machines, and release machines that failed, ended or have no slot."""
        with contextlib.suppress(errors.UnavailableError):  # an unreadable lease is not a lost one
            self._ownership.refuse_if_superseded()
        self._releaser.enforce_budget(self._budget)
        instances = self._list_instances()
        self._releaser.destroy_unrecorded(instances or [], self._starter.installation)
        decisions = self._late_machines.claim_listed(instances or [], fill_slots=True)
        decisions += self._inspect_machines(instances)
        self._releaser.update_releasing(instances or [])
        self._releaser.start_releases(decisions)
        self._is_listed = instances is not None
        if not self._is_listed and not self.machines:
            self._releaser.release([])  # no machine to go on with
        self._context.progress(
            RentalCostUpdated(
                rental=self.settings.name,
                machines=self.settings.machines,
                dollars=round(self.cost, 6),
            )
        )
        for decision in decisions:
            self._handle_release(decision)
        self._policy.refuse_uninstallable()
        if self.machines:
            self._releaser.enforce_budget(self._budget)  # with the prices and the traffic of now

    def _inspect_machines(self, instances: list[Instance] | None) -> list[ReleaseDecision]:
        """Inspect all machines with a slot.

        Args:
            instances: Listing of the account; None if the listing could not be read.

        Returns:
            Decisions to release machines.
        """
        decisions: list[ReleaseDecision] = []
        for machine in self.machines:
            instance = machine.attempt.find_instance(instances or [])
            if machine.is_unconfirmed and instance is not None:
                self._starter.confirm_machine(machine, instance.id)
            decision = self._inspector.inspect(machine, instances)
            if decision is not None and decision.reason is ReleaseReason.NEVER_RENTED:
                self._state.free_slot(machine)  # each poll still searches for the machine
                self._starter.pacer.note_unanswered()
            elif decision is not None:
                decisions.append(decision)
        return decisions

    def _handle_release(self, decision: ReleaseDecision) -> None:
        """Handle the release of a machine in a poll.

        Raises:
            MachineError: The program failed, and is not run again.
        """
        machine, reason = decision.machine, decision.reason
        if reason is ReleaseReason.UNNEEDED:
            return  # another machine has the slot
        if reason is ReleaseReason.FAILED and not self.settings.timeouts.retry_failed:
            raise errors.MachineError(decision.message)
        if reason is ReleaseReason.DONE:
            self._state.done[machine.slot] = machine
            return
        self._policy.note_loss(decision)
        self._state.excluded_host_ids.add(machine.attempt.intent.machine_id)

    def _list_instances(self, *, is_brief: bool = False) -> list[Instance] | None:
        """List the machines of the account; None if the listing cannot be read."""
        try:
            return self._context.vast.list_instances(is_brief=is_brief)
        except (errors.DeniedError, errors.UnavailableError):
            return None  # unknown, not empty
