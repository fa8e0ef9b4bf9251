"""Reads from the store of what other nodes have, where the store is quicker than the nodes.

This module owns the comparison of both, for each node, and its reason.
"""

from millrace.swarm.tracking.copies import CopyTable
from millrace.swarm.tracking.nodes import NodeState, NodeTable
from millrace.swarm.tracking.orders import STORE
from millrace.swarm.tracking.read_queue import ReadQueue


class DirectReads:
    """Comparison of the store with the nodes, once nothing waits for the store.

    Args:
        nodes: Nodes of the run.
        copies: Copies of the pieces.
        reads: Pieces that are to be read from the store.
        allowed: Whether nodes may read from the store what others have.

    Attributes:
        why: Reason why nodes do so; empty while they do not.
    """

    def __init__(
        self, nodes: NodeTable, copies: CopyTable, reads: ReadQueue, *, allowed: bool
    ) -> None:
        self._nodes, self._copies, self._reads = nodes, copies, reads
        self._allowed = allowed
        self.why = ""

    def note_read(self, node: NodeState, size: int, seconds: float, now: float) -> None:
        """Note a read of so many bytes from the store."""
        node.pace.outrun.note_read(size, now)
        node.pace.one_read = size / max(seconds, 1e-6)

    def note_fetch(self, node: NodeState, size: int) -> None:
        """Note so many bytes that came from another node."""
        node.pace.outrun.note_given(size)

    def compare(self, now: float) -> None:
        """See whether the store outruns the nodes, when nothing waits for the store."""
        if not self._allowed:
            return
        supplied = self._reads.has_any or self._is_awaiting_store()
        for node in self._nodes.iterate_living():
            outrun = node.pace.outrun
            if supplied:
                outrun.restart(now)
            elif node.transfers.fetches and not outrun.why:
                outrun.compare(node.pace.one_read, self._count_coming(node), now)
                self.why = self.why or outrun.why

    def _is_awaiting_store(self) -> bool:
        """Tell whether a piece that no node has is being read."""
        return any(
            STORE in sources and not self._copies[number].holders
            for node in self._nodes.iterate_living()
            for number, sources in node.transfers.down.items()
        )

    def _count_coming(self, node: NodeState) -> int:
        """Return the bytes of the pieces that are on their way to a node from other nodes."""
        return sum(
            self._copies[number].size
            for number, sources in node.transfers.down.items()
            if STORE not in sources
        )
