"""Tokens of the demo: the bytes of a text, and a token after its end."""

from array import array
from typing import Any

END = 256
"""Token after each text."""


def encode(sample: dict[str, Any]) -> dict[str, Any]:
    """Add the field ``tokens`` to a sample with a text."""
    tokens = array("H", [*sample["txt"].encode(), END])
    return {"txt": sample["txt"], "tokens": tokens.tobytes()}  # little-endian, as the format is
