"""Nodes as uploaders: the duration of transfers on each path, and slow nodes.

This module owns the rates of the transfers between nodes.
"""

from millrace.swarm.rates import Durations
from millrace.swarm.tracking.nodes import NodeState, NodeTable

_SLOW_FETCHER = 4.0  # seconds a byte of a slow node, over those of the fastest node
_UNKNOWN_PATH = 4.0  # factor of the timeout for several transfers on a path without history


class UploaderRanking:
    """Comparison of the nodes by their transfers to each other.

    Args:
        nodes: Nodes of the run.
    """

    def __init__(self, nodes: NodeTable) -> None:
        self._nodes = nodes
        self._least_fetch = 0.0  # the lowest `NodeRates.fetch_seconds_per_byte`
        self._paths: dict[tuple[str, str], Durations] = {}  # by zone of the uploader, and node

    def note_fetch(self, uploader: NodeState, node: NodeState, size: int, seconds: float) -> None:
        """Update the rates of a path with a completed transfer."""
        self._find_path(uploader, node).note(size, seconds)
        seconds_per_byte = seconds / max(size, 1)
        before = node.rates.fetch_seconds_per_byte
        node.rates.fetch_seconds_per_byte = (
            0.7 * before + 0.3 * seconds_per_byte if before else seconds_per_byte
        )
        if not self._least_fetch or node.rates.fetch_seconds_per_byte <= self._least_fetch:
            self._least_fetch = node.rates.fetch_seconds_per_byte
        elif before == self._least_fetch:
            self.update()
        if uploader.zone == node.zone:
            uploader.rates.is_slow = False
        rate = size / seconds
        given = uploader.rates.upload_rates.get(node.zone)
        uploader.rates.upload_rates[node.zone] = 0.8 * given + 0.2 * rate if given else rate

    def note_failed_upload(self, uploader: NodeState, node: NodeState) -> None:
        """Note a failed or late upload to a node: halve the known rate."""
        uploader.rates.upload_rates[node.zone] = self.get_rate(uploader, node) / 2

    def get_rate(self, uploader: NodeState, node: NodeState) -> float:
        """Return the rate of an uploader to the zone of a node, in bytes a second; 0 if unknown."""
        return uploader.rates.upload_rates.get(node.zone, 0.0)

    def is_slow_fetcher(self, node: NodeState) -> bool:
        """Tell whether a node receives far more slowly from other nodes than the fastest node."""
        return node.rates.fetch_seconds_per_byte > _SLOW_FETCHER * self._least_fetch > 0.0

    def knows_path(self, uploader: NodeState, node: NodeState) -> bool:
        """Tell whether enough transfers have ended on a path for a comparison."""
        return self._find_path(uploader, node).has_enough

    def compute_timeout(self, uploader: NodeState, node: NodeState, size: int) -> float:
        """Return the seconds after which a fetch is late on its path.

        The timeout is longer if several transfers share a path without history, since the link may
        just be slow.
        """
        path = self._find_path(uploader, node)
        return path.compute_timeout(size) * (
            _UNKNOWN_PATH if not path.has_enough and node.transfers.fetches > 1 else 1.0
        )

    def update(self) -> None:
        """Find the fastest node again, after a node was removed or has become slower."""
        known = (node.rates.fetch_seconds_per_byte for node in self._nodes.iterate_living())
        self._least_fetch = min(filter(None, known), default=0.0)

    def _find_path(self, uploader: NodeState, node: NodeState) -> Durations:
        """Return the durations of the transfers from a zone to a node."""
        return self._paths.setdefault((uploader.zone, node.id), Durations())
