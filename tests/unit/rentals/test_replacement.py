"""Lost machines are replaced, but not without end."""

from pathlib import Path
from typing import Any

import pytest

from millrace import errors
from millrace.rentals.machines import ReleaseDecision
from millrace.rentals.replacement import RETRY_INTERVAL, ReplacementPolicy
from millrace.schemas.rental import ReleaseReason
from tests.support.rentals.parts import make_machine, make_settings


def make_policy(folder: Path, **more: Any) -> ReplacementPolicy:
    return ReplacementPolicy(make_settings(folder, **more))


def lose(
    folder: Path, policy: ReplacementPolicy, *, setup_error: str = "", is_ready: bool = False
) -> None:
    """Have a machine of slot 0 rented and lost."""
    policy.note_rented(0)
    machine = make_machine(folder)
    machine.is_ready = is_ready
    policy.note_loss(
        ReleaseDecision(machine, ReleaseReason.DEAD, "the host vanished.", setup_error)
    )


def test_a_slot_is_given_up_after_too_many_machines(tmp_path: Path) -> None:
    policy = make_policy(tmp_path, max_attempts=2)
    lose(tmp_path, policy)
    policy.refuse_exhausted(0)
    lose(tmp_path, policy)
    with pytest.raises(errors.MachineError, match=r"2 machines for slot 0 .* the host vanished\."):
        policy.refuse_exhausted(0)
    policy.refuse_exhausted(1)


def test_a_machine_whose_program_has_run_does_not_count(tmp_path: Path) -> None:
    policy = make_policy(tmp_path, max_attempts=2)
    for _ in range(5):
        lose(tmp_path, policy, is_ready=True)
    policy.refuse_exhausted(0)


def test_two_equal_installation_errors_end_the_rental(tmp_path: Path) -> None:
    policy = make_policy(tmp_path)
    lose(tmp_path, policy, setup_error="no package x in 10 s (commit 0123456789)")
    policy.refuse_uninstallable()
    lose(tmp_path, policy, setup_error="no package x in 12 s (commit 9876543210)")
    with pytest.raises(errors.MachineError, match=r"cannot be installed.* 2 machines.*package x"):
        policy.refuse_uninstallable()
    policy.note_ready(1)  # it was installed elsewhere
    policy.refuse_uninstallable()


def test_different_installation_errors_do_not_end_the_rental(tmp_path: Path) -> None:
    policy = make_policy(tmp_path)
    lose(tmp_path, policy, setup_error="no package x")
    lose(tmp_path, policy, setup_error="no space left")
    policy.refuse_uninstallable()


def test_after_a_failed_installation_the_other_machines_are_awaited(tmp_path: Path) -> None:
    policy = make_policy(tmp_path)
    lose(tmp_path, policy, setup_error="no package x")
    assert not policy.can_try(0, 0.0, has_machines=True)
    assert policy.can_try(0, 0.0, has_machines=False)
    policy.note_ready(1)
    assert policy.can_try(0, 0.0, has_machines=True)


def test_a_failed_try_is_postponed_while_other_machines_run(tmp_path: Path) -> None:
    policy = make_policy(tmp_path)
    down, gone = errors.UnavailableError("down"), errors.NotFoundError("no offer")
    policy.postpone_or_raise(0, down, 100.0, resume_at=500.0, has_machines=True)
    assert [policy.can_try(0, now, has_machines=True) for now in (499.0, 500.0)] == [False, True]
    with pytest.raises(errors.NotFoundError):  # the program never ran on this slot
        policy.postpone_or_raise(0, gone, 100.0, resume_at=0.0, has_machines=True)
    policy.note_ready(0)
    policy.postpone_or_raise(0, gone, 600.0, resume_at=0.0, has_machines=True)
    assert not policy.can_try(0, 599.0 + RETRY_INTERVAL, has_machines=True)
    assert policy.can_try(0, 600.0 + RETRY_INTERVAL, has_machines=True)
    for error in (down, gone):
        with pytest.raises(type(error)):
            policy.postpone_or_raise(0, error, 600.0, resume_at=0.0, has_machines=False)


def test_a_quorum_whose_program_has_run_is_not_ended_by_another_slot(tmp_path: Path) -> None:
    policy = ReplacementPolicy(make_settings(tmp_path, machines=3), quorum=2)
    error = errors.NotFoundError("no offer fits")
    policy.note_ready(0)
    with pytest.raises(errors.NotFoundError):
        policy.postpone_or_raise(2, error, 0.0, resume_at=0.0, has_machines=True)
    policy.note_ready(1)
    policy.postpone_or_raise(2, error, 0.0, resume_at=0.0, has_machines=True)
    assert not policy.can_try(2, RETRY_INTERVAL - 1, has_machines=True)
    assert policy.can_try(2, RETRY_INTERVAL, has_machines=True)
    with pytest.raises(errors.NotFoundError):
        policy.postpone_or_raise(2, error, 0.0, resume_at=0.0, has_machines=False)
