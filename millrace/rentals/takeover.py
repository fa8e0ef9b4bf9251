"""Takeover of a rental: the machines and the costs of the owners before, from the ledger."""

from collections.abc import Sequence
from contextlib import suppress

from millrace.errors import UnavailableError
from millrace.formatting import format_count
from millrace.rentals.context import RentalContext
from millrace.rentals.ledger import (
    Attempt,
    list_attempts,
    refuse_copied_attempts,
    refuse_foreign_machines,
)
from millrace.rentals.life_signs import LifeSigns
from millrace.rentals.machines import Machine, ReleaseDecision
from millrace.rentals.reports import read_heartbeat, read_program_exit
from millrace.rentals.state import RentalState
from millrace.rentals.vast.instances import Instance
from millrace.schemas.rental import ReleaseReason
from millrace.storage import delete

_EXCLUDING_REASONS = {
    ReleaseReason.DEAD,
    ReleaseReason.OUTBID,
    ReleaseReason.TOO_EXPENSIVE,
}  # reasons after which a host is not rented again
_FINAL_REASONS = {
    ReleaseReason.DONE,
    ReleaseReason.FAILED,
    ReleaseReason.NEVER_RENTED,
    ReleaseReason.TOO_EXPENSIVE,  # the machine may have sent false reports
}  # reasons that tell whether the program has ended with exit code 0


def list_own_attempts(context: RentalContext) -> list[Attempt]:
    """Return all attempts of a rental, if this account pays for all that are not released.

    Raises:
        ConfigurationError: Another account pays for machines of this rental, or another store has
            rented them.
        VersionError: Another version of Millrace wrote records of the rental.
    """
    attempts = list_attempts(context.store, context.settings.name, strict=True)
    refuse_copied_attempts(context.store, context.settings.name, attempts)
    own_account = context.vast.identify_account()
    foreign = [
        one for one in attempts if one.release_record is None and one.intent.account != own_account
    ]
    refuse_foreign_machines(context.settings.name, len(foreign))
    return attempts


def take_over_machines(
    context: RentalContext,
    state: RentalState,
    attempts: Sequence[Attempt],
    instances: Sequence[Instance],
    signs: LifeSigns,
) -> list[ReleaseDecision]:
    """Fill the state of a rental with the machines of its attempts.

    Of two machines for one slot, the first in `_rank_attempt` gets it.

    Args:
        context: Settings and connections of the rental.
        state: Empty state, which is filled.
        attempts: All attempts of the rental.
        instances: Listing of the account; empty if the listing could not be read.
        signs: Last signs of life from the time of the owners before.

    Returns:
        Decisions to release the machines without a slot: another machine has it, or the rental has
        fewer slots by now.

    Raises:
        UnavailableError: The store does not answer.
    """
    decisions: list[ReleaseDecision] = []
    for attempt in sorted(attempts, key=lambda one: _rank_attempt(one, instances)):
        machine = context.make_machine(attempt)
        if attempt.release_record is not None:
            _add_released(context, state, machine)
            continue
        state.costs[attempt.number] = 0.0
        with suppress(UnavailableError):  # the money is counted before the first look at a report
            machine.reports.heartbeat = read_heartbeat(context.store, machine.reports.keys)
        instance = attempt.find_instance(instances)
        if instance is None:
            machine.estimated_end = signs.estimate_end(attempt, context.now())
        context.update_instance(machine, instance)
        if machine.is_unconfirmed:  # the owner was killed before the answer arrived
            age = (context.now() - attempt.intent.started_at).total_seconds()
            machine.rented_at -= max(0.0, age)
        if machine.slot not in state.active and machine.slot < state.slot_count:
            state.active[machine.slot] = machine
        elif machine.is_unconfirmed:
            state.unclaimed[attempt.number] = machine
        else:
            why = (
                f"the rental has {format_count(state.slot_count, 'machine')} now"
                if machine.slot >= state.slot_count
                else "an earlier owner had rented two machines for its work"
            )
            decisions.append(ReleaseDecision(machine, ReleaseReason.UNNEEDED, why))
    return decisions


def _rank_attempt(attempt: Attempt, instances: Sequence[Instance]) -> tuple[int, int]:
    """Return the rank of an attempt among those for its slot, the lowest first.

    Machines in the listing come first, the newest before the others: an owner rents another machine
    for a slot while it still releases the one before. In and out of the listing, attempts whose
    create requests got no answer come last.
    """
    is_listed = attempt.release_record is None and attempt.find_instance(instances) is not None
    is_unanswered = attempt.contract is None
    return (0 if is_listed else 2) + is_unanswered, -attempt.number if is_listed else attempt.number


def delete_detach_records(context: RentalContext, attempts: Sequence[Attempt]) -> None:
    """Delete the records of detached machines, which have an owner again."""
    keys = [context.keys.make_detached_key(one.number) for one in attempts if one.is_detached]
    if keys:
        delete(context.store, keys)


def _add_released(context: RentalContext, state: RentalState, machine: Machine) -> None:
    """Add a machine with a release record to the state of a rental.

    The reaper, and others that release machines without an owner, do not record whether the
    program has ended with exit code 0. The machine's own report tells it.

    Raises:
        UnavailableError: The store does not answer. The program may have ended.
    """
    record = machine.attempt.release_record
    assert record is not None
    state.costs[machine.attempt.number] = machine.compute_cost(record.released_at)
    state.released[machine.attempt.number] = machine
    is_done = record.reason is ReleaseReason.DONE
    if machine.slot not in state.done and record.reason not in _FINAL_REASONS:
        program_exit = read_program_exit(context.store, machine.reports.keys)
        is_done = program_exit is not None and program_exit.code == 0
    if is_done:
        state.done[machine.slot] = machine
    elif record.reason in _EXCLUDING_REASONS:
        state.excluded_host_ids.add(machine.attempt.intent.machine_id)
