"""Stragglers: members that the run no longer waits for.

This module owns the deadline of each member, which holds whatever the member reports.
"""

from dataclasses import dataclass

from millrace.formatting import format_size
from millrace.swarm.driving.members import Member
from millrace.swarm.driving.run_state import RunState

_FINISH_FACTOR = 5.0  # longest time of a node without confirmed bytes, over that of a ready node
_SLOW_DISK_RATE = 10e6  # bytes a second that a node checks, unpacks or syncs at least
_FINISH_TIMEOUT = 3600.0  # seconds of a node that reports progress, if no other one shows how long
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
    are ready. When the run gives up a member that received pieces, the time of the members that
    received none begins anew, since they may have waited for that one.

    A member with all bytes checks, unpacks or syncs its files: it may take several times as long as
    the others, or as long as a slow disk. Members that had most bytes before the run are ready at
    once, and do not show how long that takes. A member that has not joined checks the files that it
    has, and its deadline is that of the request (`AgentClient.start_run`).

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
        self._waited: dict[str, float] = {}  # by member: end of a straggler that it waited for
        self._half_ready_at: float | None = None

    def find(self, now: float) -> list[tuple[Member, str]]:
        """Return the members that the run no longer waits for, each with the reason."""
        members = self._state.members.list_living()
        done = [member for member in members if member.ready]
        if len(done) < max(1, len(members) // 2):
            self._half_ready_at = None
            self._phases.clear()
            self._waited.clear()
        elif self._half_ready_at is None:
            self._half_ready_at = now
        found: list[tuple[Member, str]] = []
        for member in members:
            if not member.joined or self._state.is_finished(member, self._files):
                continue
            reason = self._judge(member, done, now)
            if reason:
                found.append((member, reason))
        return self._spare_waiting(members, found, now) if found else found

    def _spare_waiting(
        self, members: list[Member], found: list[tuple[Member, str]], now: float
    ) -> list[tuple[Member, str]]:
        """Return the stragglers that received pieces, and begin the time of waiting members anew.

        If nobody received pieces, all stragglers are returned.
        """
        waiting = {member.node.id for member in members if self._waits_for_others(member)}
        stragglers = [(member, reason) for member, reason in found if member.node.id not in waiting]
        if not stragglers:
            return found
        for node_id in waiting:
            self._waited[node_id] = now
            self._phases.pop(node_id, None)
        return stragglers

    def _waits_for_others(self, member: Member) -> bool:
        """Tell whether a member lacks pieces, and receives none: other nodes must read them."""
        tracker, node_id = self._state.tracker, member.node.id
        return (
            member.joined and tracker.lacks_any(node_id) and not tracker.measure_incoming(node_id)
        )

    def _judge(self, member: Member, done: list[Member], now: float) -> str:
        """Return the reason not to wait for a member; empty if the run still waits.

        Args:
            member: Member that has joined, and has not all files.
            done: Members that are ready.
            now: Time.
        """
        quiet, stalled = now - member.last_progress, self._stall_timeout
        since, slowest = self._half_ready_at, max((one.seconds for one in done), default=0.0)
        lacks = self._state.tracker.lacks_any(member.node.id)
        # Before that time, the member may have waited for nodes that were not ready themselves.
        waited = self._waited.get(member.node.id, since)
        if lacks and waited is not None and min(quiet, now - waited) > stalled:
            return f"it received no byte for {quiet:.0f} s"
        finishing = max(stalled, _FINISH_FACTOR * slowest, self._size / _SLOW_DISK_RATE)
        if since is not None:
            if lacks:
                reason = self._judge_receiving(member, slowest, now)
            else:
                shown = any(one.counts.moved > self._size // 2 for one in done)
                limit = finishing if shown else max(finishing, _FINISH_TIMEOUT)
                reason = self._judge_finishing(member, limit, now)
            if reason:
                return (
                    f"it was not ready {now - self._began:.0f} s after the start, and the other "
                    f"nodes were ready after {slowest:.0f} s: {reason}"
                )
        if not lacks and quiet > finishing:
            others = f", and the other nodes were ready after {slowest:.0f} s in all"
            return f"it was not ready {quiet:.0f} s after its last byte{others if done else ''}"
        return ""

    def _enter_phase(self, member: Member, now: float, *, receives: bool) -> _Phase:
        """Return the phase of a member, a new one if the member was in the other phase before."""
        phase = self._phases.get(member.node.id)
        if phase is None or phase.receives != receives:
            confirmed = self._state.tracker.measure_confirmed(member.node.id)
            phase = self._phases[member.node.id] = _Phase(receives, now, confirmed)
        return phase

    def _judge_finishing(self, member: Member, limit: float, now: float) -> str:
        """Return the reason if a member has had all bytes for longer than a limit in seconds."""
        phase = self._enter_phase(member, now, receives=False)
        if now - phase.since <= limit:
            return ""
        return f"it has had all bytes for {now - phase.since:.0f} s: check its disk"

    def _judge_receiving(self, member: Member, slowest: float, now: float) -> str:
        """Return the reason if a member receives more slowly than the lowest rate.

        Args:
            member: Member that lacks a piece.
            slowest: Seconds that the slowest ready member took.
            now: Time.
        """
        tracker, node_id = self._state.tracker, member.node.id
        phase = self._enter_phase(member, now, receives=True)
        allowed = max(self._stall_timeout, _FINISH_FACTOR * slowest)
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
