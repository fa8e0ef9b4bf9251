"""Slots of the nodes: each free slot gets the next order.

This module owns the orders to fetch a piece. It starts the transfers in the table.
"""

from millrace.swarm.rates import ReadConcurrency
from millrace.swarm.settings import LimitSettings
from millrace.swarm.tracking.copies import CopyTable
from millrace.swarm.tracking.limits import MAX_CANDIDATES
from millrace.swarm.tracking.nodes import NodeState
from millrace.swarm.tracking.orders import STORE, PieceOrder, TrackerOutput
from millrace.swarm.tracking.read_queue import ReadQueue
from millrace.swarm.tracking.selection import ReadSelector, UploaderSelector
from millrace.swarm.tracking.transfers import TransferTable
from millrace.swarm.tracking.waiting_nodes import WaitingNodes

_FIRST_FETCHES = 4  # concurrent fetches of a node until its first one has ended


class SlotFiller:
    """Gives orders to nodes with free slots, from `begin` on.

    Args:
        limits: Numbers of slots.
        concurrency: Number of concurrent reads of each node.
        copies: Copies of the pieces.
        transfers: Transfers that are under way.
        waiting_nodes: Nodes that wait for work.
        read_queue: Pieces to read from the store.
        uploader_selector: Selection of uploaders.
        read_selector: Selection of reads from the store.
        output: Receiver of the orders.
    """

    def __init__(
        self,
        limits: LimitSettings,
        concurrency: ReadConcurrency,
        *,
        copies: CopyTable,
        transfers: TransferTable,
        waiting_nodes: WaitingNodes,
        read_queue: ReadQueue,
        uploader_selector: UploaderSelector,
        read_selector: ReadSelector,
        output: TrackerOutput,
    ) -> None:
        self._limits, self._concurrency = limits, concurrency
        self._copies, self._transfers, self._waiting_nodes = copies, transfers, waiting_nodes
        self._read_queue = read_queue
        self._uploader_selector, self._read_selector = uploader_selector, read_selector
        self._output = output
        self._begun = False

    def begin(self) -> None:
        """Give orders from now on."""
        self._begun = True

    def fill_waiting(self, now: float) -> None:
        """Fill the slots of waiting nodes. The nodes that lack most pieces come first."""
        for node in self._waiting_nodes.take_most_lacking():
            if self._is_blocked(node):  # `fill` would only move pieces within the queue
                node.queues.fetches.rotate(-MAX_CANDIDATES)
                self._waiting_nodes.mark(node)
            else:
                self.fill(node, now)

    def fill(self, node: NodeState, now: float) -> None:
        """Fill the free slots of a node."""
        if not self._begun:
            return
        limits, transfers, queues = self._limits, node.transfers, node.queues
        max_reads = self._concurrency.read_slots
        while transfers.reads < max_reads and self._transfers.reads < limits.store_reads:
            number = self._read_selector.select(node, now)
            if number is None:
                break
            self._order_read(node, number, now)
        max_fetches = self._limit_fetches(node)
        self._order_fetches(node, max_fetches, now)
        if (queues.fetches and transfers.fetches < max_fetches) or (
            (self._read_queue.has_unread or queues.without_uploader or queues.votes)
            and transfers.reads < max_reads
        ):
            self._waiting_nodes.mark(node)

    def order_fetch(self, node: NodeState, number: int, uploader: NodeState, now: float) -> None:
        """Order a node to fetch a piece from another one."""
        digest = self._copies[number].votes.digest
        self._transfers.begin_fetch(node.transfers, number, uploader.transfers, digest, now)
        if self._uploader_selector.is_low_priority(uploader, node):
            uploader.transfers.low_priority.add((node.id, number))
        self._output.orders.append(PieceOrder(node.id, number, uploader.id, digest))

    def _is_blocked(self, node: NodeState) -> bool:
        """Tell whether `fill` would give no order to a waiting node, which waits for a slot."""
        queues, transfers = node.queues, node.transfers
        return (
            self._begun
            and bool(queues.fetches)
            and transfers.fetches < self._limit_fetches(node)
            and not (self._read_queue.has_unread or queues.without_uploader or queues.votes)
            and not node.rates.store_comparison.reason
            and self._uploader_selector.is_blocked(node)
        )

    def _limit_fetches(self, node: NodeState) -> int:
        """Return the largest number of concurrent fetches of a node."""
        most = self._limits.downloads_per_node
        return most if node.rates.fetch_seconds_per_byte else min(most, _FIRST_FETCHES)

    def _order_fetches(self, node: NodeState, max_fetches: int, now: float) -> None:
        queues, transfers = node.queues, node.transfers
        tried = 0
        while queues.fetches and transfers.fetches < max_fetches and tried < MAX_CANDIDATES:
            tried += self._uploader_selector.skip_blocked(node, MAX_CANDIDATES - tried)
            if not queues.fetches or tried == MAX_CANDIDATES:
                break
            number = queues.fetches.popleft()
            if not node.needs(number):
                continue
            uploader = self._uploader_selector.select(node, number)
            if uploader is not None:
                self.order_fetch(node, number, uploader, now)
                continue
            holders = self._copies[number].holders
            if not node.trust.avoids_all(holders):
                queues.fetches.append(number)  # all holders are busy, or a neighbour should fetch
            elif holders:
                queues.without_uploader.append(number)
            tried += 1

    def _order_read(self, node: NodeState, number: int, now: float) -> None:
        digest = self._copies[number].votes.known_digest
        self._transfers.begin_read(node.transfers, number, now, digest)
        self._output.orders.append(PieceOrder(node.id, number, STORE, digest))
