"""Protocol of nodes and driver: signed HTTP requests over persistent connections.

Connections between machines are encrypted (`millrace.swarm.tls`). Agents import this module, so it
needs only the standard library: an agent starts fast and uses little memory.
"""

import hashlib
import hmac
import http.client
import io
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from millrace.swarm import tls
from millrace.swarm.heads import (
    NODE_LIMITS,
    STORE_LIMITS,
    HeadError,
    HeadLimits,
    get_length,
    keeps_alive,
    parse_response,
)

VERSION = 7
"""Version of the protocol and its messages. Drivers and agents of different versions refuse each
other."""

AUTH_HEADER = "X-Millrace-Auth"
MAX_CLOCK_SKEW = 300.0
"""Seconds that the clocks of two machines may differ. A signature is valid for as long."""

IDENTITY_SIZE = 4096
"""Bytes of an answer to ``GET /agent`` at most."""

MAX_BODY_SIZE = 256 << 20
"""Bytes of the body of a request to an agent at most."""

_MAX_IDLE = 32
_PORTS = {"http": 80, "https": 443}
_URL = re.compile(r"(?P<origin>[^/?#]+://[^/?#]+)(?P<target>[^#]*)(?:#.*)?")
_HEAD_SIZE = 64 * 1024  # bytes of an answer that are read at first
_BODY_SIZE = 256 * 1024  # bytes that are read from the socket at a time
_REASON_SIZE = 500  # bytes of the body of a refusal that are kept
_CHECK_INTERVAL = 0.05  # seconds between two checks of a body, if few bytes arrive
_GRACE = 30.0  # seconds before the rate of an answer is checked
_LEAST_RATE = 4096  # lowest rate in bytes a second: a sixteenth of a link of half a Mbit/s

Headers = dict[str, str] | Callable[[], dict[str, str]]
"""Headers of a request, or a function that makes new ones: a signature is accepted only once."""

Body = bytes | tuple[bytes, ...]
"""Body of a request, or its parts, so that several requests can share a large part."""

T = TypeVar("T")


class HttpStatusError(Exception):
    """An answer other than 2xx.

    Attributes:
        status: HTTP status of the answer.
    """

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status} {body}".strip())
        self.status = status


class ProtocolVersionError(Exception):
    """A driver or an agent has another version of the protocol.

    Args:
        version: Version that the other side states; any JSON value.
        side: Name of the other side: ``driver`` or ``agent``.
    """

    def __init__(self, version: object, side: str) -> None:
        stated = f"version {version}" if type(version) is int else "no version that can be read"
        super().__init__(
            f"the {side} speaks {stated} of the swarm's protocol, and this Millrace version "
            f"{VERSION}: install the same version of Millrace on the driver and on all nodes"
        )


class SignatureError(Exception):
    """A request has no valid signature; the text has the reason."""


def sign(
    key: bytes,
    method: str,
    path: str,
    body: Body = b"",
    *,
    to: str,
    now: float | None = None,
) -> str:
    """Return the `AUTH_HEADER` header of a request.

    The header has the time, a random number, the SHA-256 of the body, and an HMAC-SHA256 over these
    values, the request and its recipient.

    Args:
        key: Secret of sender and recipient.
        method: HTTP method.
        path: Path with its query.
        body: Body of the request.
        to: Identity of the recipient. No other agent accepts the signature.
        now: Seconds since the epoch; by default the current time.
    """
    moment = f"{time.time() if now is None else now:.3f}"
    hasher = hashlib.sha256()
    for part in _list_parts(body):
        hasher.update(part)
    digest = hasher.hexdigest()
    moment = f"{moment}:{secrets.token_hex(8)}"
    return f"{moment}:{digest}:{_compute_mac(key, method, path, to, moment, digest)}"


