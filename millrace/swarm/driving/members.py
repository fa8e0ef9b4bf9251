"""Members of a run: the nodes that the driver has heard of, and what it knows of each.

This module owns who is there, who is absent, and which agent each node is. It has no lock: whoever
uses it holds the lock of the run.
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
    """Bytes that a node has, and failed fetches.

    Attributes:
        cached: Bytes that were there already.
        from_store: Bytes that it read from the store.
        from_peers: Bytes that it got from other nodes.
        failures: Fetches that failed.
    """

    cached: int = 0
    from_store: int = 0
    from_peers: int = 0
    failures: int = 0

    @property
    def moved(self) -> int:
        """Bytes that came in this run."""
        return self.from_store + self.from_peers


@dataclass(slots=True)
class Member:
    """A node, as the driver knows it.

    Attributes:
        node: Its name, place and key.
        orders: Orders for its agent; None ends them.
        joined: Whether its agent has started the run.
        why: Reason why it is lost; empty while it lives.
        files: Numbers of the files that are in place.
        unusable: Reason why an archive could not be unpacked, by its number.
        accused: Nodes that it says gave it wrong bytes.
        counts: Bytes that it has.
        ready: Whether every file is in place.
        seconds: Seconds from the call until it was ready.
        moved: Time at which it last received a byte, or came.
    """

    node: Node
    orders: queue.SimpleQueue[Order | None] = field(default_factory=queue.SimpleQueue[Order | None])
    joined: bool = False
    why: str = ""
    files: set[int] = field(default_factory=set[int])
    unusable: dict[int, str] = field(default_factory=dict[int, str])
    accused: set[str] = field(default_factory=set[str])
    counts: TransferCounts = field(default_factory=TransferCounts)
    ready: bool = False
    seconds: float = 0.0
    moved: float = field(default_factory=time.monotonic)

    def has_all(self, files: int) -> bool:
        """Tell whether nothing more comes to the node: it is ready, or an archive is unusable."""
        return len(self.files | self.unusable.keys()) == files


class RunMembers:
    """All nodes of a run, by `Node.id`: two nodes may have the same name.

    Attributes:
        absent: Nodes without an agent.
    """

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._awaited: set[str] = set()  # of the absent ones, those that may yet come
        self._identities: dict[str, list[Node]] = {}  # identity of an agent → its nodes
        self.absent: dict[str, AbsentNode] = {}

    def __getitem__(self, identity: str) -> Member:
        """Return the member of an id."""
        return self._members[identity]

    def __contains__(self, identity: object) -> bool:
        """Tell whether there is a member of an id."""
        return identity in self._members

    def __iter__(self) -> Iterator[Member]:
        """Iterate over all members, also those that are lost."""
        return iter(self._members.values())

    def get(self, identity: str) -> Member | None:
        """Return the member of an id; None if there is none, as for the store."""
        return self._members.get(identity)

    def list_living(self) -> list[Member]:
        """Return the members that are not lost."""
        return [member for member in self._members.values() if not member.why]

    def list_joined(self) -> list[Member]:
        """Return the living members whose agents have started the run."""
        return [member for member in self.list_living() if member.joined]

    def add(self, member: Member) -> None:
        """Add a member, which is no longer absent if it has joined."""
        if member.joined:
            self.absent.pop(member.node.id, None)
        self._members[member.node.id] = member

    def add_absent(self, node: AbsentNode) -> None:
        """Note a node that has no agent."""
        self.absent[node.id] = node

    def await_member(self, member: Member, why: str) -> None:
        """Note that a member does not answer, and may yet come."""
        node = member.node
        self.absent[node.id] = AbsentNode(node.id, node.name, why)
        self._awaited.add(node.id)
        self._members.pop(node.id, None)

    def is_awaited(self, node: AbsentNode) -> bool:
        """Tell whether an absent node may yet come."""
        return node.id in self._awaited

    def has_awaited(self) -> bool:
        """Tell whether any absent node may yet come."""
        return not self._awaited.isdisjoint(self.absent)

    def find_twin(self, node: Node) -> Node | None:
        """Return another node whose address leads to the same agent; None if there is none."""
        same = self._identities.setdefault(node.place.identity, [])
        twin = next((one for one in same if _is_same_agent(one.place, node.place)), None)
        if twin is None:
            same.append(node)
        return None if twin is None or twin.id == node.id else twin

    def format_name(self, node: Node | AbsentNode) -> str:
        """Return the name of a node, with its id where another node has the same name."""
        known = [*(member.node for member in self), *self.absent.values()]
        if any(other.name == node.name and other.id != node.id for other in known):
            return f"{node.name} ({node.id})"
        return node.name


def _is_same_agent(one: Endpoint, other: Endpoint) -> bool:
    """Tell whether two places that state one identity are of one agent.

    Anybody may ask an agent for its identity, and state it. Nobody shows its certificate; over
    loopback none is shown.
    """
    fingerprints = {one.fingerprint, other.fingerprint}
    return len(fingerprints) == 1 or "" in fingerprints
