"""Copies of pieces: the votes of the nodes, the decided digests, and the holders.

This module owns the digest and the holders of each piece. A change has consequences: other nodes
may fetch the piece, a node drops its copy, or a node reads the piece from the store again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from millrace.swarm.tracking.limits import MAX_CANDIDATES
from millrace.swarm.tracking.nodes import NodeState, NodeTable
from millrace.swarm.tracking.orders import STORE, PieceOrder, TrackerOutput
from millrace.swarm.tracking.readers import ReaderRanking
from millrace.swarm.tracking.transfers import TransferTable
from millrace.swarm.tracking.votes import PieceVotes
from millrace.swarm.tracking.waiting_nodes import WaitingNodes


@dataclass(slots=True)
class PieceState:
    """State of one piece.

    Attributes:
        size: Number of bytes.
        votes: Reports of the nodes about the digest of the piece.
        holders: Trusted nodes whose copy has the decided digest, in the order of their copies.
        candidates: Bits of the last holders, which a node may fetch from (`NodeTransfers.bit`).
    """

    size: int
    votes: PieceVotes = field(default_factory=PieceVotes)
    holders: dict[str, None] = field(default_factory=dict[str, None])
    candidates: int = 0

    def list_candidates(self) -> list[str]:
        """Return the last holders, the newest first."""
        return list(islice(reversed(self.holders), MAX_CANDIDATES))


class CopyTable:
    """Copies of all pieces of a run.

    Args:
        sizes: Bytes of each piece.
        nodes: Nodes of the run.
        transfers: Transfers that are under way.
        waiting_nodes: Nodes that wait for work, and their queues.
        readers: Ranking of the readers, which counts the missing pieces of each node.
        output: Receiver of the orders to drop a copy, of disputed pieces and of faulty nodes.

    Attributes:
        pieces: State of each piece.
        excused: Nodes and pieces, of which the next wrong vote is not counted.
        held_bytes: Bytes of the copies on all living nodes, without dropped ones.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        nodes: NodeTable,
        transfers: TransferTable,
        waiting_nodes: WaitingNodes,
        readers: ReaderRanking,
        output: TrackerOutput,
    ) -> None:
        self.pieces = [PieceState(size) for size in sizes]
        self.excused: set[tuple[str, int]] = set()
        self.held_bytes = 0
        self._nodes, self._transfers = nodes, transfers
        self._waiting_nodes, self._readers = waiting_nodes, readers
        self._output = output

    def __getitem__(self, number: int) -> PieceState:
        """Return a piece."""
        return self.pieces[number]

    def __len__(self) -> int:
        """Return the number of pieces."""
        return len(self.pieces)

    def require_votes(self, votes_needed: Sequence[int]) -> None:
        """Set the number of equal votes that decide each piece."""
        for piece, count in zip(self.pieces, votes_needed, strict=False):
            piece.votes.votes_needed = count

    def set_known_digests(self, digests: Mapping[int, str]) -> None:
        """Decide pieces whose digests are known before the run."""
        for number, digest in digests.items():
            self.pieces[number].votes.set_known_digest(digest)

    def is_disputed(self, number: int) -> bool:
        """Tell whether votes for a piece differ, and the driver has not settled the piece."""
        return self.pieces[number].votes.is_disputed(self._is_trusted)

    def is_expected(self, number: int, digest: str) -> bool:
        """Tell whether a digest is the known or decided one of a piece, or a trusted vote."""
        return self.pieces[number].votes.is_expected(digest, self._is_trusted)

    def has_too_few_votes(self, number: int) -> bool:
        """Tell whether a piece has votes, but too few: the piece is in `NodeQueues.votes`."""
        return self.pieces[number].votes.has_too_few(self._is_trusted)

    def has_fast_holder(self, number: int) -> bool:
        """Tell whether a holder of a piece uploads in time."""
        nodes = self._nodes
        return any(not nodes[name].rates.is_slow for name in self.pieces[number].holders)

    def measure_confirmed(self, node: NodeState) -> int:
        """Return the bytes of the copies of a node that others confirm, in all pieces."""
        return sum(piece.size for piece in self.pieces if piece.votes.is_confirmed(node.id))

    def measure_incoming(self, node: NodeState) -> int:
        """Return the bytes of the pieces that a node is receiving."""
        return sum(self.pieces[number].size for number in node.transfers.incoming)

    def queue_for_new_node(self, node: NodeState) -> None:
        """Add the pieces that have holders to the queue of a new node, and request reads."""
        for number, piece in enumerate(self.pieces):
            if piece.holders:
                node.queues.fetches.append(number)
            self.request_read_if_needed(number)  # all holders may be slow

    def note_copy(self, node: NodeState, number: int, digest: str, *, vote: bool) -> None:
        """Note that a node has a copy of a piece.

        Args:
            node: Node.
            number: Piece.
            digest: Digest of the copy.
            vote: Whether the copy is a vote: the node did not receive it from another node.
        """
        votes = self.pieces[number].votes
        self._nodes.note_copy(node, number)
        self.held_bytes += self.pieces[number].size
        self._readers.note_copy(node)
        votes.add(node.id, digest, vote=vote)
        if votes.digest == digest:
            self._add_holder(node, number)
        elif votes.is_settled or not vote:
            self._reject(node, number)
        else:
            self._count_votes(number)
            if self._is_untrusted_copy(node, number):
                self._reject(node, number)  # counted: a Byzantine node would read it again forever
        self.request_read_if_needed(number)

    def settle(self, number: int, digest: str) -> None:
        """Note the digest of a piece that the driver has read: nodes drop other copies.

        A digest that is known before the run stays.
        """
        if self.pieces[number].votes.known_digest:
            return
        self.pieces[number].votes.is_settled = True
        self._decide(number, digest)
        self.request_read_if_needed(number)

    def forget_node(self, node: NodeState) -> None:
        """Forget the copies of a removed node. Decided digests stay decided."""
        for number, piece in enumerate(self.pieces):
            if not piece.votes.remove(node.id):
                continue
            self.held_bytes -= piece.size
            self._remove_holder(node, number)
            self.request_read_if_needed(number)

    def distrust(self, node: NodeState) -> None:
        """Trust a node no longer: ignore its votes and its copies, and undo their decisions.

        A digest with too few remaining votes is no longer decided. Then nodes drop their copies of
        the piece that are not votes, and the node drops its own copy. The node also drops copies
        that differ from decided digests.
        """
        if not node.trust.is_trusted:
            return
        node.trust.is_trusted = False
        for number, piece in enumerate(self.pieces):
            if node.id not in piece.votes.digests:
                continue
            self._remove_holder(node, number)
            self._undo_decision(node, number)
            self._drop_if_untrusted(node, number)
            self.request_read_if_needed(number)

    def count_wrong_vote(self, node: NodeState) -> None:
        """Count a wrong vote of a node, or bytes that it read and that the store does not have.

        A node with two of them is no longer trusted. A node with more of them is faulty: else it
        would read the piece again forever.
        """
        node.trust.count_wrong_vote()
        if node.trust.has_lost_vote:
            self.distrust(node)
        if node.trust.has_become_faulty:
            self._output.faulty.append(node.id)

    def mark_slow(self, node: NodeState) -> None:
        """Mark a node as slow. Request reads of the pieces that only slow nodes have."""
        if node.rates.is_slow:
            return
        node.rates.is_slow = True
        self._readers.update()
        for number in range(len(self.pieces)):
            if node.have[number]:
                self.request_read_if_needed(number)

    def request_read_if_needed(self, number: int) -> None:
        """Queue a read of a piece that a node lacks, unless a node reads or quickly uploads it."""
        if self._transfers.is_read(number) or self.has_fast_holder(number):
            return
        if self._nodes.is_lacked(number):
            self.request_read(number)

    def request_read(self, number: int) -> None:
        """Queue a read of a piece from the store: the first read, or one for a further vote."""
        if self.has_too_few_votes(number):
            self._waiting_nodes.request_vote_read(number)
        else:
            self._waiting_nodes.request_first_read(number)

    def _is_trusted(self, name: str) -> bool:
        return self._nodes[name].trust.is_trusted

    def _add_holder(self, node: NodeState, number: int) -> None:
        """Add a holder of a piece, which other nodes can fetch from."""
        piece = self.pieces[number]
        if not node.trust.is_trusted or node.id in piece.holders:
            return
        piece.holders[node.id] = None
        self._offer(node, number)
        if node.rates.is_slow:
            self.request_read_if_needed(number)
        if len(piece.holders) == 1:
            self._waiting_nodes.enqueue_for_others(number)
        elif node.zone:
            self._waiting_nodes.enqueue_for_zone(node, number)

    def _remove_holder(self, node: NodeState, number: int) -> None:
        piece = self.pieces[number]
        if node.id not in piece.holders:
            return
        del piece.holders[node.id]
        node.transfers.offers &= ~(1 << number)
        piece.candidates = 0
        for name in piece.list_candidates():
            self._offer(self._nodes[name], number)

    def _offer(self, node: NodeState, number: int) -> None:
        """Make a holder of a piece one of those that other nodes may fetch the piece from."""
        piece, bit, transfers = self.pieces[number], 1 << number, node.transfers
        piece.candidates |= transfers.bit
        transfers.offers |= bit
        if transfers.bit & self._transfers.free:
            self._transfers.available |= bit
        oldest = next(islice(reversed(piece.holders), MAX_CANDIDATES, None), None)
        if oldest is not None:
            replaced = self._nodes[oldest].transfers
            piece.candidates &= ~replaced.bit
            replaced.offers &= ~bit

    def _count_votes(self, number: int) -> None:
        """Decide a piece with enough equal votes. Note a dispute if votes differ."""
        digest = self.pieces[number].votes.count(self._is_trusted)
        if digest is not None:
            self._decide(number, digest)
        if self.is_disputed(number):
            self._output.disputed.append(number)

    def _decide(self, number: int, digest: str) -> None:
        """Set the digest of a piece. If the driver has settled it, nodes drop other copies."""
        piece = self.pieces[number]
        votes = piece.votes
        votes.digest, piece.holders, piece.candidates = digest, {}, 0
        for name, reported in list(votes.digests.items()):
            if reported == digest:
                self._add_holder(self._nodes[name], number)
            elif votes.is_settled and name in votes.digests:
                self._reject(self._nodes[name], number)
            else:
                self._drop_if_untrusted(self._nodes[name], number)

    def _drop_if_untrusted(self, node: NodeState, number: int) -> None:
        """Order a node that is not trusted to drop a copy that differs from the decided digest.

        Such a copy is no dispute, so the driver does not settle the piece.
        """
        if self._is_untrusted_copy(node, number):
            self._drop(node, number)
            self._waiting_nodes.enqueue(node, number)

    def _is_untrusted_copy(self, node: NodeState, number: int) -> bool:
        """Tell whether a node that is not trusted has a copy that differs from the decided one."""
        votes = self.pieces[number].votes
        if node.trust.is_trusted or not votes.digest:
            return False
        return votes.digests.get(node.id, votes.digest) != votes.digest

    def _reject(self, node: NodeState, number: int) -> None:
        """Order a node to drop a copy whose digest is wrong, or is no longer decided."""
        voted = node.id in self.pieces[number].votes.voters
        self._drop(node, number)
        self._waiting_nodes.enqueue(node, number)
        if voted and (node.id, number) not in self.excused:
            self.count_wrong_vote(node)
        self.excused.discard((node.id, number))

    def _undo_decision(self, node: NodeState, number: int) -> None:
        piece = self.pieces[number]
        votes = piece.votes
        if votes.is_settled or not votes.digest:
            return
        if votes.has_support(self._is_trusted, held=bool(piece.holders)):
            return
        wrong, votes.digest, piece.holders, piece.candidates = votes.digest, "", {}, 0
        for name, reported in list(votes.digests.items()):
            voted = name in votes.voters and name != node.id
            if reported == wrong and not voted:
                self._drop(self._nodes[name], number)
        self._count_votes(number)

    def _drop(self, node: NodeState, number: int) -> None:
        self.pieces[number].votes.remove(node.id)
        self._remove_holder(node, number)
        if node.have[number]:
            self._nodes.forget_copy(node, number)
            self.held_bytes -= self.pieces[number].size
            self._waiting_nodes.queue_vote_read(node, number)
            self._output.orders.append(PieceOrder(node.id, number, STORE, drop=True))
