"""Events of a run on one node, in the order in which the driver receives them."""

import threading
from collections.abc import Callable

from millrace.swarm.messages import BytesReceived, NodeEvent

_MAX_EVENTS = 1_000  # events of one answer; the next answer has the rest


class EventLog:
    """Events of a run, for any thread.

    Args:
        count_received: Returns the bytes that the node has received in this run.
        timeout: Seconds that `poll` waits for an event at most.
    """

    def __init__(self, count_received: Callable[[], int], timeout: float) -> None:
        self._count_received, self._timeout = count_received, timeout
        self._events: list[NodeEvent] = []
        self._received = 0  # bytes at the end of the last poll
        self._changed = threading.Condition()

    def append(self, event: NodeEvent) -> None:
        """Add an event, and wake `poll`."""
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def poll(self, after: int) -> list[NodeEvent]:
        """Return the events that follow the first `after` ones, a limited number of them.

        Without an event, wait for one. If bytes but no event have arrived since the last call, add
        a `BytesReceived`.
        """
        with self._changed:
            if len(self._events) <= after:
                self._changed.wait(self._timeout)
            received = self._count_received()
            if len(self._events) <= after and received != self._received:
                self._events.append(BytesReceived(received))
            self._received = received
            return self._events[after : after + _MAX_EVENTS]

    def wake(self) -> None:
        """End a `poll` that waits."""
        with self._changed:
            self._changed.notify_all()
