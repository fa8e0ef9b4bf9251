"""Merges: what the formulas say, the same in any order and on any number of threads."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import ConfigurationError
from millrace.gradients import (
    CheckedGradient,
    Codec,
    ExpectedGradient,
    GradientEncoder,
    MergeRule,
    MergeSettings,
    Transform,
    check_gradient,
    compute_worker_factors,
    decode,
    encode_gradient,
    merge,
)
from millrace.gradients.codec.merged_chunks import make_dense
from millrace.gradients.codec.transform import backward

SHAPES = {"a": (120, 70), "b": (37,), "c": (5000,)}
Gradients = dict[str, dict[str, torch.Tensor]]


def made(
    gradients: Gradients, codec: Codec, tokens: dict[str, int] | None = None
) -> dict[str, CheckedGradient]:
    """Gradients of workers, as they are after every check."""
    encoder = GradientEncoder(codec, 1)
    found: dict[str, CheckedGradient] = {}
    for uid, tensors in gradients.items():
        bodies = {name: encoder.encode(tensor) for name, tensor in tensors.items()}
        weight = (tokens or {}).get(uid, 0)
        body = encode_gradient(
            bodies, SHAPES, codec, run="r", uid=uid, window=0, base=0, tokens=weight
        )
        expected = ExpectedGradient(run="r", uid=uid, window=0, base=0, codec=codec, shapes=SHAPES)
        found[uid] = check_gradient(body, expected)
    return found


def drawn(workers: int, seed: int = 0) -> Gradients:
    dice = np.random.default_rng(seed)
    return {
        f"w{n:02d}": {
            name: torch.from_numpy(dice.standard_t(3, shape).astype(np.float32))
            for name, shape in SHAPES.items()
        }
        for n in range(workers)
    }


def sent(checked: dict[str, CheckedGradient], codec: Codec, gradients: Gradients) -> np.ndarray:
    """Return the dense gradient of each worker by the decoder: (workers, values)."""
    encoder = GradientEncoder(codec, 1)
    rows = []
    for uid in sorted(checked):
        parts = [
            decode(encoder.encode(gradients[uid][name]), shape, codec).double().flatten()
            for name, shape in SHAPES.items()
        ]
        rows.append(torch.cat(parts).numpy())
    return np.stack(rows)


def whole(
    checked: dict[str, CheckedGradient], how: MergeSettings, codec: Codec, threads: int = 1
) -> np.ndarray:
    parts = []
    for name, runs in merge(checked, how, threads=threads):
        values = torch.from_numpy(make_dense(runs, SHAPES[name]))
        parts.append(backward(values, SHAPES[name], codec.transform).flatten())
    return torch.cat(parts).double().numpy()


def clipped(rows: np.ndarray, faulty: int = 0) -> np.ndarray:
    norms = np.linalg.norm(rows, axis=1)
    found = np.sort(norms)
    limit = max(found[0], found[faulty] / 2) if faulty else found[(len(found) - 1) // 2]
    return rows * np.minimum(1, limit / norms)[:, None]


def centered_clip(rows: np.ndarray, steps: int) -> np.ndarray:
    """The published algorithm, with whole vectors."""
    apart = np.linalg.norm(rows[:, None] - rows[None], axis=2)
    centre = rows[np.argmin(np.median(apart, axis=1))]
    for _ in range(steps):
        far = np.linalg.norm(rows - centre, axis=1)
        radius = np.median(far)
        shrunk = np.array([min(1.0, radius / one) if one > radius else 1.0 for one in far])
        centre = centre + ((rows - centre) * shrunk[:, None]).mean(axis=0)
    return centre


def multi_krum(rows: np.ndarray, faulty: int) -> np.ndarray:
    apart = ((rows[:, None] - rows[None]) ** 2).sum(axis=2)
    np.fill_diagonal(apart, np.inf)
    scores = np.sort(apart, axis=1)[:, : len(rows) - faulty - 2].sum(axis=1)
    return rows[np.argsort(scores)[: len(rows) - faulty]].mean(axis=0)


LINEAR = [MergeRule.MEAN, MergeRule.TOKENS, MergeRule.CENTERED_CLIP, MergeRule.MULTI_KRUM]
CASES = [(rule, Transform.NONE) for rule in (*LINEAR, MergeRule.SENDERS, MergeRule.SIGN)]
CASES += [(rule, Transform.DCT) for rule in LINEAR]  # the others judge coefficients, not values


@pytest.mark.parametrize(("rule", "transform"), CASES)
def test_a_rule_merges_as_its_formula_says(rule, transform):
    codec = Codec(transform=transform, k=300, bits=4)
    gradients = drawn(7)
    tokens = {uid: 100 + n for n, uid in enumerate(gradients)}
    checked = made(gradients, codec, tokens)
    rows = sent(checked, codec, gradients)
    scaled = clipped(rows, faulty=2)
    share = np.array([tokens[uid] for uid in sorted(tokens)]) / sum(tokens.values())
    wanted = {
        MergeRule.MEAN: lambda: scaled.mean(axis=0),
        MergeRule.SENDERS: lambda: scaled.sum(axis=0) / np.maximum((rows != 0).sum(axis=0), 1),
        MergeRule.TOKENS: lambda: share @ scaled,
        MergeRule.SIGN: lambda: np.sign(np.sign(rows).sum(axis=0)),
        MergeRule.CENTERED_CLIP: lambda: centered_clip(scaled, 20),
        MergeRule.MULTI_KRUM: lambda: multi_krum(scaled, 2),
    }[rule]()
    got = whole(checked, MergeSettings(rule=rule, faulty=2), codec)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(
    rule=st.sampled_from(
        [
            MergeRule.MEAN,
            MergeRule.SENDERS,
            MergeRule.SIGN,
            MergeRule.CENTERED_CLIP,
            MergeRule.MULTI_KRUM,
        ]
    ),
    seed=st.integers(0, 10),
    threads=st.integers(1, 4),
)
def test_neither_order_nor_threads_change_a_byte(rule, seed, threads):
    codec = Codec(k=40)
    checked = made(drawn(6, seed), codec)
    shuffled = list(checked.items())
    random.Random(seed).shuffle(shuffled)
    how = MergeSettings(rule=rule, faulty=1)
    one = whole(checked, how, codec)
    other = whole(dict(shuffled), how, codec, threads)
    assert one.tobytes() == other.tobytes()


def test_scores_weigh_workers_beside_an_even_share():
    checked = made(drawn(4), Codec(k=300, bits=4))
    first, second, *others = sorted(checked)
    settings = MergeSettings(rule=MergeRule.SCORES, clip=False, even_share=0.2)
    scores = {first: 0.6, second: 0.2, "gone": 0.2}  # the share of who has sent nothing is divided
    factors = compute_worker_factors(checked, settings, scores=scores)
    expected = {first: 0.05 + 0.6, second: 0.05 + 0.2, **dict.fromkeys(others, 0.05)}
    assert factors.shares.tolist() == pytest.approx([expected[uid] for uid in factors.workers])
    assert factors.sum_factors.tolist() == pytest.approx(factors.shares.tolist())
    for none in (None, {}, {"gone": 1.0}, dict.fromkeys(checked, 0.0)):
        even = compute_worker_factors(checked, settings, scores=none)
        assert even.sum_factors.tolist() == [0.25] * 4


@pytest.mark.parametrize("rule", [MergeRule.MEDIAN, MergeRule.TRIMMED])
def test_coordinates_are_judged_only_where_all_have_sent_them(rule):
    codec = Codec(k=4096, bits=8)  # all of them
    gradients = drawn(5)
    checked = made(gradients, codec)
    rows = clipped(sent(checked, codec, gradients), faulty=1)
    wanted = np.median(rows, axis=0)
    if rule is MergeRule.TRIMMED:
        wanted = np.sort(rows, axis=0)[1:-1].mean(axis=0)
    got = whole(checked, MergeSettings(rule=rule, faulty=1), codec)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigurationError, match="send different indices of a, so that most"):
        whole(made(gradients, Codec(k=64)), MergeSettings(rule=rule), Codec(k=64))


@pytest.mark.parametrize("rule", [MergeRule.CENTERED_CLIP, MergeRule.MULTI_KRUM])
def test_three_liars_of_ten_hardly_move_it_and_the_mean_they_do(rule):
    codec = Codec(k=4096, bits=8)
    dice = np.random.default_rng(1)

    def noise(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.from_numpy(dice.standard_normal(shape).astype(np.float32))

    truth = {name: noise(shape) for name, shape in SHAPES.items()}
    gradients: Gradients = {}
    for n in range(10):
        gradients[f"w{n}"] = {
            name: -1000 * tensor if n < 3 else tensor + 0.1 * noise(SHAPES[name])
            for name, tensor in truth.items()
        }
    checked = made(gradients, codec)
    wanted = torch.cat([tensor.flatten() for tensor in truth.values()]).numpy()

    def off(how: MergeSettings) -> float:
        return float(np.linalg.norm(whole(checked, how, codec) - wanted) / np.linalg.norm(wanted))

    assert off(MergeSettings(rule=rule, faulty=3)) < 0.1
    assert off(MergeSettings(rule=MergeRule.MEAN, clip=False)) > 100


def of_norms(norms: list[float]) -> dict[str, CheckedGradient]:
    """Gradients with about these norms."""
    gradients = drawn(len(norms))
    for tensors, norm in zip(gradients.values(), norms, strict=True):
        whole = sum(float(tensor.square().sum()) for tensor in tensors.values()) ** 0.5
        for tensor in tensors.values():
            tensor.mul_(norm / whole)
    return made(gradients, Codec(k=4096, bits=8))


def scaled_norms(norms: list[float], how: MergeSettings) -> np.ndarray:
    """The norms of such gradients as the rule has them, in the workers' order."""
    checked = of_norms(norms)
    found = compute_worker_factors(checked, how)
    return found.scales * [checked[uid].norm for uid in found.workers]


