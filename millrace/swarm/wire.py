"""How nodes and the driver talk: signed HTTP requests over kept connections.

An agent imports this, so it is the standard library alone: start-up is short, memory small.
"""

import hashlib
import hmac
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

AUTH = "X-Millrace-Auth"
SKEW = 300.0
"""Seconds that two machines' clocks may differ, and so how long a request could be replayed."""

_KEPT = 32


class RefusedError(Exception):
    """An answer other than 2xx.

    Attributes:
        status: Its HTTP status.
    """

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{status} {said}".strip())
        self.status = status


def sign(key: bytes, method: str, path: str, body: bytes = b"", *, now: float | None = None) -> str:
    """The `AUTH` header of a request: HMAC-SHA256 over method, path, time and body."""
    moment = f"{time.time() if now is None else now:.3f}"
    return f"{moment}:{_mac(key, method, path, moment, body)}"


def signed_by(key: bytes, header: str | None, method: str, path: str, body: bytes = b"") -> bool:
    """Whether a request was signed with this key, not longer ago than clocks may differ."""
    moment, _, mac = (header or "").partition(":")
    try:
        recent = abs(time.time() - float(moment)) <= SKEW
    except ValueError:
        return False
    return recent and hmac.compare_digest(mac, _mac(key, method, path, moment, body))


def _mac(key: bytes, method: str, path: str, moment: str, body: bytes) -> str:
    text = f"{method}\n{path}\n{moment}\n{hashlib.sha256(body).hexdigest()}"
    return hmac.digest(key, text.encode(), "sha256").hex()


@dataclass(slots=True, frozen=True)
class Place:
    """Where a server listens.

    Attributes:
        scheme: ``http`` or ``https``.
        host: Its name or address.
        port: Its port.
    """

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> "tuple[Place, str]":
        """A URL's place, and the path and query that follow it."""
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        path = parts.path or "/"
        target = f"{path}?{parts.query}" if parts.query else path
        return cls(parts.scheme, parts.hostname or "", port), target


class Connections:
    """Kept HTTP connections, for any thread.

    Args:
        timeout: Seconds that a request may go without a byte before it has failed.
        ca: Certificate authorities to trust for TLS, PEM; the system's by default.
    """

    def __init__(self, timeout: float, *, ca: str | None = None) -> None:
        self._timeout, self._ca = timeout, ca
        self._idle: dict[Place, list[http.client.HTTPConnection]] = {}
        self._busy: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def request(
        self,
        place: Place,
        method: str,
        path: str,
        headers: dict[str, str] | None = None,
        body: bytes | None = None,
        *,
        timeout: float | None = None,
    ) -> Generator[http.client.HTTPResponse]:
        """Make one request; its body is read within the block.

        Raises:
            RefusedError: The answer was not 2xx.
            OSError, http.client.HTTPException: It could not be made, or broke off.
        """
        connection, used = self._take(place)
        done = False
        try:
            try:
                answer = self._ask(connection, method, path, headers, body, timeout)
            except (ConnectionError, http.client.BadStatusLine):
                if not used:
                    raise
                # A kept connection that the server has closed meanwhile: once more, on a new one.
                self._drop(connection)
                connection = self._connect(place)
                answer = self._ask(connection, method, path, headers, body, timeout)
            if not 200 <= answer.status < 300:
                raise RefusedError(answer.status, answer.read(500).decode("utf-8", "replace"))
            yield answer
            done = answer.isclosed() and not answer.will_close
        finally:
            if done:
                self._keep(place, connection)
            else:
                self._drop(connection)

    def close(self) -> None:
        """Break off every connection: requests under way fail at once."""
        with self._lock:
            self._closed = True
            idle = [connection for kept in self._idle.values() for connection in kept]
            busy = list(self._busy)
            self._idle.clear()
        for connection in idle:
            connection.close()
        for connection in busy:
            _shut(connection)

    def _ask(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        headers: dict[str, str] | None,
        body: bytes | None,
        timeout: float | None,
    ) -> http.client.HTTPResponse:
        if connection.sock is None:  # pyright: ignore[reportUnnecessaryComparison]
            connection.connect()  # which also sets TCP_NODELAY
        cast("socket.socket", connection.sock).settimeout(timeout or self._timeout)
        connection.request(method, path, body=body, headers=headers or {})
        return connection.getresponse()

    def _take(self, place: Place) -> tuple[http.client.HTTPConnection, bool]:
        with self._lock:
            kept = self._idle.get(place)
            if kept:
                connection = kept.pop()
                self._busy.add(connection)
                return connection, True
        return self._connect(place), False

    def _connect(self, place: Place) -> http.client.HTTPConnection:
        if place.scheme == "https":
            context = ssl.create_default_context(cadata=self._ca)
            connection = http.client.HTTPSConnection(
                place.host, place.port, timeout=self._timeout, context=context
            )
        else:
            connection = http.client.HTTPConnection(place.host, place.port, timeout=self._timeout)
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("The run has ended.")
            self._busy.add(connection)
        return connection

    def _keep(self, place: Place, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._busy.discard(connection)
            kept = self._idle.setdefault(place, [])
            if not self._closed and len(kept) < _KEPT:
                kept.append(connection)
                return
        connection.close()

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._busy.discard(connection)
        connection.close()


def _shut(connection: http.client.HTTPConnection) -> None:
    # Not close(): another thread may be reading from it, and must wake up.
    sock: socket.socket | None = connection.sock
    if sock is not None:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
