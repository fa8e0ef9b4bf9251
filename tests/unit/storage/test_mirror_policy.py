"""Decisions of a reader of mirrors, without a network and with a clock that the test sets."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.storage.mirror_policy import (
    CircuitBreaker,
    DurationWindow,
    HedgeBudget,
    MirrorPolicy,
    RelativeRate,
    WeightedTurns,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_breaker_opens_after_failures_in_a_row_and_a_probe_closes_it():
    clock = Clock()
    breaker = CircuitBreaker(MirrorPolicy(failures=3, first_pause=5), clock)
    breaker.note_failure()
    breaker.note_failure()
    breaker.note_success()
    assert [breaker.note_failure() for _ in range(3)] == [False, False, True]
    assert breaker.is_open
    assert not breaker.take_probe()
    clock.now += 5
    assert breaker.take_probe()
    assert not breaker.take_probe()  # one request only
    breaker.note_success()
    assert not breaker.is_open
    assert not breaker.take_probe()


def test_each_failed_probe_doubles_the_pause_up_to_a_limit():
    clock = Clock()
    breaker = CircuitBreaker(MirrorPolicy(failures=1, first_pause=5, longest_pause=15), clock)
    breaker.note_failure()
    for pause in (5, 10, 15, 15):
        assert breaker.resumes_at == clock.now + pause
        clock.now += pause
        assert breaker.take_probe()
        assert not breaker.note_failure(is_probe=True)


def test_requests_that_began_before_the_pause_do_not_make_it_longer():
    clock = Clock()
    breaker = CircuitBreaker(MirrorPolicy(failures=1, first_pause=5), clock)
    breaker.note_failure()
    clock.now += 4
    breaker.note_failure()
    assert breaker.resumes_at == 105


@given(st.lists(st.sampled_from(["read", "read", "read", "hedge", "failover"]), max_size=500))
def test_a_hedge_waits_until_the_share_has_room_for_all_further_requests(acts: list[str]):
    budget, counts = HedgeBudget(MirrorPolicy(hedge_share=0.2, hedge_burst=100)), Counter[str]()
    for act in acts:
        match act:
            case "read":
                budget.add_read()
            case "failover" if counts["failover"] < 100:
                budget.spend()
            case "hedge" if budget.try_spend():
                further = counts["hedge"] + counts["failover"] + 1
                assert further <= 0.2 * counts["read"] + 1e-6
            case _:
                continue
        counts[act] += 1


def test_hedges_alone_are_never_more_than_their_share():
    budget = HedgeBudget(MirrorPolicy())
    hedges = 0
    for reads in range(1, 2001):
        budget.add_read()
        hedges += budget.try_spend()
        assert hedges <= 0.05 * reads + 1e-6
    assert hedges == 100


def test_a_quantile_is_that_of_requests_of_about_the_same_size():
    window = DurationWindow()
    for number in range(19):
        window.record(80_000, number)
    assert window.find_quantile(80_000, 0.95) is None
    window.record(90_000, 19)
    window.record(8_000_000, 1000)
    assert window.find_quantile(80_000, 0.95) == 19
    assert window.find_quantile(80_000, 0.5) == 10
    assert window.find_quantile(8_000_000, 0.5) is None


def test_a_quantile_forgets_old_requests():
    window = DurationWindow()
    for _ in range(300):
        window.record(1000, 9.0)
    for _ in range(256):
        window.record(1000, 1.0)
    assert window.find_quantile(1000, 1.0) == 1.0


def test_turns_are_spread_by_weights():
    turns = WeightedTurns()
    assert [turns.choose({0: 2, 1: 1}, [0, 1]) for _ in range(6)] == [0, 1, 0, 0, 1, 0]
    counts = Counter(turns.choose({0: 1, 1: 1, 2: 0.1}, [0, 1, 2]) for _ in range(210))
    assert counts == {0: 100, 1: 100, 2: 10}
    assert {turns.choose({0: 1, 1: 1, 2: 0.1}, [2]) for _ in range(5)} == {2}


@pytest.mark.parametrize(("seconds", "weight"), [(0.01, 1), (0.04, 0.25), (9, 0.02)])
def test_a_weight_follows_the_measured_rate(seconds: float, weight: float):
    rate = RelativeRate()
    assert rate.weight == 1
    rate.record(5.0, None)
    for _ in range(300):
        rate.record(seconds, 0.01)
    assert rate.weight == pytest.approx(weight, rel=0.01)
