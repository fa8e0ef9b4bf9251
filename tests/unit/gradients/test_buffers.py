"""Buffers of a model, such as BatchNorm's: sent whole, averaged, and the same for all who join."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from millrace import errors
from millrace.checkpoints import Saver, load
from millrace.gradients import (
    AggregatorSettings,
    CheckedGradient,
    Codec,
    ExclusionReason,
    ExpectedGradient,
    GatherSettings,
    GradientEncoder,
    GradientError,
    InitialWeights,
    Mask,
    MergeRule,
    MergeSettings,
    OuterKind,
    OuterOptimizer,
    Participant,
    RunSettings,
    aggregate_run,
    begin_run,
    check_gradient,
    compute_worker_factors,
    encode_gradient,
    ensure_run_begun,
    merge,
    select_weights,
)
from millrace.gradients.codec.merged_chunks import make_dense
from millrace.gradients.merging.merge import MergeRequest, merge_tensor
from millrace.storage import Store, StoreSpec, open_store
from tests.unit.gradients.test_codec import drawn

MEAN, VAR, COUNT = "1.running_mean", "1.running_var", "1.num_batches_tracked"
BUFFERS = (MEAN, VAR, COUNT)
SETTINGS = RunSettings(
    run="runs/one",
    codec=Codec(k=512, bits=4),
    outer=OuterOptimizer(kind=OuterKind.NESTEROV, lr=0.7),
    gather=GatherSettings(poll_interval=timedelta(milliseconds=20), quorum=2, wanted=2),
    window_length=timedelta(minutes=1),
    steps=2,
)
UIDS = ("a", "b")


def model() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
    )


def train(one: torch.nn.Module, seed: int, steps: int = 2) -> None:
    dice = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    for _ in range(steps):
        x = torch.randn(32, 8, generator=dice) * (1 + seed) + seed
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(one(x), x[:, :3]).backward()
        optimizer.step()


def buffers_of(one: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone().float() for name, buffer in one.named_buffers()}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path.as_uri())


def aggregator(store: Store, **changes: object) -> AggregatorSettings:
    fields = {
        "run": SETTINGS,
        "store": StoreSpec(url=store.url),
        "workers": UIDS,
        "initial_weights": InitialWeights(job="trained", tensors="model."),
        "max_windows": 1,
        **changes,
    }
    return AggregatorSettings.model_validate(fields)


def begun(store: Store, **changes: object) -> AggregatorSettings:
    """A run that has begun with a model's state dict, as a person saves it."""
    with Saver(store, "trained") as saver:
        saver.save({"model": model().state_dict()}, step=0).result()
    settings = aggregator(store, **changes)
    ensure_run_begun(settings)
    return settings


def submitted(store: Store, uid: str, seed: int) -> tuple[Participant, torch.nn.Module]:
    mine = model()
    participant = Participant.join(SETTINGS, uid, store, store)
    participant.load(mine)
    train(mine, seed)
    participant.submit(mine)
    return participant, mine


def test_the_buffers_of_a_batchnorm_reach_late_joiners_and_the_checkpoint(store):
    settings = begun(store)
    workers = [submitted(store, uid, seed) for seed, uid in enumerate(UIDS)]
    sent = [buffers_of(mine) for _, mine in workers]
    assert not torch.equal(sent[0][MEAN], sent[1][MEAN])
    (link,) = aggregate_run(settings)
    assert set(link.taken) == set(UIDS)

    late = model()
    Participant.join(SETTINGS, "late", store, store).load(late)
    merged = buffers_of(late)
    for name in BUFFERS:
        torch.testing.assert_close(merged[name], (sent[0][name] + sent[1][name]) / 2)
    assert merged[COUNT] == 2
    assert (merged[VAR] >= 0).all()
    for participant, mine in workers:
        participant.receive(mine, timeout=timedelta(0))
        for name, value in buffers_of(mine).items():
            assert torch.equal(value, merged[name])
        for name, value in mine.state_dict().items():
            assert torch.equal(value, late.state_dict()[name])
    saved = load(store, SETTINGS.chain_keys.job).state["weights"]
    for name in BUFFERS:
        assert torch.equal(saved[name], merged[name])


def test_buffers_are_averaged_anew_in_each_window(store):
    """Neither momentum, nor a learning rate, nor what was not sent before has a part in it."""
    settings = begun(store, run=SETTINGS, max_windows=2)
    merged = aggregate_run(settings)
    workers = [submitted(store, uid, seed) for seed, uid in enumerate(UIDS)]
    next(merged)
    for number, (participant, mine) in enumerate(workers):
        participant.receive(mine, timeout=timedelta(0))
        train(mine, 5 + number)
        participant.submit(mine)
    sent = [buffers_of(mine) for _, mine in workers]
    next(merged)
    for participant, mine in workers:
        participant.receive(mine, timeout=timedelta(0))
        for name, value in buffers_of(mine).items():
            torch.testing.assert_close(value, (sent[0][name] + sent[1][name]) / 2)


