"""A machine costs its highest known price, and the traffic that it reports."""

from pathlib import Path

import pytest

from millrace.rentals.messages import MachineHeartbeat
from tests.support.rentals.parts import HOUR, START, FakeVast, make_attempt, make_machine


def test_a_machine_has_the_name_of_its_rental_and_its_slot(tmp_path: Path) -> None:
    machine = make_machine(tmp_path, make_attempt(3, slot=2))
    assert (machine.name, machine.slot, machine.is_unconfirmed) == ("fleet/2", 2, True)
    assert not make_machine(tmp_path, make_attempt(instance_id=1)).is_unconfirmed


def test_a_raised_price_counts_and_a_lower_price_does_not(tmp_path: Path) -> None:
    machine = make_machine(tmp_path)
    assert machine.dollars_per_hour == 0.5
    for listed, expected in ((0.8, 0.8), (0.2, 0.5)):
        machine.instance = FakeVast().add(1, dph_total=listed)
        assert machine.dollars_per_hour == expected
    assert machine.compute_cost(START + 2 * HOUR) == pytest.approx(1.0)


def test_reported_traffic_counts_as_far_as_the_network_can_transfer_it(tmp_path: Path) -> None:
    machine = make_machine(tmp_path)  # 100 Mbit/s; 0.1 dollars a GB
    machine.reports.heartbeat = MachineHeartbeat(number=1, received=10 * 10**9, sent=10**15)
    max_sent_gb = 3600 * 400 / 8 / 1000  # four times the offered speed
    expected = 0.5 + 0.1 * (10 + max_sent_gb)
    assert machine.compute_cost(START + HOUR) == pytest.approx(expected)
