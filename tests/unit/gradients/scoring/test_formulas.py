"""Formulas of scores, with vectors."""

import math
from math import fsum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.gradients.scoring import formulas
from millrace.schemas.scores import LossPair

SCORES = st.dictionaries(st.text(min_size=1), st.floats(-100, 100), max_size=40)


def test_the_improvement_is_relative_to_the_loss_before():
    assert LossPair(before=4.0, after=3.0).improvement == 0.25
    assert LossPair(before=2.0, after=3.0).improvement == -0.5
    assert LossPair(before=2.0, after=None).improvement == -math.inf


@pytest.mark.parametrize(
    ("own", "random", "result"), [(0.02, 0.01, 1), (0.01, 0.02, -1), (0.01, 0.01, -1)]
)
def test_the_use_of_own_pages_is_a_sign(own: float, random: float, result: int):
    assert formulas.compare_data_use(own, random) == result


def test_the_average_of_a_worker_that_uses_its_pages_reaches_the_threshold_in_three_windows():
    average, found = 0.0, list[float]()
    for _ in range(3):
        average = formulas.update_average(average, 1.0, 0.05)
        found.append(average)
    assert found == pytest.approx([0.05, 0.0975, 0.142625])


@pytest.mark.parametrize(
    ("behind", "exponent", "score"),
    [(0, 2.5, 1.0), (1, 2.5, 0.3628873693), (2, 2.5, 0.0641500299), (3, 2.5, 0.0), (9, 2.5, 0.0),
     (1, 5, 0.1316872428), (-1, 2.5, 1.0)],
)  # fmt: skip
def test_whoever_is_behind_by_three_steps_has_no_score(
    behind: float, exponent: float, score: float
):
    assert formulas.compute_sync_score(behind, exponent) == pytest.approx(score, abs=1e-9)


def test_the_score_of_templar():
    assert formulas.compute_score(10.0, 0.5) == 5.0
    assert formulas.compute_score(10.0, -0.5) == 0.0
    assert formulas.compute_score(-2.0, 0.5, 0.25) == -0.25


@pytest.mark.parametrize(("missed", "factor"), [(0, 1.0), (1, 0.75), (2, 0.5), (3, 0.0), (9, 0.0)])
def test_missed_windows_cost_more_and_more(missed: int, factor: float):
    assert formulas.get_miss_factor(missed) == factor


@pytest.mark.parametrize(
    ("evaluations", "proof"),
    [(0, 0.0), (1, 0.0), (4, 0.0), (5, 0.1032), (20, 0.5340), (500, 0.6797)],
)
def test_a_worker_that_always_uses_its_pages_proves_it_in_time(evaluations: int, proof: float):
    average = 1 - 0.95**evaluations
    assert formulas.compute_proof(average, evaluations, 0.05) == pytest.approx(proof, abs=1e-4)


def test_shares_are_those_of_the_squares():
    shares = formulas.share_by_squares({"a": 1.0, "b": 3.0, "c": -5.0})
    assert shares == {"a": 0.1, "b": 0.9, "c": 0.0}


def test_shares_by_rank():
    scores = {f"w{number:02}": 40.0 - number for number in range(40)}
    shares = formulas.share_by_rank(scores)
    assert fsum(shares.values()) == pytest.approx(0.5)
    assert shares["w00"] == pytest.approx(2 * shares["w19"])
    assert fsum(shares[f"w{number:02}"] for number in range(20)) == pytest.approx(0.375)
    assert shares["w20"] == pytest.approx(2 * shares["w21"])
    assert shares["w30"] == 0.0


@given(scores=SCORES)
def test_no_share_is_below_zero_and_they_never_exceed_the_whole(scores: dict[str, float]):
    for shares in (formulas.share_by_squares(scores), formulas.share_by_rank(scores)):
        assert set(shares) == set(scores)
        assert all(share >= 0 for share in shares.values())
        assert fsum(shares.values()) <= 1 + 1e-9
        assert all(shares[uid] == 0 for uid in scores if scores[uid] <= 0)
