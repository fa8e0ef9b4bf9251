"""Central tracker: decides which node fetches which piece from which source.

The tracker is a pure state machine: its inputs are events and the time, its outputs are orders.

- The nodes read the pieces from the store in order, each piece by a node with a free slot. So fast
  nodes read more.
- A node that lacks a piece fetches it from a holder: a trusted node with a correct copy. New pieces
  go first, since they have the fewest copies. So the number of copies at least doubles with each
  round.
- Failed, late and wrong transfers are ordered again from other sources.

Votes decide the digest of a piece. Each node that has read the piece from the store, or has the
piece from an earlier run, has one vote. If the driver knows the digest of the whole object, one
vote decides, since every node verifies the whole object. Otherwise two equal votes decide. If votes
differ, the driver reads the piece itself, and its digest is final (`Tracker.take_disputed`,
`Tracker.settle_piece`).

If the digest of a piece is known before the run, no vote is needed. The order to read the piece
from the store has this digest, and the node verifies the bytes.

The parts in `millrace.swarm.tracking` own the state. This module passes each event to these parts
in this order: `TransferTable` ends the transfer, `TransferOutcomes` judges the result, `CopyTable`
counts the vote and adds the holder, `WaitingNodes` queues the piece for nodes that lack it, and
`SlotFiller` gives the next orders to nodes with free slots. `LateTransferHedger` looks at all
transfers at each tick. The parts put what they decide into one `TrackerOutput`.

Source: Owl (OSDI '22), where peers only transfer, and the tracker makes every decision.
"""

from collections.abc import Iterable, Mapping, Sequence

from millrace.swarm.rates import ReadConcurrency
from millrace.swarm.settings import LimitSettings
from millrace.swarm.tracking.copies import CopyTable
from millrace.swarm.tracking.direct_reads import DirectReads
from millrace.swarm.tracking.late_transfers import LateTransferHedger
from millrace.swarm.tracking.nodes import NodeState, NodeTable
from millrace.swarm.tracking.orders import STORE, PieceOrder, TrackerOutput
from millrace.swarm.tracking.outcomes import TransferOutcomes
from millrace.swarm.tracking.read_queue import ReadQueue
from millrace.swarm.tracking.readers import ReaderRanking
from millrace.swarm.tracking.selection import ReadSelector, UploaderSelector
from millrace.swarm.tracking.slots import SlotFiller
from millrace.swarm.tracking.transfers import TransferTable
from millrace.swarm.tracking.uploaders import UploaderRanking
from millrace.swarm.tracking.waiting_nodes import WaitingNodes

__all__ = ["STORE", "PieceOrder", "Tracker"]


