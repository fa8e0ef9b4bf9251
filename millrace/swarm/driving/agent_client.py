"""Requests of the driver to the agents: identity, start and end of a run, orders, and events.

This module owns the connections to the agents. It knows only the name of the run.
"""

import http.client
import json
import threading
import time
from dataclasses import replace
from typing import Any

from millrace import errors
from millrace.formatting import clean_text
from millrace.swarm.event_checker import EventChecker, ProtocolError
from millrace.swarm.messages import NodeEvent, Order, encode_message
from millrace.swarm.nodes import Node
from millrace.swarm.protocol import (
    AUTH_HEADER,
    IDENTITY_SIZE,
    Body,
    ConnectionPool,
    HttpStatusError,
    identify,
    sign,
)

_ANSWER_TIMEOUT = 6.0  # seconds without an answer after which a node is lost
_START_TIMEOUT = 3600.0  # seconds that a node may check its files, while it answers `GET /agent`
_WATCH_INTERVAL = 1.0  # seconds between two `GET /agent` to a node that checks its files


class StartTimeoutError(Exception):
    """A node has answered, and has not ended the check of its files within the longest time."""

    def __init__(self) -> None:
        super().__init__(
            f"it still checked its files after {_START_TIMEOUT:.0f} s: check its disk, or use "
            "another machine"
        )


class AgentClient:
    """Client of all agents of one run.

    Args:
        run: Name of the run.
        checker: Checks the answers of agents.
    """

    def __init__(self, run: str, checker: EventChecker) -> None:
        self._run, self._checker = run, checker
        self._connections = ConnectionPool(_ANSWER_TIMEOUT)
        self._starts: set[ConnectionPool] = set()  # of `start_run`; changed under the lock
        self._is_canceled = False
        self._lock = threading.Lock()

    @property
    def answer_timeout(self) -> float:
        """Seconds without an answer after which a node is lost."""
        return _ANSWER_TIMEOUT

    def close(self) -> None:
        """Close all connections."""
        self._connections.close()

    def identify(self, node: Node) -> Node:
        """Ask an agent for its identity, which all further requests name.

        Returns:
            The node, whose endpoint has the identity and the fingerprint of the certificate.

        Raises:
            ProtocolError: The agent states no identity.
            ProtocolVersionError: The agent has another version of the protocol.
            TlsError: The agent does not prove that it has the key.
            OSError, http.client.HTTPException: The agent cannot be reached.
        """
        try:
            endpoint = identify(node.endpoint, node.key, _ANSWER_TIMEOUT)
        except (ValueError, RecursionError):
            raise ProtocolError("an answer without its identity") from None
        return replace(node, endpoint=endpoint)

    def start_run(self, node: Node, body: Body) -> list[tuple[int, str]]:
        """Start the run on a node, and check that the agent answers while it checks its files.

        Returns:
            The pieces that the node has, with their digests.

        Raises:
            HttpStatusError: The agent refused.
            ProtocolError: The answer is not one of an agent.
            StartTimeoutError: The node still checks its files.
            OSError, http.client.HTTPException: The agent cannot be reached, or answers no more, or
                `cancel_starts` was called.
        """
        opened, silent = threading.Event(), threading.Event()
        # A separate pool, since it is closed when the node is silent.
        connections = ConnectionPool(_ANSWER_TIMEOUT)
        with self._lock:
            if self._is_canceled:
                raise ConnectionAbortedError("The run has ended.")
            self._starts.add(connections)

        def watch() -> None:
            while not opened.wait(_WATCH_INTERVAL):
                try:
                    self._connections.request(node.endpoint, "GET", "/agent", longest=IDENTITY_SIZE)
                except HttpStatusError:
                    continue
                except (OSError, http.client.HTTPException):
                    silent.set()
                    connections.close()
                    return

        threading.Thread(target=watch, name=f"open-{node.name}", daemon=True).start()
        began = time.monotonic()
        try:
            answer = self._send(
                node, "PUT", "", body, timeout=_START_TIMEOUT, connections=connections
            )
            return self._checker.read_pieces(answer)
        except (OSError, http.client.HTTPException) as error:
            if silent.is_set():
                raise TimeoutError from error
            if isinstance(error, TimeoutError) and time.monotonic() - began >= _START_TIMEOUT:
                raise StartTimeoutError from error
            raise
        finally:
            opened.set()
            connections.close()
            with self._lock:
                self._starts.discard(connections)

    def cancel_starts(self) -> None:
        """End each `start_run`, now and later. Call `end_run` so that the agents stop, too."""
        with self._lock:
            self._is_canceled = True
            starts = list(self._starts)
        for connections in starts:
            connections.close()

    def send_orders(self, node: Node, orders: list[Order]) -> None:
        """Send orders to a node.

        Raises:
            HttpStatusError, ProtocolError, OSError, http.client.HTTPException: The node took no
                order.
        """
        self._send(
            node,
            "POST",
            "/orders",
            json.dumps([encode_message(order) for order in orders]).encode(),
        )

    def poll_events(self, node: Node, after: int) -> list[NodeEvent]:
        """Wait a while for further events of a node, and return them.

        Args:
            node: Node.
            after: Number of events that were received before.

        Raises:
            ProtocolError: The answer is not one of an agent.
            HttpStatusError, OSError, http.client.HTTPException: The node no longer answers.
        """
        longest = self._checker.max_events_bytes
        answer = self._send(node, "GET", f"/events?after={after}", longest=longest)
        return self._checker.read_events(answer)

    def end_run(self, node: Node) -> None:
        """End the run on a node. Without this request, the agent ends the run after a while."""
        try:
            self._send(node, "DELETE", "")
        except (HttpStatusError, OSError, http.client.HTTPException, ProtocolError):
            return

    def _send(
        self,
        node: Node,
        method: str,
        tail: str,
        body: Body = b"",
        *,
        timeout: float = _ANSWER_TIMEOUT,
        connections: ConnectionPool | None = None,
        longest: int | None = None,
    ) -> Any:
        path = f"/runs/{self._run}{tail}"

        def sign_headers() -> dict[str, str]:
            return {AUTH_HEADER: sign(node.key, method, path, body, to=node.endpoint.identity)}

        longest = longest or self._checker.max_answer_bytes
        content = (connections or self._connections).request(
            node.endpoint, method, path, sign_headers, body, longest=longest, timeout=timeout
        )
        if len(content) > longest:
            raise ProtocolError(f"an answer of more than {longest} bytes")
        try:
            return json.loads(content) if content else None
        except (ValueError, RecursionError):
            raise ProtocolError("an answer that is not JSON") from None


def describe_refusal(error: BaseException) -> str:
    """Return the reason of a refusal or a broken connection, in one line."""
    if isinstance(error, HttpStatusError):
        text = str(error).partition(" ")[2]
        try:
            return clean_text(_read_reason(json.loads(text)))
        except (ValueError, RecursionError):
            return clean_text(str(error))
    return errors.format_error(error)


def _read_reason(answer: Any) -> str:
    """Return the reason that a refusal states.

    Raises:
        ValueError: The refusal states no reason.
    """
    match answer:
        case {"why": str(reason)} if reason.strip():
            return reason
        case _:
            raise ValueError("The refusal states no reason.")
