"""Stragglers: members that are waited for no longer.

This module owns until when each member is waited for, whatever it says.
"""

from millrace.swarm.driving.members import Member
from millrace.swarm.driving.run_state import RunState

_STRAGGLER = 5.0  # times as long as the others take that a node may take after its last byte
_SLOW_DISK_RATE = 10e6  # bytes a second at which a node is done with its files at least
_LEAST_RATE = 100e3  # bytes a second at which a node goes on at least, once half are ready
_SLOWEST = 100.0  # times as fast as that the slowest ready node may be


class StragglerFinder:
    """Finds members that have stopped, or that go on for ever.

    One that still lacks bytes may be waiting for the others until half of them are ready. One that
    says that it has all bytes reads, unpacks or syncs its disk; alone, it may take as long as a
    slow disk does. One that says for ever that it goes on is waited for as long as the slowest node
    would take.

    Args:
        state: Members and tracker of the run.
        files: Number of files.
        size: Bytes of all files.
        stall_timeout: Seconds without a byte after which a node has stopped.
        began: Time of the call.
    """

    def __init__(
        self, state: RunState, files: int, size: int, stall_timeout: float, began: float
    ) -> None:
        self._state = state
        self._files, self._size = files, size
        self._stall_timeout, self._began = stall_timeout, began
        self._until: dict[str, float] = {}  # none until half of the nodes are ready
        self._half_ready_at: float | None = None

    def find(self, now: float) -> list[tuple[Member, str]]:
        """Return the members that are waited for no longer, each with the reason."""
        members = self._state.members.list_living()
        done = [member.seconds for member in members if member.ready]
        if len(done) < max(1, len(members) // 2):
            self._half_ready_at = None
        elif self._half_ready_at is None:
            self._half_ready_at = now
        # How long it takes to be done with the files is no one node's word.
        working = _STRAGGLER * max(done) if len(done) > 1 else self._size / _SLOW_DISK_RATE
        found: list[tuple[Member, str]] = []
        for member in members:
            if member.has_all(self._files):
                continue
            why = self._judge(member, done, working, now)
            if why:
                found.append((member, why))
        return found

    def _judge(self, member: Member, done: list[float], working: float, now: float) -> str:
        """Return why a member is waited for no longer; empty if it still is."""
        quiet, stalled, identity = now - member.moved, self._stall_timeout, member.node.id
        since = self._half_ready_at
        if since is not None and member.joined and identity not in self._until:
            self._until[identity] = now + stalled + self._compute_time_limit(member)
        lacks = member.joined and self._state.tracker.lacks(identity)
        # Before, it may have waited for what the nodes that are ready now have since then.
        if lacks and since is not None and min(quiet, now - since) > stalled:
            return f"it received no byte for {quiet:.0f} s"
        if now > self._until.get(identity, now):
            return (
                f"it goes on, and is not ready {now - self._began:.0f} s after the start, the "
                f"others after {max(done, default=0.0):.0f} s"
            )
        if lacks:
            return ""
        if (member.joined or since is not None) and quiet > max(stalled, working):
            others = f", the others after {max(done):.0f} s in all" if done else ""
            return f"it was not ready {quiet:.0f} s after its last byte{others}"
        return ""

    def _compute_time_limit(self, member: Member) -> float:
        """Return the seconds that a node may take for what it lacks, and for all of its files."""
        rates = [
            one.counts.moved / max(one.seconds, 1e-3)
            for one in self._state.members
            if one.ready and one.counts.moved > 0
        ]
        rate = max(_LEAST_RATE, min(rates) / _SLOWEST if len(rates) > 1 else 0.0)
        return (2 * self._size - self._state.count_held(member)) / rate
