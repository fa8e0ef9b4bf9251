"""Threads that follow the nodes: each starts the run on a node, and receives the events there.

This module owns the threads of a run. It adds nodes to the run, and passes their events on.
"""

import http.client
import threading
import time
from collections.abc import Callable, Iterable

from millrace import errors
from millrace.swarm.driving.agent_client import AgentClient, StartTimeoutError, describe_refusal
from millrace.swarm.driving.members import Member
from millrace.swarm.driving.run_state import RunState
from millrace.swarm.event_checker import ProtocolError
from millrace.swarm.messages import AddPeer, NodeEvent, VoidDigest
from millrace.swarm.nodes import TOO_LATE, AbsentNode, Node
from millrace.swarm.protocol import HttpStatusError, ProtocolVersionError
from millrace.swarm.run_spec import encode_start_body
from millrace.swarm.tls import TlsError

_EVENTS_AT_ONCE = 500  # events that are handled before another thread may have the run's lock
_EVENT_BURST, _EVENT_RATE = 50_000, 5_000  # events, and events a second, that a node may send
_YIELD_INTERVAL = 0.001  # seconds without the lock between them; without, no other thread wakes
_PACE_INTERVAL = 0.2  # seconds between two checks of the event rate of a node
_RETRY_INTERVAL = 1.0  # seconds between two tries to reach a host that does not answer yet
_LOST_TIMEOUT = 1.0  # seconds to wait for lost nodes at the end of the run