@pytest.mark.parametrize("rule", [MergeRule.MEAN, MergeRule.SENDERS, MergeRule.CENTERED_CLIP])
@pytest.mark.parametrize("norms", [[1.0, 1e9], [1e9, 1.0]])
def test_of_two_workers_one_with_a_huge_norm_counts_as_the_other(rule, norms):
    assert scaled_norms(norms, MergeSettings(rule=rule)) == pytest.approx([1.0, 1.0], rel=0.02)
    merged = whole(of_norms(norms), MergeSettings(rule=rule), Codec(k=4096, bits=8))
    assert np.linalg.norm(merged) < 2.01


@pytest.mark.parametrize("faulty", [1, 3, 7])
@pytest.mark.parametrize("lie", [0.0, 1e-12, 0.9, 1e9])
def test_norms_of_faulty_workers_set_no_limit_but_between_honest_ones(faulty, lie):
    """Half of the least honest norm is kept, and none counts more than the largest."""
    honest = [1.0 + 0.1 * n for n in range(16 - faulty)]
    found = scaled_norms([lie] * faulty + honest, MergeSettings(faulty=faulty))
    assert (found[faulty:] >= 0.49).all()
    assert (found <= max(honest) * 1.01).all()


def test_seven_of_sixteen_with_huge_norms_do_not_outweigh_nine_of_different_norms():
    """Nine honest gradients less seven of the limit still point forwards."""
    honest = [1.0 + 0.1 * n for n in range(9)]
    found = scaled_norms([1e9] * 7 + honest, MergeSettings(faulty=7))
    assert found[7:].sum() > 1.2 * found[:7].sum()


