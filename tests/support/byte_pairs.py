"""Byte-level tokenizers with the rules of known vocabularies, and texts of Python's sources."""

import json
import sysconfig
from functools import lru_cache
from pathlib import Path
from typing import Any

from millrace.testing.byte_level import train_byte_level


@lru_cache
def read_sources(files: int = 60) -> tuple[str, ...]:
    """Return the texts of some modules of the standard library, the same on each machine."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return tuple(path.read_text() for path in paths[:files])


@lru_cache
def train(vocabulary: int = 3000) -> str:
    """Return the ``tokenizer.json`` of a vocabulary that was trained on the standard library."""
    return train_byte_level(read_sources(25), vocabulary)


def make_tokenizer(
    pattern: str | None = None, *, vocabulary: int = 3000, **model: Any
) -> dict[str, Any]:
    """Return the parsed file of a tokenizer.

    Args:
        pattern: Expression that cuts texts into words; None for that of GPT-2.
        vocabulary: Number of tokens.
        model: Fields of the model that are replaced.
    """
    parsed = json.loads(train(vocabulary))
    parsed["model"] |= model
    if pattern is not None:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
                 "invert": False}  # fmt: skip
        parsed["pre_tokenizer"]["use_regex"] = False
        parsed["pre_tokenizer"] = {
            "type": "Sequence", "pretokenizers": [split, parsed["pre_tokenizer"]]
        }  # fmt: skip
    return parsed


def encode_json(parsed: dict[str, Any]) -> bytes:
    return json.dumps(parsed).encode()
