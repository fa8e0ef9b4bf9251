"""State of each node, and the zones of the nodes.

This module owns the pieces of each node, and the living nodes of each zone.
"""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from millrace.swarm.rates import RateComparison
from millrace.swarm.tracking.transfers import NodeTransfers
from millrace.swarm.tracking.trust import NodeTrust


@dataclass(slots=True)
class NodeRates:
    """Rates of one node.

    Attributes:
        is_slow: Whether the node uploads late within its own zone: other uploaders come first.
        upload_rates: Bytes a second of an upload to each zone, smoothed.
        read_seconds_per_byte: Duration of its reads from the store, without the effect of
            concurrent reads, smoothed; 0 before the first read.
        fetch_seconds_per_byte: Duration of its fetches from other nodes, smoothed; 0 before the
            first.
        last_read_rate: Bytes a second of its last read from the store.
        store_comparison: Comparison of the store with the other nodes.
    """

    is_slow: bool = False
    upload_rates: dict[str, float] = field(default_factory=dict[str, float])
    read_seconds_per_byte: float = 0.0
    fetch_seconds_per_byte: float = 0.0
    last_read_rate: float = 0.0
    store_comparison: RateComparison = field(default_factory=RateComparison)


@dataclass(slots=True)
class NodeQueues:
    """Pieces that one node lacks and may fetch next.

    Attributes:
        fetches: Pieces that have holders, oldest first.
        without_uploader: Pieces whose holders this node all avoids. The node reads them from the
            store itself, unless another node reads them for all.
        votes: Pieces with too few votes. A read from the store by the node is a further vote.
    """

    fetches: deque[int] = field(default_factory=deque[int])
    without_uploader: deque[int] = field(default_factory=deque[int])
    votes: deque[int] = field(default_factory=deque[int])


@dataclass(slots=True)
class NodeState:
    """State of one node.

    Attributes:
        id: Id of the node, which is unique in the run.
        zone: Zone of the node; may be empty.
        have: 1 for each piece that the node has.
        missing: Number of pieces that the node lacks.
        lacked: Bits of these pieces.
        transfers: Transfers that the node takes part in.
        alive: Whether the node takes part in the run.
        trust: Conduct of the node.
        rates: Rates of the node.
        queues: Pieces that the node may fetch next.
    """

    id: str
    zone: str
    have: bytearray
    missing: int
    lacked: int
    transfers: NodeTransfers
    alive: bool = True
    trust: NodeTrust = field(default_factory=NodeTrust)
    rates: NodeRates = field(default_factory=NodeRates)
    queues: NodeQueues = field(default_factory=NodeQueues)

    def needs(self, number: int) -> bool:
        """Tell whether the node lacks a piece, and has no transfer of the piece under way."""
        return not self.have[number] and number not in self.transfers.incoming


class NodeTable:
    """All nodes of a run, with the removed ones.

    Args:
        pieces: Number of pieces of the run.

    Attributes:
        zones: Living nodes of each zone.
        zone_bits: Bits of the nodes of each zone, with the removed ones (`NodeTransfers.bit`).
    """

    def __init__(self, pieces: int) -> None:
        self._pieces = pieces
        self._nodes: dict[str, NodeState] = {}
        self._lacking: Counter[str] = Counter()  # zone → number of living nodes that lack a piece
        self.zones: dict[str, list[NodeState]] = {}
        self.zone_bits: Counter[str] = Counter()

    def __getitem__(self, node_id: str) -> NodeState:
        """Return the node of an id."""
        return self._nodes[node_id]

    def __iter__(self) -> Iterator[NodeState]:
        """Iterate over all nodes, in the order in which they joined."""
        return iter(self._nodes.values())

    def get(self, node_id: str) -> NodeState | None:
        """Return the node of an id; None if there is none, such as for the store."""
        return self._nodes.get(node_id)

    def iterate_living(self) -> Iterator[NodeState]:
        """Iterate over the living nodes."""
        return (node for node in self._nodes.values() if node.alive)

    def add(self, node_id: str, zone: str, transfers: NodeTransfers) -> NodeState:
        """Add a node without any piece."""
        count = self._pieces
        node = NodeState(node_id, zone, bytearray(count), count, (1 << count) - 1, transfers)
        self._nodes[node_id] = node
        self.zones.setdefault(zone, []).append(node)
        self.zone_bits[zone] |= transfers.bit
        self._lacking[zone] += bool(node.missing)
        return node

    def remove(self, node: NodeState) -> None:
        """Remove a node from the living ones."""
        node.alive = False
        self.zones[node.zone].remove(node)
        self._lacking[node.zone] -= bool(node.missing)

    def note_copy(self, node: NodeState, number: int) -> None:
        """Note that a node has received a piece."""
        node.have[number] = 1
        node.missing -= 1
        node.lacked &= ~(1 << number)
        self._lacking[node.zone] -= not node.missing

    def forget_copy(self, node: NodeState, number: int) -> None:
        """Note that a node has a piece no longer."""
        self._lacking[node.zone] += node.alive and not node.missing
        node.have[number] = 0
        node.missing += 1
        node.lacked |= 1 << number

    def is_lacked(self, number: int) -> bool:
        """Tell whether a living node lacks a piece."""
        return any(not node.have[number] for node in self.iterate_living())

    def count_lacking_neighbours(self, node: NodeState) -> int:
        """Return the number of other nodes in the zone of a node that lack a piece."""
        return self._lacking[node.zone] - bool(node.missing)

    def is_one_of_zones(self, node: NodeState) -> bool:
        """Tell whether a node has a labelled zone, and nodes outside of this zone exist."""
        return bool(node.zone) and any(
            nodes for zone, nodes in self.zones.items() if zone != node.zone
        )

    def is_arriving_in_zone(self, node: NodeState, number: int) -> bool:
        """Tell whether another node of the same labelled zone has a transfer of a piece."""
        return bool(node.zone) and any(
            number in neighbour.transfers.incoming
            for neighbour in self.zones[node.zone]
            if neighbour is not node
        )
