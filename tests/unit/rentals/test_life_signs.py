"""The end of a machine that no listing shows is estimated by the last heartbeats."""

import os
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from millrace.keys.rentals import MachineKeys, RentalKeys
from millrace.rentals.life_signs import LifeSigns
from millrace.storage import open_store, put
from tests.support.rentals.parts import HOUR, START, make_attempt

KEYS = RentalKeys("fleet")
MACHINE = MachineKeys(KEYS.make_machine_prefix(0))
TIMEOUT = timedelta(minutes=5)  # without a heartbeat of the owner


def write_sign(folder: Path, key: str, age: timedelta) -> None:
    """Write an object, and give it an age."""
    put(open_store(folder.as_uri()), key, b"x")
    written_at = time.time() - age.total_seconds()
    os.utime(folder / key, (written_at, written_at))


@pytest.mark.parametrize(
    ("ages", "is_detached", "expected"),
    [
        ({}, False, 8 * HOUR),  # it cannot be known
        ({KEYS.owner: 6 * HOUR}, False, 2 * HOUR + TIMEOUT),
        ({KEYS.owner: 6 * HOUR, MACHINE.heartbeat: 7 * HOUR}, False, 2 * HOUR + TIMEOUT),
        ({KEYS.owner: 6 * HOUR, MACHINE.heartbeat: 3 * HOUR}, False, 5 * HOUR + TIMEOUT),
        ({KEYS.owner: timedelta(0)}, False, 8 * HOUR),  # it may have ended just now
        ({KEYS.owner: 6 * HOUR}, True, 8 * HOUR),
        ({KEYS.owner: 6 * HOUR, MACHINE.heartbeat: 3 * HOUR}, True, 5 * HOUR + TIMEOUT),
        ({MACHINE.heartbeat: 3 * HOUR, MACHINE.program_exit: 3 * HOUR}, True, 8 * HOUR),
    ],
)
def test_a_machine_ended_some_minutes_after_the_last_heartbeat(
    tmp_path: Path, ages: dict[str, timedelta], expected: timedelta, *, is_detached: bool
) -> None:
    for key, age in ages.items():
        write_sign(tmp_path, key, age)
    attempt = replace(make_attempt(instance_id=1), is_detached=is_detached)
    signs = LifeSigns(open_store(tmp_path.as_uri()), KEYS)
    end = signs.estimate_end(attempt, START + 8 * HOUR) - START
    assert end.total_seconds() == pytest.approx(expected.total_seconds(), abs=60)


def test_a_machine_ended_at_its_deadline_and_one_without_a_contract_never_began(
    tmp_path: Path,
) -> None:
    signs = LifeSigns(open_store(tmp_path.as_uri()), KEYS)
    assert signs.estimate_end(make_attempt(instance_id=1), START + 30 * HOUR) == START + 10 * HOUR
    assert signs.estimate_end(make_attempt(), START + 8 * HOUR) == START


def test_a_heartbeat_proves_that_an_attempt_without_a_contract_has_a_machine(
    tmp_path: Path,
) -> None:
    write_sign(tmp_path, MACHINE.heartbeat, 3 * HOUR)
    signs = LifeSigns(open_store(tmp_path.as_uri()), KEYS)
    end = signs.estimate_end(make_attempt(), START + 8 * HOUR) - START
    assert end.total_seconds() == pytest.approx((5 * HOUR + TIMEOUT).total_seconds(), abs=60)
