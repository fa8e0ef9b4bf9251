"""Nodes with free slots that wait for work, and the pieces in their queues.

This module owns the list of waiting nodes. It adds pieces to the queues of nodes, and removes none.
"""

import heapq
import itertools

from millrace.swarm.rates import ReadConcurrency
from millrace.swarm.tracking.nodes import NodeState, NodeTable
from millrace.swarm.tracking.read_queue import ReadQueue

_MAX_FILLED = 8  # waiting nodes whose slots are filled after one event


class WaitingNodes:
    """Nodes that may have a free slot, and a piece to fetch.

    Args:
        nodes: Nodes of the run.
        read_queue: Pieces to read from the store.
        concurrency: Number of concurrent reads of each node.
    """

    def __init__(
        self, nodes: NodeTable, read_queue: ReadQueue, concurrency: ReadConcurrency
    ) -> None:
        self._nodes, self._read_queue, self._concurrency = nodes, read_queue, concurrency
        self._arrivals: dict[str, int] = {}  # number of each waiting node, in order of arrival
        self._numbers = itertools.count()
        self._heap: list[tuple[int, int, str]] = []  # missing pieces (negative), number and name

    def mark(self, node: NodeState) -> None:
        """Note that a node waits."""
        if node.id not in self._arrivals:
            self._arrivals[node.id] = next(self._numbers)
            self._push(node)

    def _push(self, node: NodeState) -> None:
        heapq.heappush(self._heap, (-node.missing, self._arrivals[node.id], node.id))

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
        if self._read_queue.add(number):
            for node in self._nodes.iterate_living():
                if node.transfers.reads < self._concurrency.read_slots:
                    self.mark(node)

    def request_vote_read(self, number: int) -> None:
        """Queue a read of a piece for a further vote, by any node that lacks the piece."""
        if not self._read_queue.add_vote_request(number):
            return
        for node in self._nodes.iterate_living():
            if not node.have[number]:
                node.queues.votes.append(number)
                self.mark(node)

    def queue_vote_read(self, node: NodeState, number: int) -> None:
        """Queue a read by a node that has dropped a piece, if a further vote is requested."""
        if node.id in self._arrivals:
            self._push(node)  # it lacks one more piece
        if self._read_queue.is_vote_requested(number):
            node.queues.votes.append(number)

    def take_most_lacking(self) -> list[NodeState]:
        """Remove and return a few waiting nodes. The nodes that lack most pieces come first.

        An entry of the heap is stale if its node no longer waits, or has received pieces since.
        """
        taken: list[NodeState] = []
        while self._heap and len(taken) < _MAX_FILLED:
            missing, number, name = heapq.heappop(self._heap)
            node = self._nodes[name]
            if self._arrivals.get(name) != number:
                continue
            if node.alive and node.missing < -missing:
                self._push(node)
                continue
            del self._arrivals[name]
            if node.alive:
                taken.append(node)
        return taken
