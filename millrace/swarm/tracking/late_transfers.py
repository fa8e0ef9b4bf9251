"""Late transfers, and the second orders for them.

This module owns no state. Each call examines all transfers that are under way.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from millrace.swarm.tracking.copies import CopyTable
from millrace.swarm.tracking.nodes import NodeState, NodeTable
from millrace.swarm.tracking.orders import STORE
from millrace.swarm.tracking.read_queue import ReadQueue
from millrace.swarm.tracking.readers import ReaderRanking
from millrace.swarm.tracking.selection import UploaderSelector
from millrace.swarm.tracking.slots import SlotFiller
from millrace.swarm.tracking.transfers import TransferTable
from millrace.swarm.tracking.uploaders import UploaderRanking

_VERY_LATE = 4.0  # multiple of the timeout after which a transfer may never end


@dataclass(slots=True)
class LateTransfers:
    """Transfers of one kind that take too long.

    Attributes:
        transfers: Node, piece and source of each.
        nodes: Readers, or uploaders, of these transfers.
        very: Whether one of them is very late (`is_very_late`).
    """

    transfers: list[tuple[NodeState, int, str]] = field(
        default_factory=list[tuple[NodeState, int, str]]
    )
    nodes: set[str] = field(default_factory=set[str])
    very: bool = False

    def note(
        self, node: NodeState, number: int, source: str, seconds: float, allowed: float
    ) -> None:
        """Add a transfer if it takes longer than allowed."""
        if seconds > allowed:
            self.transfers.append((node, number, source))
            self.nodes.add(node.id if source == STORE else source)
            self.very |= is_very_late(seconds, allowed)


def is_very_late(seconds: float, allowed: float) -> bool:
    """Tell whether a transfer takes so long that it may never end."""
    return seconds > _VERY_LATE * allowed


class LateTransferHedger:
    """Orders late transfers from another source too. The first result counts.

    Args:
        nodes: Nodes of the run.
        copies: Copies of the pieces.
        transfers: Transfers that are under way.
        read_queue: Pieces to read from the store.
        readers: Ranking of the readers.
        uploaders: Rates of the transfers between nodes.
        uploader_selector: Selection of uploaders.
        slots: Gives the orders.
    """

    def __init__(
        self,
        *,
        nodes: NodeTable,
        copies: CopyTable,
        transfers: TransferTable,
        read_queue: ReadQueue,
        readers: ReaderRanking,
        uploaders: UploaderRanking,
        uploader_selector: UploaderSelector,
        slots: SlotFiller,
    ) -> None:
        self._nodes, self._copies, self._transfers = nodes, copies, transfers
        self._read_queue, self._readers, self._uploaders = read_queue, readers, uploaders
        self._uploader_selector, self._slots = uploader_selector, slots

    def hedge(self, now: float) -> None:
        """Order late transfers from another source too."""
        for late in self._find_late(now):
            for node, number, source in late.transfers:
                if source == STORE:
                    self._hedge_read(node, number, now)
                else:
                    self._hedge_fetch(node, number, self._nodes[source], now)

    def _find_late(self, now: float) -> list[LateTransfers]:
        """Return the late transfers to order again; mark very late uploaders as slow."""
        late_reads, slow_reads, near = LateTransfers(), LateTransfers(), LateTransfers()
        across: dict[str, LateTransfers] = {}  # by the zone that they go to
        crossing: Counter[str] = Counter()
        for node in self._nodes.iterate_living():
            slow = self._readers.is_probing(node) or self._readers.is_slow(node)
            for number, source, since in _iterate_single(node):
                uploader = self._nodes.get(source)
                size, seconds = self._copies[number].size, now - since
                if uploader is None:
                    late = slow_reads if slow else late_reads
                    late.note(node, number, source, seconds, self._allow_read(size, slow=slow))
                    continue
                late = near
                if uploader.zone != node.zone:
                    late = across.setdefault(node.zone, LateTransfers())
                    crossing[node.zone] += 1
                allowed = self._uploaders.compute_timeout(uploader, node, size)
                late.note(node, number, source, seconds, allowed)
                if is_very_late(seconds, allowed):
                    self._copies.mark_slow(uploader)
        # If many nodes are late at once, the network is busy, and further transfers would not help.
        few = max(1, sum(1 for _ in self._nodes.iterate_living()) // 4)
        due = [late for late in (late_reads, near) if len(late.nodes) <= few or late.very]
        due += [
            late
            for zone, late in across.items()
            if len(late.transfers) <= max(1, crossing[zone] // 4) or late.very
        ]
        return [slow_reads, *due]

    def _allow_read(self, size: int, *, slow: bool) -> float:
        return self._readers.compute_timeout(
            size, slow=slow, reads=self._transfers.reads, last=not self._read_queue.has_unread
        )

    def _hedge_read(self, node: NodeState, number: int, now: float) -> None:
        """Order a late read again: from a holder, or else as a read by another node."""
        piece = self._copies[number]
        unshared = self._transfers.measure_read(node.transfers, number, now)
        self._readers.note_seconds_per_byte(node, unshared / max(piece.size, 1))
        if not piece.holders:
            self._copies.request_read(number)
            return
        self._order_elsewhere(node, number, STORE, now)

    def _hedge_fetch(self, node: NodeState, number: int, uploader: NodeState, now: float) -> None:
        """Order a late fetch from another uploader too."""
        if uploader.zone == node.zone and self._uploaders.knows_path(uploader, node):
            self._copies.mark_slow(uploader)  # other uploaders come first from now on
        self._order_elsewhere(node, number, uploader.id, now)

    def _order_elsewhere(self, node: NodeState, number: int, source: str, now: float) -> None:
        uploader = self._uploader_selector.select(node, number)
        if uploader is not None and uploader.id != source and not uploader.rates.is_slow:
            self._slots.order_fetch(node, number, uploader, now)


def _iterate_single(node: NodeState) -> Iterator[tuple[int, str, float]]:
    """Iterate over transfers with one source, which were not ordered again yet."""
    for number, sources in node.transfers.incoming.items():
        if len(sources) == 1 and not node.have[number]:
            source, since = next(iter(sources.items()))
            yield number, source, since
