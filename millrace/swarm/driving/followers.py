"""Threads that follow the nodes: each starts the run on a node, and hears what happens there.

This module owns the threads of a run. It tells the run who joins, and what each node says.
"""

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterable

from millrace import errors
from millrace.swarm.driving.agent_client import AgentClient, describe_refusal
from millrace.swarm.driving.members import Member
from millrace.swarm.driving.run_state import RunState
from millrace.swarm.events import ProtocolError
from millrace.swarm.messages import AddPeer, NodeEvent, VoidDigest, encode_endpoint
from millrace.swarm.nodes import AbsentNode, Node
from millrace.swarm.protocol import HttpStatusError, ProtocolVersionError
from millrace.swarm.tls import TlsError

_EVENTS_AT_ONCE = 500  # events that are handled before another thread may have the run's lock
_EVENT_BURST, _EVENT_RATE = 50_000, 5_000  # events, and events a second, that a node may say
_YIELD_INTERVAL = 0.001  # seconds without the lock between them; without, no other thread wakes
_PACE_INTERVAL = 0.2  # seconds between two looks at whether a node may say more
_RETRY_INTERVAL = 1.0  # seconds between two tries to reach a host that does not answer yet
_LOST_TIMEOUT = 1.0  # seconds that the lost nodes may take to end the run


