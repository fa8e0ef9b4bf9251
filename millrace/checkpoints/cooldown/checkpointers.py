"""Choose who saves at the end of an epoch, and who stands in: the same order on every member.

Two ways. ``spread`` is ours: at least two where there are two, and everybody has a place in the
order, so that whoever is gone is followed by the next. ``psyche`` is Psyche's, exactly
(https://github.com/PsycheFoundation/psyche, ``shared/coordinator``: ``checkpointer_selection.rs``
and ``swap_or_not.rs``): a third of the members, at most sixteen, at least one.
"""

import hashlib
from collections.abc import Sequence
from enum import StrEnum

from millrace.errors import ConfigurationError

_SHARE, _MOST, _LEAST = 3, 16, 2
_ROUNDS = 90
_SEEDS = 1 << 64


class SelectionRule(StrEnum):
    """Rule by which checkpointers are chosen."""

    SPREAD = "spread"
    PSYCHE = "psyche"


def order_checkpointers(
    members: Sequence[str], seed: int, choice: SelectionRule = SelectionRule.SPREAD
) -> list[str]:
    """Return the members, in the order in which they become checkpointers.

    Args:
        members: All of an epoch, each once, in the order that all members know them in.
        seed: Of the epoch: at least 0, less than 2 to the 64th.
        choice: In which way.

    Raises:
        ConfigurationError: The seed is not of 64 bits.
    """
    if not 0 <= seed < _SEEDS:
        raise ConfigurationError(f"The seed {seed} is not a number of 64 bits: at least 0.")
    if choice is SelectionRule.PSYCHE:
        key = _derive_psyche_key(seed)
        places = [_permute_index(index, len(members), key) for index in range(len(members))]
        return [member for _, member in sorted(zip(places, members, strict=True))]
    start = seed.to_bytes(8, "little")
    return sorted(members, key=lambda name: hashlib.sha256(start + name.encode()).digest())


def count_checkpointers(members: int, choice: SelectionRule = SelectionRule.SPREAD) -> int:
    """Return how many of so many members are checkpointers at once."""
    third = min(members // _SHARE, _MOST)
    return max(third, 1) if choice is SelectionRule.PSYCHE else min(max(third, _LEAST), members)


def _derive_psyche_key(seed: int) -> bytes:
    first = hashlib.sha256(seed.to_bytes(8, "little")).digest()
    # Hashed once more for this choice, unlike for that of witnesses.
    return hashlib.sha256(hashlib.sha256(first).digest() + b"cooldown").digest()


def _permute_index(index: int, count: int, key: bytes) -> int:
    """Return the index that an index of ``count`` has after a permutation.

    Source: Hoang, Morris, Rogaway, "An enciphering scheme based on a card shuffle" (2012), as
    Ethereum's consensus specification computes it.
    """
    for number in range(_ROUNDS):
        prefix = key + bytes([number])
        pivot = int.from_bytes(hashlib.sha256(prefix).digest()[:8], "little") % count
        flip = (pivot + count - index) % count
        position = max(index, flip)
        block = hashlib.sha256(prefix + (position // 256).to_bytes(4, "little")).digest()
        if block[position % 256 // 8] >> (position % 8) & 1:
            index = flip
    return index
