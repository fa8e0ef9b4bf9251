"""A run of windows: workers that train, an aggregator, and who comes late."""

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace import errors
from millrace.checkpoints import Saver
from millrace.gradients import (
    ChainError,
    ChainLink,
    ChainStart,
    Codec,
    ExclusionReason,
    GatherSettings,
    OuterKind,
    OuterOptimizer,
    Participant,
    RunSettings,
    Sender,
    WeightState,
    begin_run,
    check_weights,
    commit_first_link,
    copy_state,
    iterate_links,
    load_checkpoint_state,
    merge_windows,
    select_weights,
)
from millrace.gradients.sync import chain_follower
from millrace.gradients.sync import participant as participant_module
from millrace.records import commit_once, fetch
from millrace.schemas.merge import MergeRule, MergeSettings
from millrace.schemas.window import WindowOpening
from millrace.storage import Store, delete, exists, open_store, put

WINDOWS = 4


def settings_of(workers: int = 3) -> RunSettings:
    return RunSettings(
        run="runs/one",
        codec=Codec(k=512, bits=4),
        outer=OuterOptimizer(kind=OuterKind.NESTEROV, lr=0.7),
        gather=GatherSettings(poll_interval=timedelta(milliseconds=20), quorum=workers),
        window_length=timedelta(minutes=1),
        steps=2,
    )


torch.manual_seed(5)
FIRST = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))


def model() -> torch.nn.Module:
    return deepcopy(FIRST)


