"""State that all threads of a run share: the tracker, the members, and their progress events.

This module owns the lock of the run. No other module passes orders of the tracker to members, or
marks a member as lost.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable

from millrace.errors import MillraceError
from millrace.progress import Event
from millrace.swarm.driving.members import Member, RunMembers
from millrace.swarm.messages import DropPiece, FetchPiece, compute_commitment
from millrace.swarm.progress_events import NodeLost, NodeUntrusted
from millrace.swarm.tracker import PieceOrder, Tracker
from millrace.swarm.tracking.orders import STORE


class RunState:
    """Tracker and members of a run.

    The caller of a method holds the lock of `news`.

    Args:
        tracker: Decides which node fetches which piece from which source.
        on_disputed: Called with a piece for which nodes have reported different digests.
        is_at_mirror: Tells whether a read of a piece in a turn begins at a mirror of the store.
            Wrong bytes of such a read do not count against the node.

    Attributes:
        news: Condition that is notified after each change; it has the lock of the run.
        members: Nodes of the run.
        tracker: Decides which node fetches which piece from which source.
        fatal: Error that ends the run; None while there is none.
        is_ending: Whether the run is over, so that all further events are ignored.
    """

    def __init__(
        self,
        tracker: Tracker,
        on_disputed: Callable[[int], None],
        is_at_mirror: Callable[[int, int], bool] = lambda _, __: False,
    ) -> None:
        self._is_at_mirror = is_at_mirror
        self._on_disputed = on_disputed
        self._untrusted: set[str] = set()
        self._events: list[Event] = []
        self._store_reads: Counter[int] = Counter()  # ordered ones, by piece
        self.news = threading.Condition(threading.RLock())
        self.members = RunMembers()
        self.tracker = tracker
        self.fatal: MillraceError | None = None
        self.is_ending = False

    @property
    def held(self) -> int:
        """Bytes on all living nodes."""
        return self.tracker.held_bytes

    def report_progress(self, event: Event) -> None:
        """Add an event to the progress events."""
        self._events.append(event)

    def note_untrusted(self) -> None:
        """Add an event for each member that the tracker no longer trusts since the last call."""
        for name in sorted(set(self.tracker.untrusted_nodes) - self._untrusted):
            self._untrusted.add(name)
            node = self.members.format_name(self.members[name].node)
            self.report_progress(NodeUntrusted(node=node))

    def take_progress_events(self) -> list[Event]:
        """Remove and return the progress events since the last call."""
        events, self._events = self._events, []
        return events

    def lose(self, member: Member, reason: str) -> None:
        """Mark a member as lost, unless the member is lost already or the run is over."""
        if member.is_lost or self.is_ending:
            return
        member.lost_reason = reason or "it gave no reason"
        member.orders.put(None)
        name = self.members.format_name(member.node)
        self.report_progress(NodeLost(node=name, reason=member.lost_reason))
        self.dispatch(self.tracker.remove_node(member.node.id, time.monotonic()))
        self.news.notify_all()

    def count_wrong_read(self, member: Member) -> None:
        """Tell the tracker that a member has read bytes from the store that the store lacks."""
        if member.is_lost or self.is_ending:
            return
        self.dispatch(self.tracker.count_wrong_read(member.node.id, time.monotonic()))
        self.note_untrusted()

    def is_finished(self, member: Member, files: int) -> bool:
        """Tell whether a member has all files that it can get, and the votes for all its pieces.

        An agent may report a file before the last piece of the file.
        """
        lacks = member.joined and self.tracker.lacks_any(member.node.id)
        return member.has_all(files) and not lacks

    def has_finished(self, files: int) -> bool:
        """Tell whether a member lives, and every living member has all files that it can get."""
        living = self.members.list_living()
        return bool(living) and all(self.is_finished(member, files) for member in living)

    def dispatch(self, orders: list[PieceOrder]) -> None:
        """Pass orders of the tracker to the members.

        Then request the disputed pieces, and mark the faulty nodes as lost.
        """
        for order in orders:
            member = self.members[order.node]
            queued = member.orders
            if order.drop:
                member.note_drop(order.piece)
                queued.put(DropPiece(order.piece))
            else:
                commitment = compute_commitment(order.digest)
                turn = 0
                if order.source == STORE:
                    turn = self._store_reads[order.piece]
                    self._store_reads[order.piece] += 1
                    if self._is_at_mirror(order.piece, turn):
                        self.tracker.excuse_read(order.node, order.piece)
                queued.put(FetchPiece(order.piece, order.source, commitment, turn))
        for number in self.tracker.take_disputed():
            self._on_disputed(number)
        for name in self.tracker.take_faulty():
            self.lose(
                self.members[name],
                "it reported bytes that the store does not have: check its memory and its disk",
            )

    def settle(self, pieces: dict[int, str]) -> bool:
        """Tell the tracker the digests of pieces that the driver has read.

        Returns:
            Whether a node had a wrong copy of one of them.
        """
        orders: list[PieceOrder] = []
        for number, digest in pieces.items():
            orders += self.tracker.settle_piece(number, digest, time.monotonic())
        self.dispatch(orders)
        self.note_untrusted()
        return any(order.drop for order in orders)
