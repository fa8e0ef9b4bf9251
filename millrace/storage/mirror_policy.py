"""Decide which mirror serves a read, when another one is asked as well, and when one is left out.

The module makes no request. A clock is an argument, so that tests set the time.
"""

import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

Clock = Callable[[], float]
"""Function that returns seconds of a monotonic clock."""


@dataclass(frozen=True, slots=True)
class MirrorPolicy:
    """Limits of a reader of mirrors.

    Attributes:
        hedge_quantile: Part of the earlier requests that were faster, after which another mirror is
            asked too.
        hedge_share: Largest share of further requests.
        hedge_burst: Largest number of further requests at once.
        failures: Number of failures in a row after which a mirror rests.
        first_pause: Seconds of the first rest. Each further one is twice as long.
        longest_pause: Seconds of the longest rest.
        differing_objects: Number of objects that differ after which a mirror is left out.
        slow_ratio: Multiple of the quantile after which a request counts as a failure.
        slow_seconds: Shortest time after which a request counts as a failure.
    """

    hedge_quantile: float = 0.95
    hedge_share: float = 0.05
    hedge_burst: float = 10.0
    failures: int = 3
    first_pause: float = 5.0
    longest_pause: float = 120.0
    differing_objects: int = 3
    slow_ratio: float = 20.0
    slow_seconds: float = 5.0


class CircuitBreaker:
    """Stops requests to a location after failures, and lets one request probe it after a pause.

    Args:
        policy: Limits.
        clock: Clock of the pauses.
    """

    def __init__(self, policy: MirrorPolicy, clock: Clock) -> None:
        self._policy, self._clock = policy, clock
        self._lock = threading.Lock()
        self._failures = 0  # in a row
        self._pause = 0.0  # seconds; 0 while requests may be made
        self._resumes_at = 0.0
        self._is_probed = False

    @property
    def is_open(self) -> bool:
        """True if no requests may be made, but for a probe."""
        return self._pause > 0

    @property
    def resumes_at(self) -> float:
        """Time of the next probe; that of the last one if the location works."""
        return self._resumes_at

    def take_probe(self) -> bool:
        """Decide whether to probe the location now. True is returned once for each pause."""
        with self._lock:
            if not self._pause or self._is_probed or self._clock() < self._resumes_at:
                return False
            self._is_probed = True
            return True

    def note_success(self) -> None:
        """Note an answer: requests may be made."""
        with self._lock:
            self._failures, self._pause, self._is_probed = 0, 0.0, False

    def note_failure(self, *, is_probe: bool = False) -> bool:
        """Note a failure.

        Args:
            is_probe: Whether the request was a probe. The failures of requests that began before
                the pause do not make the pause longer.

        Returns:
            Whether this failure stopped the requests.
        """
        policy = self._policy
        with self._lock:
            self._failures += 1
            was_open = self._pause > 0
            if was_open and not is_probe:
                return False
            if not was_open and self._failures < policy.failures:
                return False
            self._pause = min(policy.longest_pause, 2 * self._pause or policy.first_pause)
            self._resumes_at, self._is_probed = self._clock() + self._pause, False
            return not was_open


class HedgeBudget:
    """Budget of further requests, as a share of the reads. Counts are the only measure.

    Args:
        policy: Limits.
    """

    def __init__(self, policy: MirrorPolicy) -> None:
        self._policy = policy
        self._lock = threading.Lock()
        self._tokens = 0.0

    def add_read(self) -> None:
        """Note a read, which allows a share of a further request."""
        with self._lock:
            self._tokens = min(self._policy.hedge_burst, self._tokens + self._policy.hedge_share)

    def try_spend(self) -> bool:
        """Take one further request, if the budget allows it."""
        with self._lock:
            if self._tokens < 1 - 1e-9:  # a sum of shares
                return False
            self._tokens -= 1
            return True

    def spend(self) -> None:
        """Take a further request that is necessary, such as after an error. Debts are limited."""
        with self._lock:
            self._tokens = max(-self._policy.hedge_burst, self._tokens - 1)


_WINDOW = 256  # durations of a class of sizes
_LEAST = 20  # durations before a quantile is told


class DurationWindow:
    """Durations of the last requests, by classes of sizes. A class ends at four times its start."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._durations: dict[int, tuple[deque[float], list[float]]] = {}

    def record(self, size: int, seconds: float) -> None:
        """Note the duration of a request for a number of bytes."""
        with self._lock:
            recent, in_order = self._durations.setdefault(_classify(size), (deque(), []))
            if len(recent) == _WINDOW:
                in_order.remove(recent.popleft())
            recent.append(seconds)
            insort(in_order, seconds)

    def find_quantile(self, size: int, quantile: float) -> float | None:
        """Return a quantile of the durations of requests of a size; None with too few of them."""
        with self._lock:
            _, in_order = self._durations.get(_classify(size), ((), ()))
            if len(in_order) < _LEAST:
                return None
            return in_order[min(len(in_order) - 1, int(quantile * len(in_order)))]


def _classify(size: int) -> int:
    return max(0, size).bit_length() // 2


_SMOOTHING = 0.05  # weight of the last request in the mean
_LARGEST_RATIO = 100.0
_LEAST_WEIGHT = 0.02


class RelativeRate:
    """Rate of a location compared with the usual one, from the durations of its requests."""

    def __init__(self) -> None:
        self._mean = 1.0  # duration divided by the usual one for the size

    @property
    def weight(self) -> float:
        """Weight of the location: 1 at the usual rate. It is never 0, so it is measured again."""
        return max(_LEAST_WEIGHT, 1 / self._mean)

    def record(self, seconds: float, usual: float | None) -> None:
        """Note a request.

        Args:
            seconds: Duration of the request.
            usual: Usual duration of requests of this size; None if it is not known yet.
        """
        if usual:
            ratio = min(_LARGEST_RATIO, max(seconds / usual, 1 / _LARGEST_RATIO))
            self._mean += _SMOOTHING * (ratio - self._mean)


class WeightedTurns:
    """Turns by weights, spread evenly: with weights 2 and 1, the order is first, second, first.

    It is the smooth weighted round robin of nginx.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._credits: dict[int, float] = {}

    def choose(self, weights: Mapping[int, float], allowed: Collection[int]) -> int:
        """Return the number whose turn it is.

        Args:
            weights: Weights by number.
            allowed: Numbers to choose from, at least one.
        """
        with self._lock:
            for number in allowed:
                self._credits[number] = self._credits.get(number, 0.0) + weights[number]
            chosen = max(sorted(allowed), key=self._credits.__getitem__)
            self._credits[chosen] -= sum(weights[number] for number in allowed)
            return chosen
