"""Samples that were received of each stream, and the streams of each process that reads.

The functions are pure, so every process computes the counts of all the others. Samples are always
received in the order of their positions: by their index in their stream, then by the stream.
"""

from collections.abc import Sequence
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]


class Remainder(StrEnum):
    """Treatment of the last samples of an epoch, where ranks would have different numbers."""

    DROP = "drop"
    PAD = "pad"
    KEEP = "keep"


def deal_streams(counts: Counts, world_size: int, workers: int = 1) -> list[list[list[int]]]:
    """Return the streams of each worker of each rank.

    Streams that are equally far are dealt in turn, so that ranks end at about the same time.

    Args:
        counts: Samples that were received of each stream before.
        world_size: Number of ranks.
        workers: Number of worker processes of each rank.
    """
    order: list[int] = np.argsort(counts, kind="stable").tolist()
    ranks = (order[rank::world_size] for rank in range(world_size))
    return [[sorted(own[worker::workers]) for worker in range(workers)] for own in ranks]


def advance_counts(counts: Counts, ends: Counts, number: int) -> Counts:
    """Return the counts after a number of further samples, or the ends if there are fewer.

    Args:
        counts: Samples that were received of each stream.
        ends: Number of samples of each stream.
        number: Number of samples that are received next, in the order of their positions.
    """
    left = np.maximum(ends - counts, 0)
    if number >= int(left.sum()):
        return np.maximum(counts, ends)
    low, high = int(counts.min()), int(ends.max())
    while high - low > 1:  # all samples below the index `low` are among them
        middle = (low + high) // 2
        below = int(np.clip(middle - counts, 0, left).sum())
        low, high = (middle, high) if below <= number else (low, middle)
    reached = counts + np.clip(low - counts, 0, left)
    rest = number - int((reached - counts).sum())
    following = np.flatnonzero((reached == low) & (reached < ends))[:rest]
    reached[following] += 1
    return reached


def compute_ends(
    counts: Counts,
    lengths: Counts,
    dealt: Sequence[Sequence[Sequence[int]]],
    remainder: Remainder,
) -> Counts:
    """Return the number of samples of each stream with which the epoch ends.

    Workers with the same number end together on all ranks, so that all ranks have equally many
    batches of the same sizes.

    Args:
        counts: Samples that were received of each stream before the streams were dealt.
        lengths: Samples of each stream.
        dealt: Streams of each worker of each rank.
        remainder: Rule for ranks that would have different numbers of samples. ``drop`` leaves out
            the last samples of the longer ranks. ``pad`` lets the shorter ranks have their last
            sample several times: the end is then beyond the length of a stream.
    """
    ends = lengths.copy()
    if remainder is Remainder.KEEP:
        return ends
    for workers in zip(*dealt, strict=True):
        rest = [int((lengths[own] - counts[own]).sum()) for own in map(list, workers)]
        for own, left in zip(map(list, workers), rest, strict=True):
            if remainder is Remainder.DROP:
                ends[own] = advance_counts(counts[own], lengths[own], min(rest))
            elif left < max(rest):
                last = max(own, key=lambda stream: (int(lengths[stream]), stream))
                ends[last] += max(rest) - left
    return ends


def encode_counts(counts: Counts, lengths: Counts) -> tuple[int, dict[int, int]]:
    """Return counts as a position before which all samples were received, and what is beyond.

    Args:
        counts: Samples that were received of each stream.
        lengths: Samples of each stream.

    Returns:
        The position, and the number of further samples of each stream that has any.
    """
    open_streams = np.flatnonzero(counts < lengths)
    if not open_streams.size:
        return int(lengths.sum()), {}
    level = int(counts[open_streams].min())
    stream = int(open_streams[np.argmin(counts[open_streams])])
    base = _count_before(level, stream, lengths)
    ahead = np.minimum(counts, lengths) - base
    return int(base.sum()), {int(one): int(ahead[one]) for one in np.flatnonzero(ahead)}


def decode_counts(position: int, ahead: dict[int, int], lengths: Counts) -> Counts:
    """Return the counts of a position and of the samples beyond it, see `encode_counts`.

    Raises:
        ValueError: The numbers do not fit the streams.
    """
    if not 0 <= position <= int(lengths.sum()):
        raise ValueError("the position is not within the epoch")
    counts = advance_counts(np.zeros_like(lengths), lengths, position)
    for stream, more in ahead.items():
        if not 0 <= stream < len(lengths) or not 0 <= more <= int(lengths[stream] - counts[stream]):
            raise ValueError("a stream has fewer samples")
        counts[stream] += more
    return counts


def _count_before(level: int, stream: int, lengths: Counts) -> Counts:
    """Return the samples of each stream whose positions are before that of one sample."""
    reached = np.where(np.arange(len(lengths)) < stream, level + 1, level)
    return np.minimum(reached, lengths)
