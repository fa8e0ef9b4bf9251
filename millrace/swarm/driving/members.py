"""Members of a run: the nodes with an agent, and their state as the driver knows it.

This module owns the members, the absent nodes, and the identities of the agents. It has no lock:
its caller holds the lock of the run.
"""

import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from millrace.swarm.messages import Order
from millrace.swarm.nodes import AbsentNode, Node
from millrace.swarm.protocol import Endpoint


@dataclass(slots=True)
class TransferCounts:
    """Bytes on a node, and its failed fetches.

    Attributes:
        cached: Bytes that the node had before the run.
        from_store: Bytes that the node read from the store.
        from_peers: Bytes that the node received from other nodes.
        failures: Number of fetches that failed.
    """

    cached: int = 0
    from_store: int = 0
    from_peers: int = 0
    failures: int = 0

    @property
    def moved(self) -> int:
        """Bytes that the node received in this run."""
        return self.from_store + self.from_peers


@dataclass(slots=True)
class Member:
    """State of a node, as the driver knows it.

    Attributes:
        node: Name, endpoint and key of the node.
        orders: Orders for the agent of the node; None ends them.
        joined: Whether the agent has started the run.
        lost_reason: Reason for the loss of the node; empty while the node is not lost.
        files: Numbers of the files that have their final names.
        unusable: Reason for each archive that could not be unpacked, by the number of the file.
        dropping: Pieces that the member was ordered to drop, and has not reported as dropped.
        accused: Nodes that have sent wrong bytes, as this node reports.
        counts: Bytes on the node.
        ready: Whether all files have their final names.
        seconds: Seconds from the call until the node was ready.
        last_progress: Time of the last received byte or finished file, or of the start.
    """

    node: Node
    orders: queue.SimpleQueue[Order | None] = field(default_factory=queue.SimpleQueue[Order | None])
    joined: bool = False
    lost_reason: str = ""
    files: set[int] = field(default_factory=set[int])
    unusable: dict[int, str] = field(default_factory=dict[int, str])
    dropping: set[int] = field(default_factory=set[int])
    accused: set[str] = field(default_factory=set[str])
    counts: TransferCounts = field(default_factory=TransferCounts)
    ready: bool = False
    seconds: float = 0.0
    last_progress: float = field(default_factory=time.monotonic)

    @property
    def is_lost(self) -> bool:
        """True if the node takes part in the run no longer."""
        return bool(self.lost_reason)

    def has_all(self, files: int) -> bool:
        """Tell whether every file has its final name or is an unusable archive.

        False from the order to drop a piece until the files without the piece are known.
        """
        if self.dropping:
            return False
        # Asked for each node several times a second: a union of all files would take seconds.
        return len(self.files) + sum(one not in self.files for one in self.unusable) == files

    def note_drop(self, piece: int) -> None:
        """Note that the member is ordered to drop a piece, and to fetch it again."""
        self.dropping.add(piece)
        self.ready, self.last_progress = False, time.monotonic()

    def note_dropped(self, piece: int, files: list[int]) -> None:
        """Note the files that lack a dropped piece. Ignore a report without an order."""
        if piece not in self.dropping:
            return
        self.dropping.discard(piece)
        self.files.difference_update(files)
        for number in files:
            self.unusable.pop(number, None)


class RunMembers:
    """All nodes of a run, by `Node.id`, since two nodes may have the same name.

    Attributes:
        absent: Nodes without an agent, by their ids.
    """

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._awaited: set[str] = set()  # absent nodes that may still join
        self._nodes_of_agents: dict[str, list[Node]] = {}  # by the identities of the agents
        self.absent: dict[str, AbsentNode] = {}

    def __getitem__(self, node_id: str) -> Member:
        """Return the member of an id."""
        return self._members[node_id]

    def __contains__(self, node_id: object) -> bool:
        """Tell whether there is a member of an id."""
        return node_id in self._members

    def __iter__(self) -> Iterator[Member]:
        """Iterate over all members, with the lost ones."""
        return iter(self._members.values())

    def __len__(self) -> int:
        """Return the number of all members, with the lost ones."""
        return len(self._members)

    def get(self, node_id: str) -> Member | None:
        """Return the member of an id; None if there is none, such as for the store."""
        return self._members.get(node_id)

    def list_living(self) -> list[Member]:
        """Return the members that are not lost."""
        return [member for member in self._members.values() if not member.is_lost]

    def list_joined(self) -> list[Member]:
        """Return the living members whose agents have started the run."""
        return [member for member in self.list_living() if member.joined]

    def add(self, member: Member) -> None:
        """Add a member. A member that has joined is no longer absent."""
        if member.joined:
            self.absent.pop(member.node.id, None)
        self._members[member.node.id] = member

    def add_absent(self, node: AbsentNode) -> None:
        """Note a node that has no agent."""
        self.absent[node.id] = node

    def await_member(self, member: Member, reason: str) -> None:
        """Note that a member does not answer, and may still join."""
        node = member.node
        self.absent[node.id] = AbsentNode(node.id, node.name, reason)
        self._awaited.add(node.id)
        self._members.pop(node.id, None)

    def restore(self, member: Member) -> None:
        """Make an awaited node a member again: it has answered."""
        self._awaited.discard(member.node.id)
        self.absent.pop(member.node.id, None)
        self._members[member.node.id] = member

    def is_awaited(self, node: AbsentNode) -> bool:
        """Tell whether an absent node may still join."""
        return node.id in self._awaited

    def has_awaited(self) -> bool:
        """Tell whether any absent node may still join."""
        return not self._awaited.isdisjoint(self.absent)

    def register_agent(self, node: Node) -> Node | None:
        """Register the agent that the address of a node leads to.

        Returns:
            Another node that has registered the same agent before; None if there is none.
        """
        registered = self._nodes_of_agents.setdefault(node.endpoint.identity, [])
        for other in registered:
            if _is_same_agent(other.endpoint, node.endpoint):
                return None if other.id == node.id else other
        registered.append(node)
        return None

    def format_name(self, node: Node | AbsentNode) -> str:
        """Return the name of a node, and its id if another node has the same name."""
        known = [*(member.node for member in self), *self.absent.values()]
        if any(other.name == node.name and other.id != node.id for other in known):
            return f"{node.name} ({node.id})"
        return node.name


def _is_same_agent(one: Endpoint, other: Endpoint) -> bool:
    """Tell whether two endpoints with the same identity lead to one agent.

    Any process can learn the identity of an agent, and then state the same identity. Only the agent
    has the key of its certificate. Over loopback, agents have no certificate.
    """
    fingerprints = {one.fingerprint, other.fingerprint}
    return len(fingerprints) == 1 or "" in fingerprints
