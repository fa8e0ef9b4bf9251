"""Payloads of Templar's workers as gradients of a run, merged beside its own."""

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
import torch

from millrace.errors import ConfigurationError
from millrace.gradients import Codec, GatherWindow, Sender, Transform, encode, gather
from millrace.gradients.codec.compress import decode
from millrace.gradients.codec.gradient_object import (
    CheckedGradient,
    ExpectedGradient,
    check_gradient,
    encode_gradient,
)
from millrace.gradients.codec.tensors import fill_dense
from millrace.gradients.merging.links import commit_first_link
from millrace.gradients.state import WeightState
from millrace.gradients.sync.window_merge import ChainStep, merge_window
from millrace.gradients.templar.conversion import convert_payload
from millrace.gradients.templar.payload import ExpectedPayload, TemplarPayload, parse_payload
from millrace.keys.gradients import ChainKeys, GradientKeys
from millrace.schemas.chain import ChainStart, OuterOptimizer
from millrace.schemas.merge import MergeSettings
from millrace.storage import open_store, put
from tests.support.templar_gradients import Written, write_payload

SHAPES = {"a.weight": (192, 256), "b.weight": (130, 63), "norm.weight": (96,)}
EXACT = Codec(bits=32, k=4096)


def make_changes(seed: int = 1) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}


def make_payload(seed: int = 1) -> tuple[TemplarPayload, Written]:
    written = write_payload(make_changes(seed), k=32, sample_digest="d" * 16)
    return parse_payload(written.save(), ExpectedPayload(SHAPES, 32, Transform.NONE)), written


def target(codec: Codec, uid: str = "templar-7") -> ExpectedGradient:
    return ExpectedGradient("run", uid, 1, 0, codec, SHAPES)


def densify(gradient: CheckedGradient, codec: Codec) -> dict[str, np.ndarray]:
    dense: dict[str, np.ndarray] = {}
    for name, shape in SHAPES.items():
        out = np.empty(int(np.prod(shape)), np.float32)
        fill_dense(gradient.tensors[name], codec, out)
        dense[name] = out.reshape(shape)
    return dense


def test_a_codec_of_all_values_with_32_bits_keeps_each_value():
    payload, written = make_payload()
    converted = convert_payload(payload, target(EXACT))
    assert converted.lost == 0
    gradient = check_gradient(converted.body, target(EXACT))
    for name, found in densify(gradient, EXACT).items():
        assert np.array_equal(found, written.decoded[name].numpy())
    assert gradient.norm == pytest.approx(payload.norm, rel=1e-6)
    assert gradient.header.samples == "d" * 16
    assert converted.body == convert_payload(payload, target(EXACT)).body


def test_coefficients_of_equal_tiles_are_kept_within_the_rounding_of_the_transform():
    shapes = {"a.weight": SHAPES["a.weight"]}  # whole tiles, with both divisions
    changes = {name: make_changes()[name] for name in shapes}
    written = write_payload(changes, k=32, dct=True, packed=False, bins=None)
    payload = parse_payload(written.save(), ExpectedPayload(shapes, 32, Transform.DCT))
    codec = Codec(bits=32, k=32, transform=Transform.DCT)
    expected = ExpectedGradient("run", "w", 1, 0, codec, shapes)
    converted = convert_payload(payload, expected)
    assert converted.lost < 1e-6
    assert check_gradient(converted.body, expected).norm == pytest.approx(payload.norm, rel=1e-6)


def test_the_loss_of_a_smaller_codec_is_what_its_decoder_returns():
    payload, written = make_payload()
    codec = Codec(bits=2, k=16)
    converted = convert_payload(payload, target(codec))
    errors = [
        decode(encode(change, codec), SHAPES[name], codec) - change
        for name, change in written.decoded.items()
    ]
    lost = torch.cat([one.flatten() for one in errors]).norm() / payload.norm
    assert converted.lost == pytest.approx(float(lost), rel=1e-4)
    assert 0.05 < converted.lost < 1
    check_gradient(converted.body, target(codec))


def test_a_change_of_zeros_loses_nothing():
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    body = write_payload(zeros, k=32).save()
    payload = parse_payload(body, ExpectedPayload(SHAPES, 32, Transform.NONE))
    assert convert_payload(payload, target(Codec())).lost == 0


def test_another_model_and_buffers_are_refused():
    payload, _ = make_payload()
    some = ExpectedGradient("run", "w", 1, 0, EXACT, {"a.weight": (192, 256)})
    with pytest.raises(ConfigurationError, match="other parameters"):
        convert_payload(payload, some)
    with pytest.raises(ConfigurationError, match="has buffers"):
        convert_payload(payload, target(Codec(buffers=("norm.weight",))))


def test_a_converted_gradient_is_gathered_and_merged_beside_ours():
    store, keys = open_store("memory://beside"), GradientKeys("run", "1")
    payload, written = make_payload()
    ours = make_changes(seed=2)
    bodies = {name: encode(change, EXACT) for name, change in ours.items()}
    put(store, keys.make_gradient_key("templar-7", 1), convert_payload(payload, target(EXACT)).body)
    put(
        store,
        keys.make_gradient_key("ours", 1),
        encode_gradient(bodies, SHAPES, EXACT, run="run", uid="ours", window=1, base=0),
    )
    now = datetime.now(UTC)
    window = GatherWindow(
        keys, 1, 0, EXACT, SHAPES, now - timedelta(minutes=1), now + timedelta(minutes=1)
    )
    gathered = gather(window, [Sender("ours", store), Sender("templar-7", store)])
    assert set(gathered.taken) == {"ours", "templar-7"}
    state = WeightState({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
    start = ChainStart(run="run", job="run/job", step=0, root="blake3:" + "0" * 64,
                       state=state.digest())  # fmt: skip
    commit_first_link(store, ChainKeys("run", "1"), start)
    step = ChainStep(start, 1, OuterOptimizer(lr=1.0), MergeSettings(clip=False))
    link = merge_window(store, window, gathered, step, state)
    assert set(link.taken) == {"ours", "templar-7"}
    for name, weight in state.weights.items():
        sent = decode(bodies[name], SHAPES[name], EXACT)
        expected = -(sent + written.decoded[name]) / 2
        assert np.allclose(weight, expected.numpy(), rtol=1e-5, atol=1e-6)
        assert weight.any()
