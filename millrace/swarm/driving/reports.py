"""Reports of a run: its result, and its progress while it goes on."""

from dataclasses import dataclass

from millrace.swarm.driving.members import RunMembers
from millrace.swarm.driving.run_state import RunState
from millrace.swarm.progress_events import PrewarmProgressed


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Result of one node.

    Attributes:
        name: The node.
        ready: Whether everything is there, under its final name.
        why: If not, a sentence.
        cached: Bytes that were there already.
        from_store: Bytes it read from the store.
        from_peers: Bytes it got from other nodes.
        failures: Fetches that failed and were ordered again.
        seconds: From the call until it was ready.
        trusted: False when it served bytes that were not what they should be.
    """

    name: str
    ready: bool
    why: str
    cached: int
    from_store: int
    from_peers: int
    failures: int
    seconds: float
    trusted: bool


@dataclass(frozen=True, slots=True)
class PrewarmReport:
    """Result of a run.

    Attributes:
        files: How many files every node was to get.
        size: Their bytes.
        unverified: Files of which neither a record, nor the caller, nor an ETag says what they
            should be. The store's ETag did not change.
        unconfirmed: Those of them with a part that only one node has read, and the driver has not:
            nobody can say that it is what the store has.
        driver_bytes: Bytes that the driver has read from the store itself.
        seconds: From the call to the last file in place. Letting go of the agents comes after it.
        startup: Seconds of it in which agents were started, and looked at what they have.
        nodes: What became of each.
        direct: Why nodes also read from the store what others had; empty if none did.
        curve: Seconds since the call, and the bytes all nodes had by then.
    """

    files: int
    size: int
    unverified: int
    unconfirmed: int
    driver_bytes: int
    seconds: float
    startup: float
    nodes: tuple[NodeReport, ...]
    direct: str
    curve: tuple[tuple[float, int], ...]

    @property
    def store_bytes(self) -> int:
        """Bytes that were read from the store, by all nodes and the driver."""
        return self.driver_bytes + sum(node.from_store for node in self.nodes)


def report_nodes(members: RunMembers, quarantined: set[str]) -> tuple[NodeReport, ...]:
    """Return the result of each node, also of those without an agent, by name.

    Args:
        members: Nodes of the run.
        quarantined: Ids of the nodes that are not trusted.
    """
    nodes = [
        NodeReport(
            name=members.format_name(member.node),
            ready=member.ready and not member.why,
            why=member.why,
            cached=member.counts.cached,
            from_store=member.counts.from_store,
            from_peers=member.counts.from_peers,
            failures=member.counts.failures,
            seconds=round(member.seconds, 3),
            trusted=member.node.id not in quarantined,
        )
        for member in members
    ]
    nodes += [
        NodeReport(members.format_name(absent), False, absent.why, 0, 0, 0, 0, 0.0, True)  # noqa: FBT003
        for absent in members.absent.values()
    ]
    return tuple(sorted(nodes, key=lambda node: node.name))


class ProgressRecorder:
    """Progress of a run over time.

    Args:
        size: Bytes that each node is to get.
        began: Time of the call.

    Attributes:
        curve: Seconds since the call, and the bytes all nodes had by then.
    """

    def __init__(self, size: int, began: float) -> None:
        self._size, self._began = size, began
        self.curve: list[tuple[float, int]] = []

    def record(self, state: RunState, now: float) -> PrewarmProgressed:
        """Add a point to the curve, and return the event that says how far the run is."""
        seconds = now - self._began
        self.curve.append((seconds, state.held))
        living = state.members.list_living()
        return PrewarmProgressed(
            present=state.held,
            total=self._size * len(living),
            moved=sum(member.counts.moved for member in state.members),
            nodes=len(living),
            ready=sum(member.ready for member in living),
            seconds=round(seconds, 2),
        )
