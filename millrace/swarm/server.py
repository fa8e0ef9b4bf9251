"""Server of an agent: one port for TLS and plain HTTP, and the answers to requests.

This module owns the connections. The agent checks the signatures of the requests.
"""

import contextlib
import hashlib
import http.client
import json
import os
import resource
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from socketserver import StreamRequestHandler
from typing import TYPE_CHECKING, Any, cast

from millrace.errors import ConfigurationError, HeldError, MillraceError, format_error
from millrace.swarm import tls
from millrace.swarm.heads import HeadError, RequestHead, get_length, keeps_alive, read_request
from millrace.swarm.node_run import NodeRun, describe_error
from millrace.swarm.protocol import (
    AUTH_HEADER,
    MAX_BODY_SIZE,
    ProtocolVersionError,
    SignatureError,
    check_rate,
)
from millrace.swarm.uploads import UploadLimiter

if TYPE_CHECKING:
    from millrace.swarm.agent import Agent

_STALL_TIMEOUT = 10.0  # seconds without a byte after which a transfer has failed
_LINGER_TIMEOUT = 10.0  # seconds to discard the rest of a refused request
_DISCARD_SIZE = 256 * 1024  # bytes that are discarded at a time
_BACKLOG = 256
_MAX_IDLE = 1024  # open connections without a request
_HANDSHAKE_TIMEOUT = 10.0


class BusyAgentError(HeldError):
    """The agent takes part in the run of another driver."""