def check_signature(key: bytes, header: str | None, method: str, path: str, *, to: str) -> str:
    """Check the signature of a request, and return the SHA-256 that its body must have.

    The check does not need the body, so the body of an unsigned request is never read.

    Args:
        key: Secret of sender and recipient.
        header: `AUTH_HEADER` header of the request; None if there is none.
        method: HTTP method.
        path: Path with its query.
        to: Identity of the agent that checks.

    Raises:
        SignatureError: The signature is missing, has another key or another recipient, or its
            time differs by more than `MAX_CLOCK_SKEW`.
    """
    if (header or "").count(":") != 3:
        raise SignatureError("the request is not signed")
    moment, number, digest, mac = (header or "").split(":")
    try:
        behind = time.time() - float(moment)
        due = _compute_mac(key, method, path, to, f"{moment}:{number}", digest)
        own = hmac.compare_digest(mac, due)
    except (ValueError, TypeError):  # no number; not ASCII
        own, behind = False, 0.0
    if not own:
        raise SignatureError(
            "the request is signed with another key, or for another agent: give the driver this "
            "agent's MILLRACE_NODE_KEY"
        )
    if not abs(behind) <= MAX_CLOCK_SKEW:
        raise SignatureError(
            f"the key is right, but the clocks of driver and agent differ by {abs(behind):.0f} s, "
            f"and {MAX_CLOCK_SKEW:.0f} s are allowed: set both clocks"
        )
    return digest


class SignatureChecker:
    """Checks signatures for one agent, and accepts each signature once.

    Args:
        to: Identity of the agent.
        max_kept: Number of signatures that are kept at least, and twice as many at most. An older
            signature would be accepted again. None keeps all that are valid.
    """

    def __init__(self, to: str, max_kept: int | None = None) -> None:
        self._to, self._max_kept = to, max_kept
        self._seen: set[bytes] = set()
        self._older: set[bytes] = set()
        self._since = time.monotonic()
        self._lock = threading.Lock()

    def check(self, key: bytes, header: str | None, method: str, path: str) -> str:
        """Check a signature, and return the SHA-256 of the body, as `check_signature` does.

        Raises:
            SignatureError: The signature is not valid, or was used before.
        """
        digest = check_signature(key, header, method, path, to=self._to)
        mac = bytes.fromhex((header or "").rpartition(":")[2])[:16]
        with self._lock:
            # After this time, the older signatures are no longer valid.
            is_old = time.monotonic() - self._since > 2 * MAX_CLOCK_SKEW
            if is_old or len(self._seen) == self._max_kept:
                self._older, self._seen, self._since = self._seen, set(), time.monotonic()
            if mac in self._seen or mac in self._older:
                raise SignatureError("the signature was used before: sign each request anew")
            self._seen.add(mac)
        return digest


def _compute_mac(key: bytes, method: str, path: str, to: str, moment: str, digest: str) -> str:
    text = f"{method}\n{path}\n{to}\n{moment}\n{digest}"
    return hmac.digest(key, text.encode(), "sha256").hex()


