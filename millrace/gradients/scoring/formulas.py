"""Formulas by which evaluations become scores, and scores become weights.

They are those of Templar, but for `compute_proof`. All are pure functions, and add in an order that
depends on names alone, so that everyone computes the same bytes.
"""

from collections.abc import Mapping
from math import fsum

MISS_FACTORS = (1.0, 0.75, 0.5, 0.0)
"""Factor of a score after 0, 1, 2, and 3 or more windows in a row without a gradient."""


def compare_data_use(own: float, random: float) -> int:
    """Return 1 if a gradient improves the worker's own pages more than random ones, otherwise -1.

    Args:
        own: Relative improvement of the loss on the worker's own pages.
        random: Relative improvement of the loss on random pages.
    """
    return 1 if own > random else -1


def update_average(average: float, newest: float, decay: float) -> float:
    """Return a moving average with the newest value."""
    return (1 - decay) * average + decay * newest


def compute_proof(average: float, evaluations: int, decay: float) -> float:
    """Return the use of own pages that a moving average proves, from 0 to 1.

    A worker that trains on other pages has a mean of 0. The mean of all comparisons is lowered by
    two standard deviations of such a mean, so luck proves nothing.

    Args:
        average: Moving average of `compare_data_use`, which began with 0.
        evaluations: Number of its comparisons.
        decay: Share of the newest comparison in the average.
    """
    if not evaluations:
        return 0.0
    kept = (1 - decay) ** evaluations
    whole = 1 - kept  # sum of the weights of all comparisons
    squares = decay * (1 - kept**2) / (2 - decay)  # sum of the squares of these weights
    return max(0.0, (average - 2 * squares**0.5) / whole)


def compute_sync_score(behind: float, exponent: float = 2.5) -> float:
    """Return the score of a worker whose weights are some steps behind those of the run.

    Args:
        behind: Number of steps. With 3 and more, the score is 0.
        exponent: Exponent of the score: 2.5 in the code of Templar, 5 in its paper.
    """
    return (1.0 - min(max(behind, 0.0), 3.0) / 3.0) ** exponent


def compute_score(ordinal: float, use: float, sync: float = 1.0) -> float:
    """Return the score of a worker.

    Args:
        ordinal: Lower bound of its rating.
        use: Moving average of `compare_data_use`.
        sync: Result of `compute_sync_score`.
    """
    return ordinal * max(0.0, use) * sync


def get_miss_factor(missed: int) -> float:
    """Return the factor of a score after some windows in a row without a gradient."""
    return MISS_FACTORS[min(missed, len(MISS_FACTORS) - 1)]


def share_by_squares(scores: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each worker by the square of its score. Scores below 0 count as 0.

    The shares add up to 1, or are all 0 if no score is above 0.
    """
    squares = {uid: max(0.0, scores[uid]) ** 2 for uid in sorted(scores)}
    total = fsum(squares.values())
    return {uid: square / total if total else 0.0 for uid, square in squares.items()}


def share_by_rank(
    scores: Mapping[str, float],
    *,
    burned: float = 0.5,
    gathered: float = 0.75,
    first: int = 20,
    reserves: int = 10,
) -> dict[str, float]:
    """Return the share of each worker by its rank: the emission of Templar's later versions.

    Args:
        scores: Scores of the workers. Only those above 0 have a share.
        burned: Share that no worker gets.
        gathered: Share of the rest for the first workers. The first of them gets twice as much as
            the last, and those between in even steps.
        first: Number of these workers.
        reserves: Number of workers after them, among which the remaining share halves from one to
            the next.
    """
    ranked = sorted((uid for uid in scores if scores[uid] > 0), key=lambda uid: (-scores[uid], uid))
    best, next_ones = ranked[:first], ranked[first : first + reserves]
    ramp = [2.0 - place / max(1, len(best) - 1) for place in range(len(best))]
    halves = [0.5**place for place in range(len(next_ones))]
    shares = dict.fromkeys(scores, 0.0)
    rest = 1.0 - burned
    for uids, parts, part in ((best, ramp, gathered), (next_ones, halves, 1.0 - gathered)):
        for uid, one in zip(uids, parts, strict=True):
            shares[uid] = rest * part * one / fsum(parts)
    return shares