def train(one: torch.nn.Module, steps: int, seed: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    for _ in range(steps):
        x = torch.randn(16, 20, generator=dice)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(one(x), x[:, :3]).backward()
        optimizer.step()


def assert_same_tensors(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor)


def loss(one: torch.nn.Module) -> float:
    x = torch.randn(500, 20, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.mse_loss(one(x), x[:, :3]).item()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = open_store(tmp_path.as_uri())
    commit_first_link(
        made,
        settings_of().chain_keys,
        ChainStart(run="runs/one", job="j", step=100, root="", state=""),
    )
    return made


def take_part(store: Store, uid: int, windows: int) -> torch.nn.Module:
    mine, settings = model(), settings_of()
    participant = Participant(settings, str(uid), store, store, select_weights(mine))
    for window in participant.iterate_windows():
        participant.load(mine)
        train(mine, window.steps, 100 * window.number + uid)
        participant.submit(mine, tokens=32)
        participant.receive(mine, timeout=timedelta(minutes=1))
        if window.number == windows:
            return mine
    raise AssertionError


def everybody(store: Store) -> list[Sender]:
    return [Sender(str(uid), store) for uid in range(3)]


def test_all_who_take_part_have_the_same_weights_and_they_learn(store):
    state = select_weights(model())
    before = loss(model())
    with ThreadPoolExecutor(3) as pool:
        models = [pool.submit(take_part, store, uid, WINDOWS) for uid in range(3)]
        made = list(merge_windows(store, settings_of(), everybody(store), state, until=WINDOWS))
        trained = [one.result() for one in models]
    assert [link.window for link in made] == list(range(1, WINDOWS + 1))
    assert [link.step for link in made] == [102, 104, 106, 108]
    assert all(set(link.taken) == {"0", "1", "2"} for link in made)
    for one in trained:
        assert select_weights(one).digest() == select_weights(trained[0]).digest()
        for name, weight in one.named_parameters():
            assert torch.equal(weight, torch.from_numpy(state.weights[name]))
    assert loss(trained[0]) < 0.9 * before

    late = model()
    participant = Participant(settings_of(), "late", store, store, select_weights(late))
    turn = next(participant.iterate_windows())
    participant.load(late)
    assert (turn.number, turn.step) == (WINDOWS + 1, 108)
    assert select_weights(late).digest() == select_weights(trained[0]).digest()


def test_what_is_not_trained_or_has_two_names_is_carried_along(tmp_path):
    """A state dict has the running means of a norm, and a weight that is tied."""
    store = open_store(tmp_path.as_uri())
    settings = settings_of(1).model_copy(update={"codec": Codec(k=4096, bits=16)})

    def made() -> torch.nn.Module:
        torch.manual_seed(1)
        one = torch.nn.Sequential(
            torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4)
        )
        one[2].weight = one[0].weight
        return one

    with Saver(store, "trained") as saver:
        saver.save({"model": made().state_dict()}, step=3).result()
    first, step = load_checkpoint_state(store, "trained", tensors="model.")
    begin_run(store, settings.chain_keys, first, step=step)
    assert {"0.weight", "1.running_mean"} <= set(first.weights)
    mine = made()
    participant = Participant.join(settings, "0", store, store)
    next(participant.iterate_windows())
    participant.load(mine)
    with torch.no_grad():
        mine(torch.randn(64, 4) + 5)
        mine[0].weight.add_(0.1)
    moved = mine[1].running_mean.clone()
    participant.submit(mine)
    list(merge_windows(store, settings, [Sender("0", store)], first, until=1))
    participant.receive(mine, timeout=timedelta(0))
    assert torch.equal(mine[2].weight, mine[0].weight)
    assert torch.equal(mine[1].running_mean, moved)
    assert mine[1].num_batches_tracked == 1


def test_a_worker_that_is_started_again_loses_nothing_that_nobody_took(store):
    settings = settings_of().model_copy(update={"window_length": timedelta(seconds=1)})
    mine = model()
    participant = Participant(settings, "0", store, store, select_weights(mine))
    next(participant.iterate_windows())
    train(mine, 2, 7)
    participant.submit(mine)
    saved = participant.state_dict()
    whole = {
        name: before - weight.detach()
        for (name, weight), before in zip(
            mine.named_parameters(), model().parameters(), strict=True
        )
    }
    state = select_weights(model())
    (link,) = merge_windows(store, settings, everybody(store), state, until=1)
    assert not link.taken
    again = Participant(settings, "0", store, store, state, after=1)  # it begins behind it
    again.load_state_dict(saved)
    for name, change in whole.items():
        torch.testing.assert_close(again.state_dict()["kept"][name], change)


def test_a_worker_that_is_started_again_does_not_train_for_what_it_has_sent(store):
    settings, state = settings_of(1), select_weights(model())
    participant = Participant(settings, "0", store, store, select_weights(model()))
    next(participant.iterate_windows())
    mine = model()
    train(mine, 2, 7)
    participant.submit(mine)
    again = Participant(settings, "0", store, store, select_weights(model()))
    again.load_state_dict(participant.state_dict())
    with ThreadPoolExecutor(1) as pool:
        turn = pool.submit(lambda: next(again.iterate_windows()))
        (link,) = merge_windows(store, settings, [Sender("0", store)], state, until=1)
        assert set(link.taken) == {"0"}
        assert turn.result().number == 2


def test_a_worker_that_is_started_again_without_its_state_sends_no_change_twice(store):
    """Its first process was merged, and the change of its second one is about the same."""
    settings = settings_of(1)
    first = Participant(settings, "0", store, store, select_weights(model()))
    again = Participant(settings, "0", store, store, select_weights(model()))
    for seed, participant in enumerate((first, again)):
        mine = model()
        train(mine, 2, seed)
        participant.submit(mine)
        if participant is first:
            (link,) = merge_windows(
                store, settings, [Sender("0", store)], select_weights(model()), until=1
            )
            assert set(link.taken) == {"0"}
    kept = again.state_dict()["kept"]
    again.receive(mine, timeout=timedelta(0))
    assert_same_tensors(again.state_dict()["kept"], kept)


def test_a_worker_whose_weight_is_zero_loses_nothing_that_it_sent(store):
    merge = MergeSettings(rule=MergeRule.TOKENS)
    settings = settings_of(2).model_copy(update={"merge": merge})
    sent: dict[str, tuple[Participant, torch.nn.Module]] = {}
    for number, uid in enumerate("01"):
        mine = model()
        participant = Participant(settings, uid, store, store, select_weights(model()))
        train(mine, 2, number)
        participant.submit(mine, tokens=number)
        sent[uid] = participant, mine
    participant, mine = sent["0"]
    change = {
        name: before.detach() - weight.detach()
        for (name, weight), before in zip(
            mine.named_parameters(), model().parameters(), strict=True
        )
    }
    senders = [Sender(uid, store) for uid in sent]
    (link,) = merge_windows(store, settings, senders, select_weights(model()), until=1)
    assert {uid: worker.share for uid, worker in link.taken.items()} == {"0": 0, "1": 1}
    participant.receive(mine, timeout=timedelta(0))
    assert_same_tensors(participant.state_dict()["kept"], change)
    participant, mine = sent["1"]
    kept = participant.state_dict()["kept"]
    participant.receive(mine, timeout=timedelta(0))
    assert_same_tensors(participant.state_dict()["kept"], kept)


PAIR = settings_of(1).model_copy(
    update={"codec": Codec(k=1, bits=32), "outer": OuterOptimizer(lr=1.0)}
)
"""Settings of a run that sends one value of each window."""


def make_pair() -> torch.nn.Module:
    """Return a model of two weights, of which each window sends one."""
    one = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        one.weight.zero_()
    return one


def train_pair(one: torch.nn.Module) -> None:
    """Change both weights, once for the whole run."""
    with torch.no_grad():
        one.weight += torch.tensor([[1.0, 0.9]])


def join_pair(store: Store, state: WeightState, *, after: int = 0) -> Participant:
    return Participant(PAIR, "0", store, store, copy_state(state.weights), after=after)


def run_window(
    participant: Participant, one: torch.nn.Module, store: Store, state: WeightState
) -> ChainLink:
    """Submit the model, merge its window, and load the merged weights."""
    window = participant.open_window.number
    participant.submit(one)
    merge_pair(store, state, window)
    return participant.receive(one, timeout=timedelta(0))


def merge_pair(store: Store, state: WeightState, window: int) -> None:
    sender = [Sender("0", store)]
    list(merge_windows(store, PAIR, sender, state, after=window - 1, until=window))


@pytest.mark.parametrize("newest", [True, False])
def test_a_state_from_before_merged_windows_sends_no_value_twice(store, caplog, newest):
    """The process starts again from an old checkpoint of the run, or from the newest one."""
    state, one = select_weights(make_pair()), make_pair()
    first = join_pair(store, state)
    train_pair(one)
    run_window(first, one, store, state)
    saved, weights = first.state_dict(), copy_state(state.weights)
    assert run_window(first, one, store, state).taken  # sends the rest of the change
    again = join_pair(store, state, after=2) if newest else join_pair(store, weights, after=1)
    with caplog.at_level(logging.WARNING):
        again.load_state_dict(saved)
        assert next(again.iterate_windows()).number == 3
    assert [record.getMessage() for record in caplog.records] == [
        (
            "Window 2 merged a gradient of 0 that is newer than the loaded state: values that were "
            "not sent are dropped, since they may be merged already."
        )
    ]
    again.load(one)
    run_window(again, one, store, state)
    torch.testing.assert_close(one.weight.detach(), torch.tensor([[1.0, 0.9]]))


@pytest.mark.parametrize("lands", [True, False])
def test_a_submit_without_an_answer_loses_no_value_and_sends_none_twice(
    store, monkeypatch, caplog, lands
):
    """The link decides whether the gradient was sent."""

    def put_without_answer(*arguments: Any) -> None:
        if lands:
            put(*arguments)
        raise errors.UnavailableError("There was no answer.")

    state, one = select_weights(make_pair()), make_pair()
    participant = join_pair(store, state)
    train_pair(one)
    run_window(participant, one, store, state)  # sends 1.0, and keeps 0.9
    with torch.no_grad():
        one.weight += torch.tensor([[0.0, 0.5]])
    with monkeypatch.context() as patch:
        patch.setattr(participant_module, "put", put_without_answer)
        with pytest.raises(errors.UnavailableError, match="no answer"):
            participant.submit(one)
    short = PAIR.model_copy(update={"window_length": timedelta(milliseconds=1)})
    (link,) = merge_windows(store, short, [Sender("0", store)], state, after=1, until=2)
    assert bool(link.taken) is lands
    participant.receive(one, timeout=timedelta(0))
    run_window(participant, one, store, state)
    torch.testing.assert_close(one.weight.detach(), torch.tensor([[1.0, 1.4]]))
    assert not caplog.records


def test_a_repeated_submit_sends_the_same_gradient(store, monkeypatch):
    def refuse(*_: Any) -> None:
        raise errors.UnavailableError("There was no answer.")

    state, one = select_weights(make_pair()), make_pair()
    participant = join_pair(store, state)
    train_pair(one)
    with monkeypatch.context() as patch:
        patch.setattr(participant_module, "put", refuse)
        with pytest.raises(errors.UnavailableError, match="no answer"):
            participant.submit(one)
    run_window(participant, make_pair(), store, state)  # the model of the first call counts
    participant.load(one)
    torch.testing.assert_close(one.weight.detach(), torch.tensor([[1.0, 0.0]]))
    run_window(participant, one, store, state)
    torch.testing.assert_close(one.weight.detach(), torch.tensor([[1.0, 0.9]]))


def test_a_state_from_before_windows_without_its_worker_keeps_its_values(store):
    state, one = select_weights(make_pair()), make_pair()
    first = join_pair(store, state)
    train_pair(one)
    run_window(first, one, store, state)
    saved = first.state_dict()
    short = PAIR.model_copy(update={"window_length": timedelta(milliseconds=1)})
    (link,) = merge_windows(store, short, [Sender("0", store)], state, after=1, until=2)
    assert not link.taken
    again = join_pair(store, state, after=2)
    again.load_state_dict(saved)
    run_window(again, one, store, state)
    torch.testing.assert_close(one.weight.detach(), torch.tensor([[1.0, 0.9]]))


def test_an_aggregator_that_is_started_again_goes_on(store):
    settings = settings_of()
    with ThreadPoolExecutor(3) as pool:
        models = [pool.submit(take_part, store, uid, 2) for uid in range(3)]
        first = select_weights(model())
        next(merge_windows(store, settings, everybody(store), first, until=1))
        again = select_weights(model())  # it has lost all that it knew
        (link,) = merge_windows(store, settings, everybody(store), again, until=2)
        assert link.window == 2
        assert link.state == again.digest()
        assert all(one.result() for one in models)
    assert [found.window for found in iterate_links(store, settings.chain_keys)] == [1, 2]


def test_a_window_that_too_few_came_to_is_over_and_nothing_that_was_sent_is_lost(store):
    mine, settings = (
        model(),
        settings_of().model_copy(update={"window_length": timedelta(seconds=1)}),
    )
    participant = Participant(settings, "0", store, store, select_weights(mine))
    next(participant.iterate_windows())
    train(mine, 2, 7)
    change = {
        name: before - weight.detach()
        for (name, weight), before in zip(
            mine.named_parameters(), model().parameters(), strict=True
        )
    }
    participant.submit(mine)
    (link,) = merge_windows(store, settings, everybody(store), select_weights(model()), until=1)
    reasons = {uid: one.reason for uid, one in link.excluded.items()}
    assert reasons == {
        "0": ExclusionReason.QUORUM,
        "1": ExclusionReason.MISSING,
        "2": ExclusionReason.MISSING,
    }
    participant.receive(mine, timeout=timedelta(0))
    assert select_weights(mine).digest() == select_weights(model()).digest()
    kept = participant.state_dict()["kept"]
    for name, whole in change.items():
        torch.testing.assert_close(kept[name], whole)


def test_a_submit_that_fails_changes_nothing_and_can_be_made_again(store, tmp_path):
    mine = model()
    nowhere = open_store((tmp_path / "gone").as_uri())
    participant = Participant(settings_of(), "0", nowhere, store, select_weights(mine))
    next(participant.iterate_windows())
    train(mine, 2, 7)
    last = list(mine.parameters())[-1]
    good = last.detach().clone()
    with torch.no_grad():
        last[0] = float("nan")
    with pytest.raises(errors.ConfigurationError, match="not finite"):
        participant.submit(mine)
    assert participant.state_dict()["kept"] == {}
    with torch.no_grad():
        last.copy_(good)
    participant.submit(mine)
    with pytest.raises(errors.ConfigurationError, match="Window 1 was submitted already"):
        participant.submit(mine)


def test_a_model_in_half_precision_that_does_not_train_sends_nothing(store):
    mine = model().to(torch.bfloat16)
    state = select_weights(model())
    participant = Participant(settings_of(), "0", store, store, state)
    next(participant.iterate_windows())
    participant.load(mine)
    participant.submit(mine)
    assert all(not kept.any() for kept in participant.state_dict()["kept"].values())


def test_without_an_aggregator_a_worker_says_so(store):
    mine = model()
    participant = Participant(settings_of(), "0", store, store, select_weights(mine))
    next(participant.iterate_windows())
    participant.submit(mine)
    with pytest.raises(errors.UnavailableError, match="Window 1 of runs/one was not merged"):
        participant.receive(mine, timeout=timedelta(0))


def test_another_model_is_refused(store):
    state = select_weights(model())
    participant = Participant(settings_of(), "0", store, store, state)
    with pytest.raises(errors.ConfigurationError, match=r"The model has no 0\.bias"):
        participant.submit(torch.nn.Linear(3, 3))


def test_a_chain_with_a_gap_stops_the_aggregator(store):
    settings = settings_of()
    with ThreadPoolExecutor(3) as pool:
        models = [pool.submit(take_part, store, uid, 2) for uid in range(3)]
        list(merge_windows(store, settings, everybody(store), select_weights(model()), until=2))
        assert all(one.result() for one in models)
    delete(store, [settings.chain_keys.make_link_key(1)])
    with pytest.raises(ChainError, match="Window 1 of runs/one is missing"):
        list(merge_windows(store, settings, everybody(store), select_weights(model()), until=3))


def test_what_may_change_between_windows_holds_from_the_next_one_on(store):
    state = select_weights(model())
    alone = settings_of(1).model_copy(update={"window_length": timedelta(minutes=3)})
    with ThreadPoolExecutor(1) as pool:
        trained = pool.submit(take_part, store, 0, 2)
        one = everybody(store)[:1]
        made = list(merge_windows(store, alone, one, state, until=1))
        fewer = alone.gather.model_copy(update={"quorum": 0})
        later = alone.model_copy(update={"window_length": timedelta(minutes=7), "gather": fewer})
        made += list(merge_windows(store, later, one, state, after=1, until=2))
        trained.result()
    assert [link.window for link in made] == [1, 2]
    openings = [
        fetch(store, alone.chain_keys.make_opening_key(number), WindowOpening) for number in (1, 2)
    ]
    assert [one.window_length for one in openings] == [timedelta(minutes=3), timedelta(minutes=7)]
    assert [one.gather.quorum for one in openings] == [1, 0]


def test_a_gradient_above_the_runs_largest_norm_is_refused_and_the_window_goes_on(store):
    state = select_weights(model())
    alone = settings_of(2)
    with ThreadPoolExecutor(2) as pool:
        for uid in range(2):
            pool.submit(take_part, store, uid, 1)
        (free,) = merge_windows(store, alone, everybody(store)[:2], state, until=1)
    norms = sorted((one.norm, uid) for uid, one in free.taken.items())
    limit = sum(norm for norm, _ in norms) / 2
    gather = GatherSettings(poll_interval=timedelta(milliseconds=20), max_norm=limit)
    delete(store, [alone.chain_keys.make_link_key(1), alone.chain_keys.make_opening_key(1)])
    bounded = alone.model_copy(update={"gather": gather, "window_length": timedelta(seconds=1)})
    (link,) = merge_windows(store, bounded, everybody(store)[:2], select_weights(model()), until=1)
    (_, less), (_, more) = norms
    assert set(link.taken) == {less}
    assert link.excluded[more].reason is ExclusionReason.NORM
    assert f"more than {limit:.3g}" in link.excluded[more].sentence


def test_a_gradient_above_the_largest_norm_is_dropped_and_the_next_one_is_merged(store, caplog):
    """Otherwise its values would make the norms of all later gradients too large."""
    gather = GatherSettings(poll_interval=timedelta(milliseconds=20), max_norm=5.0)
    change = {"codec": Codec(), "gather": gather, "window_length": timedelta(seconds=1)}
    settings = PAIR.model_copy(update=change)
    one = torch.nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        one.weight.zero_()
    state, dice = select_weights(one), torch.Generator().manual_seed(1)
    participant = Participant(settings, "0", store, store, select_weights(one))
    refused: list[int] = []
    for window, factor in enumerate([1.0, 100.0, 1.0], start=1):
        step = torch.randn(64, 64, generator=dice)
        with torch.no_grad():
            one.weight += factor * step / step.norm()
        participant.submit(one)
        list(
            merge_windows(
                store, settings, [Sender("0", store)], state, after=window - 1, until=window
            )
        )
        link = participant.receive(one, timeout=timedelta(0))
        if "0" not in link.taken:
            assert link.excluded["0"].reason is ExclusionReason.NORM
            refused.append(window)
    assert refused == [2]
    (record,) = caplog.records
    assert record.getMessage() == (
        "The gradient of 0 in window 2 was refused for its norm: its values and those that were "
        "not sent are dropped, as the next gradient would be refused for them too."
    )


def test_a_window_that_is_open_keeps_the_rules_it_was_opened_with(store):
    short = settings_of(0).model_copy(update={"window_length": timedelta(milliseconds=1)})
    opening = short.chain_keys.make_opening_key(1)
    rules = short.model_dump(include={"window_length", "gather"})
    commit_once(store, opening, WindowOpening(run=short.run, number=1, **rules))
    longer = short.model_copy(
        update={"window_length": timedelta(days=1)}
    )  # never ends in this test
    made = list(merge_windows(store, longer, everybody(store), select_weights(model()), until=1))
    assert [(link.window, len(link.taken)) for link in made] == [(1, 0)]
    assert fetch(store, opening, WindowOpening).window_length == timedelta(milliseconds=1)


def commit_opening(store: Store, **gather: int) -> None:
    """Open the first window of the run with other options of its gathering."""
    settings = settings_of()
    options = GatherSettings(poll_interval=settings.gather.poll_interval, **gather)
    opening = WindowOpening(
        run=settings.run, number=1, window_length=settings.window_length, gather=options
    )
    commit_once(store, settings.chain_keys.make_opening_key(1), opening)


def test_an_open_window_whose_quorum_is_more_than_all_workers_has_an_empty_link(store):
    """Its aggregator had four workers. The next window has the options of this one."""
    commit_opening(store, quorum=4)
    with ThreadPoolExecutor(3) as pool:
        models = [pool.submit(take_part, store, uid, 2) for uid in range(3)]
        first, second = merge_windows(
            store, settings_of(), everybody(store), select_weights(model()), until=2
        )
        assert all(one.result() for one in models)
    assert not first.taken
    assert {one.reason for one in first.excluded.values()} == {ExclusionReason.QUORUM}
    assert first.excluded.keys() == second.taken.keys() == {"0", "1", "2"}


def test_an_open_window_that_wants_more_gradients_than_there_are_workers_takes_all(store):
    commit_opening(store, wanted=4)
    with ThreadPoolExecutor(3) as pool:
        models = [pool.submit(take_part, store, uid, 1) for uid in range(3)]
        (link,) = merge_windows(
            store, settings_of(), everybody(store), select_weights(model()), until=1
        )
        assert all(one.result() for one in models)
    assert set(link.taken) == {"0", "1", "2"}


def test_options_that_need_more_gradients_than_there_are_workers_open_no_window(store):
    settings = settings_of(4)
    merged = merge_windows(store, settings, everybody(store), select_weights(model()))
    with pytest.raises(errors.ConfigurationError, match="4 gradients are needed from 3 workers"):
        next(merged)
    assert not exists(store, settings.chain_keys.make_opening_key(1))


def test_a_worker_waits_as_long_as_the_aggregator_says(store, monkeypatch):
    """Its own settings are those of the run's beginning: a rented machine keeps its file."""
    monkeypatch.setattr(chain_follower, "_OPENING_TIMEOUT", timedelta(0))
    mine, settings = model(), settings_of().model_copy(update={"window_length": timedelta(0)})
    participant = Participant(settings, "0", store, store, select_weights(mine))
    with pytest.raises(errors.UnavailableError, match=r"not merged in 0:00:00"):
        participant.receive(mine)
    rules = {"window_length": timedelta(milliseconds=5), "gather": settings.gather}
    commit_once(
        store,
        settings.chain_keys.make_opening_key(1),
        WindowOpening(run=settings.run, number=1, **rules),
    )
    with pytest.raises(errors.UnavailableError, match=r"not merged in 0:00:00\.01"):
        participant.receive(mine)


def test_a_checkpoint_to_begin_with_is_checked_by_its_metadata(tmp_path):
    store = open_store(tmp_path.as_uri())
    with pytest.raises(errors.NotFoundError, match="has no undamaged checkpoint"):
        check_weights(store, "trained")
    with Saver(store, "trained") as saver:
        saver.save({"model": model().state_dict()}, step=3).result()
    assert check_weights(store, "trained", tensors="model.").step == 3
    with pytest.raises(errors.ConfigurationError, match=r"'modle\.': one of its tensors is"):
        check_weights(store, "trained", tensors="modle.")
    with pytest.raises(errors.NotFoundError):
        check_weights(store, "trained", step=4)
    part = next((tmp_path / "trained").rglob("*.safetensors"))
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(errors.NotFoundError, match="no undamaged checkpoint"):
        check_weights(store, "trained")