@dataclass(slots=True, frozen=True)
class Endpoint:
    """Address of a server.

    Attributes:
        scheme: ``http`` or ``https``.
        host: Name or IP address of the host.
        port: Port of the server.
        identity: Identity of the agent, which signatures name; empty if the server is no agent.
        fingerprint: Fingerprint of the agent's certificate; empty if the server is no agent, or an
            agent on loopback.
    """

    scheme: str
    host: str
    port: int
    identity: str = ""
    fingerprint: str = ""

    @property
    def netloc(self) -> str:
        """Host and port, as in the ``Host`` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @classmethod
    def parse_url(cls, url: str) -> "tuple[Endpoint, str]":
        """Split a URL into the endpoint, and the path with its query."""
        found = _URL.fullmatch(url)
        if found is None:
            raise ValueError("not the URL of a server")
        target = found["target"]
        return _parse_origin(found["origin"]), target if target.startswith("/") else f"/{target}"


@lru_cache(maxsize=64)  # the signed URLs of a run have one or a few of them
def _parse_origin(origin: str) -> Endpoint:
    url = urlsplit(origin)
    return Endpoint(url.scheme, url.hostname or "", url.port or _PORTS[url.scheme])


class ConnectionPool:
    """Persistent HTTP connections, for any thread.

    Args:
        timeout: Seconds without a byte after which a request has failed.
        ca: Certificate authorities to trust for TLS, PEM; by default those of the system.

    Attributes:
        received: Bytes of all received bodies, with those of incomplete bodies.
    """

    def __init__(self, timeout: float, *, ca: str | None = None) -> None:
        self._timeout, self._ca = timeout, ca
        self._idle: dict[Endpoint, list[http.client.HTTPConnection]] = {}
        self._busy: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()
        self._closed = False
        self.received = 0

    def request(
        self,
        endpoint: Endpoint,
        method: str,
        path: str,
        headers: Headers | None = None,
        body: Body = b"",
        *,
        longest: int,
        timeout: float | None = None,
    ) -> bytes:
        """Make a request, and return the body of the answer, up to one byte more than `longest`.

        Raises:
            HttpStatusError: The answer was not 2xx.
            OSError, http.client.HTTPException: The server could not be reached, or the connection
                broke.
        """
        with self._exchange(
            endpoint,
            lambda connection: _exchange_heads(
                self._open(connection, timeout), endpoint, method, path, headers or {}, body
            ),
        ) as (use, head):
            length = get_length(head.headers) or 0
            most = longest + 1 if head.is_success else _REASON_SIZE
            content = bytearray(min(length, most))
            self._receive_body(use, head, memoryview(content))
            if not head.is_success:
                raise HttpStatusError(head.status, content.decode("utf-8", "replace"))
            use.over = len(head.body) <= length <= longest and keeps_alive(head.headers)
        return bytes(content)

    def read_into(
        self,
        endpoint: Endpoint,
        path: str,
        headers: Headers,
        into: memoryview,
        *,
        is_over: Callable[[], bool] = lambda: False,
    ) -> dict[str, str]:
        """GET a body whose size is that of the buffer, into the buffer.

        A body that arrives more slowly than `_LEAST_RATE` fails. The head is read by
        `millrace.swarm.heads`, and that of an agent by the stricter rules.

        Args:
            endpoint: Server.
            path: Path with its query.
            headers: Headers of the request.
            into: Buffer.
            is_over: Called when bytes have arrived; true ends the request, since the rest is no
                longer needed.

        Returns:
            The headers of the answer, with names in lower case.

        Raises:
            HttpStatusError: The answer was not 2xx.
            OSError, http.client.HTTPException: The server could not be reached, the connection
                broke, or the body has another size.
        """
        with self._exchange(
            endpoint,
            lambda connection: _exchange_heads(
                self._open(connection), endpoint, "GET", path, headers
            ),
        ) as (use, head):
            if not head.is_success:
                reason = head.body[:_REASON_SIZE].decode("utf-8", "replace")
                raise HttpStatusError(head.status, reason)
            length = get_length(head.headers)
            if length != len(into):
                stated = "unknown" if length is None else length
                raise http.client.HTTPException(f"the answer has {stated} bytes, not {len(into)}")
            if len(head.body) > len(into):
                raise http.client.HTTPException(f"the answer has more than {len(into)} bytes")
            self._receive_body(use, head, into, is_over)
            use.over = keeps_alive(head.headers)
        return head.headers

    def close(self) -> None:
        """Close all connections. Requests that are under way fail at once."""
        with self._lock:
            self._closed = True
            idle = [connection for kept in self._idle.values() for connection in kept]
            busy = list(self._busy)
            self._idle.clear()
        for connection in idle:
            connection.close()
        for connection in busy:
            _shut_down(connection)

    @contextmanager
    def _exchange(
        self, endpoint: Endpoint, ask: Callable[[http.client.HTTPConnection], T]
    ) -> Generator[tuple["_ConnectionUse", T]]:
        """Use an idle connection or a new one. The connection becomes idle if the use is over."""
        connection, used = self._acquire(endpoint)
        use = _ConnectionUse(connection)
        try:
            try:
                answer = ask(connection)
            except (*tls.CLOSED_ERRORS, http.client.BadStatusLine):
                if not used:
                    raise
                # The server has closed the idle connection meanwhile: try again on a new one.
                self._discard(connection)
                use.connection = self._connect(endpoint)
                answer = ask(use.connection)
            yield use, answer
        finally:
            if use.over:
                self._release(endpoint, use.connection)
            else:
                self._discard(use.connection)

    def _receive_body(
        self,
        use: "_ConnectionUse",
        head: "_ResponseHead",
        into: memoryview,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Receive the first bytes of a body into a buffer, until the buffer is full."""
        sock, began = cast("socket.socket", use.connection.sock), time.monotonic()
        at = min(len(head.body), len(into))
        into[:at] = head.body[:at]
        self.received += at
        checked, due = 0.0, at  # seconds; bytes
        while at < len(into):
            # TLS returns one record of 16 KiB at a time. The checks take as long as its copy.
            if (now := time.monotonic() - began) - checked >= _CHECK_INTERVAL or at >= due:
                if is_over():
                    raise http.client.HTTPException("another source was faster")
                check_rate(at, began)
                checked, due = now, at + _BODY_SIZE
            size = min(_BODY_SIZE, len(into) - at)
            got = sock.recv_into(into[at : at + size], size)
            if not got:
                raise http.client.IncompleteRead(bytes(into[:0]), len(into) - at)
            at += got
            self.received += got

    def _open(
        self, connection: http.client.HTTPConnection, timeout: float | None = None
    ) -> socket.socket:
        """Return the socket of a connection. Connect first, if necessary."""
        if connection.sock is None:  # pyright: ignore[reportUnnecessaryComparison]
            connection.connect()  # which also sets TCP_NODELAY
        sock = cast("socket.socket", connection.sock)
        sock.settimeout(timeout or self._timeout)
        return sock

    def _acquire(self, endpoint: Endpoint) -> tuple[http.client.HTTPConnection, bool]:
        with self._lock:
            kept = self._idle.get(endpoint)
            if kept:
                connection = kept.pop()
                self._busy.add(connection)
                return connection, True
        return self._connect(endpoint), False

    def _connect(self, endpoint: Endpoint) -> http.client.HTTPConnection:
        host, port = endpoint.host, endpoint.port
        if endpoint.fingerprint:
            connection = tls.PinnedConnection(
                host, port, timeout=self._timeout, fingerprint=endpoint.fingerprint
            )
        elif endpoint.scheme == "https":
            context = tls.store_context(self._ca)
            connection = http.client.HTTPSConnection(
                host, port, timeout=self._timeout, context=context
            )
        else:
            connection = http.client.HTTPConnection(host, port, timeout=self._timeout)
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("The run has ended.")
            self._busy.add(connection)
        return connection

    def _release(self, endpoint: Endpoint, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._busy.discard(connection)
            kept = self._idle.setdefault(endpoint, [])
            if not self._closed and len(kept) < _MAX_IDLE:
                kept.append(connection)
                return
        connection.close()

    def _discard(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._busy.discard(connection)
        connection.close()


@dataclass(slots=True)
class _ConnectionUse:
    """One use of a connection.

    Attributes:
        connection: The connection.
        over: Whether the whole answer was read, so that the connection can be used again.
    """

    connection: http.client.HTTPConnection
    over: bool = False


@dataclass(slots=True, frozen=True)
class _ResponseHead:
    """Beginning of an answer.

    Attributes:
        status: HTTP status.
        headers: Headers, with names in lower case.
        body: Bytes of the body that arrived with the headers.
    """

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def is_success(self) -> bool:
        """True if the status is 2xx."""
        return 200 <= self.status < 300


def _exchange_heads(
    sock: socket.socket,
    endpoint: Endpoint,
    method: str,
    path: str,
    headers: Headers,
    body: Body = b"",
) -> _ResponseHead:
    """Send a request, and read the head of the answer."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {endpoint.netloc}", "Accept-Encoding: identity"]
    parts = _list_parts(body)
    size = sum(map(len, parts))
    lines += [f"Content-Length: {size}"] if size else []
    named = headers() if callable(headers) else headers
    lines += [f"{name}: {value}" for name, value in named.items()]
    request = "\r\n".join([*lines, "", ""])
    if not request.count("\r") == request.count("\n") == len(lines) + 1:
        raise ValueError("A header must be one line.")
    sock.sendall(request.encode("latin-1"))
    for part in parts:
        sock.sendall(part)
    limits = NODE_LIMITS if endpoint.identity else STORE_LIMITS
    head, beginning = _receive_head(sock, limits)
    return _ResponseHead(*parse_response(head, limits), beginning)


def _list_parts(body: Body) -> tuple[bytes, ...]:
    whole = (body,) if isinstance(body, bytes) else body
    return tuple(part for part in whole if part)


def _receive_head(sock: socket.socket, limits: HeadLimits) -> tuple[bytes, bytes]:
    """Receive the head of an answer, and the bytes of the body that arrive with it."""
    found = sock.recv(_HEAD_SIZE)
    if not found:
        raise http.client.RemoteDisconnected("the connection was closed without an answer")
    began = time.monotonic()  # a node may check its files for long before it answers
    while (end := found.find(b"\r\n\r\n", 0, limits.max_size)) < 0:
        if len(found) >= limits.max_size:
            raise HeadError(f"the head is too large: more than {limits.max_size} bytes")
        check_rate(len(found), began)
        got = sock.recv(_HEAD_SIZE)
        if not got:
            raise http.client.RemoteDisconnected(
                "the connection was closed within the head of an answer"
            )
        found += got
    return found[:end], found[end + 4 :]


def check_rate(received: int, began: float) -> None:
    """Check that an answer is transferred at `_LEAST_RATE` or faster.

    Args:
        received: Bytes that were transferred.
        began: Time of the first byte.

    Raises:
        TimeoutError: The answer is slower, after `_GRACE`.
    """
    seconds = time.monotonic() - began
    if seconds > _GRACE and received < _LEAST_RATE * seconds:
        raise TimeoutError(f"the answer is too slow: {received} bytes in {seconds:.0f} s")


def identify(endpoint: Endpoint, key: bytes, timeout: float) -> Endpoint:
    """Ask an agent for its identity and a proof of it. Outside of loopback, use TLS only.

    Args:
        endpoint: Endpoint of the agent.
        key: Key of the node.
        timeout: Seconds that the connection, its encryption and the answer may take, each.

    Returns:
        The endpoint with the identity, and the fingerprint that each later connection must show.

    Raises:
        HttpStatusError: The agent refused: it has another key, for example.
        ProtocolVersionError: The agent has another version of the protocol.
        tls.TlsError: The server does not encrypt, or cannot prove that it is the agent.
        OSError, http.client.HTTPException: The agent cannot be reached, or the connection broke.
        ValueError: The answer is not one of an agent.
    """
    nonce = secrets.token_hex(16)
    path = f"/agent?nonce={nonce}"

    def ask(connection: http.client.HTTPConnection) -> dict[str, Any]:
        try:
            headers = {AUTH_HEADER: sign(key, "GET", path, to="")}
            return _ask_agent(connection, path, headers, timeout)
        finally:
            connection.close()

    def check(answer: dict[str, Any], fingerprint: str) -> str:
        if answer.get("version") != VERSION:
            raise ProtocolVersionError(answer.get("version"), "agent")
        identity, proof = answer["identity"], answer.get("proof")
        tls.check_proof(proof, key, nonce, identity, fingerprint, at=endpoint.netloc)
        return identity

    if tls.is_loopback(endpoint.host):
        connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=timeout)
        try:
            identity = check(ask(connection), "")
            return replace(endpoint, scheme="http", identity=identity, fingerprint="")
        except HttpStatusError as error:
            # The port of this machine leads to an agent of another machine.
            if error.status != http.client.UPGRADE_REQUIRED:
                raise
    pinned = tls.PinnedConnection(endpoint.host, endpoint.port, timeout=timeout, fingerprint=None)
    identity = check(ask(pinned), pinned.fingerprint)
    return replace(endpoint, scheme="https", identity=identity, fingerprint=pinned.fingerprint)


class _TimedReader(io.RawIOBase):
    """Reader of a socket until a deadline, since a server may send one byte at a time for ever.

    Args:
        sock: Socket.
        timeout: Seconds from now to the deadline.
    """

    def __init__(self, sock: socket.socket, timeout: float) -> None:
        self._sock, self._deadline = sock, time.monotonic() + timeout

    def makefile(self, _: str) -> io.BufferedReader:
        """Return a file, as `socket.socket.makefile` does."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the answer took too long")
        self._sock.settimeout(left)
        return self._sock.recv_into(buffer)


def _ask_agent(
    connection: http.client.HTTPConnection, path: str, headers: dict[str, str], timeout: float
) -> dict[str, Any]:
    # `http.client` parses this answer, which may be that of another server with its own HTTP.
    connection.request("GET", path, headers=headers)
    reader = _TimedReader(cast("socket.socket", connection.sock), timeout)
    answer = http.client.HTTPResponse(cast("socket.socket", reader), method="GET")
    answer.begin()
    content = answer.read(IDENTITY_SIZE)
    if answer.length and len(content) < IDENTITY_SIZE:
        raise http.client.IncompleteRead(content, answer.length)
    if answer.status != http.client.OK:
        reason = content[:_REASON_SIZE].decode("utf-8", "replace")
        raise HttpStatusError(answer.status, reason)
    match json.loads(content):
        case {"identity": str() as identity, **more}:
            return {**cast("dict[str, Any]", more), "identity": identity[:64]}
        case _:
            raise ValueError("no identity")


def _shut_down(connection: http.client.HTTPConnection) -> None:
    # Not close(): a thread that reads from the socket must wake up.
    sock: socket.socket | None = connection.sock
    if sock is not None:
        with suppress(OSError):
            tls.shut(sock, socket.SHUT_RDWR)
