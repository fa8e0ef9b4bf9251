"""The time limit of an epoch's end, and its extensions."""

from datetime import timedelta

from millrace.checkpoints.cooldown.deadline import Deadline
from tests.unit.checkpoints.cooldown.conftest import Clock


def test_a_deadline_is_over_after_its_limit(clock: Clock) -> None:
    deadline = Deadline(timedelta(seconds=10), extensions=0)
    clock.now += 10
    assert not deadline.is_over
    clock.now += 0.5
    assert deadline.is_over
    assert deadline.elapsed == 10.5


def test_each_extension_adds_the_limit_once(clock: Clock) -> None:
    deadline = Deadline(timedelta(seconds=10), extensions=2)
    clock.now += 11
    assert deadline.extend()
    assert not deadline.is_over
    assert deadline.extend()
    assert not deadline.extend()
    clock.now += 19
    assert not deadline.is_over
    clock.now += 1
    assert deadline.is_over
    assert deadline.times == 3
