"""A scorer follows the chain, and its scores are those of everyone."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from millrace import errors
from millrace.cleanup import CleanupKind, CleanupSettings, Rule, execute, make_plan
from millrace.gradients import (
    ChainError,
    MergeRule,
    MergeSettings,
    WeightState,
    catch_up,
    find_newest_window,
    iterate_kept_links,
)
from millrace.gradients.merging.links import ChainGapError, find_kept_windows
from millrace.gradients.merging.scores import read_newest_scores
from millrace.gradients.progress_events import WindowScored
from millrace.gradients.scoring.scorer import iterate_scores, score_run
from millrace.gradients.scoring.settings import ScorerOptions
from millrace.gradients.weights import save_weights
from millrace.keys.gradients import ChainKeys
from millrace.records import commit_once, digest_record, fetch
from millrace.schemas.gradient import ExclusionReason
from millrace.schemas.scores import WindowScores
from millrace.schemas.window import GatherSettings, WindowOpening
from millrace.storage import Store, delete, open_store, put, read
from tests.support.scored_run import ScoredRun

WORKERS = [f"w{number}" for number in range(6)]
MULTI_KRUM = MergeSettings(rule=MergeRule.MULTI_KRUM, faulty=1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path.as_uri())


def make_run(store: Store, windows: int = 3, **options: object) -> ScoredRun:
    run = ScoredRun(store, WORKERS, **options)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    for _ in run.merge_windows(windows):
        pass
    return run


def test_each_window_has_scores_and_a_second_scorer_has_nothing_to_do(store: Store):
    run = make_run(store, attacks={"w5": "copy"})
    events: list[WindowScored] = []

    def progress(event: object) -> None:
        if isinstance(event, WindowScored):
            events.append(event)

    scores = list(score_run(store, run.keys, run.compute_loss, progress=progress))
    assert [one.evidence.window for one in scores] == [1, 2, 3]
    assert [(one.evaluated, one.copies) for one in events] == [(5, 1)] * 3
    assert scores[-1].standings["w5"].weight == 0.0
    assert {one.evidence.copies["w5"].overlap for one in scores} == {1.0}
    assert not list(score_run(store, run.keys, run.compute_loss))
    assert list(iterate_scores(store, run.keys)) == scores
    assert read_newest_scores(store, run.keys) == scores[-1]


def test_a_scorer_that_was_killed_goes_on_with_equal_scores(store: Store, tmp_path: Path):
    run = make_run(store)
    whole = list(score_run(store, run.keys, run.compute_loss))
    delete(store, [run.keys.make_scores_key(window) for window in (2, 3)])
    again = list(score_run(store, run.keys, run.compute_loss))
    assert again == whole[1:]


def test_scores_stop_at_a_window(store: Store):
    run = make_run(store)
    assert len(list(score_run(store, run.keys, run.compute_loss, ScorerOptions(until=2)))) == 2
    assert len(list(score_run(store, run.keys, run.compute_loss))) == 1


def save_and_clean(run: ScoredRun, kept: int) -> None:
    """Save a checkpoint, merge further windows, and clean the objects before the checkpoint."""
    save_weights(run.state, run.store, run.keys.job, step=run.window, window=run.window)
    head = run.window
    list(run.merge_windows(kept))
    rule = Rule(kinds=(CleanupKind.GATHERS,), older_than=timedelta(0))
    settings = CleanupSettings(store=run.store.spec, rules=(rule,))
    execute(settings, make_plan(settings).name)
    assert find_kept_windows(run.store, run.keys) == range(head, head + kept + 1)


def test_a_new_scorer_begins_after_the_checkpoint_that_a_cleaning_kept(store: Store, caplog):
    run = make_run(store)
    save_and_clean(run, kept=2)
    save_weights(run.state, store, run.keys.job, step=run.window, window=run.window)
    list(run.merge_windows(1))
    scores = list(score_run(store, run.keys, run.compute_loss))
    assert [one.evidence.window for one in scores] == [4, 5, 6]
    assert "The windows 1 to 3 of runs/one get no scores" in caplog.text
    assert list(iterate_scores(store, run.keys)) == scores
    assert not list(score_run(store, run.keys, run.compute_loss))


def test_a_scorer_behind_a_cleaning_keeps_the_standings(store: Store, caplog):
    run = make_run(store, windows=5)
    scorer = score_run(store, run.keys, run.compute_loss)
    scores = [next(scorer), next(scorer)]
    save_and_clean(run, kept=1)
    scores += scorer
    list(run.merge_windows(2))
    save_and_clean(run, kept=1)
    scores += score_run(store, run.keys, run.compute_loss)
    assert list(iterate_scores(store, run.keys)) == scores[2:]  # the older ones were cleaned
    assert [one.evidence.window for one in scores] == [1, 2, 6, 9]
    assert scores[-1].standings["w0"].evaluations == 4
    assert "The windows 3 to 5 of runs/one get no scores" in caplog.text
    assert "The windows 7 to 8 of runs/one get no scores" in caplog.text


@pytest.mark.parametrize("kind", ["link", "update"])
def test_a_missing_object_without_a_newer_checkpoint_is_a_sentence(store: Store, kind: str):
    run = make_run(store)
    (update,) = list(iterate_kept_links(store, run.keys))[1].updates
    delete(store, [run.keys.make_link_key(2) if kind == "link" else update.key])
    with pytest.raises(ChainGapError, match=r"missing.*restore it"):
        list(score_run(store, run.keys, run.compute_loss))


def test_of_two_scorers_the_first_decides(store: Store):
    run = make_run(store, windows=1)
    (first,) = score_run(store, run.keys, run.compute_loss)
    body = read(store, run.keys.make_scores_key(1))
    delete(store, [run.keys.make_scores_key(1)])

    def compute_other_loss(weights: Mapping[str, torch.Tensor], window: int, uid: str | None):
        if uid == WORKERS[0]:  # another scorer commits meanwhile
            put(store, run.keys.make_scores_key(1), body)
        return 2 * run.compute_loss(weights, window, uid) + 1

    (second,) = score_run(store, run.keys, compute_other_loss)
    assert second == first


@pytest.mark.parametrize(
    ("reason", "wanted", "merge", "counts"),
    [
        (ExclusionReason.MISSING, None, MergeSettings(), False),
        (ExclusionReason.MISSING, 6, MULTI_KRUM, False),
        (ExclusionReason.FORMAT, 5, MergeSettings(), False),
        (ExclusionReason.MISSING, 5, MergeSettings(), True),
        (ExclusionReason.MISSING, 5, MULTI_KRUM, True),
        (ExclusionReason.UNAVAILABLE, None, MergeSettings(), True),
        (ExclusionReason.QUORUM, None, MergeSettings(), True),
        (ExclusionReason.WARM_UP, None, MergeSettings(), True),
    ],
)
def test_only_a_worker_that_fails_by_its_own_fault_misses_a_window(
    store: Store, reason: ExclusionReason, wanted: int | None, merge: MergeSettings, counts: bool
):
    run = make_run(store, windows=1, merge=merge)
    for _ in range(3):
        run.window += 1
        sent = run.make_gradients(run.state, run.window)
        del sent["w0"]
        run.merge_gradients(sent, {"w0": reason})
        opening = WindowOpening(
            run=run.keys.run, number=run.window, gather=GatherSettings(wanted=wanted)
        )
        commit_once(store, run.keys.make_opening_key(run.window), opening)
    *_, last = score_run(store, run.keys, run.compute_loss)
    assert last.standings["w0"].missed == (0 if counts else 3)
    was_unawaited = counts and reason is ExclusionReason.MISSING
    assert last.standings["w0"].absent == (3 if was_unawaited else 0)
    assert last.standings["w1"].missed == 0


@pytest.mark.parametrize("merge", [MergeSettings(), MULTI_KRUM])
def test_a_window_that_merged_no_gradient_has_scores(store: Store, merge: MergeSettings):
    run = make_run(store, windows=2, merge=merge)
    run.window += 1
    excluded = dict.fromkeys(WORKERS, ExclusionReason.QUORUM)
    link = run.merge_gradients({}, excluded | {"w0": ExclusionReason.MISSING})
    assert (link.taken, link.updates) == ({}, ())
    list(run.merge_windows(2))
    scores = list(score_run(store, run.keys, run.compute_loss))
    assert [bool(one.evidence.evaluations) for one in scores] == [True, True, False, True, True]
    empty = scores[2].evidence
    assert (empty.valid, empty.missing) == (tuple(WORKERS[1:]), ("w0",))
    assert scores[2].standings["w1"].mu == scores[1].standings["w1"].mu
    assert list(iterate_scores(store, run.keys)) == scores


def test_changed_scores_are_found(store: Store):
    run = make_run(store)
    list(score_run(store, run.keys, run.compute_loss))
    key = run.keys.make_scores_key(3)
    body, score = read(store, key), fetch(store, key, WindowScores).standings["w1"].score
    put(store, key, body.replace(f'"score":{score}'.encode(), b'"score":99.0'))
    assert fetch(store, key, WindowScores).standings["w1"].score == 99.0
    with pytest.raises(ChainError, match="window 3 of runs/one do not follow from their evidence"):
        list(iterate_scores(store, run.keys))
    put(store, run.keys.make_scores_key(2), read(store, run.keys.make_scores_key(1)))
    with pytest.raises(ChainError, match="window 2 of runs/one do not follow those before"):
        list(iterate_scores(store, run.keys))


def test_only_some_workers_are_evaluated(store: Store):
    run = make_run(store)
    scores = list(score_run(store, run.keys, run.compute_loss, ScorerOptions(count=2)))
    assert [len(one.evidence.evaluations) for one in scores] == [2, 2, 2]
    assert {len(one.evidence.valid) for one in scores} == {6}


def test_copies_take_no_place_of_other_workers(store: Store):
    attacks = dict.fromkeys(WORKERS[3:], "copy")
    run = make_run(store, windows=6, attacks=attacks)
    scores = list(score_run(store, run.keys, run.compute_loss, ScorerOptions(count=2)))
    assert {tuple(one.evidence.copies) for one in scores} == {tuple(WORKERS[3:])}
    assert [len({*one.evidence.evaluations} - {*attacks}) for one in scores] == [2] * 6


@pytest.mark.parametrize("rule", [MergeRule.MEAN, MergeRule.SENDERS, MergeRule.CENTERED_CLIP])
def test_the_merge_is_worse_without_an_honest_worker_and_better_without_noise(
    store: Store, rule: MergeRule
):
    run = make_run(store, attacks={"w5": "noise"}, merge=MergeSettings(rule=rule, clip=False))
    options = ScorerOptions(with_values=True)
    values = dict.fromkeys(WORKERS, 0.0)
    for scores in score_run(store, run.keys, run.compute_loss, options):
        for uid, one in scores.evidence.evaluations.items():
            assert one.value is not None
            values[uid] += one.value
    assert all(values["w5"] < values[uid] for uid in WORKERS[:5])


def test_a_loss_that_is_not_finite_after_a_gradient_is_noted(store: Store):
    run = make_run(store, windows=1)
    before = run.state.weights["a"].copy()

    def compute_loss(weights: Mapping[str, torch.Tensor], window: int, uid: str | None) -> float:
        loss = run.compute_loss(weights, window, uid)
        return loss if calls.pop() else float("nan")

    # w0's own and random pages before, then after; each other one before and after
    calls = [True] * (2 * 5 + 5) + [False, False, True, True]
    (scores,) = score_run(store, run.keys, compute_loss)
    first = scores.evidence.evaluations["w0"]
    assert (first.own.after, first.random.after) == (None, None)
    assert scores.standings["w0"].mu == min(one.mu for one in scores.standings.values())
    assert (run.state.weights["a"] == before).all()


def test_a_loss_of_zero_before_a_window_is_a_sentence(store: Store):
    run = make_run(store, windows=1)
    with pytest.raises(errors.ConfigurationError, match="the pages of w0 before window 1 is 0"):
        list(score_run(store, run.keys, lambda weights, window, uid: 0.0))


def test_a_window_of_merged_values_has_scores_without_evaluations(store: Store, caplog):
    run = make_run(store, windows=1)
    run.window += 1
    sent = run.make_gradients(run.state, run.window)
    run.merge_gradients(dict.fromkeys(WORKERS[1:], sent["w1"]), {"w0": ExclusionReason.MISSING})
    list(run.merge_windows(1))
    scores = list(score_run(store, run.keys, run.compute_loss))
    assert [len(one.evidence.evaluations) for one in scores] == [6, 0, 6]
    assert (scores[1].evidence.valid, scores[1].evidence.missing) == (tuple(WORKERS[1:]), ("w0",))
    assert scores[1].standings["w1"].mu == scores[0].standings["w1"].mu
    assert caplog.text.count("Nobody is evaluated in window 2 of runs/one") == 1
    assert list(iterate_scores(store, run.keys)) == scores


def test_a_run_that_has_not_begun_is_a_sentence(store: Store):
    run = ScoredRun(open_store("memory://elsewhere"), WORKERS)
    with pytest.raises(errors.NotFoundError):
        list(score_run(store, run.keys, run.compute_loss))


def test_a_merge_weighs_workers_by_the_newest_scores(store: Store):
    attacks = dict.fromkeys(["w1", "w3", "w5"], "noise")
    merge = MergeSettings(rule=MergeRule.SCORES, even_share=0.06)
    weighted = ScoredRun(store, WORKERS, attacks, merge=merge)
    plain = ScoredRun(store, WORKERS, attacks, keys=ChainKeys("runs/two", "1"))
    (last,) = weighted.merge_windows(1)
    assert last.scores == ""
    assert {one.share for one in last.taken.values()} == {1 / 6}
    scores = None
    for last in weighted.merge_windows(10):
        assert last.scores == (digest_record(scores) if scores else "")
        *_, scores = score_run(store, weighted.keys, weighted.compute_loss)
    for uid in attacks:  # they are still sent to workers, and scored
        assert last.taken[uid].share == pytest.approx(0.01)
    assert sum(one.share for one in last.taken.values()) == pytest.approx(1)
    for _ in plain.merge_windows(11):
        pass

    def loss(run: ScoredRun) -> float:
        weights = {"a": torch.from_numpy(run.state.weights["a"])}  # pyright: ignore[reportUnknownMemberType]
        return run.compute_loss(weights, 100, None)

    assert loss(weighted) < 0.9 * loss(plain)
    late = WeightState(weighted.first)
    catch_up(store, weighted.keys, late)
    assert late.digest() == last.state


def test_scores_that_cannot_be_read_end_a_merge_before_it_changes_anything(store: Store):
    run = make_run(store, windows=1, merge=MergeSettings(rule=MergeRule.SCORES))
    list(score_run(store, run.keys, run.compute_loss))
    put(store, run.keys.make_scores_key(1), b"{")
    before = run.state.digest()
    with pytest.raises(errors.CorruptError, match=run.keys.make_scores_key(1)):
        list(run.merge_windows(1))
    assert run.state.digest() == before
    assert find_newest_window(store, run.keys) == 1


@pytest.mark.parametrize(
    ("count", "windows", "seed"),
    [(6, 12, 0), *(pytest.param(16, 20, seed, marks=pytest.mark.soak) for seed in range(3))],
)
def test_attackers_are_below_all_honest_workers(store: Store, count: int, windows: int, seed: int):
    workers = [f"w{number:02}" for number in range(count)]
    attacks = {"w01": "noise", "w03": "copy", "w05": "skip"}
    run = ScoredRun(store, workers, attacks, seed)
    for _ in run.merge_windows(windows):
        pass
    *_, last = score_run(store, run.keys, run.compute_loss)
    honest = [one.score for uid, one in last.standings.items() if uid not in attacks]
    attackers = [last.standings[uid].score for uid in attacks]
    assert max(attackers) < min(honest)
    assert sum(last.standings[uid].weight for uid in attacks) < 0.001
