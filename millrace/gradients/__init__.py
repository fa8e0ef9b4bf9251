"""Gradients of many workers: compressed, check_payload, and merged through a bucket."""

from millrace.gradients.compress import Decoder, Encoder, Feedback, decode, encode
from millrace.gradients.merging import Merged, MergeSettings, Rule, Weights, merge, weights_of
from millrace.gradients.payload import (
    Expected,
    Payload,
    PayloadError,
    check_payload,
    payload_bytes,
    read_payload,
)
from millrace.gradients.tensors import CodeError
from millrace.models.gradient import Codec, GradientHeader, Refusal, Transform

__all__ = [
    "CodeError",
    "Codec",
    "Decoder",
    "Encoder",
    "Expected",
    "Feedback",
    "GradientHeader",
    "MergeSettings",
    "Merged",
    "Payload",
    "PayloadError",
    "Refusal",
    "Rule",
    "Transform",
    "Weights",
    "check_payload",
    "decode",
    "encode",
    "merge",
    "payload_bytes",
    "read_payload",
    "weights_of",
]
