"""Events of a run on one node, in the order in which the driver receives them."""

import threading
from collections.abc import Callable

from millrace.swarm.messages import BytesReceived, NodeEvent

_MAX_EVENTS = 1_000  # events of one answer; the next answer has the rest


class EventLog:
    """Events of a run, for any thread.

    Args:
        count_progress: Returns the bytes that the node has received and unpacked in this run.
        timeout: Seconds that `poll` waits for an event at most.
    """

    def __init__(self, count_progress: Callable[[], int], timeout: float) -> None:
        self._count_progress, self._timeout = count_progress, timeout
        self._events: list[NodeEvent] = []
        self._counted = 0  # bytes at the end of the last poll
        self._changed = threading.Condition()

    def append(self, event: NodeEvent) -> None:
        """Add an event, and wake `poll`."""
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def poll(self, after: int) -> list[NodeEvent]:
        """Return the events that follow the first `after` ones, a limited number of them.

        Without an event, wait for one. If there is none, and bytes have arrived or were unpacked
        since the last call, add a `BytesReceived`.
        """
        with self._changed:
            if len(self._events) <= after:
                self._changed.wait(self._timeout)
            counted = self._count_progress()
            if len(self._events) <= after and counted != self._counted:
                self._events.append(BytesReceived(counted))
            self._counted = counted
            return self._events[after : after + _MAX_EVENTS]

    def wake(self) -> None:
        """End a `poll` that waits."""
        with self._changed:
            self._changed.notify_all()
