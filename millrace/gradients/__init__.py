"""Gradients of many workers: compressed, checked, and merged through a bucket."""

from millrace.gradients.codec import Codec, Transform
from millrace.gradients.compress import Feedback, decode, encode
from millrace.gradients.tensors import CodeError

__all__ = ["CodeError", "Codec", "Feedback", "Transform", "decode", "encode"]
