"""The parts of a participant, each alone: its model, its compression, and its weights."""

import logging
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.numpy import load as unpack

from millrace.errors import ConfigurationError, UnavailableError
from millrace.gradients import (
    Codec,
    Decoder,
    GatherSettings,
    Participant,
    RunSettings,
    Sender,
    WeightState,
    begin_run,
    copy_state,
    merge_windows,
    select_weights,
)
from millrace.gradients.backends.rank_group import RankGroup
from millrace.gradients.backends.ranks import RankedWeights
from millrace.gradients.progress_events import LinkApplied
from millrace.gradients.sync import chain_follower
from millrace.gradients.sync.chain_follower import ChainFollower
from millrace.gradients.sync.change_compressor import ChangeCompressor
from millrace.gradients.sync.model_tensors import ModelTensors
from millrace.progress import Event
from millrace.records import commit_once
from millrace.schemas.window import WindowOpening, WindowOptions
from millrace.storage import Store, open_store

RANKS = RankGroup()
SETTINGS = RunSettings(
    run="runs/one",
    codec=Codec(k=4096, bits=32),
    gather=GatherSettings(poll_interval=timedelta(milliseconds=10)),
    window_length=timedelta(minutes=1),
    steps=2,
)


def model_of(seed: int = 1) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))


def weights_of(state: WeightState) -> RankedWeights:
    shapes = {name: weight.shape for name, weight in state.weights.items()}
    return RankedWeights(shapes, RANKS, state, threads=1)


def tensors_of(weights: RankedWeights) -> ModelTensors:
    return ModelTensors(weights, RANKS, SETTINGS.codec)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = open_store(tmp_path.as_uri())
    begin_run(made, SETTINGS.chain_keys, select_weights(model_of()), step=10)
    return made


# -- the model


def test_loaded_weights_are_the_models_own():
    model = model_of(2)
    weights = weights_of(select_weights(model_of(1)))
    tensors = tensors_of(weights)
    assert list(tensors.select(model)) == sorted(weights.shapes)
    tensors.load(model)
    assert select_weights(model).digest() == weights.digest()


@pytest.mark.parametrize(
    "other", [torch.nn.Linear(3, 4), torch.nn.Sequential(torch.nn.Linear(3, 5))]
)
def test_a_model_with_other_tensors_is_refused(other):
    tensors = tensors_of(weights_of(select_weights(model_of())))
    with pytest.raises(ConfigurationError, match=r"The model has no 0\.bias of the shape \[4\]"):
        tensors.select(other)


def test_buffers_that_the_run_lacks_are_named_once(caplog):
    tensors = tensors_of(weights_of(select_weights(model_of(), buffers=())))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            tensors.select(model_of())
    assert [record.getMessage().count("1.running_mean") for record in caplog.records] == [1]


# -- the compression


def compressor_of(weights: RankedWeights) -> ChangeCompressor:
    return ChangeCompressor(SETTINGS, weights, RANKS, tensors_of(weights), threads=1)


def test_the_change_of_a_weight_and_the_values_of_a_buffer_are_packed():
    before, model = model_of(), model_of()
    with torch.no_grad():
        model[0].bias += 0.5
        model[1].running_mean += 2.0
    packed = unpack(compressor_of(weights_of(select_weights(before))).compress(model, 1))
    decoder = Decoder(SETTINGS.codec, 1)
    bias = decoder.decode(packed["0.bias"].tobytes(), (4,))
    assert torch.allclose(bias, torch.full((4,), -0.5))
    mean = Decoder(SETTINGS.codec.select_for_tensor("1.running_mean"), 1).decode(
        packed["1.running_mean"].tobytes(), (4,)
    )
    assert torch.equal(mean, torch.full((4,), 2.0))


@pytest.mark.parametrize("name", ["0.weight", "1.running_var"])
def test_values_that_are_not_finite_are_refused_and_leave_the_residuals(name):
    weights, model = weights_of(select_weights(model_of())), model_of()
    compressor = compressor_of(weights)
    with torch.no_grad():
        model.state_dict()[name].fill_(float("nan"))
    with (
        pytest.raises(ConfigurationError, match="not finite"),
        compressor.feedback.restore_on_error(),
    ):
        compressor.compress(model, 1)
    assert compressor.feedback.state_dict()["kept"] == {}


