"""Selection of the next order: the uploader of a piece, and the next read from the store.

These classes change no state but the queues of pieces.
"""

from dataclasses import dataclass

from millrace.swarm.tracking.copies import CopyTable
from millrace.swarm.tracking.limits import MAX_CANDIDATES
from millrace.swarm.tracking.nodes import NodeState, NodeTable
from millrace.swarm.tracking.read_queue import ReadChoice, ReadQueue
from millrace.swarm.tracking.readers import ReaderRanking
from millrace.swarm.tracking.transfers import TransferTable
from millrace.swarm.tracking.uploaders import UploaderRanking


@dataclass(frozen=True, slots=True)
class UploaderSelector:
    """Selection of the uploader of a piece.

    Attributes:
        nodes: Nodes of the run.
        copies: Copies of the pieces.
        uploaders: Rates of the transfers between nodes.
        transfers: Transfers that are under way.
    """

    nodes: NodeTable
    copies: CopyTable
    uploaders: UploaderRanking
    transfers: TransferTable

    def select(self, node: NodeState, number: int) -> NodeState | None:
        """Return the holder to fetch a piece from.

        Holders in the same zone come first, then fast nodes, then those with the highest rate for
        each upload.

        Returns:
            None if no holder has a slot, or if a neighbour has or fetches the piece.
        """
        nodes, avoids = self.nodes, node.trust.avoids
        near = False
        best: tuple[tuple[bool, bool, float], NodeState] | None = None
        for name in self.copies[number].list_candidates():
            holder = nodes[name]
            if not (holder.alive and holder.trust.is_trusted) or avoids(name):
                continue
            same = holder.zone == node.zone
            near = near or same
            if not self._has_slot(holder, node):
                continue
            rate = self.uploaders.get_rate(holder, node) or 1e12
            cost = (not same, holder.rates.is_slow, (holder.transfers.uploads + 1) / rate)
            if best is None or cost < best[0]:
                best = cost, holder
        if best is None:
            return None
        if best[0][0] and (near or self.nodes.is_arriving_in_zone(node, number)):
            return None  # one copy enters a zone; the other nodes of the zone fetch that copy
        return best[1]

    def skip_blocked(self, node: NodeState, most: int) -> int:
        """Move pieces that no holder has a slot for from the start of a queue to its end.

        One copy enters a zone. So a piece that a neighbour has waits for a slot of a neighbour. The
        holders are not examined, which would take most of the tracker's time.

        Args:
            node: Node with the queue of fetches.
            most: Largest number of pieces to move.

        Returns:
            Number of moved pieces, and of removed ones that have no holder any longer.
        """
        if node.trust.avoids_any:
            return 0
        fetches, have, incoming = node.queues.fetches, node.have, node.transfers.incoming
        pieces, free, near = (
            self.copies.pieces,
            self.transfers.free,
            self.nodes.zone_bits[node.zone],
        )
        moved = 0
        while fetches and moved < most:
            number = fetches[0]
            if have[number] or number in incoming:
                fetches.popleft()
                continue
            candidates = pieces[number].candidates
            if (candidates & near or candidates) & free:
                break
            if candidates:
                fetches.rotate(-1)
            else:
                fetches.popleft()  # the next first holder puts the piece into the queue again
            moved += 1
        return moved

    def is_blocked(self, node: NodeState) -> bool:
        """Tell whether a node may fetch pieces, and no holder has a slot for any of them.

        False if a holder may have one.
        """
        transfers = self.transfers
        needed = node.lacked & ~node.transfers.incoming_bits
        if node.trust.avoids_any or not needed:
            return False
        while found := transfers.available & needed:
            bit = found & -found
            if self.copies.pieces[bit.bit_length() - 1].candidates & transfers.free:
                return False
            transfers.available &= ~bit
        return True

    def is_low_priority(self, uploader: NodeState, node: NodeState) -> bool:
        """Tell whether a transfer has low priority: to another zone, or to a slow node."""
        return uploader.zone != node.zone or self.uploaders.is_slow_fetcher(node)

    def _has_slot(self, uploader: NodeState, node: NodeState) -> bool:
        """Tell whether an uploader has a slot for a node.

        Transfers with low priority take long. They use at most half of the slots while neighbours
        of the uploader lack pieces.
        """
        if uploader.transfers.uploads >= self.transfers.max_uploads:
            return False
        neighbours = self.nodes.count_lacking_neighbours(uploader)
        most = max(1, self.transfers.max_uploads // 2)
        low_priority = len(uploader.transfers.low_priority)
        return not neighbours or low_priority < most or not self.is_low_priority(uploader, node)


@dataclass(frozen=True, slots=True)
class ReadSelector:
    """Selection of the piece that a node reads from the store.

    Attributes:
        nodes: Nodes of the run.
        copies: Copies of the pieces.
        read_queue: Pieces to read from the store.
        readers: Ranking of the readers.
    """

    nodes: NodeTable
    copies: CopyTable
    read_queue: ReadQueue
    readers: ReaderRanking

    def select(self, node: NodeState, now: float) -> int | None:
        """Remove and return the next piece that a node reads; None if there is none."""
        if node.rates.store_comparison.reason:  # the node makes direct reads (`DirectReads`)
            number = self._take_held(node, now)
        else:
            number = self._take_without_uploader(node, now)
        if number is None:
            number = self._take_vote(node, now)
        if number is None:
            number = self._take_unread(node, now)
        return number

    def _take_held(self, node: NodeState, now: float) -> int | None:
        """Remove and return any piece with holders that this node lacks."""
        for queue in (node.queues.without_uploader, node.queues.fetches):
            for _ in range(min(len(queue), MAX_CANDIDATES)):
                number = queue.pop()
                if not node.needs(number):
                    continue
                if self.read_queue.is_due(number, now):
                    return number
                queue.appendleft(number)  # the last read failed just now
        return None

    def _take_without_uploader(self, node: NodeState, now: float) -> int | None:
        """Remove and return a piece that this node must read, since it avoids all of its holders.

        Pieces that a further node has by now are moved to the queue of fetches.
        """
        queues = node.queues
        for _ in range(min(len(queues.without_uploader), MAX_CANDIDATES)):
            number = queues.without_uploader.pop()
            if not node.needs(number):
                continue
            if not node.trust.avoids_all(self.copies[number].holders):
                queues.fetches.append(number)
            elif self.read_queue.is_due(number, now) and self._must_read_itself(node, number):
                return number
            else:  # the last read failed just now, or another node reads
                queues.without_uploader.appendleft(number)
        return None

    def _must_read_itself(self, node: NodeState, number: int) -> bool:
        """Tell whether no other node will read a piece that a node can fetch from no holder.

        A trusted node reads pieces that only slow nodes have. No node reads pieces that fast
        holders have, so a node that avoids these holders reads such a piece itself.
        """
        holders = self.copies[number].holders
        if node.trust.excluded.issuperset(holders) or self.copies.has_fast_holder(number):
            return True
        return not node.trust.is_trusted and self._is_left_to_untrusted(number)

    def _take_vote(self, node: NodeState, now: float) -> int | None:
        """Remove and return a piece with too few votes that this node lacks and no other reads."""
        may_read = self.readers.may_read(node)
        skipped: list[int] = []
        found = None
        queue = node.queues.votes
        while queue and len(skipped) < MAX_CANDIDATES:
            number = queue.popleft()
            if not self.read_queue.is_vote_requested(number) or node.have[number]:
                continue
            if self.copies[number].votes.digest:
                self.read_queue.remove_vote_request(number)
            elif (
                number not in node.transfers.incoming
                and (may_read or (not node.trust.is_trusted and self._is_left_to_untrusted(number)))
                and not self._is_left_to_others(node, number, now)
            ):
                self.read_queue.remove_vote_request(number)
                found = number
                break
            else:
                skipped.append(number)
        queue.extendleft(reversed(skipped))
        return found

    def _is_left_to_untrusted(self, number: int) -> bool:
        """Tell whether no trusted node lacks a piece, so that none will read the piece."""
        living = self.nodes.iterate_living()
        return all(node.have[number] for node in living if node.trust.is_trusted)

    def _is_left_to_others(self, node: NodeState, number: int, now: float) -> bool:
        """Tell whether the node's read of a piece has just failed, and others have not tried.

        Otherwise a node that fails each read at once would get each piece again, before the others.
        """
        failed = self.read_queue.list_failed_readers(number, now)
        return node.id in failed and any(
            other.trust.is_trusted and other.id not in failed and other.needs(number)
            for other in self.nodes.iterate_living()
        )

    def _take_unread(self, node: NodeState, now: float) -> int | None:
        """Remove and return the first piece without a fast holder that this node does not read."""
        if not self.readers.may_read(node):
            return None

        def choose(number: int) -> ReadChoice:
            if self.copies.has_fast_holder(number) or self.copies.has_too_few_votes(number):
                return ReadChoice.DISCARD
            if not node.transfers.reads_from_store(number) and not node.have[number]:
                left = self._is_left_to_others(node, number, now)
                return ReadChoice.SKIP if left else ReadChoice.TAKE
            # If no node lacks the piece, the nodes that lacked it were removed.
            return ReadChoice.SKIP if self.nodes.is_lacked(number) else ReadChoice.DISCARD

        return self.read_queue.take_first(choose)
