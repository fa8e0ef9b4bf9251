"""Standings follow from the evidence alone."""

import random
from datetime import UTC, datetime

import pytest

from millrace.gradients.scoring.formulas import MISS_FACTORS
from millrace.gradients.scoring.ratings import make_first_standing
from millrace.gradients.scoring.standings import choose_workers, update_standings
from millrace.schemas.scores import (
    CopiedGradient,
    Evaluation,
    LossPair,
    ScoreFormula,
    ScoringRules,
    Standing,
    WindowEvidence,
)

RULES = ScoringRules()
WORKERS = [f"w{number}" for number in range(8)]
NOW = datetime(2026, 1, 1, tzinfo=UTC)
RECORDED = [
    ("w0", 53.028182, 23.711751),
    ("w1", 54.725198, 28.082923),
    ("w2", 39.035543, 14.607063),
    ("w3", 25.805104, 1.516623),
    ("w4", 13.719145, 3.346195),
    ("w5", 14.845928, 0.0),
    ("w6", 9.968586, 1.456987),
    ("w7", -5.865539, 0.0),
]
"""Mean of the rating and score of each worker after `make_recorded_run`."""


def evaluate(random_after: float | None, own_after: float | None) -> Evaluation:
    return Evaluation(
        digest="blake3:" + "0" * 64, written=NOW,
        random=LossPair(before=1.0, after=random_after), own=LossPair(before=1.0, after=own_after),
    )  # fmt: skip


def make_evidence(
    window: int,
    evaluations: dict[str, Evaluation],
    *,
    copies: dict[str, CopiedGradient] | None = None,
    missing: tuple[str, ...] = (),
) -> WindowEvidence:
    return WindowEvidence(
        window=window, evaluations=evaluations, copies=copies or {},
        valid=tuple(sorted(evaluations)), missing=missing,
    )  # fmt: skip


def make_recorded_run(windows: int = 30) -> list[WindowEvidence]:
    """Make the evidence of a run: a worker is the better, the lower its number."""
    dice = random.Random(7)
    found: list[WindowEvidence] = []
    for window in range(1, windows + 1):
        evaluations: dict[str, Evaluation] = {}
        for number, uid in enumerate(WORKERS):
            better = 0.02 - 0.002 * number + dice.gauss(0, 0.004)
            evaluations[uid] = evaluate(1.0 - better, 1.0 - better - dice.gauss(0.01, 0.01))
        missing = (WORKERS[3],) if window % 9 == 0 else ()
        for uid in missing:
            del evaluations[uid]
        found.append(make_evidence(window, evaluations, missing=missing))
    return found


def play(run: list[WindowEvidence], rules: ScoringRules = RULES) -> dict[str, Standing]:
    standings: dict[str, Standing] = {}
    for evidence in run:
        standings = update_standings(standings, evidence, rules)
    return standings


def test_a_recorded_run_has_its_scores():
    standings = play(make_recorded_run())
    found = [(uid, round(one.mu, 6), round(one.score, 6)) for uid, one in standings.items()]
    assert found == RECORDED


def test_a_recorded_run_has_its_scores_by_the_formula_of_templar():
    standings = play(make_recorded_run(), ScoringRules(formula=ScoreFormula.TEMPLAR))
    for uid, one in standings.items():
        counts = one.use >= 0.1
        assert one.score == (one.ordinal * max(0.0, one.use) if counts else 0.0), uid


def test_nothing_depends_on_the_order_of_names_or_evaluations():
    run = make_recorded_run()
    expected = play(run)
    dice = random.Random(1)
    standings: dict[str, Standing] = {}
    for evidence in run:
        shuffled = list(evidence.evaluations.items())
        dice.shuffle(shuffled)
        known = list(standings.items())
        dice.shuffle(known)
        valid = tuple(uid for uid, _ in shuffled)
        other = evidence.model_copy(update={"evaluations": dict(shuffled), "valid": valid})
        standings = update_standings(dict(known), other, RULES)
    assert standings == expected


