"""Selection of the checkpointers of an epoch, and of their substitutes.

Every member computes the same order. The rule ``spread`` selects at least two members, if there are
two, and the next member in the order replaces a lost one. The rule ``psyche`` is exactly that of
Psyche: a third of the members, at least one, at most sixteen.

Source: https://github.com/PsycheFoundation/psyche, ``shared/coordinator``:
``checkpointer_selection.rs`` and ``swap_or_not.rs``.
"""

import hashlib
from collections.abc import Sequence
from enum import StrEnum

from millrace.errors import ConfigurationError

_SHARE, _MOST, _LEAST = 3, 16, 2
_ROUNDS = 90
_SEEDS = 1 << 64


class SelectionRule(StrEnum):
    """Rule that selects the checkpointers."""

    SPREAD = "spread"
    PSYCHE = "psyche"


def order_checkpointers(
    members: Sequence[str], seed: int, choice: SelectionRule = SelectionRule.SPREAD
) -> list[str]:
    """Return the members in the order in which they become checkpointers.

    Args:
        members: All members of the epoch without repetition, in an order that all members know.
        seed: Seed of the epoch: at least 0, less than 2 to the 64th.
        choice: Rule of the selection.

    Raises:
        ConfigurationError: The seed is out of range.
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
    """Return the number of checkpointers among a number of members."""
    third = min(members // _SHARE, _MOST)
    return max(third, 1) if choice is SelectionRule.PSYCHE else min(max(third, _LEAST), members)


def _derive_psyche_key(seed: int) -> bytes:
    first = hashlib.sha256(seed.to_bytes(8, "little")).digest()
    # Psyche hashes once more for this selection, unlike for that of witnesses.
    return hashlib.sha256(hashlib.sha256(first).digest() + b"cooldown").digest()


def _permute_index(index: int, count: int, key: bytes) -> int:
    """Return the result of a pseudo-random permutation of ``count`` indices for one index.

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
