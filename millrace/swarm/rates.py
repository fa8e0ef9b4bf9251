"""Durations of transfers: how many reads pay off, which are late, and when the store is quicker.

Pure: told of each transfer, with its bytes, its seconds and the time.
"""

from collections import deque
from dataclasses import dataclass

_WINDOW = 2  # reads of each slot, after which their rate is looked at
_QUICKER = 1.2  # times the rate before, so that twice as many at once are worth it
_LATE_AT_LEAST = 3.0  # seconds before a transfer can be called late
_LATE_UNKNOWN = 30.0  # seconds, before there are enough to compare with
_LATE = 6.0  # times the median
_KNOWN, _REMEMBERED = 4, 64  # transfers
_OUTRUN = 2.0  # times what the nodes give each other, that the store must give
_COMPARE_INTERVAL = 2.0  # seconds over which the nodes are looked at


@dataclass(slots=True)
class ReadConcurrency:
    """Number of reads from the store that each node has under way: more while more is quicker.

    Begins with one, and doubles as long as that brings a good part more bytes a second. Pieces
    that share the store's rate all come late, and what comes late is passed on late.

    Attributes:
        most: Of one node, whatever it brings.
        reads: Of one node, now.
    """

    most: int
    reads: int = 1
    _grows: bool = True
    _before: float = 0.0
    _since: float | None = None
    _count: int = 0
    _bytes: int = 0
    _nodes: int = 0

    def note_read(self, size: int, nodes: int, now: float) -> None:
        """So many bytes were read; after a while, see whether it was quicker than before."""
        if nodes < self._nodes:  # each of those that are left may bring more
            self._grows, self._before, self._since, self._count, self._bytes = True, 0.0, None, 0, 0
        self._nodes = nodes
        if not self._grows:
            return
        if self._since is None:  # of the first, nobody knows how long it waited
            self._since = now
            return
        self._count += 1
        self._bytes += size
        if self._count < _WINDOW * self.reads * max(nodes, 1):
            return
        rate = self._bytes / max(now - self._since, 1e-6)
        if rate < _QUICKER * self._before:
            self.reads, self._grows = self.reads // 2, False
            return
        self._before, self._since, self._count, self._bytes = rate, now, 0, 0
        if self.reads * 2 > self.most:
            self._grows = False
        else:
            self.reads *= 2


class SharedClock:
    """A clock that runs slower the more share what it times, as each gets less of it.

    The difference of two readings is the time that something would have taken alone, if all had
    equal shares (the virtual time of processor sharing).

    Attributes:
        users: How many share now.
    """

    def __init__(self) -> None:
        self.users = 0
        self._reading, self._read_at = 0.0, 0.0

    def read(self, now: float) -> float:
        """Read the clock."""
        return self._reading + max(0.0, now - self._read_at) / max(self.users, 1)

    def change_users(self, by: int, now: float) -> None:
        """Note that more, or fewer, share from now on."""
        self._reading, self._read_at = self.read(now), max(now, self._read_at)
        self.users += by


class Durations:
    """Longest time that a transfer may take before it is late, by the median of the last ones."""

    def __init__(self) -> None:
        self._last = deque[float](maxlen=_REMEMBERED)  # seconds a byte
        self._median: float | None = None

    def note(self, size: int, seconds: float) -> None:
        """Note that a transfer of so many bytes took so long."""
        self._last.append(seconds / max(size, 1))
        self._median = None

    @property
    def has_enough(self) -> bool:
        """True if there were enough transfers to compare with."""
        return len(self._last) >= _KNOWN

    def compute_timeout(self, size: int) -> float:
        """Seconds that one of so many bytes may take."""
        if not self.has_enough:
            return _LATE_UNKNOWN
        if self._median is None:
            self._median = sorted(self._last)[len(self._last) // 2]
        return max(_LATE_AT_LEAST, _LATE * self._median * max(size, 1))


class RateComparison:
    """Comparison of what the store gives a node with what the other nodes give it.

    What the store gives is measured while the node reads from it; what the nodes give once every
    piece has left the store, when nothing but the nodes themselves holds them up.

    Attributes:
        why: A sentence with both rates, once the store gives more.
    """

    def __init__(self) -> None:
        self.why = ""
        self._first: float | None = None  # when the first read was over
        self._last = 0.0
        self._read = 0
        self._since: float | None = None
        self._given = 0

    def note_read(self, size: int, now: float) -> None:
        """Note a read of so many bytes from the store."""
        if self._first is None:  # how long it waited is unknown
            self._first = now
        else:
            self._read += size
        self._last = now

    def note_given(self, size: int) -> None:
        """Note so many bytes that came from other nodes."""
        self._given += size

    def restart(self, now: float) -> None:
        """Begin again: the nodes wait for the store, so that their own rate cannot be seen."""
        self._since, self._given = now, 0

    def compare(self, one_read: float, coming: int, now: float) -> None:
        """Compare the rates, once there has been time enough.

        Args:
            one_read: Bytes a second of one read from the store; 0 if the node has read nothing.
            coming: Bytes of the pieces that are on their way from other nodes; they count as
                given, so that a slow link with many pieces on it is not taken for no link.
            now: Time.
        """
        if self._since is None:
            self._since = now
        if now - self._since < _COMPARE_INTERVAL:
            return
        from_store = one_read
        if self._first is not None and self._last - self._first >= _COMPARE_INTERVAL / 2:
            from_store = self._read / (self._last - self._first)
        from_nodes = (self._given + coming) / (now - self._since)
        if from_store > 0 and from_store >= _OUTRUN * from_nodes:
            self.why = (
                f"the store gave each node {from_store / 1e6:.1f} MB/s, and the other nodes "
                f"{from_nodes / 1e6:.1f} MB/s"
            )