class NodeFollowers:
    """Followers of all nodes of a run.

    Args:
        state: Members and tracker of the run.
        client: Client of the agents; closed with the followers.
        plan: Body that starts the run on a node.
        sizes: Bytes of each piece.
        handle: Told each event of a member, with the lock of the run held.
        list_void: Returns the files whose digest is void, which a new node is told.
    """

    def __init__(
        self,
        state: RunState,
        client: AgentClient,
        plan: bytes,
        sizes: list[int],
        *,
        handle: Callable[[Member, NodeEvent], None],
        list_void: Callable[[], Iterable[int]],
    ) -> None:
        self._state, self._client = state, client
        self._plan, self._sizes = plan, sizes
        self._handle, self._list_void = handle, list_void
        self._threads: list[threading.Thread] = []

    def add(self, node: Node | AbsentNode) -> None:
        """Follow a node that has come; of one without an agent, note that it is absent."""
        state = self._state
        if isinstance(node, AbsentNode):
            with state.news:
                state.members.add_absent(node)
                state.news.notify_all()
            return
        member = Member(node)
        thread = threading.Thread(
            target=self._follow, args=(member,), name=f"events-{node.name}", daemon=True
        )
        with state.news:
            if state.is_ending:
                return
            state.members.add(member)
            self._threads.append(thread)
        thread.start()

    def end_runs(self) -> None:
        """End the run on all nodes, and wait a while for the threads.

        A lost node is told too, as it could not begin another run for a while. It is waited for
        less long: it may be dead.
        """
        state = self._state
        with state.news:
            state.is_ending = True
            members = [member for member in state.members if member.joined]
            state.news.notify_all()
        enders = {
            member.node.id: threading.Thread(target=self._end_run, args=(member,), daemon=True)
            for member in members
        }
        for thread in enders.values():
            thread.start()
        deadline = time.monotonic() + _LOST_TIMEOUT
        for member in members:
            if member.why:
                enders.pop(member.node.id).join(max(0.0, deadline - time.monotonic()))
        for thread in [*enders.values(), *self._threads]:
            thread.join(self._client.answer_timeout)

    def close(self) -> None:
        """Close the connections to all nodes."""
        self._client.close()

    def _end_run(self, member: Member) -> None:
        member.orders.put(None)
        self._client.end_run(member.node)

    def _follow(self, member: Member) -> None:
        """Start the run of one node, then hear what happens there."""
        state = self._state
        try:
            if not self._connect(member):
                return
            sender = threading.Thread(
                target=self._send_orders, args=(member,), name="orders", daemon=True
            )
            sender.start()
            self._hear_events(member)
        except Exception as error:  # noqa: BLE001 - a fault of ours must not leave a run hanging
            with state.news:
                name = state.members.format_name(member.node)
                why = f"{name}: {type(error).__name__}: {error}"
                state.fatal = state.fatal or errors.WorkerError(why)
                state.news.notify_all()

    def _connect(self, member: Member) -> bool:
        """Start the run of a node; return False if it is lost, or the run is over before."""
        state = self._state
        with state.news:
            peers = {m.node.id: m.node for m in state.members if m.joined}
        known = {each: encode_endpoint(node.place) for each, node in peers.items()}
        body = b"\n".join((json.dumps(known).encode(), self._plan))
        while True:
            try:
                if not self._identify(member):
                    return False
                have = self._client.start_run(member.node, body)
                break
            except (HttpStatusError, ProtocolError, TlsError, ProtocolVersionError) as error:
                why = describe_refusal(error)
                if not isinstance(error, HttpStatusError) or error.status != http.client.LOCKED:
                    self._lose(member, why)
                    return False
            except TimeoutError:
                why = f"it did not answer for {self._client.answer_timeout:.0f} s"
            except (OSError, http.client.HTTPException) as error:
                why = f"it cannot be reached ({errors.format_error(error)})"
            if not self._wait_to_retry(member, why):
                return False
        with state.news:
            self._join(member, have, set(peers))
        return True

    def _identify(self, member: Member) -> bool:
        """Ask an agent who it is. False if it is another node's."""
        member.node = self._client.identify(member.node)
        state = self._state
        with state.news:
            twin = state.members.find_twin(member.node)
            if twin is not None:
                name = state.members.format_name(twin)
                state.lose(member, f"its address leads to the agent of {name}: name each node once")
        return twin is None

    def _wait_to_retry(self, member: Member, why: str) -> bool:
        """Wait a moment, and tell whether to try a host again that did not answer or was busy."""
        state = self._state
        with state.news:
            if state.is_ending:
                return False
            state.members.await_member(member, why)
            state.news.wait(_RETRY_INTERVAL)
            return not state.is_ending

    def _join(self, member: Member, have: list[tuple[int, str]], known: set[str]) -> None:
        """Let a node take part: the others hear of it, and it hears of those it does not know."""
        state, identity = self._state, member.node.id
        for other in state.members.list_joined():
            other.orders.put(AddPeer(identity, member.node.place))
            if other.node.id not in known:
                member.orders.put(AddPeer(other.node.id, other.node.place))
        member.joined, member.moved = True, time.monotonic()
        state.members.add(member)
        member.counts.cached = sum(self._sizes[number] for number, _ in have)
        state.held += member.counts.cached
        for number in self._list_void():
            member.orders.put(VoidDigest(number))
        state.dispatch(
            state.tracker.add_node(identity, have, time.monotonic(), zone=member.node.zone)
        )
        state.news.notify_all()

    def _send_orders(self, member: Member) -> None:
        while (order := member.orders.get()) is not None:
            batch = [order]
            while not member.orders.empty():
                more = member.orders.get()
                if more is None:
                    member.orders.put(None)
                    break
                batch.append(more)
            try:
                self._client.send_orders(member.node, batch)
            except (HttpStatusError, OSError, http.client.HTTPException, ProtocolError) as error:
                self._lose(member, f"it took no orders ({describe_refusal(error)})")
                return

    def _hear_events(self, member: Member) -> None:
        after, state, began = 0, self._state, time.monotonic()
        while not (state.is_ending or member.why):
            try:
                events = self._client.poll_events(member.node, after)
            except (HttpStatusError, OSError, http.client.HTTPException) as error:
                self._lose(member, f"it no longer answers ({describe_refusal(error)})")
                return
            except ProtocolError as error:
                self._lose(member, str(error))
                return
            after += len(events)
            for at in range(0, len(events), _EVENTS_AT_ONCE):
                if at:
                    time.sleep(_YIELD_INTERVAL)
                with state.news:
                    for event in events[at : at + _EVENTS_AT_ONCE]:
                        self._handle(member, event)
                    state.news.notify_all()
            self._pace(member, after, began)

    def _pace(self, member: Member, said: int, began: float) -> None:
        """Wait while a node has said more events than any agent has to say.

        Args:
            member: Node.
            said: Number of its events.
            began: Time of the first look at them.
        """
        state = self._state
        while not (state.is_ending or member.why):
            if said <= _EVENT_BURST + _EVENT_RATE * (time.monotonic() - began):
                return
            time.sleep(_PACE_INTERVAL)

    def _lose(self, member: Member, why: str) -> None:
        with self._state.news:
            self._state.lose(member, why)
