"""Rates of transfers: useful concurrency, timeouts, and the comparison of store and nodes.

These classes have no clock: each call receives the time.
"""

from collections import deque
from dataclasses import dataclass

_WINDOW = 2  # reads of each slot over which a rate is measured
_MIN_GAIN = 1.2  # rate after a doubling of the reads, over the rate before, for a further doubling
_FIRST_PAUSE = 4  # windows between a trial of more reads that failed and the next one
_MIN_TIMEOUT = 3.0  # seconds before a transfer can be late
_UNKNOWN_TIMEOUT = 30.0  # the same, before there are enough transfers to compare with
_LATE = 6.0  # duration of a late transfer, over the median
_ENOUGH, _REMEMBERED = 4, 64  # transfers for a comparison: at least, and at most
_MIN_ADVANTAGE = 2.0  # rate of the store, over the rate of the nodes, for direct reads
_COMPARE_INTERVAL = 2.0  # seconds over which the rate of the nodes is measured


@dataclass(slots=True)
class ReadConcurrency:
    """Number of concurrent reads from the store by each node.

    The number begins with one, and doubles while this increases the bytes a second enough. More
    reads than useful would delay each piece, and so its copies. A trial that failed may have fallen
    into a bad moment of the network, so it is repeated, after twice as many reads each time.

    Attributes:
        most: Upper limit for one node.
        read_slots: Current number for one node.
    """

    most: int
    read_slots: int = 1
    _is_trial: bool = False
    _pause: int = _FIRST_PAUSE
    _windows_left: int = 1
    _before: float = 0.0
    _since: float | None = None
    _count: int = 0
    _bytes: int = 0
    _nodes: int = 0

    def note_read(self, size: int, nodes: int, now: float) -> None:
        """Note a read of a number of bytes, and adjust the number of reads after a while.

        Args:
            size: Bytes of the read.
            nodes: Number of nodes that read.
            now: Time.
        """
        if nodes < self._nodes:  # the remaining nodes may share a higher rate
            self._is_trial, self._windows_left, self._since = False, 1, None
        self._nodes = nodes
        if self._since is None:  # the waiting time of the first read is unknown
            self._since, self._count, self._bytes = now, 0, 0
            return
        self._count += 1
        self._bytes += size
        if self._count < _WINDOW * self.read_slots * max(nodes, 1):
            return
        rate = self._bytes / max(now - self._since, 1e-6)
        self._since, self._count, self._bytes = now, 0, 0
        if self._is_trial and rate < _MIN_GAIN * self._before:
            self.read_slots //= 2
            self._is_trial, self._windows_left = False, self._pause
            self._pause *= 2
            return
        if self._is_trial:
            self._pause, self._windows_left = _FIRST_PAUSE, 1
        self._windows_left -= 1
        self._before = rate
        self._is_trial = self._windows_left <= 0 and self.read_slots * 2 <= self.most
        if self._is_trial:
            self.read_slots *= 2


class SharedClock:
    """Clock of a shared resource: with N users, the clock runs N times slower.

    The difference of two readings is the time that one use would take without other users, if all
    users have equal shares (the virtual time of processor sharing).

    Attributes:
        users: Current number of users.
    """

    def __init__(self) -> None:
        self.users = 0
        self._reading, self._read_at = 0.0, 0.0

    def read(self, now: float) -> float:
        """Return the reading of the clock."""
        return self._reading + max(0.0, now - self._read_at) / max(self.users, 1)

    def change_users(self, by: int, now: float) -> None:
        """Add a number of users, or remove them if it is negative."""
        self._reading, self._read_at = self.read(now), max(now, self._read_at)
        self.users += by


class Durations:
    """Timeout of a transfer, from the median of the last transfers."""

    def __init__(self) -> None:
        self._last = deque[float](maxlen=_REMEMBERED)  # seconds a byte
        self._median: float | None = None

    def note(self, size: int, seconds: float) -> None:
        """Note the duration of a transfer of a number of bytes."""
        self._last.append(seconds / max(size, 1))
        self._median = None

    @property
    def has_enough(self) -> bool:
        """True if enough transfers have ended for a comparison."""
        return len(self._last) >= _ENOUGH

    def compute_timeout(self, size: int) -> float:
        """Return the seconds after which a transfer of a number of bytes is late."""
        if not self.has_enough:
            return _UNKNOWN_TIMEOUT
        if self._median is None:
            self._median = sorted(self._last)[len(self._last) // 2]
        return max(_MIN_TIMEOUT, _LATE * self._median * max(size, 1))


class RateComparison:
    """Comparison of the rate of the store for a node with the rate of the other nodes for it.

    The rate of the store is measured while the node reads from the store. The rate of the nodes is
    measured after every piece has left the store, when the nodes no longer wait for the store.

    Attributes:
        reason: Sentence with both rates, once the store is faster; else empty.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._first: float | None = None  # end of the first read
        self._last = 0.0
        self._read = 0
        self._since: float | None = None
        self._received = 0

    def note_read(self, size: int, now: float) -> None:
        """Note a read of a number of bytes from the store."""
        if self._first is None:  # the waiting time of the first read is unknown
            self._first = now
        else:
            self._read += size
        self._last = now

    def note_received(self, size: int) -> None:
        """Note a number of bytes from other nodes."""
        self._received += size

    def restart(self, now: float) -> None:
        """Restart the measurement of the nodes: they wait for the store."""
        self._since, self._received = now, 0

    def compare(self, last_read_rate: float, coming: int, now: float) -> None:
        """Compare the rates, after `_COMPARE_INTERVAL`.

        Args:
            last_read_rate: Bytes a second of one read from the store; 0 if there was none.
            coming: Bytes of the pieces in transfer from other nodes. They count as received: else
                a slow link with many pieces in transfer would count as no link.
            now: Time.
        """
        if self._since is None:
            self._since = now
        if now - self._since < _COMPARE_INTERVAL:
            return
        from_store = last_read_rate
        if self._first is not None and self._last - self._first >= _COMPARE_INTERVAL / 2:
            from_store = self._read / (self._last - self._first)
        from_nodes = (self._received + coming) / (now - self._since)
        if from_store > 0 and from_store >= _MIN_ADVANTAGE * from_nodes:
            self.reason = (
                f"the store gave each node {from_store / 1e6:.1f} MB/s, and the other nodes "
                f"{from_nodes / 1e6:.1f} MB/s"
            )
