"""Outcomes of transfers: what the tracker learns from each transfer that has ended.

This module owns the accusations of wrong bytes. It passes all else to the part that owns it.
"""

from millrace.swarm.tracking.copies import CopyTable
from millrace.swarm.tracking.direct_reads import DirectReads
from millrace.swarm.tracking.nodes import NodeState, NodeTable
from millrace.swarm.tracking.orders import STORE, TrackerOutput
from millrace.swarm.tracking.read_queue import ReadQueue
from millrace.swarm.tracking.readers import ReaderRanking
from millrace.swarm.tracking.transfers import EndedTransfer, TransferTable
from millrace.swarm.tracking.trust import Accusations
from millrace.swarm.tracking.uploaders import UploaderRanking
from millrace.swarm.tracking.waiting_nodes import WaitingNodes


class TransferOutcomes:
    """Ends transfers, and updates copies, queues, rates and trust.

    Args:
        nodes: Nodes of the run.
        copies: Copies of the pieces.
        transfers: Transfers that are under way.
        read_queue: Pieces to read from the store.
        waiting_nodes: Nodes that wait for work, and their queues.
        readers: Ranking of the readers.
        uploaders: Ranking of the uploaders.
        direct: Comparison of the store with the nodes.
        output: Receiver of faulty nodes.
    """

    def __init__(
        self,
        *,
        nodes: NodeTable,
        copies: CopyTable,
        transfers: TransferTable,
        read_queue: ReadQueue,
        waiting_nodes: WaitingNodes,
        readers: ReaderRanking,
        uploaders: UploaderRanking,
        direct: DirectReads,
        output: TrackerOutput,
    ) -> None:
        self._nodes, self._copies, self._transfers = nodes, copies, transfers
        self._read_queue, self._waiting_nodes = read_queue, waiting_nodes
        self._readers, self._uploaders, self._direct = readers, uploaders, direct
        self._output = output
        self._accusations = Accusations()

    def complete(self, node: NodeState, number: int, source: str, digest: str, now: float) -> bool:
        """Note that a node has received a piece with a digest.

        An agent rejects bytes that do not have the digest of the order. So a node is faulty if it
        reports another digest, wherever the bytes came from.

        Returns:
            Whether the node has a new copy, so that slots may be filled.
        """
        ended = self._transfers.end(node.transfers, number, source, now)
        is_ordered = ended is not None and (source != STORE or bool(ended.digest))
        if ended is not None and is_ordered and digest != ended.digest:
            self._output.faulty.append(node.id)
            self._copies.request_read_if_needed(number)
            return False
        if ended is not None:
            self._measure(node, number, source, ended, now)
        if not node.alive or node.have[number]:
            self._copies.request_read_if_needed(number)
            return False
        self._read_queue.clear_failures(number)
        node.trust.clear_failed_uploads(source)
        self._copies.note_copy(node, number, digest, vote=source == STORE)
        return True

    def fail(self, node: NodeState, number: int, source: str, now: float, *, wrong: bool) -> bool:
        """Note that a transfer has failed. Ignore the report of a transfer that is not under way.

        Args:
            node: Node that was to receive the piece.
            number: Piece.
            source: Source of the transfer.
            now: Time.
            wrong: Whether the bytes did not have the digest of the order.

        Returns:
            Whether the transfer was under way, so that slots may be filled.
        """
        piece = self._copies[number]
        ended = self._transfers.end(node.transfers, number, source, now)
        if ended is None:
            return False
        if source == STORE:
            self._read_queue.delay(number, node.id, now)
        elif not wrong:
            self._note_failed_upload(node, self._nodes[source])
        elif ended.digest == piece.votes.digest:  # else the uploader has dropped the ordered copy
            self._accuse(node, self._nodes[source])
        if node.alive and not node.have[number] and piece.holders:
            self._waiting_nodes.enqueue(node, number)
        return True

    def note_redundant(self, node: NodeState, number: int, source: str, now: float) -> None:
        """Note that a transfer was redundant, since another source was faster.

        If no other source has sent the piece to the node, the transfer counts as failed.
        """
        piece = self._copies[number]
        ended = self._transfers.end(node.transfers, number, source, now)
        if ended is not None and node.alive and not node.have[number]:
            if source == STORE:
                self._read_queue.delay(number, node.id, now)
            if piece.holders:
                self._waiting_nodes.enqueue(node, number)
        if source != STORE and ended is not None:
            uploader = self._nodes[source]
            if ended.seconds > self._uploaders.compute_timeout(uploader, node, piece.size):
                self._note_failed_upload(node, uploader)
        if source != STORE or node.have[number]:
            # Meanwhile no other read was ordered, and other nodes may be unable to use this copy.
            self._copies.request_read_if_needed(number)

    def _measure(
        self, node: NodeState, number: int, source: str, ended: EndedTransfer, now: float
    ) -> None:
        """Update the rates with the duration of a transfer."""
        size = self._copies[number].size
        if source == STORE:
            self._direct.note_read(node, size, ended.seconds, now)
            self._readers.note_read(node, size, ended.seconds, ended.unshared, now)
        else:
            self._direct.note_fetch(node, size)
            seconds = max(ended.seconds, 1e-6)
            self._uploaders.note_fetch(self._nodes[source], node, size, seconds)

    def _accuse(self, node: NodeState, uploader: NodeState) -> None:
        """Note that an uploader sent wrong bytes to a node: the node uses it no more."""
        node.trust.excluded.add(uploader.id)
        if self._accusations.accuse(node.id, uploader.id):
            self._copies.distrust(uploader)

    def _note_failed_upload(self, node: NodeState, uploader: NodeState) -> None:
        """Note a failed upload. After several in a row, the uploader counts as slow.

        A slow node may report that it has every piece. So pieces that only slow nodes have are read
        from the store again.
        """
        self._uploaders.note_failed_upload(uploader, node)
        if node.trust.count_failed_upload(uploader.id):
            self._copies.mark_slow(uploader)
