"""Transfers that are under way: their sources, their digests, and the slots that they take.

This module owns when each transfer began and who takes part in it. It decides nothing.
"""

from dataclasses import dataclass, field

from millrace.swarm.rates import SharedClock
from millrace.swarm.tracking.orders import STORE


@dataclass(slots=True)
class NodeTransfers:
    """Transfers that one node takes part in.

    Attributes:
        name: Name of the node.
        down: Start of each transfer to the node, by its piece and its source.
        reads: Number of its reads from the store.
        fetches: Number of its transfers from other nodes.
        up: Number of its transfers to other nodes.
        yielding: Receiver and piece of those transfers of `up` that leave slots to others.
        ordered: Digest that was ordered, by piece and source.
        began: Reading of the shared clock at the start of each read from the store.
    """

    name: str
    down: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])
    reads: int = 0
    fetches: int = 0
    up: int = 0
    yielding: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    ordered: dict[tuple[int, str], str] = field(default_factory=dict[tuple[int, str], str])
    began: dict[int, float] = field(default_factory=dict[int, float])

    def reads_from_store(self, number: int) -> bool:
        """Tell whether the node reads a piece from the store."""
        return STORE in self.down.get(number, {})


@dataclass(frozen=True, slots=True)
class TransferTime:
    """Time that a transfer took.

    Attributes:
        seconds: Seconds from the order to the end.
        digest: Digest that was ordered.
        alone: Seconds that a read from the store would have taken alone.
    """

    seconds: float
    digest: str = ""
    alone: float = 0.0


class TransferTable:
    """All transfers of a run that are under way.

    Args:
        pieces: Number of pieces of the run.
    """

    def __init__(self, pieces: int) -> None:
        self._nodes: dict[str, NodeTransfers] = {}
        self._readers: list[set[str]] = [set() for _ in range(pieces)]
        self._clock = SharedClock()

    @property
    def reads(self) -> int:
        """Number of reads from the store by all nodes."""
        return self._clock.users

    def add_node(self, name: str) -> NodeTransfers:
        """Return the empty record of a new node."""
        self._nodes[name] = added = NodeTransfers(name)
        return added

    def is_read(self, number: int) -> bool:
        """Tell whether a node reads a piece from the store."""
        return bool(self._readers[number])

    def begin_read(self, node: NodeTransfers, number: int, now: float) -> None:
        """Note that a node begins to read a piece from the store."""
        node.down.setdefault(number, {})[STORE] = now
        node.ordered[number, STORE] = ""
        node.reads += 1
        node.began[number] = self._clock.read(now)
        self._clock.change_users(1, now)
        self._readers[number].add(node.name)

    def begin_fetch(
        self, node: NodeTransfers, number: int, giver: NodeTransfers, digest: str, now: float
    ) -> None:
        """Note that a node begins to fetch a piece of a digest from another node."""
        node.down.setdefault(number, {})[giver.name] = now
        node.ordered[number, giver.name] = digest
        node.fetches += 1
        giver.up += 1

    def end(self, node: NodeTransfers, number: int, source: str, now: float) -> TransferTime | None:
        """End a transfer; return how long it took, or None if it is not under way."""
        sources = node.down.get(number, {})
        since = sources.pop(source, None)
        if since is None:
            return None
        if not sources:
            del node.down[number]
        digest = node.ordered.pop((number, source))
        if source != STORE:
            node.fetches -= 1
            giver = self._nodes[source]
            giver.up -= 1
            giver.yielding.discard((node.name, number))
            return TransferTime(now - since, digest)
        alone = self.measure_read(node, number, now)
        del node.began[number]
        node.reads -= 1
        self._clock.change_users(-1, now)
        self._readers[number].discard(node.name)
        return TransferTime(now - since, alone=alone)

    def measure_read(self, node: NodeTransfers, number: int, now: float) -> float:
        """Return the seconds that a read would have taken until now if it were alone."""
        return self._clock.read(now) - node.began[number]