def test_an_infinite_value_that_stays_equal_has_no_change():
    """An attention mask, which is saved with the model."""
    before = model_of()
    before.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
    weights = weights_of(copy_state(before.state_dict()))
    packed = unpack(compressor_of(weights).compress(before, 1))
    change = Decoder(SETTINGS.codec, 1).decode(packed["mask"].tobytes(), (2, 2))
    assert torch.equal(change, torch.zeros(2, 2))
    with torch.no_grad():
        before.mask[0, 1] = 1.0
    with pytest.raises(ConfigurationError, match="The change of mask has values that are not fin"):
        compressor_of(weights).compress(before, 1)


@pytest.mark.parametrize(
    ("name", "value"), [("0.weight", "nan"), ("1.running_var", "nan"), ("1.running_mean", "inf")]
)
def test_a_run_begins_with_no_weights_that_cannot_be_sent(tmp_path, name, value):
    state = select_weights(model_of())
    state.weights[name].fill(float(value))
    with pytest.raises(ConfigurationError, match=f"The tensor {name} has values that are not"):
        begin_run(open_store(tmp_path.as_uri()), SETTINGS.chain_keys, state)
    assert list(tmp_path.iterdir()) == []


# -- the weights


def follower_of(store: Store, heard: list[Event] | None = None) -> ChainFollower:
    return ChainFollower(
        SETTINGS,
        store,
        weights_of(select_weights(model_of())),
        RANKS,
        after=0,
        progress=(heard if heard is not None else []).append,
    )


def send_and_merge(store: Store, count: int) -> list[str]:
    """Merge windows with one worker, and return the digests of the weights after each."""
    model = model_of()
    participant = Participant(SETTINGS, "a", store, store, select_weights(model))
    participant.submit(model)
    merged = merge_windows(
        store, SETTINGS, [Sender("a", store)], select_weights(model_of()), until=count
    )
    digests: list[str] = []
    for link in merged:
        digests.append(link.state)
        with torch.no_grad():
            model[0].bias += 1.0
        participant.catch_up()
        participant.submit(model)
    return digests


def test_new_links_are_applied_in_order_and_yielded_after_it(store):
    heard: list[Event] = []
    follower = follower_of(store, heard)
    assert (follower.window, follower.link.step) == (0, 10)
    assert list(follower.iterate_new_links()) == []
    digests = send_and_merge(store, 2)
    found = [(link.window, follower.window, link.state) for link in follower.iterate_new_links()]
    assert found == [(1, 1, digests[0]), (2, 2, digests[1])]
    assert follower.link.step == 14
    found = [event for event in heard if isinstance(event, LinkApplied)]
    assert found == heard
    assert [(event.window, event.step) for event in found] == [(1, 12), (2, 14)]


def test_the_next_link_is_waited_for_and_not_applied(store):
    follower = follower_of(store)
    with pytest.raises(
        UnavailableError, match=r"Window 1 of runs/one was not merged in 0:00:00\.05"
    ):
        follower.wait_for_next_link(timedelta(milliseconds=50))
    send_and_merge(store, 1)
    follower.wait_for_next_link(timedelta(0))
    assert follower.window == 0


def test_the_wait_for_a_window_begins_with_its_opening(store, monkeypatch):
    """The leader of a campaign opens the first window when the quorum has joined."""
    follower, now = follower_of(store), [0.0]
    length = SETTINGS.window_length.total_seconds()
    opened_at = 20 * length

    def sleep(_: float) -> None:
        now[0] += length / 2
        if now[0] == opened_at:
            opening = WindowOpening(run=SETTINGS.name, number=1, **options)
            commit_once(store, SETTINGS.chain_keys.make_opening_key(1), opening)

    options = {name: getattr(SETTINGS, name) for name in WindowOptions.model_fields}
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(chain_follower, "time", clock)
    with pytest.raises(UnavailableError, match="Window 1 of runs/one was not merged"):
        follower.wait_for_next_link()
    assert opened_at + 2 * length < now[0] <= opened_at + 3 * length


def test_a_window_that_never_opens_is_not_waited_for_longer(store, monkeypatch):
    follower, now = follower_of(store), [0.0]

    def sleep(_: float) -> None:
        now[0] += 600

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(chain_follower, "time", clock)
    with pytest.raises(UnavailableError, match="was not merged in 2:00:00"):
        follower.wait_for_next_link()
