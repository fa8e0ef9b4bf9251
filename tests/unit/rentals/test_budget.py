"""The budget limits prices, traffic, lifetimes, and the cost of all machines together."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from millrace.rentals.budget import Budget
from millrace.rentals.machines import ReleaseDecision
from millrace.rentals.messages import MachineHeartbeat
from millrace.rentals.state import RentalState
from millrace.schemas.rental import ReleaseReason
from tests.support.rentals.parts import (
    HOUR,
    START,
    make_attempt,
    make_machine,
    make_offer,
    make_settings,
)


def make_budget(folder: Path, *, is_detached: bool = False, **more: Any) -> Budget:
    return Budget(make_settings(folder, **more), is_detached=is_detached)


def test_a_machine_with_an_owner_may_live_as_long_as_the_settings_say(tmp_path: Path) -> None:
    budget = make_budget(tmp_path, max_total=0.01, max_lifetime=5 * HOUR)
    offer = make_offer(make_settings(tmp_path).request)
    assert budget.compute_deadline(offer, START, RentalState(1)) == START + 5 * HOUR


@pytest.mark.parametrize(("price", "hours"), [(0.5, 4.0), (2.0, 1.0), (0.0, 24.0), (0.05, 24.0)])
def test_a_detached_machine_ends_before_its_share_is_spent(
    tmp_path: Path, price: float, hours: float
) -> None:
    settings = make_settings(tmp_path, max_total=4.0, machines=2)
    offer = make_offer(settings.request, dollars_per_hour=price)
    deadline = Budget(settings, is_detached=True).compute_deadline(offer, START, RentalState(2))
    assert deadline == START + timedelta(hours=hours)


def test_the_expected_traffic_shortens_the_life_of_a_detached_machine(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, max_total=2.0, download="10GB")
    row = {"id": 1, "machine_id": 1, "num_gpus": 1, "dph_total": 0.5, "inet_down_cost": 0.1}
    offer = type(make_offer(settings.request)).from_row(row, settings.request)
    deadline = Budget(settings, is_detached=True).compute_deadline(offer, START, RentalState(1))
    assert deadline == START + 2 * HOUR


def test_money_for_the_next_poll_and_for_the_release_is_reserved(tmp_path: Path) -> None:
    budget = make_budget(tmp_path, max_total=1.0, poll_interval=timedelta(minutes=10))
    state = RentalState(slot_count=1, active={0: make_machine(tmp_path)})
    reserve = timedelta(minutes=13, seconds=3)  # the interval, and the release of one machine
    before, after = (START + 2 * HOUR - reserve + timedelta(seconds=one) for one in (-10, 10))
    assert budget.find_excess(state, before) == ""
    assert budget.find_excess(state, after) == "$0.89 of $1.00 are spent"


def test_money_is_reserved_until_the_last_of_many_machines_is_destroyed(tmp_path: Path) -> None:
    """Also for machines whose release has started."""
    budget = make_budget(tmp_path, max_total=100.0, poll_interval=timedelta(minutes=10))
    machines = [
        make_machine(tmp_path, make_attempt(one, slot=one, instance_id=one)) for one in range(100)
    ]
    state = RentalState(slot_count=100, active=dict(enumerate(machines)))
    state.start_release(ReleaseDecision(machines[0], ReleaseReason.DEAD, ""))
    reserve = timedelta(minutes=13 + 5)  # a destroy request every three seconds
    before, after = (START + 2 * HOUR - reserve + timedelta(seconds=one) for one in (-1, 1))
    assert budget.find_excess(state, before) == ""
    assert budget.find_excess(state, after) == "$85.01 of $100.00 are spent"


def test_money_for_the_traffic_until_the_next_poll_is_reserved(tmp_path: Path) -> None:
    """A machine has received 50 GB for five dollars in two hours."""
    interval = timedelta(minutes=20)
    budget = make_budget(tmp_path, max_total=7.0, poll_interval=interval)
    machine = make_machine(tmp_path)
    state = RentalState(slot_count=1, active={0: machine})
    assert budget.find_excess(state, START + 2 * HOUR) == ""
    machine.reports.heartbeat = MachineHeartbeat(number=1, received=4 * 10**10)
    assert budget.find_excess(state, START + 2 * HOUR) == ""
    machine.reports.heartbeat = MachineHeartbeat(number=1, received=5 * 10**10)
    assert budget.find_excess(state, START + 2 * HOUR) == "$6.00 of $7.00 are spent"


def test_a_detached_machine_whose_traffic_costs_its_share_is_not_rented(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, max_total=4.0, download="60GB", machines=2)
    budget, state = Budget(settings, is_detached=True), RentalState(2)
    offer = make_offer(settings.request)
    assert budget.find_shortage(replace(offer, download_dollars_per_gb=0.01), state, START) == ""
    found = budget.find_shortage(replace(offer, download_dollars_per_gb=0.1), state, START)
    assert "does not pay for one at $0.500 an hour, with its traffic" in found


def test_the_deadline_of_a_machine_ends_the_rental(tmp_path: Path) -> None:
    budget = make_budget(tmp_path, max_total=100.0)
    state = RentalState(slot_count=1, active={0: make_machine(tmp_path)})
    assert budget.find_excess(state, START + 10 * HOUR) == (
        "the deadline of machine fleet/0 has passed"
    )


def test_a_price_is_refused_above_the_limit_and_reported_when_it_was_raised(
    tmp_path: Path,
) -> None:
    budget, machine = make_budget(tmp_path, max_hourly=1.0), make_machine(tmp_path)
    assert budget.check_price(machine, 1.0) == ""
    assert "costs $1.001 an hour, and was offered for $0.500" in budget.check_price(machine, 1.001)
    assert [budget.is_raised(machine, price) for price in (0.5, 0.55, 0.56, 1.0, 1.01)] == [
        False, False, True, True, False,
    ]  # fmt: skip
    machine.reported_price = 0.9
    assert not budget.is_raised(machine, 0.95)


def test_a_detached_machine_may_not_cost_more_than_its_share_until_its_deadline(
    tmp_path: Path,
) -> None:
    machine = make_machine(tmp_path)  # lives for ten hours
    detached = make_budget(tmp_path, is_detached=True, max_total=6.0)
    assert detached.check_price(machine, 0.54) == ""  # within the tolerance
    assert "would cost more than its share" in detached.check_price(machine, 0.61)
    assert make_budget(tmp_path, max_total=6.0).check_price(machine, 0.61) == ""


def test_traffic_that_no_network_can_transfer_is_refused(tmp_path: Path) -> None:
    budget, machine = make_budget(tmp_path, max_total=1000.0), make_machine(tmp_path)
    assert budget.check_traffic(machine, START) == ""  # no heartbeat yet
    machine.reports.heartbeat = MachineHeartbeat(number=1, received=10**10)
    assert budget.check_traffic(machine, START) == ""  # a machine may start with a large count
    machine.reports.heartbeat = MachineHeartbeat(number=1, sent=10**15)
    assert "1000000 GB sent, more than its network can transfer" in budget.check_traffic(
        machine, START + HOUR
    )


def test_traffic_of_one_of_several_machines_may_cost_its_share_at_most(tmp_path: Path) -> None:
    machine = make_machine(tmp_path)
    machine.reports.heartbeat = MachineHeartbeat(number=1, received=60 * 10**9)  # 6 dollars
    now = START + HOUR
    assert make_budget(tmp_path, max_total=10.0).check_traffic(machine, now) == ""
    message = make_budget(tmp_path, max_total=10.0, machines=2).check_traffic(machine, now)
    assert message == "the traffic of the machine has cost $6.00, more than its share"
