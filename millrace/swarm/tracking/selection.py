"""Selection of the next order: from whom a node fetches a piece, and what it reads itself.

These classes change nothing but the queues that they take a piece from.
"""

from dataclasses import dataclass

from millrace.swarm.tracking.copies import CopyTable
from millrace.swarm.tracking.givers import GiverRanking
from millrace.swarm.tracking.limits import MAX_CANDIDATES
from millrace.swarm.tracking.nodes import NodeState, NodeTable
from millrace.swarm.tracking.read_queue import ReadChoice, ReadQueue
from millrace.swarm.tracking.readers import ReaderRanking


@dataclass(frozen=True, slots=True)
class GiverSelector:
    """Selection of the node that gives a piece.

    Attributes:
        nodes: Nodes of the run.
        copies: Copies of the pieces.
        givers: Rates of the transfers between nodes.
        up: Number of transfers that a node gives at once.
    """

    nodes: NodeTable
    copies: CopyTable
    givers: GiverRanking
    up: int

    def select(self, node: NodeState, number: int) -> NodeState | None:
        """Return the holder to fetch from: near, idle, quick.

        None if none has a slot, or none should.
        """
        nodes, avoids = self.nodes, node.trust.avoids
        holders = self.copies[number].holders
        near = False
        best: tuple[tuple[bool, bool, float], NodeState] | None = None
        for name in reversed(holders[-MAX_CANDIDATES:]):
            holder = nodes[name]
            if not (holder.alive and holder.trust.is_trusted) or avoids(name):
                continue
            same = holder.zone == node.zone
            near = near or same
            if not self._has_slot(holder, node):
                continue
            rate = self.givers.get_rate(holder, node) or 1e12
            cost = (not same, holder.pace.is_slow, (holder.transfers.up + 1) / rate)
            if best is None or cost < best[0]:
                best = cost, holder
        if best is None:
            return None
        if best[0][0] and (near or self.nodes.is_arriving_near(node, number)):
            return None  # one copy a zone: the others take it from there
        return best[1]

    def yields(self, giver: NodeState, node: NodeState) -> bool:
        """Tell whether a transfer leaves slots to others: to another zone, or to a slow node."""
        return giver.zone != node.zone or self.givers.is_slow_fetcher(node)

    def _has_slot(self, giver: NodeState, node: NodeState) -> bool:
        """Tell whether a giver has a slot for a node.

        Transfers over slow links take long: they leave half of the slots to neighbours that lack
        something.
        """
        if giver.transfers.up >= self.up:
            return False
        neighbours = self.nodes.count_lacking_neighbours(giver)
        most = max(1, self.up // 2)
        yielding = len(giver.transfers.yielding)
        return not neighbours or yielding < most or not self.yields(giver, node)


@dataclass(frozen=True, slots=True)
class ReadSelector:
    """Selection of the piece that a node reads from the store.

    Attributes:
        nodes: Nodes of the run.
        copies: Copies of the pieces.
        reads: Pieces that are to be read.
        readers: Ranking of the readers.
    """

    nodes: NodeTable
    copies: CopyTable
    reads: ReadQueue
    readers: ReaderRanking

    def select(self, node: NodeState, now: float) -> int | None:
        """Remove from its queue and return the piece that a node reads next; None for nothing."""
        number = self._take_direct(node, now)
        if number is None:
            number = self._take_vote(node)
        if number is None:
            number = self._take_unread(node)
        return number

    def _take_direct(self, node: NodeState, now: float) -> int | None:
        """Return a piece that others have, and that this node is to read from the store."""
        queues, outrun = node.queues, node.pace.outrun.why
        for waiting in (queues.alone, queues.fetches) if outrun else (queues.alone,):
            for _ in range(min(len(waiting), MAX_CANDIDATES)):
                number = waiting.pop()
                if not node.needs(number):
                    continue
                if not outrun and not node.trust.avoids_all(self.copies[number].holders):
                    queues.fetches.append(number)  # another node has it by now
                    continue
                if self.reads.is_due(number, now) and (outrun or self._is_alone(node, number)):
                    return number
                waiting.appendleft(number)  # it failed a moment ago, or is read for all
        return None

    def _is_alone(self, node: NodeState, number: int) -> bool:
        """Tell whether nobody else will read a piece that a node can get from no other node.

        What only slow nodes have is read for all, by a trusted node that lacks it. What others give
        well, though not to this node, is not.
        """
        holders = self.copies[number].holders
        if node.trust.shunned.issuperset(holders) or self.copies.is_well_held(number):
            return True
        return not node.trust.is_trusted and self._is_left_to_untrusted(number)

    def _take_vote(self, node: NodeState) -> int | None:
        """Return a piece with too few votes that this node lacks, and that nobody else reads."""
        may = self.readers.may_read(node)
        passed: list[int] = []
        found = None
        queue = node.queues.votes
        while queue and len(passed) < MAX_CANDIDATES:
            number = queue.popleft()
            if not self.reads.is_wanted(number) or node.have[number]:
                continue
            if self.copies[number].votes.digest:
                self.reads.remove_wanted(number)
            elif number not in node.transfers.down and (
                may or (not node.trust.is_trusted and self._is_left_to_untrusted(number))
            ):
                self.reads.remove_wanted(number)
                found = number
                break
            else:
                passed.append(number)
        queue.extendleft(reversed(passed))
        return found

    def _is_left_to_untrusted(self, number: int) -> bool:
        """Tell whether no trusted node lacks a piece, so that none will read it any more."""
        living = self.nodes.iterate_living()
        return all(node.have[number] for node in living if node.trust.is_trusted)

    def _take_unread(self, node: NodeState) -> int | None:
        """Return the first piece that nobody has, and that this node does not read already."""
        if not self.readers.may_read(node):
            return None

        def choose(number: int) -> ReadChoice:
            if self.copies.is_well_held(number) or self.copies.is_waiting_for_votes(number):
                return ReadChoice.DISCARD
            if not node.transfers.reads_from_store(number) and not node.have[number]:
                return ReadChoice.TAKE
            # Where no node lacks the piece, those that did are gone.
            return ReadChoice.SKIP if self.nodes.is_lacked(number) else ReadChoice.DISCARD

        return self.reads.take_first(choose)
