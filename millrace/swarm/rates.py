"""What transfers take: how many reads pay off, which are late, and when the store is quicker.

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
_LOOK = 2.0  # seconds over which the nodes are looked at


@dataclass(slots=True)
class Pace:
    """How many reads from the store each node has under way: more while more is quicker.

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

    def read(self, size: int, nodes: int, now: float) -> None:
        """So many bytes were read; after a while, see whether it was quicker than before."""
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


class Durations:
    """How long a transfer may take before it is late, by the median of the last ones."""

    def __init__(self) -> None:
        self._last = deque[float](maxlen=_REMEMBERED)  # seconds a byte
        self._median: float | None = None

    def took(self, size: int, seconds: float) -> None:
        """A transfer of so many bytes took so long."""
        self._last.append(seconds / max(size, 1))
        self._median = None

    def allowed(self, size: int) -> float:
        """Seconds that one of so many bytes may take."""
        if len(self._last) < _KNOWN:
            return _LATE_UNKNOWN
        if self._median is None:
            self._median = sorted(self._last)[len(self._last) // 2]
        return max(_LATE_AT_LEAST, _LATE * self._median * max(size, 1))


class Outrun:
    """Whether the store gives a node more than the other nodes do.

    The store's rate is measured while pieces leave it for the first time; that of the nodes once
    all have left it, when nothing but the nodes themselves holds them up.

    Attributes:
        why: A sentence with the figures, once it is so.
    """

    def __init__(self) -> None:
        self.why = ""
        self._first: float | None = None  # when the first read was over
        self._last = 0.0
        self._read = 0
        self._since: float | None = None
        self._given = 0

    def read(self, size: int, now: float) -> None:
        """So many bytes came out of the store, while pieces there were unread."""
        if self._first is None:  # of it, nobody knows how long it waited
            self._first = now
        else:
            self._read += size
        self._last = now

    def given(self, size: int) -> None:
        """So many bytes went from node to node."""
        self._given += size

    def supplied(self, now: float) -> None:
        """The nodes wait for the store: their own rate cannot be seen now."""
        self._since, self._given = now, 0

    def look(self, nodes: int, lacking: int, now: float) -> None:
        """See whether those that lack something should read it from the store themselves.

        Args:
            nodes: How many live.
            lacking: How many of them still lack something that others have.
            now: The time.
        """
        if self._since is None:
            self._since = now
        if self._first is None or not lacking or now - self._since < _LOOK:
            return
        from_store = self._read / max(self._last - self._first, 1e-6) / max(nodes, 1)
        from_nodes = self._given / (now - self._since) / lacking
        self._since, self._given = now, 0
        if self._last - self._first >= _LOOK / 2 and from_store >= _OUTRUN * from_nodes:
            self.why = (
                f"the store gave each node {from_store / 1e6:.1f} MB/s, and the other nodes "
                f"{from_nodes / 1e6:.1f} MB/s"
            )
