"""The state of a rental knows which slots need a machine, and what all machines have cost."""

from pathlib import Path

import pytest

from millrace.rentals.state import RentalState
from tests.support.rentals.parts import HOUR, START, make_attempt, make_machine


def test_a_slot_needs_a_machine_unless_it_has_one_or_is_done(tmp_path: Path) -> None:
    state = RentalState(slot_count=3)
    assert state.find_missing_slots() == [0, 1, 2]
    state.active[0] = make_machine(tmp_path)
    state.done[2] = make_machine(tmp_path, make_attempt(1, slot=2))
    assert state.find_missing_slots() == [1]
    assert not state.needs_machine(3)  # the rental has become smaller


def test_costs_are_those_of_released_and_of_rented_machines(tmp_path: Path) -> None:
    state = RentalState(slot_count=2)
    for number in (0, 1):
        attempt = make_attempt(number, slot=number, instance_id=number)
        state.active[number] = make_machine(tmp_path, attempt)
        state.costs[number] = 0.0
    state.add_release(state.active[0], cost=3.0)
    assert state.compute_cost(START + 2 * HOUR) == pytest.approx(3.0 + 2 * 0.5)
    assert state.dollars_per_hour == 0.5
    assert [one.slot for one in state.machines] == [1]
    assert state.next_attempt == 2


def test_a_machine_without_an_answer_leaves_its_slot_and_is_remembered(tmp_path: Path) -> None:
    state = RentalState(slot_count=1)
    lost = make_machine(tmp_path, make_attempt(0))
    state.active[0] = lost
    state.free_slot(lost)
    assert (state.active, state.unclaimed) == ({}, {0: lost})
    replacement = make_machine(tmp_path, make_attempt(1, instance_id=1))
    state.active[0] = replacement
    state.add_release(lost, cost=0.0)
    assert (state.active, state.unclaimed) == ({0: replacement}, {})


def test_hosts_that_are_excluded_or_in_use_are_not_rented(tmp_path: Path) -> None:
    state = RentalState(slot_count=2, excluded_host_ids={7})
    state.active[0] = make_machine(tmp_path, make_attempt(machine_id=8))
    assert state.unavailable_host_ids == {7, 8}
