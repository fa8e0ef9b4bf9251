"""Places that all workers of a window send: known to all, sent by none, all of them in turn."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import ConfigurationError
from millrace.gradients import (
    CheckedGradient,
    Codec,
    CodeError,
    ErrorFeedback,
    ExpectedGradient,
    GradientEncoder,
    Mask,
    MergeRule,
    MergeSettings,
    Support,
    Transform,
    check_gradient,
    compute_worker_factors,
    decode,
    encode_gradient,
    merge,
)
from millrace.gradients.codec.compress import Decoder
from millrace.gradients.codec.merged_chunks import make_dense
from millrace.gradients.codec.tensors import (
    compute_largest_size,
    decode_values,
    pack_tensor,
    unpack_tensor,
)
from millrace.schemas.gradient import CHUNK_SIZE
from tests.support.examples import scale_examples
from tests.unit.gradients.test_codec import BITS, drawn, shapes

SHARED = Codec(support=Support.SHARED, k=256, bits=8)
codecs = st.builds(
    Codec,
    support=st.just(Support.SHARED),
    transform=st.sampled_from(Transform),
    k=st.integers(1, CHUNK_SIZE),
    bits=st.sampled_from(BITS),
)


def test_the_places_of_a_window_are_the_same_on_every_machine():
    assert Mask("runs/one", 3).select_indices(20, 4).tolist() == [3, 8, 10, 15]
    assert Mask("runs/one", 4).select_indices(20, 4).tolist() == [0, 9, 13, 19]
    assert Mask("runs/two", 3).select_indices(20, 4).tolist() == [8, 13, 14, 18]


@given(size=st.integers(1, CHUNK_SIZE), data=st.data())
def test_every_place_has_its_turn(size, data):
    k = data.draw(st.integers(1, size))
    windows = -(-size // k)
    cycle = data.draw(st.integers(0, 5))
    sent = [
        Mask("run", window).select_indices(size, k)
        for window in range(cycle * windows, cycle * windows + windows)
    ]
    assert all(len(indices) == k and (np.diff(indices.astype(int)) > 0).all() for indices in sent)
    assert set(np.concatenate(sent).tolist()) == set(range(size))


@settings(max_examples=scale_examples(80), deadline=None)
@given(shape=shapes, codec=codecs, seed=st.integers(0, 9), window=st.integers(0, 99))
def test_what_is_decoded_is_what_stood_at_the_places(shape, codec, seed, window):
    tensor, mask = drawn(shape, seed), Mask("run", window)
    body = GradientEncoder(codec, 1).encode(tensor, mask)
    assert len(body) <= compute_largest_size(shape, codec)
    runs = unpack_tensor(body, shape, codec, mask=mask)
    assert pack_tensor(runs, codec) == body
    assert all(
        (run.indices == mask.select_indices(run.chunks.size, run.chunks.k)).all() for run in runs
    )
    if codec.transform is Transform.NONE and codec.bits == 16:
        got = Decoder(codec, 1).decode(body, shape, mask=mask)
        at = got != 0
        torch.testing.assert_close(got[at], tensor[at], rtol=1e-3, atol=1e-6)
    with pytest.raises(CodeError):
        unpack_tensor(body[:-1], shape, codec, mask=mask)


def test_no_place_is_sent():
    tensor = drawn((64, 64))
    codec = Codec(support=Support.SHARED, k=64)
    assert len(GradientEncoder(codec).encode(tensor, Mask("run", 0))) == 64 * 2 // 8 + 3
    assert tensor.numel() * 4 / 19 > 800


def test_nothing_is_lost_only_late():
    change, codec = drawn((90, 70)), Codec(support=Support.SHARED, k=512, bits=16)
    feedback, got = ErrorFeedback(codec), torch.zeros(90, 70)
    for window in range(CHUNK_SIZE // 512 + 1):
        mask = Mask("run", window)
        body = feedback.compress("w", change * (window == 0), mask)
        got += Decoder(codec).decode(body, (90, 70), mask=mask)
    torch.testing.assert_close(got, change, rtol=2e-3, atol=1e-5)


def test_what_nobody_took_is_kept_also_by_whoever_starts_again():
    change, mask = drawn((90, 70)), Mask("run", 3)
    feedback, again = ErrorFeedback(SHARED), ErrorFeedback(SHARED)
    feedback.compress("w", change, mask)
    again.load_state_dict(feedback.state_dict())
    again.restore_sent()
    torch.testing.assert_close(again.read_residual("w"), change)


def test_without_its_window_it_is_refused():
    with pytest.raises(ConfigurationError, match="give its Mask"):
        GradientEncoder(SHARED).encode(drawn((64, 64)))
    with pytest.raises(ConfigurationError, match="give its Mask"):
        decode(b"", (64, 64), SHARED)
    tensor = drawn((64, 64))
    hidden = next(
        n for n in range(CHUNK_SIZE) if n not in set(Mask("run", 0).select_indices(CHUNK_SIZE, 256))
    )
    tensor.view(-1)[hidden] = float("nan")  # where nothing is sent
    with pytest.raises(ConfigurationError, match="not finite"):
        GradientEncoder(SHARED).encode(tensor, Mask("run", 0))


SHAPES = {"bias": (30,), "weight": (100, 90)}


def check_all(gradients: list[dict[str, torch.Tensor]]) -> dict[str, CheckedGradient]:
    found: dict[str, CheckedGradient] = {}
    for number, gradient in enumerate(gradients):
        encoder, mask = GradientEncoder(SHARED, 1), Mask("runs/one", 7)
        bodies = {name: encoder.encode(tensor, mask) for name, tensor in gradient.items()}
        said = {"run": "runs/one", "uid": f"w{number}", "window": 7, "base": 1}
        body = encode_gradient(bodies, SHAPES, SHARED, **said)  # pyright: ignore[reportArgumentType]
        expected = ExpectedGradient("runs/one", f"w{number}", 7, 1, SHARED, SHAPES)
        found[f"w{number}"] = check_gradient(body, expected)
    return found


@pytest.mark.parametrize("rule", [MergeRule.MEDIAN, MergeRule.TRIMMED])
def test_three_liars_of_nine_do_not_move_what_is_judged_by_place(rule):
    truth = {name: drawn(shape, 1) for name, shape in SHAPES.items()}
    honest = [
        {name: each + 0.1 * drawn(SHAPES[name], 10 + n) for name, each in truth.items()}
        for n in range(6)
    ]
    liars = [{name: -1000 * each for name, each in truth.items()} for _ in range(3)]
    sent = check_all(honest + liars)
    how = MergeSettings(rule=rule, faulty=3)
    merged = dict(merge(sent, how, compute_worker_factors(sent, how)))
    for name, shape in SHAPES.items():
        got = make_dense(merged[name], shape).reshape(shape)
        at = got != 0
        (run, *_) = sent["w0"].tensors[name]
        assert at.sum() >= 0.9 * decode_values(run, SHARED).size
        true = truth[name].numpy()[at]
        assert np.linalg.norm(got[at] - true) < 0.3 * np.linalg.norm(true)
