"""The end of a machine that no listing shows is estimated by the last heartbeats."""

import os
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from millrace.keys.rentals import MachineKeys, RentalKeys
from millrace.rentals import Instance
from millrace.rentals.life_signs import LifeSigns
from millrace.storage import open_store, put
from tests.support.rentals.parts import HOUR, START, make_attempt

KEYS = RentalKeys("fleet")
MACHINE = MachineKeys(KEYS.make_machine_prefix(0))
MINUTE = timedelta(minutes=1)
TIMEOUT = timedelta(minutes=5)  # without a heartbeat of the owner


def write_sign(folder: Path, key: str, age: timedelta, content: bytes = b"x") -> None:
    """Write an object, and give it an age."""
    put(open_store(folder.as_uri()), key, content)
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


def find_failure(folder: Path, **row: str) -> str:
    """Return why a detached machine cannot work any more, eight hours after its rental."""
    signs = LifeSigns(open_store(folder.as_uri()), KEYS)
    instance = Instance.from_row({"id": 1, "actual_status": "running"} | row)
    return signs.find_failure(make_attempt(instance_id=1), instance, START + 8 * HOUR)


@pytest.mark.parametrize("state", ["failed", "starting", "junk"])
@pytest.mark.parametrize(
    ("heartbeat_age", "setup_age", "has_failed"),
    [
        (None, 2 * HOUR, True),  # the program has never run
        (3 * HOUR, 2 * HOUR, True),  # the machine was restarted
        (2 * HOUR, 3 * HOUR, False),  # the program has run since
        (50 * MINUTE, 40 * MINUTE, False),  # a restart may follow
        (MINUTE, 2 * MINUTE, False),
    ],
)
def test_a_detached_machine_has_failed_if_its_installation_failed_after_its_last_heartbeat(
    tmp_path: Path,
    heartbeat_age: timedelta | None,
    setup_age: timedelta,
    state: str,
    *,
    has_failed: bool,
) -> None:
    if heartbeat_age is not None:
        write_sign(tmp_path, MACHINE.heartbeat, heartbeat_age)
    content = b"{" if state == "junk" else f'{{"state": "{state}"}}'.encode()
    write_sign(tmp_path, MACHINE.setup, setup_age, content)
    reason = find_failure(tmp_path)
    assert reason.startswith("the machine could not install the program, and has sent no") is (
        has_failed and state == "failed"
    )
    assert bool(reason) is (has_failed and state == "failed")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"actual_status": "exited"}, "the machine is exited"),
        ({"actual_status": "offline"}, "the machine is offline"),
        (
            {"cur_state": "stopped", "intended_status": "stopped", "next_state": "stopped"},
            "the machine was stopped",
        ),
        ({"actual_status": "loading"}, ""),
        ({"status_msg": "Error response from daemon"}, ""),  # it runs
        ({}, ""),  # silence alone proves nothing: the store may be unreachable for the machine
    ],
)
@pytest.mark.parametrize("age", [MINUTE, 59 * MINUTE, 61 * MINUTE])
def test_a_detached_machine_that_does_not_run_has_failed_after_an_hour_of_silence(
    tmp_path: Path, row: dict[str, str], reason: str, age: timedelta
) -> None:
    write_sign(tmp_path, MACHINE.heartbeat, age)
    expected = f"{reason}, and has sent no heartbeat for " if reason else ""
    found = find_failure(tmp_path, **row)
    assert (found.startswith(expected) and bool(found) is bool(reason)) if age > HOUR else not found


def test_a_detached_machine_is_silent_for_as_long_as_its_owner_would_have_waited(
    tmp_path: Path,
) -> None:
    write_sign(tmp_path, MACHINE.heartbeat, 3 * HOUR)
    signs = LifeSigns(open_store(tmp_path.as_uri()), KEYS)
    instance = Instance.from_row({"id": 1, "actual_status": "exited"})
    for timeout, has_failed in ((2 * HOUR, True), (4 * HOUR, False)):
        attempt = make_attempt(instance_id=1, heartbeat_timeout=timeout)
        assert bool(signs.find_failure(attempt, instance, START + 8 * HOUR)) is has_failed