class NodeFollowers:
    """Followers of all nodes of a run.

    Args:
        state: Members and tracker of the run.
        client: Client of the agents; closed with the followers.
        spec: Encoded specification of the run.
        sizes: Bytes of each piece.
        on_event: Called with each event of a member, while the lock of the run is held.
        list_void: Returns the files whose digest is void, for new nodes.
    """

    def __init__(
        self,
        state: RunState,
        client: AgentClient,
        spec: bytes,
        sizes: list[int],
        *,
        on_event: Callable[[Member, NodeEvent], None],
        list_void: Callable[[], Iterable[int]],
    ) -> None:
        self._state, self._client = state, client
        self._spec, self._sizes = spec, sizes
        self._on_event, self._list_void = on_event, list_void
        self._threads: list[threading.Thread] = []

    def add(self, node: Node | AbsentNode) -> None:
        """Follow a new node. Note a node without an agent as absent."""
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
                state.members.add_absent(AbsentNode(node.id, node.name, TOO_LATE))
                return
            state.members.add(member)
            self._threads.append(thread)
        thread.start()

    def end_runs(self) -> None:
        """End the run on all nodes, and wait a while for the threads.

        Lost nodes are included: else a living agent would refuse other runs for a while. The wait
        for lost nodes is shorter, since they may be dead. Nodes that still check their files stop.
        """
        state = self._state
        with state.news:
            state.is_ending = True
            members = [member for member in state.members if member.node.endpoint.identity]
            state.news.notify_all()
        self._client.cancel_starts()
        enders = {
            member.node.id: threading.Thread(target=self._end_run, args=(member,), daemon=True)
            for member in members
        }
        for thread in enders.values():
            thread.start()
        began = time.monotonic()
        lost = [enders.pop(member.node.id) for member in members if member.is_lost]
        _join_all(lost, began + _LOST_TIMEOUT)
        _join_all([*enders.values(), *self._threads], began + self._client.answer_timeout)

    def close(self) -> None:
        """Close the connections to all nodes."""
        self._client.close()

    def _end_run(self, member: Member) -> None:
        member.orders.put(None)
        self._client.end_run(member.node)

    def _follow(self, member: Member) -> None:
        """Start the run on one node, then receive its events."""
        state = self._state
        try:
            if not self._connect(member):
                return
            sender = threading.Thread(
                target=self._send_orders, args=(member,), name="orders", daemon=True
            )
            sender.start()
            self._receive_events(member)
        except Exception as error:  # noqa: BLE001 - an unexpected error ends the run
            with state.news:
                name = state.members.format_name(member.node)
                reason = f"{name}: {type(error).__name__}: {error}"
                state.fatal = state.fatal or errors.WorkerError(reason)
                state.news.notify_all()

    def _connect(self, member: Member) -> bool:
        """Start the run on a node; return False if the node is lost or the run has ended before."""
        state = self._state
        with state.news:
            agents = {m.node.id: m.node.endpoint for m in state.members if m.joined}
        body = encode_start_body(agents, self._spec)
        while True:
            try:
                if not self._identify(member):
                    return False
                have = self._client.start_run(member.node, body)
                break
            except (
                HttpStatusError,
                ProtocolError,
                ProtocolVersionError,
                StartTimeoutError,
                TlsError,
            ) as error:
                reason = describe_refusal(error)
                if not isinstance(error, HttpStatusError) or error.status != http.client.LOCKED:
                    self._lose(member, reason)
                    return False
            except TimeoutError:
                reason = f"it did not answer for {self._client.answer_timeout:.0f} s"
            except (OSError, http.client.HTTPException) as error:
                reason = f"it cannot be reached ({errors.format_error(error)})"
            if not self._wait_to_retry(member, reason):
                return False
        with state.news:
            self._join(member, have, set(agents))
        return True

    def _identify(self, member: Member) -> bool:
        """Ask an agent for its identity; return False if another node leads to the same agent."""
        member.node = self._client.identify(member.node)
        state = self._state
        with state.news:
            other = state.members.register_agent(member.node)
            if other is not None:
                name = state.members.format_name(other)
                state.lose(member, f"its address leads to the agent of {name}: name each node once")
        return other is None

    def _wait_to_retry(self, member: Member, reason: str) -> bool:
        """Wait a moment; tell whether to try a host again that did not answer or was busy."""
        state = self._state
        with state.news:
            if state.is_ending:
                return False
            state.members.await_member(member, reason)
            state.news.wait(_RETRY_INTERVAL)
            return not state.is_ending

    def _join(self, member: Member, have: list[tuple[int, str]], known: set[str]) -> None:
        """Add a node to the run, and make the node and the other nodes known to each other.

        Args:
            member: Node.
            have: Pieces that the node has, with their digests.
            known: Ids of the nodes whose agents were in the body of the request.
        """
        state, node_id = self._state, member.node.id
        for other in state.members.list_joined():
            other.orders.put(AddPeer(node_id, member.node.endpoint))
            if other.node.id not in known:
                member.orders.put(AddPeer(other.node.id, other.node.endpoint))
        member.joined, member.last_progress = True, time.monotonic()
        state.members.add(member)  # again: `await_member` may have made it absent
        member.counts.cached = sum(self._sizes[number] for number, _ in have)
        for number in self._list_void():
            member.orders.put(VoidDigest(number))
        state.dispatch(
            state.tracker.add_node(node_id, have, time.monotonic(), zone=member.node.zone)
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
                self._lose(member, f"sending orders to it failed ({describe_refusal(error)})")
                return

    def _receive_events(self, member: Member) -> None:
        after, state, began = 0, self._state, time.monotonic()
        while not (state.is_ending or member.is_lost):
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
                        self._on_event(member, event)
                    state.news.notify_all()
            self._pace(member, after, began)

    def _pace(self, member: Member, count: int, began: float) -> None:
        """Wait while a node has sent more events than a correct agent sends.

        Args:
            member: Node.
            count: Number of its events.
            began: Time of the first request for events.
        """
        state = self._state
        while not (state.is_ending or member.is_lost):
            if count <= _EVENT_BURST + _EVENT_RATE * (time.monotonic() - began):
                return
            time.sleep(_PACE_INTERVAL)

    def _lose(self, member: Member, reason: str) -> None:
        with self._state.news:
            self._state.members.restore(member)
            self._state.lose(member, reason)


def _join_all(threads: Iterable[threading.Thread], deadline: float) -> None:
    """Wait until all threads have ended, or until the deadline."""
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
