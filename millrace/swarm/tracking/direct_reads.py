"""Direct reads: reads from the store of pieces that nodes have, if the store is faster.

This module decides when the rates are compared, and owns the reason for direct reads.
"""

from millrace.swarm.tracking.copies import CopyTable
from millrace.swarm.tracking.nodes import NodeState, NodeTable
from millrace.swarm.tracking.orders import STORE
from millrace.swarm.tracking.read_queue import ReadQueue


class DirectReads:
    """Comparison of the store with the nodes, once no piece waits for the store.

    Args:
        nodes: Nodes of the run.
        copies: Copies of the pieces.
        read_queue: Pieces to read from the store.
        allowed: Whether direct reads are allowed.

    Attributes:
        reason: Reason for direct reads, with both rates; empty if no node makes any.
    """

    def __init__(
        self, nodes: NodeTable, copies: CopyTable, read_queue: ReadQueue, *, allowed: bool
    ) -> None:
        self._nodes, self._copies, self._read_queue = nodes, copies, read_queue
        self._allowed = allowed
        self.reason = ""

    def note_read(self, node: NodeState, size: int, seconds: float, now: float) -> None:
        """Note a read of a number of bytes from the store."""
        node.rates.store_comparison.note_read(size, now)
        node.rates.last_read_rate = size / max(seconds, 1e-6)

    def note_fetch(self, node: NodeState, size: int) -> None:
        """Note a number of bytes from another node."""
        node.rates.store_comparison.note_received(size)

    def compare(self, now: float) -> None:
        """Compare the store with the nodes, if no piece waits for the store."""
        if not self._allowed:
            return
        supplied = self._read_queue.has_any or self._is_awaiting_store()
        for node in self._nodes.iterate_living():
            store_comparison = node.rates.store_comparison
            if supplied:
                store_comparison.restart(now)
            elif node.transfers.fetches and not store_comparison.reason:
                store_comparison.compare(node.rates.last_read_rate, self._count_coming(node), now)
                self.reason = self.reason or store_comparison.reason

    def _is_awaiting_store(self) -> bool:
        """Tell whether a node reads a piece that has no holder."""
        return any(
            STORE in sources and not self._copies[number].holders
            for node in self._nodes.iterate_living()
            for number, sources in node.transfers.incoming.items()
        )

    def _count_coming(self, node: NodeState) -> int:
        """Return the bytes of the pieces in transfer to a node from other nodes."""
        return sum(
            self._copies[number].size
            for number, sources in node.transfers.incoming.items()
            if STORE not in sources
        )
