"""Nodes as givers: how long transfers between nodes take on their path, and who is slow.

This module owns what is known of the transfers between nodes.
"""

from millrace.swarm.rates import Durations
from millrace.swarm.tracking.nodes import NodeState, NodeTable

_SLOW_FETCHER = 4.0  # times as long as the quickest node takes for a piece of another one
_UNKNOWN_PATH = 4.0  # times as long as else that one of several transfers of a new path may take


class GiverRanking:
    """Comparison of the nodes by what they give to each other.

    Args:
        nodes: Nodes of the run.
    """

    def __init__(self, nodes: NodeTable) -> None:
        self._nodes = nodes
        self._least_fetch = 0.0  # the least `NodePace.fetch_pace`
        self._paths: dict[tuple[str, str], Durations] = {}  # by the giver's zone and the node

    def note_fetch(self, giver: NodeState, node: NodeState, size: int, seconds: float) -> None:
        """Learn from a transfer of so many bytes how long one takes on its path."""
        self._find_path(giver, node).note(size, seconds)
        pace = seconds / max(size, 1)
        before = node.pace.fetch_pace
        node.pace.fetch_pace = 0.7 * before + 0.3 * pace if before else pace
        if not self._least_fetch or node.pace.fetch_pace <= self._least_fetch:
            self._least_fetch = node.pace.fetch_pace
        elif before == self._least_fetch:
            self.update()
        if giver.zone == node.zone:
            giver.pace.is_slow = False
        rate = size / seconds
        given = giver.pace.rates.get(node.zone)
        giver.pace.rates[node.zone] = 0.8 * given + 0.2 * rate if given else rate

    def note_refusal(self, giver: NodeState, node: NodeState) -> None:
        """Note that a giver gave nothing to a node."""
        giver.pace.rates[node.zone] = self.get_rate(giver, node) / 2

    def get_rate(self, giver: NodeState, node: NodeState) -> float:
        """Return the bytes a second that a giver gives to a node's zone; 0 if unknown."""
        return giver.pace.rates.get(node.zone, 0.0)

    def is_slow_fetcher(self, node: NodeState) -> bool:
        """Tell whether a node takes far longer than the quickest one for what others give."""
        return node.pace.fetch_pace > _SLOW_FETCHER * self._least_fetch > 0.0

    def knows_path(self, giver: NodeState, node: NodeState) -> bool:
        """Tell whether there were enough transfers on a path to compare with."""
        return self._find_path(giver, node).has_enough

    def compute_timeout(self, giver: NodeState, node: NodeState, size: int) -> float:
        """Return the seconds that a fetch may take on its path.

        While nothing is known of the path, several that are slow at once have a slow link.
        """
        path = self._find_path(giver, node)
        return path.compute_timeout(size) * (
            _UNKNOWN_PATH if not path.has_enough and node.transfers.fetches > 1 else 1.0
        )

    def update(self) -> None:
        """Find the quickest fetcher anew, as one is gone or has become slower."""
        paces = [n.pace.fetch_pace for n in self._nodes.iterate_living() if n.pace.fetch_pace]
        self._least_fetch = min(paces, default=0.0)

    def _find_path(self, giver: NodeState, node: NodeState) -> Durations:
        """Return durations of what a node gets from a zone: the links of both set them."""
        return self._paths.setdefault((giver.zone, node.name), Durations())
