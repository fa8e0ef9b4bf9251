"""Nodes that have a slot free and wait for work, and the pieces in their queues.

This module owns who waits. It puts pieces into the queues of nodes, and takes none out.
"""

import heapq

from millrace.swarm.rates import ReadConcurrency
from millrace.swarm.tracking.nodes import NodeState, NodeTable
from millrace.swarm.tracking.read_queue import ReadQueue

_MAX_FILLED = 8  # waiting nodes that are offered what one event has freed


class WaitingNodes:
    """Nodes that may have a slot free, and something to fetch.

    Args:
        nodes: Nodes of the run.
        reads: Pieces that are to be read from the store.
        concurrency: Number of reads that each node has under way.
    """

    def __init__(self, nodes: NodeTable, reads: ReadQueue, concurrency: ReadConcurrency) -> None:
        self._nodes, self._reads, self._concurrency = nodes, reads, concurrency
        self._waiting: dict[str, None] = {}  # in order, so that the choices are always the same

    def mark(self, node: NodeState) -> None:
        """Note that a node waits."""
        self._waiting[node.name] = None

    def enqueue(self, node: NodeState, number: int) -> None:
        """Let a node fetch a piece from other nodes."""
        node.queues.fetches.append(number)
        self.mark(node)

    def enqueue_for_others(self, number: int) -> None:
        """Let every node fetch a piece that needs it."""
        for node in self._nodes.iterate_living():
            if node.needs(number):
                self.enqueue(node, number)

    def pass_on(self, node: NodeState, number: int) -> None:
        """Let the other nodes of a zone fetch a piece next that has just entered it."""
        for mate in self._nodes.zones[node.zone]:
            if mate.needs(number):
                mate.queues.fetches.appendleft(number)
                self.mark(mate)

    def offer_read(self, number: int) -> None:
        """Let a node read a piece from the store that no node has."""
        if self._reads.offer(number):
            for node in self._nodes.iterate_living():
                if node.transfers.reads < self._concurrency.reads:
                    self.mark(node)

    def offer_vote(self, number: int) -> None:
        """Let a node that lacks a piece read it for a further vote."""
        if not self._reads.want_vote(number):
            return
        for node in self._nodes.iterate_living():
            if not node.have[number]:
                node.queues.votes.append(number)
                self.mark(node)

    def queue_vote(self, node: NodeState, number: int) -> None:
        """Let a node that has dropped a piece read it, if the piece needs a further vote."""
        if self._reads.is_wanted(number):
            node.queues.votes.append(number)

    def list_most_lacking(self) -> list[NodeState]:
        """Return a few living nodes that wait, those first that lack most."""
        waiting = [node for name in self._waiting if (node := self._nodes[name]).alive]
        return heapq.nlargest(_MAX_FILLED, waiting, key=lambda node: node.missing)

    def unmark(self, node: NodeState) -> None:
        """Note that a node waits no more."""
        self._waiting.pop(node.name, None)
