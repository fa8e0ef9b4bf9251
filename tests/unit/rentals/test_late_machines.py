"""A machine that is listed late gets its slot if it is free, and is released otherwise."""

from pathlib import Path

import pytest

from millrace.rentals import machine_starter
from millrace.rentals.late_machines import LateMachineClaimer
from millrace.schemas.rental import ReleaseReason
from millrace.storage import exists
from tests.support.rentals.parts import HOUR, START, make_attempt, make_machine
from tests.unit.rentals.test_machine_starter import Bench, fail


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    bench.state.unclaimed[0] = make_machine(tmp_path, make_attempt())
    return bench


@pytest.fixture
def claimer(bench: Bench) -> LateMachineClaimer:
    return LateMachineClaimer(bench.context, bench.state, bench.starter)


def test_nothing_is_claimed_while_no_listing_shows_the_machine(
    bench: Bench, claimer: LateMachineClaimer
) -> None:
    bench.vast.add(5, "another")
    assert claimer.claim_listed(bench.vast.list_instances(), fill_slots=True) == []
    assert set(bench.state.unclaimed) == {0}


def test_a_late_machine_gets_its_free_slot(bench: Bench, claimer: LateMachineClaimer) -> None:
    bench.vast.clock.sleep(500)
    bench.vast.add(5, "label-0")
    assert claimer.claim_listed(bench.vast.list_instances(), fill_slots=True) == []
    claimed = bench.state.active[0]
    assert (claimed.attempt.instance_id, claimed.rented_at) == (5, bench.vast.clock.monotonic())
    assert bench.state.unclaimed == {}


def test_a_late_machine_is_released_if_its_slot_is_taken(
    bench: Bench, claimer: LateMachineClaimer, tmp_path: Path
) -> None:
    bench.state.active[0] = make_machine(tmp_path, make_attempt(1, instance_id=4))
    bench.vast.add(5, "label-0")
    (decision,) = claimer.claim_listed(bench.vast.list_instances(), fill_slots=True)
    assert decision.reason is ReleaseReason.UNNEEDED
    assert decision.machine.attempt.instance_id == 5
    assert bench.state.active[0].attempt.instance_id == 4


def test_a_released_machine_that_is_listed_again_is_released_again(
    bench: Bench, claimer: LateMachineClaimer, tmp_path: Path
) -> None:
    bench.state.released[3] = make_machine(tmp_path, make_attempt(3, instance_id=6))
    bench.vast.add(6, "label-3")
    (decision,) = claimer.claim_listed(bench.vast.list_instances(), fill_slots=True)
    assert decision.message == "the machine was released before, and is listed again"
    assert decision.machine.attempt.release_record is None


@pytest.mark.parametrize("state", ["unclaimed", "released"])
def test_the_price_of_a_late_machine_that_is_released_counts(
    bench: Bench, claimer: LateMachineClaimer, tmp_path: Path, state: str
) -> None:
    machine = make_machine(tmp_path, make_attempt(3, instance_id=6))
    bench.state.active[0] = make_machine(tmp_path, make_attempt(1, instance_id=4))
    getattr(bench.state, state)[3] = machine
    bench.vast.add(6, "label-3", dph_total=1.5)
    (decision,) = claimer.claim_listed(bench.vast.list_instances(), fill_slots=True)
    assert decision.machine.compute_cost(START + HOUR) == 1.5
    assert exists(bench.context.store, bench.context.keys.make_raised_key(3, 0))


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_late_machine_whose_number_cannot_be_recorded_is_not_forgotten(
    bench: Bench,
    claimer: LateMachineClaimer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    is_taken: bool,
) -> None:
    machine = bench.state.unclaimed[0]
    if is_taken:
        bench.state.active[0] = make_machine(tmp_path, make_attempt(1, instance_id=4))
    bench.vast.add(5, "label-0")
    monkeypatch.setattr(machine_starter, "commit_once", fail)
    decisions = claimer.claim_listed(bench.vast.list_instances(), fill_slots=True)
    assert [one.machine for one in decisions] == [machine] * is_taken
    assert (bench.state.active[0] is machine) is not is_taken
    assert list(bench.state.unclaimed) == [0] * is_taken  # until its release starts
    assert machine.is_unconfirmed
    assert "The number of machine fleet/0, 5, is not recorded yet: 503" in caplog.text
    bench.releaser.start_releases(decisions)
    assert bench.state.unclaimed == {}
    assert list(bench.vast.instances) == [5] * (not is_taken)


def test_at_the_end_of_a_rental_all_unconfirmed_machines_are_released(
    bench: Bench, claimer: LateMachineClaimer, tmp_path: Path
) -> None:
    bench.state.unclaimed[1] = make_machine(tmp_path, make_attempt(1))
    bench.vast.add(5, "label-0")
    decisions = claimer.give_up_unclaimed(bench.vast.list_instances())
    assert [(one.machine.attempt.number, one.reason) for one in decisions] == [
        (0, ReleaseReason.UNNEEDED),
        (1, ReleaseReason.NEVER_RENTED),
    ]
    assert bench.state.active == {}
