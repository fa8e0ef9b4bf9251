"""State that all threads of a run share: the tracker, the members, and what was said of them.

This module owns the lock of the run. It alone gives the orders of the tracker to the members, and
it alone says that a member is lost.
"""

import threading
import time
from collections.abc import Callable, Sequence

from millrace.errors import MillraceError
from millrace.progress import Event
from millrace.swarm.driving.members import Member, RunMembers
from millrace.swarm.messages import DropPiece, FetchPiece
from millrace.swarm.progress_events import NodeLost, NodeUntrusted
from millrace.swarm.tracker import Order, Tracker


class RunState:
    """Tracker and members of a run.

    Whoever calls a method holds the lock of `news`.

    Args:
        tracker: Decides who fetches what.
        sizes: Bytes of each piece.
        disputed: Told a piece of which nodes have different digests.

    Attributes:
        news: Condition that is notified when something has happened; it has the run's lock.
        members: Nodes of the run.
        tracker: Decides who fetches what.
        fatal: Error that ends the run; None while there is none.
        is_ending: Whether the run is over, so that nothing is believed any more.
        held: Bytes that all living nodes have.
    """

    def __init__(
        self, tracker: Tracker, sizes: Sequence[int], disputed: Callable[[int], None]
    ) -> None:
        self._sizes, self._disputed = sizes, disputed
        self._untrusted: set[str] = set()
        self._told: list[Event] = []
        self.news = threading.Condition(threading.RLock())
        self.members = RunMembers()
        self.tracker = tracker
        self.fatal: MillraceError | None = None
        self.is_ending = False
        self.held = 0

    def tell(self, event: Event) -> None:
        """Note an event for `take_events`."""
        self._told.append(event)

    def tell_untrusted(self) -> None:
        """Note an event of each member that the tracker has come to distrust."""
        for name in sorted(set(self.tracker.quarantined) - self._untrusted):
            self._untrusted.add(name)
            self.tell(NodeUntrusted(node=self.members.format_name(self.members[name].node)))

    def take_events(self) -> list[Event]:
        """Return the events since the last call."""
        told, self._told = self._told, []
        return told

    def lose(self, member: Member, why: str) -> None:
        """Note that a member is lost, unless it is already, or the run is over."""
        if member.why or self.is_ending:
            return
        member.why = why or "it gave no reason"
        member.orders.put(None)
        self.tell(NodeLost(node=self.members.format_name(member.node), reason=member.why))
        self.held -= self.count_held(member)
        self.dispatch(self.tracker.remove_node(member.node.id, time.monotonic()))
        self.news.notify_all()

    def count_held(self, member: Member) -> int:
        """Return the bytes of the pieces that a member has."""
        return sum(self.tracker.list_held_sizes(member.node.id, self._sizes))

    def dispatch(self, orders: list[Order]) -> None:
        """Give orders of the tracker to the members, and act on what it has found."""
        for order in orders:
            queued = self.members[order.node].orders
            if order.drop:
                self.held -= self._sizes[order.piece]
                queued.put(DropPiece(order.piece))
            else:
                queued.put(FetchPiece(order.piece, order.source, order.digest))
        for number in self.tracker.take_disputed():
            self._disputed(number)
        for name in self.tracker.take_hopeless():
            self.lose(self.members[name], "what it has, or reads, is not what the store has")

    def settle(self, pieces: dict[int, str]) -> bool:
        """Tell the tracker what pieces are; return whether a node had one of them wrong."""
        orders: list[Order] = []
        for number, digest in pieces.items():
            orders += self.tracker.settle_piece(number, digest, time.monotonic())
        self.dispatch(orders)
        self.tell_untrusted()
        return any(order.drop for order in orders)