class Tracker:
    """Keeps the copies of all pieces, and decides the next transfers.

    Each method that receives an event returns the orders that follow. Before `begin` there are no
    orders: the pieces of a node that joins a moment later need not be read from the store.

    Args:
        sizes: Bytes of each piece.
        limits: Limits on concurrent transfers.
        votes_needed: Number of equal votes that decide the digest of each piece; by default one.
        known_digests: Digests of pieces that are known before the run.
        seed: Seed of the random pauses before a failed read is tried again.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        limits: LimitSettings | None = None,
        *,
        votes_needed: Sequence[int] = (),
        known_digests: Mapping[int, str] | None = None,
        seed: int = 0,
    ) -> None:
        limits, count = limits or LimitSettings(), len(sizes)
        concurrency = ReadConcurrency(limits.store_reads_per_node)
        self._output = TrackerOutput()
        self._nodes = NodeTable(count)
        self._transfers = TransferTable(count, limits.uploads_per_node)
        self._read_queue = ReadQueue(count, seed)
        self._waiting_nodes = WaitingNodes(self._nodes, self._read_queue, concurrency)
        self._readers = ReaderRanking(self._nodes, concurrency, limits.downloads_per_node, count)
        self._uploaders = UploaderRanking(self._nodes)
        self._copies = CopyTable(
            sizes,
            nodes=self._nodes,
            transfers=self._transfers,
            waiting_nodes=self._waiting_nodes,
            readers=self._readers,
            output=self._output,
        )
        self._copies.require_votes(votes_needed)
        self._copies.set_known_digests(known_digests or {})
        self._direct = DirectReads(
            self._nodes, self._copies, self._read_queue, allowed=limits.direct_reads
        )
        uploader_selector = UploaderSelector(
            self._nodes, self._copies, self._uploaders, self._transfers
        )
        self._slots = SlotFiller(
            limits,
            concurrency,
            copies=self._copies,
            transfers=self._transfers,
            waiting_nodes=self._waiting_nodes,
            read_queue=self._read_queue,
            uploader_selector=uploader_selector,
            read_selector=ReadSelector(self._nodes, self._copies, self._read_queue, self._readers),
            output=self._output,
        )
        self._outcomes = TransferOutcomes(
            nodes=self._nodes,
            copies=self._copies,
            transfers=self._transfers,
            read_queue=self._read_queue,
            waiting_nodes=self._waiting_nodes,
            readers=self._readers,
            uploaders=self._uploaders,
            direct=self._direct,
            output=self._output,
        )
        self._hedger = LateTransferHedger(
            nodes=self._nodes,
            copies=self._copies,
            transfers=self._transfers,
            read_queue=self._read_queue,
            readers=self._readers,
            uploaders=self._uploaders,
            uploader_selector=uploader_selector,
            slots=self._slots,
        )

    def begin(self, now: float) -> list[PieceOrder]:
        """Give orders from now on: the expected nodes have joined."""
        self._slots.begin()
        return self._fill_all(now)

    @property
    def untrusted_nodes(self) -> list[str]:
        """Nodes that are not trusted: no other node fetches from them."""
        return [node.id for node in self._nodes if not node.trust.is_trusted]

    @property
    def direct_reads_reason(self) -> str:
        """Reason for reads from the store of pieces that nodes have; empty if there are none."""
        return self._direct.reason

    @property
    def held_bytes(self) -> int:
        """Bytes of the pieces that all living nodes have."""
        return self._copies.held_bytes

    def take_disputed(self) -> list[int]:
        """Remove and return the pieces that have become disputed since the last call.

        The driver reads those that are still disputed (`is_disputed`), and reports their digests
        (`settle_piece`).
        """
        return self._output.take_disputed()

    def take_faulty(self) -> list[str]:
        """Remove and return the nodes that have become faulty since the last call.

        They reported bytes without the digest of their order, or too many wrong votes. The driver
        marks them as lost.
        """
        return self._output.take_faulty()

    def is_decided(self, piece: int) -> bool:
        """Tell whether votes, or the driver, have decided the digest of a piece."""
        return bool(self._copies[piece].votes.digest)

    def get_known_digest(self, piece: int) -> str:
        """Return the digest of a piece that is known before the run; empty if there is none."""
        return self._copies[piece].votes.known_digest

    def excuse_read(self, node: str, piece: int) -> None:
        """Do not count the next wrong vote of a node for a piece, which a mirror may have sent."""
        self._copies.excused.add((node, piece))

    def is_expected(self, piece: int, digest: str) -> bool:
        """Tell whether a digest is the known or decided one of a piece, or a trusted vote."""
        return self._copies.is_expected(piece, digest)

    def is_lacked(self, piece: int) -> bool:
        """Tell whether a living node lacks a piece."""
        return self._nodes.is_lacked(piece)

    def is_disputed(self, piece: int) -> bool:
        """Tell whether votes for a piece differ, and the driver has not settled the piece."""
        return self._copies.is_disputed(piece)

    def lacks_any(self, node: str) -> bool:
        """Tell whether a node lacks any piece."""
        return self._nodes[node].missing > 0

    def measure_confirmed(self, node: str) -> int:
        """Return the bytes of a node's pieces whose digests the driver or another node has, too.

        A node can state such a digest only if it has the bytes, or if another node tells it: the
        orders have no digest (`FetchPiece.commitment`). The cost is that of a look at each piece.
        """
        return self._copies.measure_confirmed(self._nodes[node])

    def measure_incoming(self, node: str) -> int:
        """Return the bytes of the pieces that a node is receiving."""
        return self._copies.measure_incoming(self._nodes[node])

    def has(self, node: str, piece: int) -> bool:
        """Tell whether a node has a piece."""
        return bool(self._nodes[node].have[piece])

    def add_node(
        self, node_id: str, have: Iterable[tuple[int, str]], now: float, *, zone: str = ""
    ) -> list[PieceOrder]:
        """Add a node, with the pieces that it has already and their digests."""
        node = self._nodes.add(node_id, zone, self._transfers.add_node(node_id))
        node.queues.votes.extend(self._read_queue.list_vote_requests())
        self._copies.queue_for_new_node(node)
        for number, digest in have:
            self._copies.note_copy(node, number, digest, vote=True)
        return self._fill_after(node, now)

    def complete_transfer(
        self, node_id: str, piece: int, source: str, digest: str, now: float
    ) -> list[PieceOrder]:
        """Note that a node has received a piece with a digest.

        The agent reports `PieceFailed` for bytes without the digest of the order. A node that
        reports such bytes as received is faulty.
        """
        node = self._nodes[node_id]
        if not self._outcomes.complete(node, piece, source, digest, now):
            return self._output.take_orders()
        return self._fill_after(node, now)

    def fail_transfer(
        self, node_id: str, piece: int, source: str, now: float, *, wrong: bool = False
    ) -> list[PieceOrder]:
        """Note that a node could not fetch a piece from a source.

        A report of a transfer that is not under way is ignored.

        Args:
            node_id: Id of the node.
            piece: Piece.
            source: Node, or `STORE`, that was to send the piece.
            now: Time.
            wrong: Whether the bytes did not have the digest of the order.
        """
        node = self._nodes[node_id]
        if not self._outcomes.fail(node, piece, source, now, wrong=wrong):
            return self._output.take_orders()
        return self._fill_after(node, now)

    def note_redundant_transfer(
        self, node_id: str, piece: int, source: str, now: float
    ) -> list[PieceOrder]:
        """Note that a transfer was redundant, since another source was faster.

        If no other source has sent the piece to the node, the transfer counts as failed.
        """
        node = self._nodes[node_id]
        self._outcomes.note_redundant(node, piece, source, now)
        return self._fill_after(node, now)

    def remove_node(self, node_id: str, now: float) -> list[PieceOrder]:
        """Remove a node with all of its copies. Its transfers end."""
        node = self._nodes.get(node_id)
        if node is None or not node.alive:
            return []
        self._nodes.remove(node)
        self._readers.update()
        self._uploaders.update()
        for number, sources in list(node.transfers.incoming.items()):
            for source in list(sources):
                self._transfers.end(node.transfers, number, source, now)
            self._copies.request_read_if_needed(number)
        self._copies.forget_node(node)
        for other in self._nodes.iterate_living():
            for number, sources in list(other.transfers.incoming.items()):
                if node_id in sources:
                    self._transfers.end(other.transfers, number, node_id, now)
                    self._waiting_nodes.enqueue(other, number)
            self._slots.fill(other, now)
        return self._output.take_orders()

    def tick(self, now: float) -> list[PieceOrder]:
        """Note that time has passed: retry delayed reads, and order late transfers elsewhere."""
        for number in self._read_queue.take_due(now):
            self._copies.request_read(number)
        self._hedger.hedge(now)
        self._direct.compare(now)
        return self._fill_all(now)

    def settle_piece(self, piece: int, digest: str, now: float) -> list[PieceOrder]:
        """Note the digest of a piece that the driver has read itself.

        Nodes drop other copies. A node whose vote was wrong twice is no longer trusted.
        """
        self._copies.settle(piece, digest)
        self._slots.fill_waiting(now)
        return self._output.take_orders()

    def count_wrong_read(self, node_id: str, now: float) -> list[PieceOrder]:
        """Note that a node has read bytes that differ from those that the driver has read.

        After two such reads, the node is no longer trusted.
        """
        node = self._nodes[node_id]
        self._copies.count_wrong_vote(node)
        return self._fill_after(node, now)

    def _fill_after(self, node: NodeState, now: float) -> list[PieceOrder]:
        """Fill the slots of a node after an event, then those of waiting nodes."""
        if node.alive:
            self._slots.fill(node, now)
        self._slots.fill_waiting(now)
        return self._output.take_orders()

    def _fill_all(self, now: float) -> list[PieceOrder]:
        for node in self._nodes.iterate_living():
            self._slots.fill(node, now)
        return self._output.take_orders()
