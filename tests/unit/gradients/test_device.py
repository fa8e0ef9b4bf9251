"""A GPU selects the same values as the processor.

Both run here on the processor; on a GPU too, where there is one.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import ConfigurationError
from millrace.gradients import Codec, Decoder, GradientEncoder, Mask, Support, Transform
from millrace.gradients.codec import device as there
from millrace.gradients.codec.device import fill_dense_on_device, select_on_device
from millrace.gradients.codec.tensors import fill_dense, pack_tensor, select_values
from millrace.gradients.codec.transform import forward
from tests.support.examples import scale_examples
from tests.unit.gradients.test_codec import SHAPES, codecs, drawn

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SHARED = Mask("run", 3)


@settings(max_examples=scale_examples(150), deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    codec=codecs,
    kind=st.sampled_from(["gauss", "few", "tiny", "wide"]),
    support=st.sampled_from(Support),
)
def test_the_same_is_chosen_and_put_back(shape, codec, kind, support):
    codec = codec.model_copy(update={"support": support})
    values = forward(drawn(shape, 3, kind), codec.transform)
    here = select_values(values.numpy(), shape, codec, mask=SHARED)
    expected = np.empty(values.numel(), np.float32)
    fill_dense(here, codec, expected)
    for device in DEVICES:
        found = select_on_device(values.to(device), shape, codec, mask=SHARED)
        assert pack_tensor(found, codec) == pack_tensor(here, codec)
        filled = torch.full((values.numel(),), 9.0, device=device)
        fill_dense_on_device(found, codec, filled)
        assert filled.cpu().numpy().tobytes() == expected.tobytes()


def test_many_chunks_are_chosen_some_at_a_time(monkeypatch):
    values, codec = drawn((100, 4096)).flatten(), Codec()
    expected = pack_tensor(select_values(values.numpy(), (100, 4096), codec), codec)
    monkeypatch.setattr(there, "_AT_ONCE", 7 * 4096)
    assert pack_tensor(select_on_device(values, (100, 4096), codec), codec) == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_there_too(value):
    with pytest.raises(ConfigurationError, match="not finite"):
        select_on_device(torch.tensor([1.0, value]), (2,), Codec())


@pytest.mark.parametrize("transform", Transform)
@pytest.mark.parametrize("device", DEVICES)
def test_a_tensor_is_encoded_and_decoded_where_it_is(device, transform):
    codec, shape = Codec(k=256, bits=4, transform=transform), (130, 70)
    tensor = drawn(shape)
    body = GradientEncoder(codec).encode(tensor)
    expected = Decoder(codec).decode(body, shape)
    out = Decoder(codec).decode(body, shape, out=torch.empty(shape, device=device))
    assert out.device.type == device
    # What two kinds of device may differ by, where there is a transform.
    assert torch.allclose(out.cpu(), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    made = GradientEncoder(codec).encode(tensor.to(device))
    if transform is Transform.NONE or device == "cpu":
        assert made == body
    again = Decoder(codec).decode(made, shape)
    assert float((again - expected).norm() / expected.norm()) < 1e-3
