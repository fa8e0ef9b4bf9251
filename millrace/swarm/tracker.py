"""Central tracker: decides which node fetches which piece from whom.

The tracker is a pure state machine: its inputs are events and the time, its outputs are orders.
Pieces are read from the store in order, each by a node with a free slot, so fast nodes read more. A
node that lacks a piece fetches it from a node that has it. New pieces go first, since they have the
fewest copies, so the number of copies at least doubles with each round. Lost, late and wrong
transfers are ordered again from other nodes.

Votes decide which digest a piece has. Each node that read the piece from the store, or has it from
an earlier run, has one vote. If the driver knows the digest of the object, its pieces are given to
other nodes after the first vote, as every node checks the whole object. Any other piece is given
when two nodes agree. If votes differ, the driver reads the piece (`Tracker.take_disputed`). Its
digest of any piece is final.

The state is in the parts of `millrace.swarm.tracking`. This module tells them each event.

Source: Owl (OSDI '22), where peers have the mechanism, and the tracker makes every decision.
"""

from collections.abc import Iterable, Sequence

from millrace.swarm.rates import ReadConcurrency
from millrace.swarm.settings import LimitSettings
from millrace.swarm.tracking.copies import CopyTable
from millrace.swarm.tracking.direct_reads import DirectReads
from millrace.swarm.tracking.givers import GiverRanking
from millrace.swarm.tracking.late_transfers import LateTransferHedger
from millrace.swarm.tracking.nodes import NodeState, NodeTable
from millrace.swarm.tracking.orders import STORE, Order
from millrace.swarm.tracking.read_queue import ReadQueue
from millrace.swarm.tracking.readers import ReaderRanking
from millrace.swarm.tracking.selection import GiverSelector, ReadSelector
from millrace.swarm.tracking.slots import SlotFiller
from millrace.swarm.tracking.transfers import TransferTable, TransferTime
from millrace.swarm.tracking.trust import Accusations
from millrace.swarm.tracking.waiting import WaitingNodes

__all__ = ["STORE", "Order", "Tracker"]


