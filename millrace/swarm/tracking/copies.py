"""Copies of pieces: who has which, what the votes for them decide, and whom others fetch from.

This module owns what each piece is, and the holders that give it. A change has consequences: other
nodes may fetch the piece, a copy is dropped, or the piece is read from the store again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from millrace.swarm.tracking.nodes import NodeState, NodeTable
from millrace.swarm.tracking.orders import STORE, Order
from millrace.swarm.tracking.readers import ReaderRanking
from millrace.swarm.tracking.transfers import TransferTable
from millrace.swarm.tracking.votes import PieceVotes
from millrace.swarm.tracking.waiting import WaitingNodes


@dataclass(slots=True)
class PieceState:
    """One piece, as the tracker knows it.

    Attributes:
        size: Number of bytes.
        votes: Statements of the nodes about its digest.
        holders: Trusted nodes whose copy has the decided digest.
    """

    size: int
    votes: PieceVotes = field(default_factory=PieceVotes)
    holders: list[str] = field(default_factory=list[str])


class CopyTable:
    """Copies of all pieces of a run.

    Args:
        sizes: Bytes of each piece.
        nodes: Nodes of the run.
        transfers: Transfers that are under way.
        waiting: Nodes that wait for work, and their queues.
        readers: Ranking that is told how far each node is.
        orders: List that orders to drop a copy are added to.

    Attributes:
        disputed: Pieces of which nodes have different digests.
        hopeless: Nodes that had too many pieces wrong.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        nodes: NodeTable,
        transfers: TransferTable,
        waiting: WaitingNodes,
        readers: ReaderRanking,
        orders: list[Order],
    ) -> None:
        self._pieces = [PieceState(size) for size in sizes]
        self._nodes, self._transfers = nodes, transfers
        self._waiting, self._readers = waiting, readers
        self._orders = orders
        self.disputed: list[int] = []
        self.hopeless: list[str] = []

    def __getitem__(self, number: int) -> PieceState:
        """Return a piece."""
        return self._pieces[number]

    def __len__(self) -> int:
        """Return the number of pieces."""
        return len(self._pieces)

    def require_votes(self, needs: Sequence[int]) -> None:
        """Set the number of votes that decide, for each piece."""
        for piece, votes in zip(self._pieces, needs, strict=False):
            piece.votes.needs = votes

    def is_disputed(self, number: int) -> bool:
        """Tell whether votes for a piece differ, and the owner has not said what it is."""
        return self._pieces[number].votes.is_disputed(self._is_trusted)

    def is_waiting_for_votes(self, number: int) -> bool:
        """Tell whether a piece has a vote, and too few: nodes have it in `NodeQueues.votes`."""
        return self._pieces[number].votes.is_waiting(self._is_trusted)

    def is_well_held(self, number: int) -> bool:
        """Tell whether some node has a piece from which it comes in time."""
        nodes = self._nodes
        return any(not nodes[name].pace.is_slow for name in self._pieces[number].holders)

    def welcome(self, node: NodeState) -> None:
        """Let a new node fetch what others have, and read the rest."""
        for number, piece in enumerate(self._pieces):
            if piece.holders:
                node.queues.fetches.append(number)
            self.offer_if_nobody_has(number)  # those that have it may give nothing

    def note_copy(self, node: NodeState, number: int, digest: str, *, vote: bool) -> None:
        """Note that a node has a copy of a piece; `vote`: it did not get it from a node."""
        votes = self._pieces[number].votes
        self._nodes.note_copy(node, number)
        self._readers.note_copy(node)
        votes.add(node.name, digest, vote=vote)
        if votes.digest == digest:
            self._add_holder(node, number)
        elif votes.is_settled or not vote:
            self._reject(node, number)
        else:
            self._count_votes(number)
        self.offer_if_nobody_has(number)

    def settle(self, number: int, digest: str) -> None:
        """Note the digest of a piece that the owner has read: copies that differ are dropped."""
        self._pieces[number].votes.is_settled = True
        self._decide(number, digest)
        self.offer_if_nobody_has(number)

    def forget_node(self, node: NodeState) -> None:
        """Forget the copies of a node that is gone. What they were stays decided."""
        for number, piece in enumerate(self._pieces):
            if not piece.votes.remove(node.name):
                continue
            if node.name in piece.holders:
                piece.holders.remove(node.name)
            self.offer_if_nobody_has(number)

    def distrust(self, node: NodeState) -> None:
        """Fetch nothing more from a node, count its votes no more, and undo what they decided.

        A piece of which too few votes are left is open again. Copies of it that came from other
        nodes are dropped where two votes were needed, and those of the node itself where no other
        node has it.
        """
        if not node.trust.is_trusted:
            return
        node.trust.is_trusted = False
        for number, piece in enumerate(self._pieces):
            if node.name not in piece.votes.said:
                continue
            if node.name in piece.holders:
                piece.holders.remove(node.name)
            self._undo_decision(node, number)
            self.offer_if_nobody_has(number)

    def mark_slow(self, node: NodeState) -> None:
        """Compare nobody with a node. What only slow nodes have is read from the store again."""
        if node.pace.is_slow:
            return
        node.pace.is_slow = True
        self._readers.update()
        for number in range(len(self._pieces)):
            if node.have[number]:
                self.offer_if_nobody_has(number)

    def offer_if_nobody_has(self, number: int) -> None:
        """Let a piece be read that is lacked, and that no node reads or gives in time."""
        if self._transfers.is_read(number) or self.is_well_held(number):
            return
        if self._nodes.is_lacked(number):
            self.offer(number)

    def offer(self, number: int) -> None:
        """Let a node read a piece from the store: the first one, or one that has no vote yet."""
        if self.is_waiting_for_votes(number):
            self._waiting.offer_vote(number)
        else:
            self._waiting.offer_read(number)

    def _is_trusted(self, name: str) -> bool:
        return self._nodes[name].trust.is_trusted

    def _add_holder(self, node: NodeState, number: int) -> None:
        """Let others fetch a piece from a node, whose copy is right."""
        piece = self._pieces[number]
        if not node.trust.is_trusted or node.name in piece.holders:
            return
        piece.holders.append(node.name)
        if node.pace.is_slow:
            self.offer_if_nobody_has(number)
        if len(piece.holders) == 1:
            self._waiting.enqueue_for_others(number)
        elif node.zone:
            self._waiting.pass_on(node, number)

    def _count_votes(self, number: int) -> None:
        """Count the votes for a piece: enough for one digest decide, and others are a dispute."""
        digest = self._pieces[number].votes.count(self._is_trusted)
        if digest is not None:
            self._decide(number, digest)
        if self.is_disputed(number):
            self.disputed.append(number)

    def _decide(self, number: int, digest: str) -> None:
        """Let a piece be what is said; where the owner says so, other copies are dropped."""
        piece = self._pieces[number]
        votes = piece.votes
        votes.digest, piece.holders = digest, []
        for name, said in list(votes.said.items()):
            if said == digest:
                self._add_holder(self._nodes[name], number)
            elif votes.is_settled and name in votes.said:
                self._reject(self._nodes[name], number)

    def _reject(self, node: NodeState, number: int) -> None:
        """Have a node drop a copy: the owner says otherwise, or it is of a digest that is undone.

        A node whose vote was wrong twice has none any more. One that goes on so is given up: it
        would read the piece again for ever.
        """
        voted = node.name in self._pieces[number].votes.voters
        self._drop(node, number)
        self._waiting.enqueue(node, number)
        if not voted:
            return
        node.trust.count_wrong_vote()
        if node.trust.has_lost_vote:
            self.distrust(node)
        if node.trust.has_become_hopeless:
            self.hopeless.append(node.name)

    def _undo_decision(self, node: NodeState, number: int) -> None:
        piece = self._pieces[number]
        votes = piece.votes
        if votes.is_settled or not votes.digest:
            return
        if votes.has_support(self._is_trusted, held=bool(piece.holders)):
            return
        wrong, votes.digest, piece.holders = votes.digest, "", []
        for name, said in list(votes.said.items()):
            voted = name in votes.voters and name != node.name
            if said == wrong and not voted:
                self._drop(self._nodes[name], number)
        self._count_votes(number)

    def _drop(self, node: NodeState, number: int) -> None:
        piece = self._pieces[number]
        piece.votes.remove(node.name)
        if node.name in piece.holders:
            piece.holders.remove(node.name)
        if node.have[number]:
            self._nodes.forget_copy(node, number)
            self._waiting.queue_vote(node, number)
            self._orders.append(Order(node.name, number, STORE, drop=True))