def test_a_run_that_begins_with_a_model_has_its_buffers():
    state = select_weights(model())
    assert set(BUFFERS) <= set(state.weights)
    assert state.weights[COUNT].shape == ()


def test_other_buffers_are_averaged_if_the_settings_name_them(store):
    class Averaged(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(5))
            self.register_buffer("scale", torch.zeros(3))

    codec = Codec(buffers=("scale",))
    settings = SETTINGS.model_copy(
        update={"codec": codec, "gather": GatherSettings(poll_interval=timedelta(milliseconds=20))}
    )
    begin_run(store, settings.chain_keys, select_weights(Averaged(), buffers=("scale",)))
    mine = Averaged()
    participant = Participant.join(settings, "a", store, store)
    participant.load(mine)
    mine.scale += torch.tensor([1.0, -2.0, 1e-30])
    participant.submit(mine)
    list(aggregate_run(aggregator(store, run=settings, workers=("a",), initial_weights=None)))
    mine.scale.zero_()
    participant.receive(mine, timeout=timedelta(0))
    assert mine.scale.tolist() == torch.tensor([1.0, -2.0, 1e-30]).tolist()


def test_a_model_whose_buffers_are_not_finite_is_not_sent(store):
    begun(store)
    mine = model()
    participant = Participant.join(SETTINGS, "a", store, store)
    participant.load(mine)
    mine[1].running_mean[0] = float("inf")
    with pytest.raises(errors.ConfigurationError, match=r"The buffer 1\.running_mean has values"):
        participant.submit(mine)


def test_a_run_without_a_models_buffers_is_named_in_the_log(store, caplog):
    mine = model()
    trained = {name: weight.detach().numpy() for name, weight in mine.named_parameters()}
    begin_run(store, SETTINGS.chain_keys, type(select_weights(mine))(trained))
    participant = Participant.join(SETTINGS, "a", store, store)
    participant.load(mine)
    participant.load(mine)
    said = [one.getMessage() for one in caplog.records if "The run has no" in one.getMessage()]
    assert len(said) == 1
    assert all(name in said[0] for name in BUFFERS)


# -- what workers send that is wrong

SHAPES = {"1.weight": (40, 30), MEAN: (40,), VAR: (40,), COUNT: ()}
CODEC = SETTINGS.codec
MASK = Mask("runs/one", 1)


def expected(uid: str) -> ExpectedGradient:
    return ExpectedGradient(run="runs/one", uid=uid, window=1, base=0, codec=CODEC, shapes=SHAPES)


def bodies(seed: int, values: Mapping[str, torch.Tensor] | None = None) -> dict[str, bytes]:
    sent = {
        "1.weight": drawn((40, 30), seed),
        MEAN: drawn((40,), seed),
        VAR: drawn((40,), seed).abs(),
        COUNT: torch.tensor(float(seed)),
        **(values or {}),
    }
    return {
        name: GradientEncoder(CODEC.select_for_tensor(name), 1).encode(one, MASK)
        for name, one in sent.items()
    }


def made(uid: str, content: Mapping[str, bytes]) -> bytes:
    shapes = {name: SHAPES[name] for name in content}
    return encode_gradient(content, shapes, CODEC, run="runs/one", uid=uid, window=1, base=0)


def gradient(seed: int, values: Mapping[str, torch.Tensor] | None = None) -> CheckedGradient:
    return check_gradient(made(str(seed), bodies(seed, values)), expected(str(seed)))


def float32(*values: float) -> Callable[[dict[str, bytes]], None]:
    """Replace the first variances."""
    head = np.array(values, "<f4").tobytes()
    return lambda content: content.update({VAR: head + content[VAR][len(head) :]})


def single(value: float) -> bytes:
    return np.array(value, "<f4").tobytes()


