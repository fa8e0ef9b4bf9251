"""Transfers that are under way: their sources, digests and slots.

This module owns the start and the participants of each transfer. It makes no decisions.
"""

from dataclasses import dataclass, field

from millrace.swarm.rates import SharedClock
from millrace.swarm.tracking.orders import STORE


@dataclass(slots=True)
class NodeTransfers:
    """Transfers that one node takes part in.

    Attributes:
        id: Id of the node.
        bit: Integer with one bit, which is the node's own in sets of nodes (`TransferTable.free`).
        offers: Bits of the pieces that the node is one of the last holders of.
        incoming_bits: Bits of the pieces of `incoming`.
        incoming: Start of each transfer to the node, by its piece and its source.
        reads: Number of its reads from the store.
        fetches: Number of its transfers from other nodes.
        uploads: Number of its transfers to other nodes.
        low_priority: Receiver and piece of each transfer of `uploads` with low priority.
        ordered: Digest of the order, by piece and source.
        began: Reading of the shared clock at the start of each read from the store.
    """

    id: str
    bit: int = 1
    offers: int = 0
    incoming_bits: int = 0
    incoming: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])
    reads: int = 0
    fetches: int = 0
    uploads: int = 0
    low_priority: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    ordered: dict[tuple[int, str], str] = field(default_factory=dict[tuple[int, str], str])
    began: dict[int, float] = field(default_factory=dict[int, float])

    def reads_from_store(self, number: int) -> bool:
        """Tell whether the node reads a piece from the store."""
        return STORE in self.incoming.get(number, {})


@dataclass(frozen=True, slots=True)
class EndedTransfer:
    """A transfer that has ended.

    Attributes:
        seconds: Seconds from the order to the end.
        digest: Digest of the order; empty for a read of a piece whose digest is not known.
        unshared: Seconds of a read from the store without concurrent reads, computed.
    """

    seconds: float
    digest: str = ""
    unshared: float = 0.0


class TransferTable:
    """All transfers of a run that are under way.

    Args:
        pieces: Number of pieces of the run.
        max_uploads: Largest number of concurrent uploads of a node.

    Attributes:
        max_uploads: Largest number of concurrent uploads of a node.
        free: Bits of the nodes with a free upload slot.
        available: Bits of the pieces that one of these nodes may offer, and of some others.
    """

    def __init__(self, pieces: int, max_uploads: int) -> None:
        self.max_uploads, self.free, self.available = max_uploads, 0, 0
        self._nodes: dict[str, NodeTransfers] = {}
        self._reading: list[set[str]] = [set() for _ in range(pieces)]
        self._clock = SharedClock()

    @property
    def reads(self) -> int:
        """Number of reads from the store by all nodes."""
        return self._clock.users

    def add_node(self, node_id: str) -> NodeTransfers:
        """Return the empty record of a new node."""
        self._nodes[node_id] = added = NodeTransfers(node_id, 1 << len(self._nodes))
        self.free |= added.bit
        return added

    def is_read(self, number: int) -> bool:
        """Tell whether a node reads a piece from the store."""
        return bool(self._reading[number])

    def begin_read(self, node: NodeTransfers, number: int, now: float, digest: str = "") -> None:
        """Note that a node begins to read a piece, whose digest may be known, from the store."""
        node.incoming_bits |= 1 << number
        node.incoming.setdefault(number, {})[STORE] = now
        node.ordered[number, STORE] = digest
        node.reads += 1
        node.began[number] = self._clock.read(now)
        self._clock.change_users(1, now)
        self._reading[number].add(node.id)

    def begin_fetch(
        self, node: NodeTransfers, number: int, uploader: NodeTransfers, digest: str, now: float
    ) -> None:
        """Note that a node begins to fetch a piece with a digest from another node."""
        node.incoming_bits |= 1 << number
        node.incoming.setdefault(number, {})[uploader.id] = now
        node.ordered[number, uploader.id] = digest
        node.fetches += 1
        uploader.uploads += 1
        if uploader.uploads >= self.max_uploads:
            self.free &= ~uploader.bit

    def end(
        self, node: NodeTransfers, number: int, source: str, now: float
    ) -> EndedTransfer | None:
        """End a transfer, and return it; None if no such transfer is under way."""
        sources = node.incoming.get(number, {})
        since = sources.pop(source, None)
        if since is None:
            return None
        if not sources:
            del node.incoming[number]
            node.incoming_bits &= ~(1 << number)
        digest = node.ordered.pop((number, source))
        if source != STORE:
            node.fetches -= 1
            uploader = self._nodes[source]
            uploader.uploads -= 1
            if uploader.uploads < self.max_uploads:
                self.free |= uploader.bit
                self.available |= uploader.offers
            uploader.low_priority.discard((node.id, number))
            return EndedTransfer(now - since, digest)
        unshared = self.measure_read(node, number, now)
        del node.began[number]
        node.reads -= 1
        self._clock.change_users(-1, now)
        self._reading[number].discard(node.id)
        return EndedTransfer(now - since, digest, unshared)

    def measure_read(self, node: NodeTransfers, number: int, now: float) -> float:
        """Return the seconds of a read until now, computed as if there were no concurrent reads."""
        return self._clock.read(now) - node.began[number]
