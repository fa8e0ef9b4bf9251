"""Stragglers: members that the run no longer waits for.

This module owns the deadline of each member, which holds whatever the member reports.
"""

from millrace.swarm.driving.members import Member
from millrace.swarm.driving.run_state import RunState

_FINISH_FACTOR = 5.0  # longest time to finish the files, over that of the slowest ready node
_SLOW_DISK_RATE = 10e6  # bytes a second that a node checks, unpacks or syncs at least
_MIN_RATE = 100e3  # bytes a second that a node must receive, once half of the nodes are ready
_MAX_RATE_RATIO = 100.0  # rate of the slowest ready node, over the lowest allowed rate


class StragglerFinder:
    """Finds members that have stopped, or that never end.

    A member that lacks bytes may wait for other nodes, so its stalls count once half of the nodes
    are ready. A member with all bytes checks, unpacks or syncs its files: it may take several times
    as long as the others, or as long as a slow disk if no two others are ready. A member that
    reports progress forever has a deadline: the time that the slowest allowed node would take.

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
        self._deadlines: dict[str, float] = {}  # empty until half of the nodes are ready
        self._half_ready_at: float | None = None

    def find(self, now: float) -> list[tuple[Member, str]]:
        """Return the members that the run no longer waits for, each with the reason."""
        members = self._state.members.list_living()
        done = [member.seconds for member in members if member.ready]
        if len(done) < max(1, len(members) // 2):
            self._half_ready_at = None
        elif self._half_ready_at is None:
            self._half_ready_at = now
        # One ready node alone does not show how long the others need.
        working = _FINISH_FACTOR * max(done) if len(done) > 1 else self._size / _SLOW_DISK_RATE
        found: list[tuple[Member, str]] = []
        for member in members:
            if member.has_all(self._files):
                continue
            reason = self._judge(member, done, working, now)
            if reason:
                found.append((member, reason))
        return found

    def _judge(self, member: Member, done: list[float], working: float, now: float) -> str:
        """Return the reason not to wait for a member; empty if the run still waits.

        Args:
            member: Member that has not all files.
            done: Seconds that each ready member took.
            working: Seconds that a member with all bytes may take to finish its files.
            now: Time.
        """
        quiet, stalled, identity = now - member.last_progress, self._stall_timeout, member.node.id
        since = self._half_ready_at
        if since is not None and member.joined and identity not in self._deadlines:
            self._deadlines[identity] = now + stalled + self._compute_time_limit(member)
        lacks = member.joined and self._state.tracker.lacks(identity)
        # Before that time, the member may have waited for nodes that were not ready themselves.
        if lacks and since is not None and min(quiet, now - since) > stalled:
            return f"it received no byte for {quiet:.0f} s"
        if now > self._deadlines.get(identity, now):
            return (
                f"it was not ready {now - self._began:.0f} s after the start, and the other nodes "
                f"were ready after {max(done, default=0.0):.0f} s"
            )
        if lacks:
            return ""
        if (member.joined or since is not None) and quiet > max(stalled, working):
            others = (
                f", and the other nodes were ready after {max(done):.0f} s in all" if done else ""
            )
            return f"it was not ready {quiet:.0f} s after its last byte{others}"
        return ""

    def _compute_time_limit(self, member: Member) -> float:
        """Return the seconds that a node may take to receive its missing bytes and finish."""
        rates = [
            one.counts.moved / max(one.seconds, 1e-3)
            for one in self._state.members
            if one.ready and one.counts.moved > 0
        ]
        rate = max(_MIN_RATE, min(rates) / _MAX_RATE_RATIO if len(rates) > 1 else 0.0)
        return (2 * self._size - self._state.count_held(member)) / rate
