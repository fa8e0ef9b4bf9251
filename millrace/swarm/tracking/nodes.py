"""State of each node, and the zones that the nodes are in.

This module owns which node has which piece, and who lives in which zone.
"""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from millrace.swarm.rates import RateComparison
from millrace.swarm.tracking.transfers import NodeTransfers
from millrace.swarm.tracking.trust import NodeTrust


@dataclass(slots=True)
class NodePace:
    """Rates of one node.

    Attributes:
        is_slow: Whether the node gives late within its own zone: other givers come first.
        rates: Bytes a second of one piece that the node gives to a zone, smoothed.
        read_pace: Seconds a byte of its reads from the store, had each been alone, smoothed; 0
            before the first.
        fetch_pace: Seconds a byte of the pieces from other nodes, smoothed; 0 before the first.
        one_read: Bytes a second of its last read from the store.
        outrun: Comparison of the store with the other nodes.
    """

    is_slow: bool = False
    rates: dict[str, float] = field(default_factory=dict[str, float])
    read_pace: float = 0.0
    fetch_pace: float = 0.0
    one_read: float = 0.0
    outrun: RateComparison = field(default_factory=RateComparison)


@dataclass(slots=True)
class NodeQueues:
    """Pieces that one node lacks and may fetch next.

    Attributes:
        fetches: Pieces that some node has, oldest first.
        alone: Pieces that only nodes have that this node asks no more: it reads them from the
            store itself, unless they are read for all.
        votes: Pieces with too few votes: a read from the store by the node would be a further one.
    """

    fetches: deque[int] = field(default_factory=deque[int])
    alone: deque[int] = field(default_factory=deque[int])
    votes: deque[int] = field(default_factory=deque[int])


@dataclass(slots=True)
class NodeState:
    """One node, as the tracker knows it.

    Attributes:
        name: Name of the node.
        zone: Zone of the node; may be empty.
        have: 1 for each piece that the node has.
        missing: Number of pieces that the node lacks.
        transfers: Transfers that the node takes part in.
        alive: Whether the node takes part in the run.
        trust: Conduct of the node.
        pace: Rates of the node.
        queues: Pieces that the node may fetch next.
    """

    name: str
    zone: str
    have: bytearray
    missing: int
    transfers: NodeTransfers
    alive: bool = True
    trust: NodeTrust = field(default_factory=NodeTrust)
    pace: NodePace = field(default_factory=NodePace)
    queues: NodeQueues = field(default_factory=NodeQueues)

    def needs(self, number: int) -> bool:
        """Tell whether the node lacks a piece, and no transfer brings that piece."""
        return not self.have[number] and number not in self.transfers.down


class NodeTable:
    """All nodes of a run, also those that are gone.

    Args:
        pieces: Number of pieces of the run.

    Attributes:
        zones: Living nodes of each zone.
    """

    def __init__(self, pieces: int) -> None:
        self._pieces = pieces
        self._nodes: dict[str, NodeState] = {}
        self._lacking: Counter[str] = Counter()  # zone → living nodes that lack something
        self.zones: dict[str, list[NodeState]] = {}

    def __getitem__(self, name: str) -> NodeState:
        """Return the node of a name."""
        return self._nodes[name]

    def __iter__(self) -> Iterator[NodeState]:
        """Iterate over all nodes, in the order in which they came."""
        return iter(self._nodes.values())

    def get(self, name: str) -> NodeState | None:
        """Return the node of a name; None if there is none, as for the store."""
        return self._nodes.get(name)

    def iterate_living(self) -> Iterator[NodeState]:
        """Iterate over the living nodes."""
        return (node for node in self._nodes.values() if node.alive)

    def add(self, name: str, zone: str, transfers: NodeTransfers) -> NodeState:
        """Add a node without any piece."""
        node = NodeState(name, zone, bytearray(self._pieces), self._pieces, transfers)
        self._nodes[name] = node
        self.zones.setdefault(zone, []).append(node)
        self._lacking[zone] += bool(node.missing)
        return node

    def remove(self, node: NodeState) -> None:
        """Note that a node is gone."""
        node.alive = False
        self.zones[node.zone].remove(node)
        self._lacking[node.zone] -= bool(node.missing)

    def note_copy(self, node: NodeState, number: int) -> None:
        """Note that a node has got a piece."""
        node.have[number] = 1
        node.missing -= 1
        self._lacking[node.zone] -= not node.missing

    def forget_copy(self, node: NodeState, number: int) -> None:
        """Note that a node has a piece no more."""
        self._lacking[node.zone] += node.alive and not node.missing
        node.have[number] = 0
        node.missing += 1

    def is_lacked(self, number: int) -> bool:
        """Tell whether a living node lacks a piece."""
        return any(not node.have[number] for node in self.iterate_living())

    def is_complete(self) -> bool:
        """Tell whether every living node has every piece."""
        return all(node.missing == 0 for node in self.iterate_living())

    def count_lacking_neighbours(self, node: NodeState) -> int:
        """Return the number of other nodes of a node's zone that lack something."""
        return self._lacking[node.zone] - bool(node.missing)

    def is_one_of_zones(self, node: NodeState) -> bool:
        """Tell whether a node has a labelled zone, and there are nodes outside of it."""
        return bool(node.zone) and any(
            nodes for zone, nodes in self.zones.items() if zone != node.zone
        )

    def is_arriving_near(self, node: NodeState, number: int) -> bool:
        """Tell whether another node of a labelled zone is getting a piece."""
        return bool(node.zone) and any(
            number in mate.transfers.down for mate in self.zones[node.zone] if mate is not node
        )
