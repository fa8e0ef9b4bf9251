"""Gradients of many workers: compressed, check_payload, and merged through a bucket."""

from millrace.gradients.compress import Encoder, Feedback, decode, encode
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
    "Encoder",
    "Expected",
    "Feedback",
    "GradientHeader",
    "Payload",
    "PayloadError",
    "Refusal",
    "Transform",
    "check_payload",
    "decode",
    "encode",
    "payload_bytes",
    "read_payload",
]
