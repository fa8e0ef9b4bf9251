"""Requests of the driver to the agents: who they are, the run, its orders, and its events.

This module owns the connections to the agents. It knows nothing of the run but its name.
"""

import http.client
import json
import threading
from dataclasses import replace
from typing import Any

from millrace import errors
from millrace.formatting import clean_text
from millrace.swarm.events import EventChecker, ProtocolError
from millrace.swarm.messages import NodeEvent, Order, encode_message
from millrace.swarm.nodes import Node
from millrace.swarm.protocol import (
    AUTH_HEADER,
    ConnectionPool,
    HttpStatusError,
    identify,
    read_body,
    sign,
)

_ANSWER_TIMEOUT = 6.0  # seconds without an answer after which a node is lost
_START_TIMEOUT = 3600.0  # seconds that a node may look at what it has, while it answers otherwise
_WATCH_INTERVAL = 1.0  # seconds between two looks at whether a node that starts a run answers
_IDENTITY_SIZE = 4096  # bytes of an answer to `GET /agent` at most


class AgentClient:
    """Client of all agents of one run.

    Args:
        run: Name of the run.
        check: Checks what agents say.
    """

    def __init__(self, run: str, check: EventChecker) -> None:
        self._run, self._check = run, check
        self._connections = ConnectionPool(_ANSWER_TIMEOUT)

    @property
    def answer_timeout(self) -> float:
        """Seconds without an answer after which a node is lost."""
        return _ANSWER_TIMEOUT

    def close(self) -> None:
        """Close all connections."""
        self._connections.close()

    def identify(self, node: Node) -> Node:
        """Ask an agent who it is, as all that follows names it; return the node with its place.

        Raises:
            ProtocolError: It states no identity.
            ProtocolVersionError: It has another version of the protocol.
            TlsError: It does not prove that it has the key.
            OSError, http.client.HTTPException: It cannot be reached.
        """
        try:
            place = identify(node.place, node.key, _ANSWER_TIMEOUT)
        except (ValueError, RecursionError):
            raise ProtocolError("no identity") from None
        return replace(node, place=place)

    def start_run(self, node: Node, body: bytes) -> list[tuple[int, str]]:
        """Start the run on a node, and see that the node answers while it looks at what it has.

        Returns:
            The pieces that the node has, with their digests.

        Raises:
            HttpStatusError: The node refused.
            ProtocolError: It answered what no agent does.
            OSError, http.client.HTTPException: It cannot be reached, or fell silent.
        """
        opened, silent = threading.Event(), threading.Event()
        # The pool is of its own, as it is closed when the node is silent.
        connections = ConnectionPool(_ANSWER_TIMEOUT)

        def watch() -> None:
            while not opened.wait(_WATCH_INTERVAL):
                try:
                    with self._connections.request(node.place, "GET", "/agent") as answer:
                        read_body(answer, _IDENTITY_SIZE)
                except HttpStatusError:
                    continue
                except (OSError, http.client.HTTPException):
                    silent.set()
                    connections.close()
                    return

        threading.Thread(target=watch, name=f"open-{node.name}", daemon=True).start()
        try:
            said = self._send(
                node, "PUT", "", body, timeout=_START_TIMEOUT, connections=connections
            )
            return self._check.read_pieces(said)
        except (OSError, http.client.HTTPException) as error:
            if silent.is_set():
                raise TimeoutError from error
            raise
        finally:
            opened.set()
            connections.close()

    def send_orders(self, node: Node, orders: list[Order]) -> None:
        """Send orders to a node.

        Raises:
            HttpStatusError, ProtocolError, OSError, http.client.HTTPException: It took none.
        """
        self._send(
            node,
            "POST",
            "/orders",
            json.dumps([encode_message(order) for order in orders]).encode(),
        )

    def poll_events(self, node: Node, after: int) -> list[NodeEvent]:
        """Wait a while for what has happened on a node since so many events.

        Raises:
            ProtocolError: It says what no agent does.
            HttpStatusError, OSError, http.client.HTTPException: It no longer answers.
        """
        longest = self._check.max_events_bytes
        said = self._send(node, "GET", f"/events?after={after}", longest=longest)
        return self._check.read_events(said)

    def end_run(self, node: Node) -> None:
        """End the run on a node. A node that hears nothing ends the run itself after a while."""
        try:
            self._send(node, "DELETE", "")
        except (HttpStatusError, OSError, http.client.HTTPException, ProtocolError):
            return

    def _send(
        self,
        node: Node,
        method: str,
        tail: str,
        body: bytes = b"",
        *,
        timeout: float = _ANSWER_TIMEOUT,
        connections: ConnectionPool | None = None,
        longest: int | None = None,
    ) -> Any:
        path = f"/runs/{self._run}{tail}"

        def sign_headers() -> dict[str, str]:
            return {AUTH_HEADER: sign(node.key, method, path, body, to=node.place.identity)}

        with (connections or self._connections).request(
            node.place, method, path, sign_headers, body or None, timeout=timeout
        ) as answer:
            longest = longest or self._check.max_answer_bytes
            said = read_body(answer, longest)
        if len(said) > longest:
            raise ProtocolError("more than there is to say")
        try:
            return json.loads(said) if said else None
        except (ValueError, RecursionError):
            raise ProtocolError("no JSON") from None


def describe_refusal(error: BaseException) -> str:
    """Return the reason of a refusal or a broken connection, in one line."""
    if isinstance(error, HttpStatusError):
        text = str(error).partition(" ")[2]
        try:
            return clean_text(_read_reason(json.loads(text)))
        except (ValueError, RecursionError):
            return clean_text(str(error))
    return errors.format_error(error)


def _read_reason(said: Any) -> str:
    """Return the reason that a refusal states.

    Raises:
        ValueError: It states none.
    """
    match said:
        case {"why": str(why)} if why.strip():
            return why
        case _:
            raise ValueError("no reason")