HOSTILE = {
    "nan": (ExclusionReason.CODES, float32(float("nan"))),
    "infinite": (ExclusionReason.CODES, float32(float("inf"))),
    "negative count": (
        ExclusionReason.CODES,
        lambda content: content.update({COUNT: single(-1.0)}),
    ),
    "huge count": (ExclusionReason.CODES, lambda content: content.update({COUNT: single(1e30)})),
    "negative variance": (ExclusionReason.CODES, float32(-1e-6)),
    "too few values": (
        ExclusionReason.CODES,
        lambda content: content.update({VAR: content[VAR][:-4]}),
    ),
    "half a value": (
        ExclusionReason.CODES,
        lambda content: content.update({VAR: content[VAR][:-2]}),
    ),
    "too many values": (
        ExclusionReason.CODES,
        lambda content: content.update({VAR: content[VAR] * 2}),
    ),
    "sparse": (
        ExclusionReason.CODES,
        lambda content: content.update({VAR: content["1.weight"][:160]}),
    ),
    "missing": (ExclusionReason.MODEL, lambda content: content.pop(VAR)),
    "none": (ExclusionReason.CODES, lambda content: content.update({COUNT: b""})),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_buffers_that_are_wrong_cost_their_sender_only(what):
    reason, change = HOSTILE[what]
    content = bodies(7)
    change(content)
    with pytest.raises(GradientError) as caught:
        check_gradient(made("7", content), expected("7"))
    assert caught.value.reason is reason
    assert len(str(caught.value)) < 200


def test_a_window_with_a_wrong_buffer_is_merged_without_its_sender(store):
    few = GatherSettings(poll_interval=timedelta(milliseconds=20), quorum=0)
    short = {"window_length": timedelta(seconds=1), "gather": few}
    settings = begun(store, run=SETTINGS.model_copy(update=short))
    _, mine = submitted(store, "a", 1)
    liar = model()
    participant = Participant.join(SETTINGS, "b", store, store)
    participant.load(liar)
    liar[1].running_var[3] = -1
    participant.submit(liar)
    (link,) = aggregate_run(settings)
    assert (set(link.taken), set(link.excluded)) == ({"a"}, {"b"})
    assert link.excluded["b"].reason is ExclusionReason.CODES
    assert "1.running_var" in link.excluded["b"].sentence
    late = model()
    Participant.join(SETTINGS, "late", store, store).load(late)
    for name in BUFFERS:
        assert torch.equal(buffers_of(late)[name], buffers_of(mine)[name])


Arrays = dict[str, np.ndarray]


def merged_of(gradients: Mapping[str, CheckedGradient], rule: MergeRule, faulty: int = 0) -> Arrays:
    settings = MergeSettings(rule=rule, faulty=faulty, clip=False)
    return {name: make_dense(runs, SHAPES[name]) for name, runs in merge(gradients, settings)}


RULES = [
    MergeRule.MEAN,
    MergeRule.SENDERS,
    MergeRule.SIGN,
    MergeRule.CENTERED_CLIP,
    MergeRule.MULTI_KRUM,
]


@pytest.mark.parametrize("rule", RULES)
def test_a_worker_moves_the_buffers_no_further_than_others_differ(rule):
    """A worker that sends a right gradient, and buffers that no data has."""
    honest = {str(seed): gradient(seed) for seed in range(4)}
    huge = {MEAN: torch.full((40,), 3e38), VAR: torch.full((40,), 3e38)}
    lying = {**honest, "4": gradient(4, {**huge, COUNT: torch.tensor(1e15)})}
    found, right = merged_of(lying, rule, faulty=1), merged_of(honest, rule)
    for name in BUFFERS:
        assert np.abs(found[name] - right[name]).max() < 10
        assert np.isfinite(found[name]).all()
    assert (found[VAR] >= 0).all()


@pytest.mark.parametrize("rule", [MergeRule.MEDIAN, MergeRule.TRIMMED])
def test_rules_that_judge_each_value_judge_those_of_buffers(rule):
    values = [1.0, 2.0, 4.0, 6.0, 3e38]
    sent = {
        str(seed): gradient(seed, {MEAN: torch.full((40,), value)})
        for seed, value in enumerate(values)
    }
    settings = MergeSettings(rule=rule, faulty=1)
    gradients = {uid: one.tensors for uid, one in sent.items()}
    factors = compute_worker_factors(sent, settings)
    request = MergeRequest(CODEC, settings, factors)
    found = make_dense(merge_tensor(MEAN, gradients, request), (40,))
    assert found.tolist() == [4.0] * 40


def test_buffers_do_not_change_how_gradients_count():
    """Their values may be large, and are no part of norms and distances."""
    plain = {str(seed): gradient(seed) for seed in range(5)}
    large = {
        str(seed): gradient(seed, {VAR: torch.full((40,), 1e6 * (seed + 1))}) for seed in range(5)
    }
    for rule in RULES:
        one, other = (merged_of(each, rule, faulty=1)["1.weight"] for each in (plain, large))
        assert one.tobytes() == other.tobytes()
    assert [one.norm for one in plain.values()] == [one.norm for one in large.values()]


def test_merged_buffers_are_the_same_bytes_in_any_order_and_on_any_number_of_threads():
    gradients = {str(seed): gradient(seed) for seed in range(5)}
    turned = dict(reversed(gradients.items()))
    for rule in RULES:
        settings = MergeSettings(rule=rule, faulty=1)
        made = {
            tuple(
                (name, group.values.tobytes())
                for name, groups in merge(some, settings, threads=threads)
                for group in groups
            )
            for some in (gradients, turned)
            for threads in (1, 3)
        }
        assert len(made) == 1