def test_gradients_without_values_set_no_limit():
    found = scaled_norms([0.0, 0.0, 3.0], MergeSettings())
    assert found == pytest.approx([0.0, 0.0, 3.0], rel=0.02)
    assert scaled_norms([0.0, 0.0], MergeSettings()).tolist() == [0.0, 0.0]


def test_whoever_is_larger_than_the_median_is_scaled_down_to_it():
    gradients = drawn(5)
    gradients["w03"] = {name: 50 * tensor for name, tensor in gradients["w03"].items()}
    checked = made(gradients, Codec())
    found = compute_worker_factors(checked, MergeSettings())
    norms = np.array([checked[uid].norm for uid in found.workers])
    assert (norms * found.scales).max() <= np.median(norms) * (1 + 1e-12)
    assert (found.scales == 1).sum() >= 3
    assert (compute_worker_factors(checked, MergeSettings(clip=False)).scales == 1).all()


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (MergeSettings(rule=MergeRule.MULTI_KRUM, faulty=2), "at least 7, and there are 6"),
        (MergeSettings(rule=MergeRule.TOKENS), "number of tokens"),
    ],
)
def test_a_rule_that_cannot_bear_it_says_so(how, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        compute_worker_factors(made(drawn(6), Codec()), how)


def test_nothing_cannot_be_merged():
    with pytest.raises(ConfigurationError, match="No gradient was gathered"):
        compute_worker_factors({}, MergeSettings())
