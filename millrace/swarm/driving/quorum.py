"""Quorum of a run: the time of its first order, and the share of nodes that must live.

This module owns the number of expected nodes, and the time that the run waits for them.
"""

from millrace import errors
from millrace.swarm.driving.members import RunMembers

_LATECOMER_TIMEOUT = 5.0  # seconds after the call, until which ready nodes wait for a missing host


class Quorum:
    """Number of nodes that must take part.

    Args:
        members: Nodes of the run.
        min_share: Share of the expected nodes that must live.
        start_timeout: Seconds to wait for nodes before the first order.
        began: Time of the call.

    Attributes:
        node_count: Number of expected nodes; 0 until the number is known.
    """

    def __init__(
        self, members: RunMembers, min_share: float, start_timeout: float, began: float
    ) -> None:
        self._members = members
        self._min_share, self._start_timeout, self._began = min_share, start_timeout, began
        self.node_count = 0

    def can_start(self, now: float) -> bool:
        """Tell whether to give the first order.

        The run starts when each expected node has joined, is lost or is absent, and enough have
        joined. After the timeout, the run starts with one node.
        """
        members = self._members
        joined = len(members.list_joined())
        settled = joined + sum(member.is_lost for member in members) + len(members.absent)
        if self._is_enough(joined) and settled >= self.node_count > 0:
            return True
        return joined > 0 and self._is_start_over(now)

    def awaits_latecomers(self, now: float) -> bool:
        """Tell whether to wait for a missing node when all others are ready.

        The wait ends a few seconds after the call. While the others are too few, the wait ends with
        that for the first order.
        """
        limit = self._start_timeout
        if self._is_enough(len(self._members.list_living())):
            limit = min(_LATECOMER_TIMEOUT, limit)
        return self._members.has_awaited() and now - self._began <= limit

    def check(self, now: float, *, is_last: bool = False) -> None:
        """Check that enough nodes live, or may still join.

        A lost node does not count if another node has joined instead.

        Args:
            now: Time.
            is_last: Whether the run is over, so that no further node joins.

        Raises:
            WorkerError: Too many nodes are lost.
        """
        members = self._members
        lost = {members.format_name(m.node): m.lost_reason for m in members if m.is_lost}
        over = is_last or self._is_start_over(now)
        living = len(members.list_living())
        starting = max(0, self.node_count - len(members) - len(members.absent))
        if not is_last:
            living += starting
        for absent in members.absent.values():
            if over or not members.is_awaited(absent):
                lost[members.format_name(absent)] = absent.reason
            else:
                living += 1
        if not self.node_count or not self._is_enough(living):
            found = [f"{name}: {reason}" for name, reason in sorted(lost.items())[:5]]
            if is_last and starting:
                after = f"{self._start_timeout:.0f} s, the `start_timeout`"
                found.append(f"{starting} did not start within {after}")
            reasons = "; ".join(found)
            raise errors.WorkerError(
                f"{self.node_count - living} of {self.node_count} nodes are lost, and at least "
                f"{self._min_share:.0%} must live ({reasons or 'the cluster has no node'}). Run "
                "it again when they are back: the other nodes keep the data that they have."
            )

    def _is_enough(self, nodes: int) -> bool:
        return nodes > 0 and nodes >= self._min_share * self.node_count - 1e-9

    def _is_start_over(self, now: float) -> bool:
        return now - self._began > self._start_timeout