class Tracker:
    """Knows who has what, and decides what is fetched next.

    Every method that tells it something returns the orders that follow. It gives none before
    `begin`: what a node has that comes a moment later need not be read from the store.

    Args:
        sizes: Bytes of each piece.
        limits: How much goes on at once.
        needs: Votes for the same digest that each piece needs before a node may get it from
            another one; left out, one.
        seed: Seed of the pauses before something is read again.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        limits: LimitSettings | None = None,
        *,
        needs: Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        limits, count = limits or LimitSettings(), len(sizes)
        concurrency = ReadConcurrency(limits.node_store)
        self._orders: list[Order] = []
        self._accusations = Accusations()
        self._nodes = NodeTable(count)
        self._transfers = TransferTable(count)
        self._unread = ReadQueue(count, seed)
        self._waiting = WaitingNodes(self._nodes, self._unread, concurrency)
        self._readers = ReaderRanking(self._nodes, concurrency, limits.down, count)
        self._givers = GiverRanking(self._nodes)
        self._copies = CopyTable(
            sizes,
            nodes=self._nodes,
            transfers=self._transfers,
            waiting=self._waiting,
            readers=self._readers,
            orders=self._orders,
        )
        self._copies.require_votes(needs)
        self._direct = DirectReads(self._nodes, self._copies, self._unread, allowed=limits.direct)
        selector = GiverSelector(self._nodes, self._copies, self._givers, limits.up)
        self._slots = SlotFiller(
            limits,
            concurrency,
            copies=self._copies,
            transfers=self._transfers,
            waiting=self._waiting,
            unread=self._unread,
            givers=selector,
            reads=ReadSelector(self._nodes, self._copies, self._unread, self._readers),
            orders=self._orders,
        )
        self._hedger = LateTransferHedger(
            nodes=self._nodes,
            copies=self._copies,
            transfers=self._transfers,
            unread=self._unread,
            readers=self._readers,
            givers=self._givers,
            selector=selector,
            slots=self._slots,
        )

    def begin(self, now: float) -> list[Order]:
        """Give orders from now on: those that were expected have come."""
        self._slots.begin()
        return self._fill_all(now)

    @property
    def nodes(self) -> list[str]:
        """The nodes that live."""
        return [node.name for node in self._nodes.iterate_living()]

    @property
    def quarantined(self) -> list[str]:
        """The nodes that nothing is fetched from any more."""
        return [node.name for node in self._nodes if not node.trust.is_trusted]

    @property
    def slow(self) -> list[str]:
        """The nodes that give late within their own zone."""
        return [node.name for node in self._nodes if node.pace.is_slow]

    @property
    def direct(self) -> str:
        """Reason why nodes read from the store what others have; empty while they do not."""
        return self._direct.why

    def take_disputed(self) -> list[int]:
        """Return the pieces of which nodes have come to have different digests since the last call.

        The owner reads those that still are disputed (`is_disputed`), and tells what they are
        (`settle_piece`).
        """
        disputed, self._copies.disputed = self._copies.disputed, []
        return disputed

    def take_hopeless(self) -> list[str]:
        """Return the nodes that have had too many pieces wrong since the last call.

        The owner says that they are lost.
        """
        hopeless, self._copies.hopeless = self._copies.hopeless, []
        return hopeless

    def is_decided(self, piece: int) -> bool:
        """Tell whether enough votes, or the owner, have decided what a piece is."""
        return bool(self._copies[piece].votes.digest)

    def is_lacked(self, piece: int) -> bool:
        """Tell whether a living node lacks a piece."""
        return self._nodes.is_lacked(piece)

    def is_disputed(self, piece: int) -> bool:
        """Tell whether votes for a piece differ, and the owner has not said what it is."""
        return self._copies.is_disputed(piece)

    def is_complete(self) -> bool:
        """Tell whether every living node has every piece."""
        return self._nodes.is_complete()

    def list_held_sizes(self, node: str, sizes: Sequence[int]) -> list[int]:
        """Return the sizes of the pieces that a node has; of one that never joined, none."""
        known = self._nodes.get(node)
        return [size for size, has in zip(sizes, known.have, strict=True) if has] if known else []

    def lacks(self, node: str) -> bool:
        """Tell whether a node lacks a piece."""
        return self._nodes[node].missing > 0

    def has(self, node: str, piece: int) -> bool:
        """Tell whether a node has a piece."""
        return bool(self._nodes[node].have[piece])

    def add_node(
        self, name: str, have: Iterable[tuple[int, str]], now: float, *, zone: str = ""
    ) -> list[Order]:
        """Note that a node has come, with the pieces (and their digests) that it holds already."""
        node = self._nodes.add(name, zone, self._transfers.add_node(name))
        node.queues.votes.extend(self._unread.list_wanted())
        self._copies.welcome(node)
        for number, digest in have:
            self._copies.note_copy(node, number, digest, vote=True)
        return self._fill_after(node, now)

    def complete_transfer(
        self, name: str, number: int, source: str, digest: str, now: float
    ) -> list[Order]:
        """Note that a node has a piece, of this digest.

        From another node it is of the digest that was ordered, or the agent says `failed`: one that
        says another digest lies.
        """
        node = self._nodes[name]
        took = self._transfers.end(node.transfers, number, source, now)
        if took is not None and source != STORE and digest != took.digest:
            self._copies.hopeless.append(name)
            return self._take_orders()
        if took is not None:
            self._measure(node, number, source, took, now)
        if not node.alive or node.have[number]:
            self._copies.offer_if_nobody_has(number)
            return self._take_orders()
        self._unread.clear_failures(number)
        node.trust.clear_refusals(source)
        self._copies.note_copy(node, number, digest, vote=source == STORE)
        return self._fill_after(node, now)

    def fail_transfer(
        self, name: str, number: int, source: str, now: float, *, wrong: bool = False
    ) -> list[Order]:
        """Note that a node could not fetch a piece from a source.

        ``wrong``: the bytes were not right.

        Of a transfer that was not ordered, or is over, nothing is believed.
        """
        node, piece = self._nodes[name], self._copies[number]
        took = self._transfers.end(node.transfers, number, source, now)
        if took is None:
            return self._take_orders()
        if source == STORE:
            self._unread.delay(number, now)
        elif not wrong:
            self._note_refusal(node, self._nodes[source])
        elif took.digest == piece.votes.digest:  # else the giver has dropped what was ordered
            self._accuse(node, self._nodes[source])
        if node.alive and not node.have[number] and piece.holders:
            self._waiting.enqueue(node, number)
        return self._fill_after(node, now)

    def cancel_transfer(self, name: str, number: int, source: str, now: float) -> list[Order]:
        """Note that a node needs a piece from this source no more: another one was quicker.

        Where the node is not known to have the piece, the transfer has failed.
        """
        node, piece = self._nodes[name], self._copies[number]
        took = self._transfers.end(node.transfers, number, source, now)
        if took is not None and node.alive and not node.have[number]:
            if source == STORE:
                self._unread.delay(number, now)
            if piece.holders:
                self._waiting.enqueue(node, number)
        if source != STORE and took is not None:
            giver = self._nodes[source]
            if took.seconds > self._givers.compute_timeout(giver, node, piece.size):
                self._note_refusal(node, giver)
        if source != STORE or node.have[number]:
            # Nobody else was to read the piece meanwhile, and others may not fetch this copy.
            self._copies.offer_if_nobody_has(number)
        return self._fill_after(node, now)

    def remove_node(self, name: str, now: float) -> list[Order]:
        """Note that a node is gone, with what it had."""
        node = self._nodes.get(name)
        if node is None or not node.alive:
            return []
        self._nodes.remove(node)
        self._readers.update()
        self._givers.update()
        for number, sources in list(node.transfers.down.items()):
            for source in list(sources):
                self._transfers.end(node.transfers, number, source, now)
            self._copies.offer_if_nobody_has(number)
        self._copies.forget_node(node)
        for other in self._nodes.iterate_living():
            for number, sources in list(other.transfers.down.items()):
                if name in sources:
                    self._transfers.end(other.transfers, number, name, now)
                    self._waiting.enqueue(other, number)
            self._slots.fill(other, now)
        return self._take_orders()

    def tick(self, now: float) -> list[Order]:
        """Time has passed: what was delayed is due, and what is late is ordered elsewhere too."""
        for number in self._unread.take_due(now):
            self._copies.offer(number)
        self._hedger.hedge(now)
        self._direct.compare(now)
        return self._fill_all(now)

    def settle_piece(self, number: int, digest: str, now: float) -> list[Order]:
        """Note the digest of a piece that the owner has read itself.

        Others drop copies that differ.

        A node that said otherwise of what it read from the store, or had, loses its vote when it
        does so a second time, and nothing is fetched from it any more.
        """
        self._copies.settle(number, digest)
        self._slots.fill_waiting(now)
        return self._take_orders()

    def _measure(
        self, node: NodeState, number: int, source: str, took: TransferTime, now: float
    ) -> None:
        """Learn from a transfer how long one takes on its path."""
        size = self._copies[number].size
        if source == STORE:
            self._direct.note_read(node, size, took.seconds, now)
            self._readers.note_read(node, size, took.seconds, took.alone, now)
        else:
            self._direct.note_fetch(node, size)
            self._givers.note_fetch(self._nodes[source], node, size, max(took.seconds, 1e-6))

    def _accuse(self, node: NodeState, giver: NodeState) -> None:
        """Note that a node was given wrong bytes: it asks the giver no more."""
        node.trust.shunned.add(giver.name)
        if self._accusations.accuse(node.name, giver.name):
            self._copies.distrust(giver)

    def _note_refusal(self, node: NodeState, giver: NodeState) -> None:
        """Note that a giver did not give; of one that goes on so, copies are no source.

        What only such a node has is read from the store again. It may say that it has everything,
        so nobody is compared with it.
        """
        self._givers.note_refusal(giver, node)
        if node.trust.count_refusal(giver.name):
            self._copies.mark_slow(giver)

    def _fill_after(self, node: NodeState, now: float) -> list[Order]:
        """Fill the slots of a node of which something happened, and of those that wait."""
        if node.alive:
            self._slots.fill(node, now)
        self._slots.fill_waiting(now)
        return self._take_orders()

    def _fill_all(self, now: float) -> list[Order]:
        for node in self._nodes.iterate_living():
            self._slots.fill(node, now)
        return self._take_orders()

    def _take_orders(self) -> list[Order]:
        orders = list(self._orders)
        self._orders.clear()  # the parts add to this list
        return orders