def test_a_copy_loses_what_its_sender_had_earned():
    run = make_recorded_run()
    before = play(run)
    copies = {"w0": CopiedGradient(earlier="w1", overlap=0.9)}
    evaluations = {uid: evaluate(0.98, 0.97) for uid in WORKERS}
    after = update_standings(before, make_evidence(31, evaluations, copies=copies), RULES)
    first = make_first_standing(RULES)
    assert before["w0"].score > 0
    assert (after["w0"].mu, after["w0"].sigma, after["w0"].use) == (first.mu, first.sigma, 0.0)
    assert after["w0"].score == after["w0"].weight == 0.0
    assert after["w1"].score > 0


def test_missed_windows_lower_the_score_until_a_gradient_comes():
    standings = play(make_recorded_run())
    whole = standings["w0"].score
    evaluations = {uid: evaluate(0.98, 0.97) for uid in WORKERS[1:]}
    for window, factor in enumerate((0.75, 0.5, 0.0, 0.0), start=31):
        evidence = make_evidence(window, evaluations, missing=("w0",))
        standings = update_standings(standings, evidence, RULES)
        assert standings["w0"].score == pytest.approx(factor * whole)
    back = make_evidence(35, evaluations).model_copy(update={"valid": tuple(WORKERS)})
    assert update_standings(standings, back, RULES)["w0"].score == pytest.approx(whole)


def test_ten_windows_that_did_not_wait_for_a_worker_count_as_a_missed_one():
    standings = play(make_recorded_run())
    whole = standings["w0"].score
    evaluations = {uid: evaluate(0.98, 0.97) for uid in WORKERS[1:]}
    for window in range(31, 61):
        evidence = make_evidence(window, evaluations).model_copy(update={"absent": ("w0",)})
        standings = update_standings(standings, evidence, RULES)
        factor = MISS_FACTORS[(window - 30) // 10]
        assert standings["w0"].score == pytest.approx(factor * whole)
    sent = make_evidence(61, evaluations).model_copy(update={"valid": tuple(WORKERS)})
    unneeded = make_evidence(61, evaluations)
    for evidence, missed in ((sent, 0), (unneeded, 3)):
        after = update_standings(standings, evidence, RULES)["w0"]
        assert (after.missed, after.absent) == (missed, 0)
    new = unneeded.model_copy(update={"absent": ("new",)})
    assert set(update_standings(standings, new, RULES)) == set(WORKERS)


def test_a_loss_that_is_not_finite_is_the_last_in_its_window():
    evaluations = {uid: evaluate(1.5, 1.4) for uid in WORKERS[1:]} | {"w0": evaluate(None, None)}
    standings = update_standings({}, make_evidence(1, evaluations), RULES)
    assert all(standings["w0"].mu < standings[uid].mu for uid in WORKERS[1:])
    assert standings["w0"].use < 0


def test_one_worker_alone_is_compared_with_nobody():
    standings = update_standings({}, make_evidence(1, {"w0": evaluate(0.5, 0.4)}), RULES)
    first = make_first_standing(RULES)
    assert (standings["w0"].mu, standings["w0"].sigma) == (first.mu, first.sigma)
    assert standings["w0"].evaluations == 1


def test_every_worker_is_chosen_in_time_and_nobody_knows_when():
    standings: dict[str, Standing] = {}
    first = make_first_standing(RULES)
    seen: dict[str, int] = dict.fromkeys(WORKERS, 0)
    longest = 0
    for window in range(1, 201):
        chosen = choose_workers(standings, WORKERS, window, 2, f"link {window}")
        assert len(chosen) == 2
        assert chosen == choose_workers(standings, WORKERS[::-1], window, 2, f"link {window}")
        for uid in chosen:
            longest = max(longest, window - seen[uid])
            seen[uid] = window
            standings[uid] = first.model_copy(update={"evaluated": window})
    assert longest <= 16
    other = {tuple(choose_workers(standings, WORKERS, 201, 2, f"{n}")) for n in range(50)}
    assert len(other) > 10
