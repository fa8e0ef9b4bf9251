"""A new owner finds the machines and the costs of the owners before in the ledger."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from millrace import errors
from millrace.keys.rentals import MachineKeys
from millrace.records import commit_once
from millrace.rentals.context import RentalContext
from millrace.rentals.destroy import record_release
from millrace.rentals.ledger import Attempt
from millrace.rentals.life_signs import LifeSigns
from millrace.rentals.machines import ReleaseDecision
from millrace.rentals.messages import MachineHeartbeat, ProgramExit
from millrace.rentals.state import RentalState
from millrace.rentals.takeover import (
    delete_detach_records,
    list_own_attempts,
    take_over_machines,
)
from millrace.schemas.rental import DetachRecord, ReleaseReason
from millrace.storage import exists, put
from tests.support.rentals.parts import (
    START,
    FakeVast,
    make_attempt,
    make_context,
    make_settings,
)


@pytest.fixture
def context(tmp_path: Path) -> RentalContext:
    return make_context(make_settings(tmp_path, machines=2), FakeVast(), [])


def write(context: RentalContext, attempt: Attempt, reason: ReleaseReason | None = None) -> None:
    """Write the records of an attempt."""
    commit_once(context.store, context.keys.make_intent_key(attempt.number), attempt.intent)
    if attempt.contract is not None:
        commit_once(context.store, context.keys.make_contract_key(attempt.number), attempt.contract)
    if reason is not None:
        record_release(context.store, "fleet", attempt, reason, "over", 2.0, START)


def take_over(context: RentalContext, state: RentalState) -> list[ReleaseDecision]:
    """Take over the machines of a rental, as its next owner does."""
    signs = LifeSigns(context.store, context.keys)
    instances = context.vast.list_instances()
    return take_over_machines(context, state, list_own_attempts(context), instances, signs)


def test_machines_get_their_slots_and_costs_are_summed(context: RentalContext) -> None:
    write(context, make_attempt(0, instance_id=10), ReleaseReason.DEAD)
    write(context, make_attempt(1, slot=1, instance_id=11), ReleaseReason.DONE)
    write(context, make_attempt(2, instance_id=12))
    state = RentalState(2)
    assert take_over(context, state) == []
    assert {slot: one.attempt.instance_id for slot, one in state.active.items()} == {0: 12}
    assert set(state.done) == {1}
    assert state.costs == {0: 2.0, 1: 2.0, 2: 0.0}
    assert state.excluded_host_ids == {100}
    assert state.find_missing_slots() == []


def test_a_machine_without_a_slot_is_released(context: RentalContext) -> None:
    write(context, make_attempt(0, instance_id=10))
    write(context, make_attempt(1, instance_id=11))  # has the same slot
    write(context, make_attempt(2, instance_id=12, slot=2))  # the rental has become smaller
    write(context, make_attempt(3))  # its create request got no answer
    state = RentalState(2)
    decisions = take_over(context, state)
    assert [one.machine.attempt.number for one in decisions] == [1, 2]
    assert set(state.unclaimed) == {3}


def test_a_machine_that_runs_keeps_its_slot_beside_an_earlier_unanswered_request(
    context: RentalContext,
) -> None:
    write(context, make_attempt(0))
    write(context, make_attempt(1, instance_id=11))  # was rented after the wait for attempt 0
    state = RentalState(2)
    assert take_over(context, state) == []
    assert state.active[0].attempt.instance_id == 11
    assert set(state.unclaimed) == {0}
    assert state.next_attempt == 2


@pytest.mark.parametrize("listed", [{11}, {10, 11}])
def test_a_machine_keeps_its_slot_beside_the_one_before_that_is_being_released(
    context: RentalContext, listed: set[int]
) -> None:
    write(context, make_attempt(0, instance_id=10))  # lost; its destroy requests fail, or are late
    write(context, make_attempt(1, instance_id=11))
    for number in listed:
        cast("FakeVast", context.vast).add(number)
    state = RentalState(2)
    decisions = take_over(context, state)
    assert state.active[0].attempt.instance_id == 11
    assert [one.machine.attempt.number for one in decisions] == [0]


@pytest.mark.parametrize("code", [0, 1, None])
@pytest.mark.parametrize("reason", list(ReleaseReason))
def test_a_program_that_ended_with_exit_code_0_is_done_whoever_released_its_machine(
    context: RentalContext, reason: ReleaseReason, code: int | None
) -> None:
    """Unless its owner has decided otherwise."""
    write(context, make_attempt(0, instance_id=10), reason)
    if code is not None:
        key = MachineKeys(context.keys.make_machine_prefix(0)).program_exit
        put(context.store, key, ProgramExit(code=code).model_dump_json().encode())
    state = RentalState(2)
    assert take_over(context, state) == []
    undone = {ReleaseReason.FAILED, ReleaseReason.NEVER_RENTED, ReleaseReason.TOO_EXPENSIVE}
    is_done = reason is ReleaseReason.DONE or (code == 0 and reason not in undone)
    assert (0 in state.done) is is_done


def test_the_traffic_of_a_machine_counts_from_the_beginning(context: RentalContext) -> None:
    """A new owner whose money is spent releases its machines before it looks at their reports."""
    attempt = make_attempt(0, instance_id=10)
    priced = attempt.intent.model_copy(update={"download_dollars_per_gb": 0.5})
    write(context, replace(attempt, intent=priced))
    heartbeat = MachineHeartbeat(number=1, received=10**9)
    key = MachineKeys(context.keys.make_machine_prefix(0)).heartbeat
    put(context.store, key, heartbeat.model_dump_json().encode())
    context.clock.sleep(3600)
    state = RentalState(2)
    take_over(context, state)
    assert state.active[0].compute_cost(context.now()) == pytest.approx(
        0.5 + attempt.intent.dollars_per_hour
    )


def test_a_detached_machine_has_an_owner_again(context: RentalContext) -> None:
    write(context, make_attempt(0, instance_id=10))
    key = context.keys.make_detached_key(0)
    commit_once(context.store, key, DetachRecord(since=START))
    delete_detach_records(context, list_own_attempts(context))
    assert not exists(context.store, key)


def test_the_age_of_an_unanswered_create_request_counts(context: RentalContext) -> None:
    write(context, make_attempt(0))
    context.clock.sleep(500)
    state = RentalState(2)
    take_over(context, state)
    assert context.clock.monotonic() - state.active[0].rented_at == pytest.approx(500)


def test_machines_of_another_account_are_refused(context: RentalContext) -> None:
    attempt = make_attempt(0, instance_id=10)
    write(context, replace(attempt, intent=attempt.intent.model_copy(update={"account": "other"})))
    with pytest.raises(errors.ConfigurationError, match="another account"):
        take_over(context, RentalState(2))
