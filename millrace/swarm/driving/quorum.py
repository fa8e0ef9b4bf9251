"""Quorum of a run: the time of its first order, and the share of nodes that must live.

This module owns the number of expected nodes, and the time that the run waits for them.
"""

from millrace import errors
from millrace.swarm.driving.members import RunMembers

_LATECOMER_TIMEOUT = 5.0  # seconds to wait for a missing host when all others are ready


class Quorum:
    """Number of nodes that must take part.

    Args:
        members: Nodes of the run.
        min_share: Share of the expected nodes that must live.
        start_timeout: Seconds to wait for nodes before the first order.
        began: Time of the call.

    Attributes:
        expected: Number of expected nodes; 0 until the number is known.
    """

    def __init__(
        self, members: RunMembers, min_share: float, start_timeout: float, began: float
    ) -> None:
        self._members = members
        self._min_share, self._start_timeout, self._began = min_share, start_timeout, began
        self.expected = 0

    def can_start(self, now: float) -> bool:
        """Tell whether to give the first order.

        The run starts when each expected node has joined, is lost or is absent, and enough have
        joined. After the timeout, the run starts with one node.
        """
        joined = sum(member.joined or member.is_lost for member in self._members)
        enough = joined >= self._min_share * self.expected
        if enough and joined + len(self._members.absent) >= self.expected > 0:
            return True
        return bool(joined) and self._is_start_over(now)

    def awaits_latecomers(self, now: float) -> bool:
        """Tell whether to wait for a missing node when all others are ready."""
        limit = min(_LATECOMER_TIMEOUT, self._start_timeout)
        return self._members.has_awaited() and now - self._began <= limit

    def check(self, now: float) -> None:
        """Check that enough nodes live.

        Raises:
            WorkerError: Too many nodes are lost.
        """
        members = self._members
        lost = {members.format_name(m.node): m.lost_reason for m in members if m.is_lost}
        over = self._is_start_over(now)
        for absent in members.absent.values():
            if over or not members.is_awaited(absent):
                lost[members.format_name(absent)] = absent.reason
        if not self.expected or len(lost) > (1 - self._min_share) * self.expected + 1e-9:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(lost.items())[:5])
            raise errors.WorkerError(
                f"{len(lost)} of {self.expected} nodes are lost, and at least "
                f"{self._min_share:.0%} must live ({reasons or 'the cluster has no node'}). Run "
                "it again when they are back: the other nodes keep the data that they have."
            )

    def _is_start_over(self, now: float) -> bool:
        return now - self._began > self._start_timeout
