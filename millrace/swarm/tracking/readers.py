"""Nodes as readers of the store: the rates of their reads, and the nodes that read for all.

This module owns the durations of the reads from the store, and the slow zones and nodes.
"""

from collections.abc import Iterable

from millrace.swarm.rates import Durations, ReadConcurrency
from millrace.swarm.tracking.nodes import NodeState, NodeTable

_SLOW_READER = 3.0  # seconds a byte of a slow reader, over that of the fastest reader of its zone
_SLOW_ZONE = 1.3  # seconds a byte of a slow zone, over that of the fastest zone
_SLOW_MIN_TIMEOUT = 1.5  # seconds before another node also reads the piece of a slow reader
_SLOW_LAST_TIMEOUT = 0.5  # the same, if no other piece waits for its first read
_SLOW_READ = 3.0  # duration of a late read of a slow reader, over that of the fastest read
# Missing pieces of a node, beyond those of the fastest node, at which the node is behind. The unit
# is the number of concurrent fetches of a node.
_BEHIND = 2.0
_SLOW_BEHIND = 1.0  # for a slow reader
_SLOW_ZONE_BEHIND = 0.5  # for a node of a slow zone


class ReaderRanking:
    """Comparison of the nodes, and of the zones, by their reads from the store.

    Args:
        nodes: Nodes of the run.
        concurrency: Number of concurrent reads of each node, which each read adjusts.
        max_fetches: Number of concurrent fetches of a node.
        pieces: Number of pieces of the run.
    """

    def __init__(
        self, nodes: NodeTable, concurrency: ReadConcurrency, max_fetches: int, pieces: int
    ) -> None:
        self._nodes, self._concurrency = nodes, concurrency
        self._max_fetches, self._pieces = max_fetches, pieces
        self._durations = Durations()
        self._fastest = 0.0  # the lowest `NodeRates.read_seconds_per_byte`
        self._shortest = 0.0  # seconds of the shortest read; 0 before the first one
        self._slow_zones: set[str] = set()  # labelled zones with slow reads
        self._slow_readers: set[str] = set()  # nodes that are slow compared with their zone
        self._least_missing = pieces

    def may_read(self, node: NodeState) -> bool:
        """Tell whether a node reads pieces from the store for all.

        A slow reader, or a node that is behind, reads only while it can fetch nothing from other
        nodes. Its slow link serves reads and fetches, and all nodes would wait for its reads.
        """
        if not node.trust.is_trusted and any(
            other.trust.is_trusted for other in self._nodes.iterate_living()
        ):
            return False
        if not (node.transfers.fetches or node.queues.fetches):
            return not self.is_probing(node)
        return not (self._is_behind(node, _BEHIND) or self.is_probing(node) or self.is_slow(node))

    def is_probing(self, node: NodeState) -> bool:
        """Tell whether a first read is under way that measures the rate of a node.

        In a labelled zone, one node makes the first read, since the zone may share one slow link.
        """
        if node.rates.read_seconds_per_byte:
            return False
        if self._nodes.is_one_of_zones(node) and not _find_least(self._nodes.zones[node.zone]):
            return any(neighbour.transfers.reads for neighbour in self._nodes.zones[node.zone])
        return node.transfers.reads > 0

    def is_slow(self, node: NodeState) -> bool:
        """Tell whether the reads of a node or of its zone are slow, and the node is behind.

        A slow read alone is not enough: with equal links, every node has slow reads at times.
        """
        if node.zone in self._slow_zones and self._is_behind(node, _SLOW_ZONE_BEHIND):
            return True
        return node.id in self._slow_readers and self._is_behind(node, _SLOW_BEHIND)

    def note_read(
        self, node: NodeState, size: int, seconds: float, unshared: float, now: float
    ) -> None:
        """Update the rates with a completed read.

        Args:
            node: Reader.
            size: Number of bytes.
            seconds: Duration of the read in seconds.
            unshared: Duration without concurrent reads, computed (`SharedClock`).
            now: Time.
        """
        self._durations.note(size, seconds)
        self._shortest = min(self._shortest or seconds, seconds)
        self.note_seconds_per_byte(node, max(unshared, 1e-6) / max(size, 1))
        if not self.is_slow(node):
            count = sum(not self.is_slow(other) for other in self._nodes.iterate_living())
            self._concurrency.note_read(size, count, now)

    def note_seconds_per_byte(self, node: NodeState, seconds_per_byte: float) -> None:
        """Note the seconds a byte of a read, and compare the nodes again."""
        before = node.rates.read_seconds_per_byte
        node.rates.read_seconds_per_byte = (
            0.7 * before + 0.3 * seconds_per_byte if before else seconds_per_byte
        )
        self._find_slow(node)

    def note_copy(self, node: NodeState) -> None:
        """Note that a node has received a piece."""
        if not node.rates.is_slow:
            self._least_missing = min(self._least_missing, node.missing)

    def update(self) -> None:
        """Compare the nodes again, after a node was removed or has become slow."""
        living = list(self._nodes.iterate_living())
        self._fastest = _find_least(living)
        missing = (node.missing for node in living if not node.rates.is_slow)
        self._least_missing = min(missing, default=self._pieces)

    def compute_timeout(self, size: int, *, slow: bool, reads: int, last: bool) -> float:
        """Return the seconds after which a read is late.

        The order, the connection and the first byte take time in each read, however few bytes
        follow. So a read is not late before a multiple of the shortest read of any size.

        Args:
            size: Number of bytes.
            slow: Whether the reader is slow, so that all other nodes wait for it.
            reads: Number of concurrent reads from the store by all nodes.
            last: Whether no other piece waits for its first read.
        """
        allowed = self._durations.compute_timeout(size)
        if not slow or not self._fastest:
            return allowed
        quick = max(self._fastest * size * reads, self._shortest)
        return min(
            allowed, max(_SLOW_LAST_TIMEOUT if last else _SLOW_MIN_TIMEOUT, _SLOW_READ * quick)
        )

    def _is_behind(self, node: NodeState, factor: float) -> bool:
        """Tell whether a node lacks many more pieces than the fastest node."""
        return node.missing - self._least_missing > factor * self._max_fetches

    def _find_slow(self, measured: NodeState) -> None:
        """Compare each zone with the fastest reader, and each node with the fastest of its zone.

        A slow node stays slow until its own next read, since reads of different times cannot be
        compared.
        """
        self.update()
        self._slow_zones.discard(measured.zone)
        self._slow_readers.discard(measured.id)
        for zone, nodes in self._nodes.zones.items():
            fastest = _find_least(nodes) if zone else self._fastest
            if zone and fastest > _SLOW_ZONE * self._fastest:
                self._slow_zones.add(zone)
            for node in nodes:
                if node.rates.read_seconds_per_byte > _SLOW_READER * fastest:
                    self._slow_readers.add(node.id)


def _find_least(nodes: Iterable[NodeState]) -> float:
    """Return the lowest `NodeRates.read_seconds_per_byte` of trusted nodes; 0 before any read."""
    trusted = (node.rates.read_seconds_per_byte for node in nodes if node.trust.is_trusted)
    return min(filter(None, trusted), default=0.0)
