"""A run for the tests of the driver's parts: members without agents, and a real tracker."""

import time
from collections.abc import Mapping

from millrace.progress import Event
from millrace.swarm.catalogue import Catalogue, File, build_catalogue
from millrace.swarm.driving.members import Member
from millrace.swarm.driving.run_state import RunState
from millrace.swarm.messages import Order
from millrace.swarm.nodes import Node
from millrace.swarm.protocol import Endpoint
from millrace.swarm.tracker import Tracker

SIZE = 1 << 20


def make_catalogue(*files: File) -> Catalogue:
    """Return a catalogue whose files have a piece each."""
    return build_catalogue(files or (make_file("a"), make_file("b")), SIZE)


def make_file(name: str, digest: str = "") -> File:
    return File(name, SIZE, "etag", f"s3://bucket/{name}", digest)


def make_member(name: str, *, port: int = 1, identity: str = "", fingerprint: str = "") -> Member:
    endpoint = Endpoint("http", "127.0.0.1", port, identity, fingerprint)
    return Member(Node(f"id-{name}", name, endpoint, b"key"))


class Run:
    """State of a run with members that have joined.

    Attributes:
        state: The state; the test holds its lock.
        disputed: Pieces of which the tracker has heard different digests.
    """

    def __init__(
        self,
        names: str,
        *,
        pieces: int = 2,
        needs: int = 1,
        known: Mapping[int, str] | None = None,
    ) -> None:
        tracker = Tracker([SIZE] * pieces, votes_needed=[needs] * pieces, known_digests=known)
        self.disputed: list[int] = []
        self.state = RunState(tracker, self.disputed.append)
        self.state.news.acquire()  # as whoever calls its methods does
        for name in names:
            self.join(name)

    def join(self, name: str) -> Member:
        member = make_member(name)
        member.joined = True
        self.state.members.add(member)
        orders = self.state.tracker.add_node(member.node.id, [], time.monotonic())
        self.state.dispatch(orders)
        return member

    def __getitem__(self, name: str) -> Member:
        return self.state.members[f"id-{name}"]

    def take_orders(self, name: str) -> list[Order | None]:
        """Return the orders that a member was given."""
        orders = self[name].orders
        return [orders.get() for _ in range(orders.qsize())]

    def take_events(self) -> list[tuple[type[Event], str]]:
        """Return the classes of the events, and the node or the file of each."""
        return [
            (type(event), getattr(event, "node", "") or getattr(event, "origin", ""))
            for event in self.state.take_progress_events()
        ]
