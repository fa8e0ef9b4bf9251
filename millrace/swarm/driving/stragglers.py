"""Stragglers: members that the run no longer waits for.

This module owns the deadline of each member, which holds whatever the member reports.
"""

from dataclasses import dataclass

from millrace.formatting import format_size
from millrace.swarm.driving.members import Member
from millrace.swarm.driving.run_state import RunState

_FINISH_FACTOR = 5.0  # longest time of a node without confirmed bytes, over that of a ready node
_SLOW_DISK_RATE = 10e6  # bytes a second that a node checks, unpacks or syncs at least
_MIN_RATE = 100e3  # bytes a second that a node must receive, once half of the nodes are ready
_MAX_RATE_RATIO = 100.0  # rate of the slowest ready node, over the lowest allowed rate
_SLACK = 2.0  # longest time of a node for its confirmed bytes, over that at the lowest rate


@dataclass(slots=True)
class _Phase:
    """Receiving or finishing of one member, observed since half of the nodes are ready.

    Attributes:
        receives: Whether the member lacks a piece; otherwise it finishes its files.
        since: First time of the observation.
        confirmed: Confirmed bytes at that time.
        extension: Seconds that the member may take longer, for its confirmed bytes since then.
    """

    receives: bool
    since: float
    confirmed: int
    extension: float = 0.0


class StragglerFinder:
    """Finds members that have stopped, or that never end.

    A member that lacks bytes may wait for other nodes, so its stalls count once half of the nodes
    are ready. A member with all bytes checks, unpacks or syncs its files: it may take several times
    as long as the others, or as long as a slow disk if no two others are ready.

    A member may report progress forever, so each phase of a member has a deadline that no report
    extends. Only confirmed bytes extend it: pieces whose digests the driver or another node has,
    too (`Tracker.measure_confirmed`). So a member is followed at any rate above the lowest one.

    Args:
        state: Members and tracker of the run.
        files: Number of files.
        size: Bytes of all files.
        stall_timeout: Seconds without a byte after which a member has stopped.
        began: Time of the call.
    """

    def __init__(
        self, state: RunState, files: int, size: int, stall_timeout: float, began: float
    ) -> None:
        self._state = state
        self._files, self._size = files, size
        self._stall_timeout, self._began = stall_timeout, began
        self._phases: dict[str, _Phase] = {}  # empty unless half of the nodes are ready
        self._half_ready_at: float | None = None

    def find(self, now: float) -> list[tuple[Member, str]]:
        """Return the members that the run no longer waits for, each with the reason."""
        members = self._state.members.list_living()
        done = [member.seconds for member in members if member.ready]
        if len(done) < max(1, len(members) // 2):
            self._half_ready_at = None
            self._phases.clear()
        elif self._half_ready_at is None:
            self._half_ready_at = now
        found: list[tuple[Member, str]] = []
        for member in members:
            if self._state.is_finished(member, self._files):
                continue
            reason = self._judge(member, done, now)
            if reason:
                found.append((member, reason))
        return found

    def _judge(self, member: Member, done: list[float], now: float) -> str:
        """Return the reason not to wait for a member; empty if the run still waits.

        Args:
            member: Member that has not all files.
            done: Seconds that each ready member took.
            now: Time.
        """
        quiet, stalled = now - member.last_progress, self._stall_timeout
        since, slowest = self._half_ready_at, max(done, default=0.0)
        lacks = member.joined and self._state.tracker.lacks_any(member.node.id)
        # Before that time, the member may have waited for nodes that were not ready themselves.
        if lacks and since is not None and min(quiet, now - since) > stalled:
            return f"it received no byte for {quiet:.0f} s"
        if since is not None and member.joined:
            reason = self._judge_phase(member, slowest, now, receives=lacks)
            if reason:
                return (
                    f"it was not ready {now - self._began:.0f} s after the start, and the other "
                    f"nodes were ready after {slowest:.0f} s: {reason}"
                )
        if lacks:
            return ""
        # One ready node alone does not show how long the others need.
        working = _FINISH_FACTOR * slowest if len(done) > 1 else self._size / _SLOW_DISK_RATE
        if (member.joined or since is not None) and quiet > max(stalled, working):
            others = f", and the other nodes were ready after {slowest:.0f} s in all"
            return f"it was not ready {quiet:.0f} s after its last byte{others if done else ''}"
        return ""

    def _judge_phase(self, member: Member, slowest: float, now: float, *, receives: bool) -> str:
        """Return the reason if a member is past the deadline of its phase; otherwise nothing.

        Args:
            member: Member that has joined.
            slowest: Seconds that the slowest ready member took.
            now: Time.
            receives: Whether the member lacks a piece.
        """
        tracker, node_id = self._state.tracker, member.node.id
        phase = self._phases.get(node_id)
        if phase is None or phase.receives != receives:
            confirmed = tracker.measure_confirmed(node_id)
            phase = self._phases[node_id] = _Phase(receives, now, confirmed)
        allowed = max(self._stall_timeout, _FINISH_FACTOR * slowest)
        if not receives:
            if now - phase.since <= max(allowed, self._size / _SLOW_DISK_RATE):
                return ""
            return f"it has had all bytes for {now - phase.since:.0f} s: check its disk"
        if now - phase.since <= allowed + phase.extension:
            return ""
        confirmed = tracker.measure_confirmed(node_id)
        # The pieces that it is receiving may all end at the same time.
        received = _SLACK * (confirmed - phase.confirmed) + tracker.measure_incoming(node_id)
        phase.extension = received / self._compute_min_rate()
        if now - phase.since <= allowed + phase.extension:
            return ""
        return (
            f"of its bytes, {format_size(confirmed)} of {format_size(self._size)} are confirmed by "
            "the driver or another node: check its network, or use another machine"
        )

    def _compute_min_rate(self) -> float:
        """Return the lowest rate in bytes a second at which a member is followed to its end."""
        rates = [
            one.counts.moved / max(one.seconds, 1e-3)
            for one in self._state.members
            if one.ready and one.counts.moved > 0
        ]
        return max(_MIN_RATE, min(rates) / _MAX_RATE_RATIO if len(rates) > 1 else 0.0)
