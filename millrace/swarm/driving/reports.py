"""Reports of a run: its result, and its progress."""

from dataclasses import dataclass

from millrace.swarm.driving.members import RunMembers
from millrace.swarm.driving.run_state import RunState
from millrace.swarm.progress_events import PrewarmProgressed


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Result of one node.

    Attributes:
        name: Name of the node.
        ready: Whether all files have their final names.
        reason: Reason if the node is lost; else empty.
        cached: Bytes that the node had before the run.
        from_store: Bytes that the node read from the store.
        from_peers: Bytes that the node received from other nodes.
        failures: Number of fetches that failed.
        seconds: Seconds from the call until the node was ready.
        trusted: Whether other nodes could still fetch from the node: no wrong bytes were proven.
        id: Unique id: the id of the node in Ray, or the URL of the host.
    """

    name: str
    ready: bool
    reason: str
    cached: int
    from_store: int
    from_peers: int
    failures: int
    seconds: float
    trusted: bool
    id: str


@dataclass(frozen=True, slots=True)
class PrewarmReport:
    """Result of a run.

    Attributes:
        files: Number of files.
        size: Bytes of all files.
        unverified: Number of files without a digest: neither a record, nor the caller, nor an ETag
            has one. The ETag did not change during the run.
        unconfirmed: Number of unverified files with bytes that one node alone has read. Neither
            another node nor the driver has confirmed these bytes.
        driver_bytes: Bytes that the driver has read from the store.
        seconds: Seconds from the call until the last file had its final name. The end of the agents
            is not included.
        startup: Seconds until the first order: agents started, and checked their files.
        nodes: Result of each node.
        direct: Reason for which nodes read pieces from the store that other nodes had; empty if
            no node did.
        curve: Seconds since the call, and the bytes on all nodes at that time.
        refused: Reason for each dataset whose digests of blocks were not used. The nodes decided
            the pieces of its shards by votes.
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
    refused: tuple[str, ...] = ()

    @property
    def store_bytes(self) -> int:
        """Bytes that were read from the store, by all nodes and the driver."""
        return self.driver_bytes + sum(node.from_store for node in self.nodes)


def report_nodes(members: RunMembers, untrusted: set[str]) -> tuple[NodeReport, ...]:
    """Return the result of each node, with those without an agent, ordered by name.

    Args:
        members: Nodes of the run.
        untrusted: Ids of the nodes that are not trusted.
    """
    nodes = [
        NodeReport(
            name=members.format_name(member.node),
            ready=member.ready and not member.is_lost,
            reason=member.lost_reason,
            cached=member.counts.cached,
            from_store=member.counts.from_store,
            from_peers=member.counts.from_peers,
            failures=member.counts.failures,
            seconds=round(member.seconds, 3),
            trusted=member.node.id not in untrusted,
            id=member.node.id,
        )
        for member in members
    ]
    nodes += [
        NodeReport(
            name=members.format_name(absent),
            ready=False,
            reason=absent.reason,
            cached=0,
            from_store=0,
            from_peers=0,
            failures=0,
            seconds=0.0,
            trusted=True,
            id=absent.id,
        )
        for absent in members.absent.values()
    ]
    return tuple(sorted(nodes, key=lambda node: node.name))


class ProgressRecorder:
    """Progress of a run over time.

    Args:
        size: Bytes of all files.
        began: Time of the call.

    Attributes:
        curve: Seconds since the call, and the bytes on all nodes at that time.
    """

    def __init__(self, size: int, began: float) -> None:
        self._size, self._began = size, began
        self.curve: list[tuple[float, int]] = []

    def record(self, state: RunState, now: float) -> PrewarmProgressed:
        """Add a point to the curve, and return the progress event."""
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
