"""Transfers that take too long: which are late, and what is ordered in their place.

This module owns no state. It looks at all transfers at one moment.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from millrace.swarm.tracking.copies import CopyTable
from millrace.swarm.tracking.givers import GiverRanking
from millrace.swarm.tracking.nodes import NodeState, NodeTable
from millrace.swarm.tracking.orders import STORE
from millrace.swarm.tracking.read_queue import ReadQueue
from millrace.swarm.tracking.readers import ReaderRanking
from millrace.swarm.tracking.selection import GiverSelector
from millrace.swarm.tracking.slots import SlotFiller
from millrace.swarm.tracking.transfers import TransferTable

_VERY_LATE = 4.0  # times what is late


@dataclass(slots=True)
class LateTransfers:
    """Transfers of one kind that take too long.

    Attributes:
        transfers: Node, piece and source of each.
        nodes: Readers, or givers, of these transfers.
        very: Whether one takes far too long.
    """

    transfers: list[tuple[NodeState, int, str]] = field(
        default_factory=list[tuple[NodeState, int, str]]
    )
    nodes: set[str] = field(default_factory=set[str])
    very: bool = False

    def note(self, node: NodeState, number: int, source: str, took: float, allowed: float) -> None:
        """Add a transfer if it takes longer than allowed."""
        if took > allowed:
            self.transfers.append((node, number, source))
            self.nodes.add(node.name if source == STORE else source)
            self.very |= is_very_late(took, allowed)


def is_very_late(took: float, allowed: float) -> bool:
    """Tell whether a transfer takes so long that it may never end."""
    return took > _VERY_LATE * allowed


class LateTransferHedger:
    """Orders what is late from somewhere else too; whichever comes first counts.

    Args:
        nodes: Nodes of the run.
        copies: Copies of the pieces.
        transfers: Transfers that are under way.
        unread: Pieces that are to be read from the store.
        readers: Ranking of the readers.
        givers: Rates of the transfers between nodes.
        selector: Selection of givers.
        slots: Gives the orders.
    """

    def __init__(
        self,
        *,
        nodes: NodeTable,
        copies: CopyTable,
        transfers: TransferTable,
        unread: ReadQueue,
        readers: ReaderRanking,
        givers: GiverRanking,
        selector: GiverSelector,
        slots: SlotFiller,
    ) -> None:
        self._nodes, self._copies, self._transfers = nodes, copies, transfers
        self._unread, self._readers, self._givers = unread, readers, givers
        self._selector, self._slots = selector, slots

    def hedge(self, now: float) -> None:
        """Order what is late from somewhere else too."""
        for late in self._find_late(now):
            for node, number, source in late.transfers:
                if source == STORE:
                    self._hedge_read(node, number, now)
                else:
                    self._hedge_fetch(node, number, self._nodes[source], now)

    def _find_late(self, now: float) -> list[LateTransfers]:
        """Return the late transfers that are to be hedged; mark givers that are very late."""
        reads, slow_reads, near = LateTransfers(), LateTransfers(), LateTransfers()
        across: dict[str, LateTransfers] = {}  # by the zone that they go to
        crossing: Counter[str] = Counter()
        for node in self._nodes.iterate_living():
            slow = self._readers.is_probing(node) or self._readers.is_slow(node)
            for number, source, since in _iterate_single(node):
                giver = self._nodes.get(source)
                size, took = self._copies[number].size, now - since
                if giver is None:
                    late = slow_reads if slow else reads
                    late.note(node, number, source, took, self._allow_read(size, slow=slow))
                    continue
                late = near
                if giver.zone != node.zone:
                    late = across.setdefault(node.zone, LateTransfers())
                    crossing[node.zone] += 1
                allowed = self._givers.compute_timeout(giver, node, size)
                late.note(node, number, source, took, allowed)
                if is_very_late(took, allowed):
                    self._copies.mark_slow(giver)
        # Late at many at once is a crowded network, and more of the same would not help.
        few = max(1, sum(1 for _ in self._nodes.iterate_living()) // 4)
        due = [late for late in (reads, near) if len(late.nodes) <= few or late.very]
        due += [
            late
            for zone, late in across.items()
            if len(late.transfers) <= max(1, crossing[zone] // 4) or late.very
        ]
        return [slow_reads, *due]

    def _allow_read(self, size: int, *, slow: bool) -> float:
        return self._readers.compute_timeout(
            size, slow=slow, reads=self._transfers.reads, last=not self._unread.has_unread
        )

    def _hedge_read(self, node: NodeState, number: int, now: float) -> None:
        """Let another node read a piece too, or fetch it from a node that has it by now."""
        piece = self._copies[number]
        alone = self._transfers.measure_read(node.transfers, number, now)
        self._readers.note_pace(node, alone / max(piece.size, 1))
        if not piece.holders:
            self._copies.offer(number)
            return
        self._order_elsewhere(node, number, STORE, now)

    def _hedge_fetch(self, node: NodeState, number: int, giver: NodeState, now: float) -> None:
        """Let a node fetch a piece from another giver too."""
        if giver.zone == node.zone and self._givers.knows_path(giver, node):
            self._copies.mark_slow(giver)  # other givers serve this node better
        self._order_elsewhere(node, number, giver.name, now)

    def _order_elsewhere(self, node: NodeState, number: int, source: str, now: float) -> None:
        giver = self._selector.select(node, number)
        if giver is not None and giver.name != source and not giver.pace.is_slow:
            self._slots.order_fetch(node, number, giver, now)


def _iterate_single(node: NodeState) -> Iterator[tuple[int, str, float]]:
    """Iterate over transfers that have one source: neither hedged already, nor read again."""
    for number, sources in node.transfers.down.items():
        if len(sources) == 1 and not node.have[number]:
            source, since = next(iter(sources.items()))
            yield number, source, since
