"""Nodes with free slots that wait for work, and the pieces in their queues.

This module owns the list of waiting nodes. It adds pieces to the queues of nodes, and removes none.
"""

import heapq

from millrace.swarm.rates import ReadConcurrency
from millrace.swarm.tracking.nodes import NodeState, NodeTable
from millrace.swarm.tracking.read_queue import ReadQueue

_MAX_FILLED = 8  # waiting nodes whose slots are filled after one event


class WaitingNodes:
    """Nodes that may have a free slot, and a piece to fetch.

    Args:
        nodes: Nodes of the run.
        reads: Pieces to read from the store.
        concurrency: Number of concurrent reads of each node.
    """

    def __init__(self, nodes: NodeTable, reads: ReadQueue, concurrency: ReadConcurrency) -> None:
        self._nodes, self._reads, self._concurrency = nodes, reads, concurrency
        self._waiting: dict[str, None] = {}  # ordered, so that decisions are reproducible

    def mark(self, node: NodeState) -> None:
        """Note that a node waits."""
        self._waiting[node.name] = None

    def enqueue(self, node: NodeState, number: int) -> None:
        """Add a piece to the queue of a node, to fetch from other nodes."""
        node.queues.fetches.append(number)
        self.mark(node)

    def enqueue_for_others(self, number: int) -> None:
        """Add a piece to the queue of every node that needs the piece."""
        for node in self._nodes.iterate_living():
            if node.needs(number):
                self.enqueue(node, number)

    def enqueue_for_zone(self, node: NodeState, number: int) -> None:
        """Put a piece that has entered a zone first in the queues of the other nodes there."""
        for neighbour in self._nodes.zones[node.zone]:
            if neighbour.needs(number):
                neighbour.queues.fetches.appendleft(number)
                self.mark(neighbour)

    def request_first_read(self, number: int) -> None:
        """Queue the first read of a piece from the store."""
        if self._reads.add(number):
            for node in self._nodes.iterate_living():
                if node.transfers.reads < self._concurrency.reads:
                    self.mark(node)

    def request_vote_read(self, number: int) -> None:
        """Queue a read of a piece for a further vote, by any node that lacks the piece."""
        if not self._reads.add_vote_request(number):
            return
        for node in self._nodes.iterate_living():
            if not node.have[number]:
                node.queues.votes.append(number)
                self.mark(node)

    def queue_vote_read(self, node: NodeState, number: int) -> None:
        """Queue a read by a node that has dropped a piece, if a further vote is requested."""
        if self._reads.is_vote_requested(number):
            node.queues.votes.append(number)

    def list_most_lacking(self) -> list[NodeState]:
        """Return a few waiting nodes. The nodes that lack most pieces come first."""
        waiting = [node for name in self._waiting if (node := self._nodes[name]).alive]
        return heapq.nlargest(_MAX_FILLED, waiting, key=lambda node: node.missing)

    def unmark(self, node: NodeState) -> None:
        """Note that a node no longer waits."""
        self._waiting.pop(node.name, None)
