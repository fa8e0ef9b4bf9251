"""Nodes as readers of the store: how quick their reads are, and who reads for the others.

This module owns what is known of the reads from the store: their durations, which zones and nodes
are slow, and how many reads a node has under way.
"""

from millrace.swarm.rates import Durations, ReadConcurrency
from millrace.swarm.tracking.nodes import NodeState, NodeTable

_SLOW_READER = 3.0  # times as long as the quickest reader of its zone takes
_SLOW_ZONE = 1.3  # times as long as the quickest zone takes
_SLOW_LEAST = 1.5  # seconds after which a slow reader's piece is read by another node too
_SLOW_LAST = 0.5  # and where it is one of the last
_SLOW_READ = 3.0  # and times as long as the quickest reader takes
_BEHIND = 2.0  # times the pieces that a node fetches at once, that it may be behind another one
_SLOW_BEHIND = 1.0  # and that a slow reader may be
_SLOW_ZONE_BEHIND = 0.5  # and that the nodes of a slow zone may be


class ReaderRanking:
    """Comparison of the nodes, and of the zones, by their reads from the store.

    Args:
        nodes: Nodes of the run.
        concurrency: Number of reads that each node has under way; this class tells it of reads.
        down: Number of pieces that a node fetches at once.
        pieces: Number of pieces of the run.
    """

    def __init__(
        self, nodes: NodeTable, concurrency: ReadConcurrency, down: int, pieces: int
    ) -> None:
        self._nodes, self._concurrency = nodes, concurrency
        self._down, self._pieces = down, pieces
        self._durations = Durations()
        self._quickest = 0.0  # the least `NodePace.read_pace`
        self._slow_zones: set[str] = set()  # labelled zones that read slowly from the store
        self._slow_readers: set[str] = set()  # nodes that do, beside the others of their zone
        self._least_missing = pieces

    def may_read(self, node: NodeState) -> bool:
        """Tell whether a node reads from the store for the others.

        A node whose reads are slow, or that has fallen behind (its link is thin, or the one that
        leads to its zone), does so only while there is nothing that it could fetch from others
        instead: that takes the same link, and all would wait for what it reads.
        """
        if not node.trust.is_trusted and any(
            other.trust.is_trusted for other in self._nodes.iterate_living()
        ):
            return False
        if not (node.transfers.fetches or node.queues.fetches):
            return not self.is_probing(node)
        return not (self._is_behind(node, _BEHIND) or self.is_probing(node) or self.is_slow(node))

    def is_probing(self, node: NodeState) -> bool:
        """Tell whether a first read is under way that will show how quick a node's reads are.

        The first read of a zone is one node's: all of a zone may have one thin link to the store.
        """
        if node.pace.read_pace:
            return False
        if self._nodes.is_one_of_zones(node) and not self._find_zone_pace(node.zone):
            return any(mate.transfers.reads for mate in self._nodes.zones[node.zone])
        return node.transfers.reads > 0

    def is_slow(self, node: NodeState) -> bool:
        """Tell whether a node's reads, or its zone's, are slow, and it has fallen behind.

        A single slow read says little: where all have the same links, each is the slow one at
        times, and the others may not be left to do its part.
        """
        if node.zone in self._slow_zones and self._is_behind(node, _SLOW_ZONE_BEHIND):
            return True
        return node.name in self._slow_readers and self._is_behind(node, _SLOW_BEHIND)

    def note_read(
        self, node: NodeState, size: int, seconds: float, alone: float, now: float
    ) -> None:
        """Learn from a read that is over.

        Args:
            node: Reader.
            size: Number of bytes.
            seconds: Seconds that the read took.
            alone: Seconds that it would have taken alone.
            now: Time.
        """
        self._durations.note(size, seconds)
        self.note_pace(node, max(alone, 1e-6) / max(size, 1))
        if not self.is_slow(node):
            readers = sum(not self.is_slow(other) for other in self._nodes.iterate_living())
            self._concurrency.note_read(size, readers, now)

    def note_pace(self, node: NodeState, pace: float) -> None:
        """Note the seconds a byte of a read, and compare the nodes anew."""
        before = node.pace.read_pace
        node.pace.read_pace = 0.7 * before + 0.3 * pace if before else pace
        self._find_slow(node)

    def note_copy(self, node: NodeState) -> None:
        """Note that a node lacks a piece less."""
        if not node.pace.is_slow:
            self._least_missing = min(self._least_missing, node.missing)

    def update(self) -> None:
        """Compare the nodes anew, as one is gone or gives late."""
        living = list(self._nodes.iterate_living())
        paces = [n.pace.read_pace for n in living if n.trust.is_trusted and n.pace.read_pace]
        self._quickest = min(paces, default=0.0)
        missing = (node.missing for node in living if not node.pace.is_slow)
        self._least_missing = min(missing, default=self._pieces)

    def compute_timeout(self, size: int, *, slow: bool, reads: int, last: bool) -> float:
        """Return the seconds that a read may take before it is late.

        Args:
            size: Number of bytes.
            slow: Whether the reader is slow: all others wait for it.
            reads: Number of reads from the store that are under way.
            last: Whether no other piece waits for its first read.
        """
        allowed = self._durations.compute_timeout(size)
        if not slow or not self._quickest:
            return allowed
        quick = self._quickest * size * reads
        return min(allowed, max(_SLOW_LAST if last else _SLOW_LEAST, _SLOW_READ * quick))

    def _find_zone_pace(self, zone: str) -> float:
        """Return the least `NodePace.read_pace` of a zone; 0 before its first read."""
        paces = [
            mate.pace.read_pace
            for mate in self._nodes.zones[zone]
            if mate.trust.is_trusted and mate.pace.read_pace
        ]
        return min(paces, default=0.0)

    def _is_behind(self, node: NodeState, times: float) -> bool:
        """Tell whether a node lacks more pieces than the quickest, by what it fetches at once."""
        return node.missing - self._least_missing > times * self._down

    def _find_slow(self, measured: NodeState) -> None:
        """Compare each zone with the quickest reader, and each node with that of its zone.

        A node that is slow stays so until its own next read. What was measured then cannot be
        compared with what the others do now.
        """
        self.update()
        self._slow_zones.discard(measured.zone)
        self._slow_readers.discard(measured.name)
        for zone, nodes in self._nodes.zones.items():
            quickest = self._find_zone_pace(zone) if zone else self._quickest
            if zone and quickest > _SLOW_ZONE * self._quickest:
                self._slow_zones.add(zone)
            for node in nodes:
                if node.pace.read_pace > _SLOW_READER * quickest:
                    self._slow_readers.add(node.name)