class AgentServer(ThreadingHTTPServer):
    """Server that closes the oldest idle connection if there are too many.

    Attributes:
        agent: Agent that answers the requests.
        uploads: Limit on the uploads.
    """

    daemon_threads = True
    request_queue_size = _BACKLOG
    agent: "Agent"

    def __init__(self, family: socket.AddressFamily, address: tuple[str, int]) -> None:
        self.address_family = family
        self._idle: dict[socket.socket, None] = {}  # connections without a request, oldest first
        self._most_idle = min(_MAX_IDLE, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._lock = threading.Lock()
        self.uploads = UploadLimiter()
        super().__init__(address, AgentRequestHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection. Close the oldest idle one if there are too many."""
        self.set_idle(request, idle=True)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection in its own thread. The TLS handshake is in this thread, too."""
        try:
            request.settimeout(AgentRequestHandler.timeout)
            if tls.is_hello(request):
                request = self._encrypt(request)
        except OSError:
            self.shutdown_request(request)
            return
        super().process_request_thread(request, client_address)

    def _encrypt(self, plain: socket.socket) -> ssl.SSLSocket:
        context = self.agent.certificate.context
        self.set_idle(plain, idle=False)
        plain.settimeout(_HANDSHAKE_TIMEOUT)
        secured = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        self.set_idle(secured, idle=True)
        try:
            secured.do_handshake()
        except OSError:
            self.shutdown_request(secured)
            raise
        return secured

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self.set_idle(request, idle=False)
        super().shutdown_request(request)

    def set_idle(self, connection: socket.socket, *, idle: bool) -> None:
        """Note whether a connection waits for a request, which any process can open."""
        with self._lock:
            self._idle.pop(connection, None)
            if not idle:
                return
            self._idle[connection] = None
            if len(self._idle) > self._most_idle:
                oldest = next(iter(self._idle))
                del self._idle[oldest]
                with contextlib.suppress(OSError):
                    tls.shut(oldest, socket.SHUT_RDWR)  # the thread of the connection closes it

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore an error of a connection. The other side sees it, and tries again."""


def listen(host: str, port: int) -> AgentServer:
    """Return a server that listens on an address of IPv4 or IPv6.

    Raises:
        ConfigurationError: The process cannot listen on this address and port.
    """
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # Without a host, the first address may be IPv6, and this machine may have no IPv6.
        family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        return AgentServer(family, (str(address[0]), int(address[1])))
    except (OSError, OverflowError) as error:
        raise ConfigurationError(
            f"The agent cannot listen at {host or '*'}, port {port}: {format_error(error)}. Choose "
            "an address of this machine and a free port."
        ) from error


class AgentRequestHandler(StreamRequestHandler):
    """Handler of the requests of drivers and of other nodes."""

    disable_nagle_algorithm = True
    timeout = 120.0
    _head: RequestHead

    def setup(self) -> None:
        """Prepare a connection."""
        super().setup()
        self._is_secured = tls.is_secured(self.connection)
        self._closing = False

    def handle(self) -> None:
        """Answer the requests of a connection until it is closed, or a read times out."""
        with contextlib.suppress(TimeoutError):
            while not self._closing:
                self._handle_request()

    @property
    def _agent(self) -> "Agent":
        return cast("AgentServer", self.server).agent

    def _handle_request(self) -> None:
        try:
            head = read_request(self.rfile)
            size = 0 if head is None else get_length(head.headers) or 0
        except HeadError as error:
            self._refuse(str(error), _DISCARD_SIZE, error.status)
            return
        if head is None:
            self._closing = True
            return
        self._head = head
        self._closing = not keeps_alive(head.headers)
        server = cast("AgentServer", self.server)
        server.set_idle(self.connection, idle=False)
        try:
            self._dispatch(size)
        finally:
            server.set_idle(self.connection, idle=not self._closing)

    def _get_auth(self) -> str | None:
        return self._head.headers.get(AUTH_HEADER.lower())

    def _dispatch(self, size: int) -> None:
        verbs = {"GET": self._get, "PUT": self._put, "POST": self._post, "DELETE": self._delete}
        verb = verbs.get(self._head.method)
        if not self._is_secured:
            reason = (
                "this agent answers over TLS, and plain HTTP only on its own machine: install the "
                "same version of Millrace on the driver and on all nodes"
            )
            self._refuse(reason, size, http.client.UPGRADE_REQUIRED)
        elif verb is None:
            reason = f"the method {self._head.method[:20]} is not supported"
            self._refuse(reason, size, http.client.NOT_IMPLEMENTED)
        elif size > MAX_BODY_SIZE:
            self._closing = True
            self._send(http.client.REQUEST_ENTITY_TOO_LARGE)
        else:
            self._answer(verb, size)

    def _answer(self, verb: Callable[[list[str], bytes], None], size: int) -> None:
        body = self._read_body(size)
        if body is None:
            return
        path, _, _ = self._head.path.partition("?")
        words = path.strip("/").split("/")
        about = words == ["agent"] and self._head.method == "GET"
        if not about and (len(words) < 2 or words[0] != "runs"):
            self._send(http.client.NOT_FOUND)
            return
        try:
            if about:
                encrypted = isinstance(self.connection, ssl.SSLSocket)
                answer = self._agent.introduce(
                    self._get_auth(), self._head.path, encrypted=encrypted
                )
                self._send(http.client.OK, answer)
            else:
                verb(words[1:], body)
        except (KeyError, ValueError) as error:
            self._send(
                http.client.NOT_FOUND,
                {"why": f"the request names no run or piece of this agent: {error}"},
            )
        except SignatureError as error:
            self._send(http.client.FORBIDDEN, {"why": str(error)})
        except ProtocolVersionError as error:
            self._send(http.client.CONFLICT, {"why": str(error)})
        except BusyAgentError as error:
            self._send(http.client.LOCKED, {"why": str(error)})
        except MillraceError as error:
            self._send(http.client.CONFLICT, {"why": str(error)})
        except OSError as error:
            self._send(http.client.INSUFFICIENT_STORAGE, {"why": describe_error(error)})

    def _refuse(self, reason: str, size: int, status: int = http.client.FORBIDDEN) -> None:
        """Refuse a request, and discard the rest of its body.

        If the connection were closed at once, the sender would see a reset, not the answer. Every
        process can make a connection wait here, so the connection counts as idle.

        Args:
            reason: Reason, for the sender.
            size: Bytes of the body that were not read yet.
            status: HTTP status.
        """
        self._closing = True
        self._send(status, {"why": reason})
        cast("AgentServer", self.server).set_idle(self.connection, idle=True)
        deadline = time.monotonic() + _LINGER_TIMEOUT
        with contextlib.suppress(OSError):
            tls.shut(self.connection, socket.SHUT_WR)
            self.connection.settimeout(_LINGER_TIMEOUT)
            while (
                size > 0
                and time.monotonic() < deadline
                and (got := self.rfile.read1(_DISCARD_SIZE))
            ):
                size -= len(got)

    def _read_body(self, size: int) -> bytes | None:
        """Read the body of a request of the driver; return None after a refusal."""
        if self._head.method == "GET" and not size:
            return b""
        if self._head.method == "GET":
            self._refuse("a GET request must not have a body", size)
            return None
        try:
            digest = self._check_driver()
        except SignatureError as error:
            self._refuse(str(error), size)
            return None
        body = self.rfile.read(size)
        if hashlib.sha256(body).hexdigest() != digest:
            self._refuse("the body does not have the SHA-256 that was signed", 0)
            return None
        return body

    def _check_driver(self) -> str:
        return self._agent.check_driver(self._get_auth(), self._head.method, self._head.path)

    def _get(self, words: list[str], _: bytes) -> None:
        match words:
            case [name, "pieces", number]:
                run = self._agent.get_run(name)
                self._agent.check_peer(run, self._get_auth(), self._head.path)
                self._send_piece(run, int(number))
            case [name, "events"]:
                self._check_driver()
                after = int(self._head.path.rpartition("after=")[2] or 0)
                self._send(http.client.OK, self._agent.get_run(name).poll_events(after))
            case _:
                self._send(http.client.NOT_FOUND)

    def _put(self, words: list[str], body: bytes) -> None:
        self._send(http.client.OK, {"have": self._agent.start_run(words[0], body)})

    def _post(self, words: list[str], body: bytes) -> None:
        self._agent.get_run(words[0]).take_orders(json.loads(body))
        self._send(http.client.OK)

    def _delete(self, words: list[str], _: bytes) -> None:
        self._agent.end_run(words[0])
        self._send(http.client.OK)

    def _send_piece(self, run: NodeRun, number: int) -> None:
        if not 0 <= number < len(run.assembler):
            self._send(http.client.NOT_FOUND)
            return
        uploads, address = cast("AgentServer", self.server).uploads, str(self.client_address[0])
        with (
            run.assembler.open_piece(number) as segments,
            uploads.track(self.connection, address, len(segments)),
        ):
            try:
                self._send_head(http.client.OK, sum(size for _, _, size in segments))
                for descriptor, start, size in segments:
                    _send_file(self.connection, descriptor, start, size)
            except OSError:
                self._closing = True

    def _send(self, status: int, value: Any = None) -> None:
        body = json.dumps(value).encode() if value is not None else b""
        try:
            self.connection.sendall(self._make_head(status, len(body)) + body)
        except OSError:
            self._closing = True

    def _send_head(self, status: int, size: int) -> None:
        """Send the head of an answer whose body follows, over plain TCP in the same packet."""
        flags = socket.MSG_MORE if size and not isinstance(self.connection, ssl.SSLSocket) else 0
        self.connection.sendall(self._make_head(status, size), flags)

    def _make_head(self, status: int, size: int) -> bytes:
        close = "Connection: close\r\n" if self._closing else ""
        reason = http.client.responses[status]
        return f"HTTP/1.1 {status:d} {reason}\r\nContent-Length: {size}\r\n{close}\r\n".encode()


def _send_file(to: socket.socket, descriptor: int, start: int, size: int) -> None:
    if isinstance(to, ssl.SSLSocket):
        to.settimeout(_STALL_TIMEOUT)
        tls.send_file(to, descriptor, start, size)
        to.settimeout(AgentRequestHandler.timeout)
        return
    end, room, first, began = start + size, select.poll(), start, time.monotonic()
    room.register(to, select.POLLOUT)
    while start < end:
        try:
            sent = os.sendfile(to.fileno(), descriptor, start, end - start)
        except BlockingIOError:  # the socket has a timeout, so it does not block
            if not room.poll(_STALL_TIMEOUT * 1000):
                raise
            check_rate(start - first, began)
            continue
        if not sent:
            raise OSError("The file is shorter than the piece.")
        start += sent
