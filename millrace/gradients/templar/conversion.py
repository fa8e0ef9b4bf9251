"""Conversion of a Templar payload into a gradient of a run, which the aggregator can merge.

Both formats have changes to subtract from the weights, so signs are equal. Their chunks differ:
Templar selects values in tiles, and a run without a transform in 4096 consecutive values. So the
payload is made dense, one parameter at a time, and compressed again with the codec of the run.
`ConvertedGradient.lost` says how much this changes. Nothing is lost with 32 bits and a ``k`` of
4096. With a smaller ``k``, vectors lose most of their values, since Templar sends the short tiles
of a vector whole.
"""

import math
from dataclasses import dataclass, field

from millrace import errors
from millrace.gradients.codec.compress import Decoder, GradientEncoder
from millrace.gradients.codec.gradient_object import ExpectedGradient, encode_gradient
from millrace.gradients.codec.shared_indices import Mask
from millrace.gradients.templar.payload import TemplarPayload

_SAMPLES = "sample_digest"
_SAMPLES_MOST = 100  # characters of a digest in the header of a gradient


@dataclass(frozen=True, slots=True)
class ConvertedGradient:
    """Gradient of a run with the values of a payload.

    Attributes:
        body: Bytes of the gradient.
        lost: L2 norm of what the codec of the run changed, as a share of the norm of the payload.
    """

    body: bytes = field(repr=False)
    lost: float


def convert_payload(
    payload: TemplarPayload, target: ExpectedGradient, *, threads: int | None = None
) -> ConvertedGradient:
    """Convert a payload into a gradient of a run. Equal payloads give equal bytes.

    Memory: five dense copies of the largest parameter, and the gradient.

    Args:
        payload: Checked payload.
        target: Run, worker, window, base step, codec and shapes of the gradient.
        threads: Number of threads; by default one per processor.

    Raises:
        ConfigurationError: The model of the run has other parameters than the payload, or buffers.
    """
    codec, mask = target.codec, Mask(target.run, target.window)
    if set(target.shapes) != set(payload.parameters) or any(map(codec.is_buffer, target.shapes)):
        raise errors.ConfigurationError(
            "The model of the run has other parameters than the payload, or has buffers, which "
            "Templar does not send: name the model of the Templar run."
        )
    encoder, decoder = GradientEncoder(codec, threads), Decoder(codec, threads)
    bodies: dict[str, bytes] = {}
    lost = 0.0
    for name, shape in target.shapes.items():
        change = payload.restore_change(name, shape)
        bodies[name] = encoder.encode(change, mask)
        change -= decoder.decode(bodies[name], shape, mask=mask)
        lost += float(change.double().square().sum())
    samples = payload.metadata.get(_SAMPLES)
    body = encode_gradient(
        bodies,
        target.shapes,
        codec,
        run=target.run,
        uid=target.uid,
        window=target.window,
        base=target.base,
        samples=samples[:_SAMPLES_MOST] if isinstance(samples, str) else "",
    )
    return ConvertedGradient(body, math.sqrt(lost) / payload.norm if payload.norm else 0.0)
