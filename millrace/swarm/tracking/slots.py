"""Slots of the nodes: each free one gets the next order.

This module owns the orders that fetch a piece, and the transfers that they begin.
"""

from millrace.swarm.rates import ReadConcurrency
from millrace.swarm.settings import LimitSettings
from millrace.swarm.tracking.copies import CopyTable
from millrace.swarm.tracking.limits import MAX_CANDIDATES
from millrace.swarm.tracking.nodes import NodeState
from millrace.swarm.tracking.orders import STORE, Order
from millrace.swarm.tracking.read_queue import ReadQueue
from millrace.swarm.tracking.selection import GiverSelector, ReadSelector
from millrace.swarm.tracking.transfers import TransferTable
from millrace.swarm.tracking.waiting import WaitingNodes

_FIRST_FETCHES = 4  # of a node, until one is over


class SlotFiller:
    """Gives orders to nodes that have a slot free. It gives none before `begin`.

    Args:
        limits: Numbers of slots.
        concurrency: Number of reads that each node has under way.
        copies: Copies of the pieces.
        transfers: Transfers that are under way.
        waiting: Nodes that wait for work.
        unread: Pieces that are to be read from the store.
        givers: Selection of givers.
        reads: Selection of reads from the store.
        orders: List that the orders are added to.
    """

    def __init__(
        self,
        limits: LimitSettings,
        concurrency: ReadConcurrency,
        *,
        copies: CopyTable,
        transfers: TransferTable,
        waiting: WaitingNodes,
        unread: ReadQueue,
        givers: GiverSelector,
        reads: ReadSelector,
        orders: list[Order],
    ) -> None:
        self._limits, self._concurrency = limits, concurrency
        self._copies, self._transfers, self._waiting = copies, transfers, waiting
        self._unread, self._givers, self._reads = unread, givers, reads
        self._orders = orders
        self._begun = False

    def begin(self) -> None:
        """Give orders from now on."""
        self._begun = True

    def fill_waiting(self, now: float) -> None:
        """Offer what has become free to those that wait; to those that lack most first."""
        for node in self._waiting.list_most_lacking():
            self._waiting.unmark(node)
            self.fill(node, now)

    def fill(self, node: NodeState, now: float) -> None:
        """Fill a node's free slots."""
        if not self._begun:
            return
        limits, transfers, queues = self._limits, node.transfers, node.queues
        most_reads = self._concurrency.reads
        while transfers.reads < most_reads and self._transfers.reads < limits.store:
            number = self._reads.select(node, now)
            if number is None:
                break
            self._order_read(node, number, now)
        down = limits.down if node.pace.fetch_pace else min(limits.down, _FIRST_FETCHES)
        self._order_fetches(node, down, now)
        if (queues.fetches and transfers.fetches < down) or (
            (self._unread.has_unread or queues.alone or queues.votes)
            and transfers.reads < most_reads
        ):
            self._waiting.mark(node)

    def order_fetch(self, node: NodeState, number: int, giver: NodeState, now: float) -> None:
        """Order a node to fetch a piece from another one."""
        digest = self._copies[number].votes.digest
        self._transfers.begin_fetch(node.transfers, number, giver.transfers, digest, now)
        if self._givers.yields(giver, node):
            giver.transfers.yielding.add((node.name, number))
        self._orders.append(Order(node.name, number, giver.name, digest))

    def _order_fetches(self, node: NodeState, down: int, now: float) -> None:
        queues, transfers = node.queues, node.transfers
        looked = 0
        while queues.fetches and transfers.fetches < down and looked < MAX_CANDIDATES:
            number = queues.fetches.popleft()
            if not node.needs(number):
                continue
            giver = self._givers.select(node, number)
            if giver is not None:
                self.order_fetch(node, number, giver, now)
                continue
            holders = self._copies[number].holders
            if not node.trust.avoids_all(holders):
                queues.fetches.append(number)  # all are busy, or better left to a neighbour
            elif holders:
                queues.alone.append(number)
            looked += 1

    def _order_read(self, node: NodeState, number: int, now: float) -> None:
        self._transfers.begin_read(node.transfers, number, now)
        self._orders.append(Order(node.name, number, STORE))
