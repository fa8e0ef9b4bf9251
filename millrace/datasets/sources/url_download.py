"""Download the bodies of URLs that anybody may have written, within limits."""

import random
import re
import socket
import ssl
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from http.client import HTTPException, IncompleteRead, InvalidURL, RemoteDisconnected
from typing import Any, cast
from urllib.parse import urljoin, urlsplit

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import (
    HTTPError,
    InvalidHeader,
    LocationParseError,
    ProtocolError,
    ReadTimeoutError,
    SSLError,
)
from urllib3.response import BaseHTTPResponse
from urllib3.util.connection import create_connection

from millrace import errors
from millrace.datasets.sources.host_limits import HostBusyError, HostLimits
from millrace.datasets.sources.http_files import (
    REDIRECT_STATUSES,
    TRANSIENT_STATUSES,
    RetryClock,
    check_public,
    encode_location,
    is_compressed,
    release,
)
from millrace.datasets.sources.settings import DownloadSettings, UrlSettings
from millrace.retry_after import parse_retry_after

_MAX_TRIES = 4  # requests for one URL
_MAX_UNANSWERED_TRIES = 2  # of these, to a host that does not answer
_MAX_REDIRECTS = 5
_CONNECT_TIMEOUT = 5.0
_READ_TIMEOUT = 20.0
_BLOCK = 256 << 10
_MAX_URL_LENGTH = 8192
_NO_HTTP = "the answer of its server is not valid HTTP"
_WEB = re.compile(r"https?://", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x20\x7f]")


@dataclass(frozen=True, slots=True)
class Body:
    """Body of an answer.

    Attributes:
        data: Bytes of the body.
        media_type: Media type of the answer, such as ``image/jpeg``; empty if there is none.
    """

    data: bytes
    media_type: str


class Contact(StrEnum):
    """Contact with the server of a URL that has no body."""

    NONE = "none"  # nothing was sent
    ANSWERED = "answered"
    FAILING = "failing"  # another request may succeed later
    BUSY = "busy"  # asks for a longer pause than the caller can wait
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class Failure:
    """A URL without a body.

    Attributes:
        reason: Reason why there is no body.
        contact: Contact with the server.
        host: Host that is busy or silent; empty if a server has answered.
    """

    reason: str
    contact: Contact = Contact.ANSWERED
    host: str = ""

    @property
    def data(self) -> bytes:
        """No bytes."""
        return b""


class _FailedTryError(Exception):
    """A request has failed.

    Attributes:
        failure: Failure of the URL, if no other request succeeds.
        is_transient: Whether another request may succeed.
    """

    def __init__(
        self,
        reason: str,
        contact: Contact | None = None,
        *,
        host: str = "",
        is_transient: bool = False,
    ) -> None:
        super().__init__(reason)
        contact = contact or (Contact.FAILING if is_transient else Contact.ANSWERED)
        self.failure, self.is_transient = Failure(reason, contact, host), is_transient


class UrlDownloader:
    """Downloads the bodies of URLs. Many threads can use it at once.

    Each request has a connection of its own. Nothing secret is sent.

    Args:
        settings: Limits on the answers.
        downloads: Limits on the requests.
        allow_private: Whether addresses of private networks and of this machine may be read.

    Attributes:
        limits: Limits on the requests to one host.
    """

    def __init__(
        self, settings: UrlSettings, downloads: DownloadSettings, *, allow_private: bool
    ) -> None:
        self._settings = settings
        self._timeout = downloads.timeout.total_seconds()
        self.limits = HostLimits(downloads.requests_per_host, downloads.host_interval)
        self._allow_private = allow_private
        self._headers = {
            "Accept-Encoding": "identity", "Connection": "close",
            "User-Agent": downloads.user_agent,
        }  # fmt: skip
        self._pool = urllib3.PoolManager(
            downloads.requests, maxsize=downloads.requests, retries=False,
            timeout=urllib3.Timeout(connect=_CONNECT_TIMEOUT, read=_READ_TIMEOUT),
            ssl_context=ssl.create_default_context(),  # else each host reads all authorities
        )  # fmt: skip
        self._pool.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
        self._stopped = threading.Event()
        self._open: set[_OpenRequest] = set()

    def stop(self) -> None:
        """End all requests. Later ones fail."""
        self._stopped.set()
        for request in tuple(self._open):
            request.cut()

    def fetch(self, url: str) -> Body | Failure:
        """Return the body of a URL, or the reason why there is none.

        Errors that may pass are tried again, at most three times.
        """
        if fault := _find_fault(url):
            return Failure(fault, Contact.NONE)
        clock: RetryClock | None = None  # begins after the first try, which may wait for others
        deadline = 0.0
        for number in range(1, _MAX_TRIES + 1):
            longest_pause = max(0.0, deadline - time.monotonic()) if clock else self._timeout
            try:
                return self._fetch_once(url, longest_pause)
            except HostBusyError as error:
                return Failure(str(error), Contact.BUSY, error.host)
            except _FailedTryError as error:
                failure, is_silent = error.failure, error.failure.contact is Contact.SILENT
                if not error.is_transient or number == _MAX_TRIES or self._stopped.is_set():
                    return failure
                if is_silent and number == _MAX_UNANSWERED_TRIES:
                    return failure
            if clock is None:
                clock = RetryClock(self._timeout)
                deadline = time.monotonic() + self._timeout
            try:
                clock.wait(errors.UnavailableError(failure.reason))
            except errors.UnavailableError:
                return failure
        raise AssertionError("the last try returns")

    def _fetch_once(self, url: str, longest_pause: float) -> Body:
        """Request a URL, and the URLs that it redirects to.

        Raises:
            _FailedTryError: There is no body.
            HostBusyError: A host has asked for a longer pause.
        """
        for _ in range(_MAX_REDIRECTS + 1):
            with self._request(url, longest_pause) as answer:
                location = answer.headers.get("Location")
                if answer.status not in REDIRECT_STATUSES or not location:
                    return self._read_answer(answer)
            location = encode_location(location)
            try:
                url = urljoin(url, location)
            except ValueError:
                url = location
            if fault := _find_fault(url):
                raise _FailedTryError(f"it redirects to an address that {fault}")
        raise _FailedTryError("it is redirected too often")

    @contextmanager
    def _request(self, url: str, longest_pause: float) -> Generator[BaseHTTPResponse]:
        """Request one URL. The whole exchange is limited in time.

        Raises:
            _FailedTryError: The request failed, or the exchange was not finished in time.
        """
        host = urlsplit(url).hostname or ""
        with self.limits.hold(host, longest_pause, self._stopped.wait):
            request = _OpenRequest(allow_private=self._allow_private)
            self._open.add(request)
            if self._stopped.is_set():
                request.cut()
            timer = threading.Timer(self._timeout, request.cut)
            timer.daemon = True
            timer.start()
            _current.request = request
            try:
                answer = self._pool.request(
                    "GET", url, headers=self._headers,
                    preload_content=False, redirect=False, decode_content=False,
                )  # fmt: skip
                try:
                    if answer.status in TRANSIENT_STATUSES:
                        if asked := parse_retry_after(answer.headers.get("Retry-After", "")):
                            self.limits.pause(host, asked * random.uniform(1.0, 1.1))
                        raise _FailedTryError(f"status {answer.status}", is_transient=True)
                    yield answer
                finally:
                    release(answer)
                if request.is_cut:  # a body without a length seems to have ended
                    raise _FailedTryError(self._describe_cut(), Contact.FAILING)
            except errors.ConfigurationError:
                raise _FailedTryError(
                    "its address is in a private network (see `allow_private` of `source`)",
                    Contact.NONE,
                ) from None
            except (HTTPError, HTTPException, OSError, ValueError) as error:
                if request.is_cut:
                    raise _FailedTryError(self._describe_cut(), Contact.FAILING) from None
                raise _translate_error(error) from None
            finally:
                _current.request = None
                timer.cancel()
                self._open.discard(request)
                request.close()

    def _read_answer(self, answer: BaseHTTPResponse) -> Body:
        if answer.status != 200:
            raise _FailedTryError(f"status {answer.status}")
        media_type = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        patterns = self._settings.media_types
        if patterns and not any(fnmatchcase(media_type, pattern.lower()) for pattern in patterns):
            raise _FailedTryError(f"media type {media_type[:100] or 'missing'}")
        if is_compressed(answer):
            raise _FailedTryError("compressed, although the server is asked not to")
        limit = int(self._settings.max_body_bytes)
        declared = answer.headers.get("Content-Length", "")
        too_large = f"larger than {limit} bytes"
        if declared.isdecimal() and int(declared[:20]) > limit:
            raise _FailedTryError(too_large)
        blocks: list[bytes] = []
        size = 0
        while data := answer.read(min(_BLOCK, limit + 1 - size)):
            blocks.append(data)
            size += len(data)
            if size > limit:
                raise _FailedTryError(too_large)
        return Body(blocks[0] if len(blocks) == 1 else b"".join(blocks), media_type)

    def _describe_cut(self) -> str:
        if self._stopped.is_set():
            return "the run was stopped"
        return f"its server took longer than {self._timeout:.0f} s"


class _OpenRequest:
    """Sockets of a request, by which another thread can end it."""

    def __init__(self, *, allow_private: bool) -> None:
        self.is_cut = False
        self._allow_private = allow_private
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()

    def connect(self, connection: Any) -> socket.socket:
        """Open the socket of a connection, which ends when the request is cut.

        The addresses of the host are tried one after another. An address of a private network is
        refused before anything is sent to it.

        Raises:
            ConfigurationError: An address is in a private network.
            _FailedTryError: No address can be reached.
        """
        name = str(connection._dns_host).strip("[]")  # noqa: SLF001 - `host` has no last dot
        port = connection.port
        try:
            found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        except socket.gaierror:
            raise _make_silent_error(name, "its host has no address") from None
        fault = _make_silent_error(name, "its host does not answer")
        for address in [str(one[4][0]) for one in found]:
            if self.is_cut:
                break
            if not self._allow_private:
                check_public(name, address)
            try:
                opened = create_connection(
                    (address, port), _CONNECT_TIMEOUT, socket_options=connection.socket_options
                )
            except TimeoutError:
                fault = _make_silent_error(name, "its host does not answer")
            except OSError:
                fault = _make_silent_error(name, "its host cannot be reached")
            else:
                return self._watch(opened)
        raise fault

    def _watch(self, opened: socket.socket) -> socket.socket:
        with self._lock:
            self._sockets.append(opened.dup())  # TLS takes the descriptor of the socket itself
        if self.is_cut:
            self.cut()
        return opened

    def cut(self) -> None:
        """End the connections of the request."""
        self.is_cut = True
        with self._lock:
            for one in self._sockets:
                with suppress(OSError):  # the server has closed it
                    one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the descriptors."""
        with self._lock:
            for one in self._sockets:
                one.close()
            self._sockets.clear()


class _Current(threading.local):
    """The request that a thread makes."""

    request: _OpenRequest | None = None


_current = _Current()


def _connect(connection: Any) -> socket.socket:
    assert _current.request is not None, "connections are opened in a request"
    return _current.request.connect(connection)


class _WatchedConnection(HTTPConnection):
    def _new_conn(self) -> socket.socket:
        return _connect(self)


class _TlsConnection(HTTPSConnection):
    def _new_conn(self) -> socket.socket:
        return _connect(self)


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = cast("Any", _WatchedConnection)


class _TlsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = cast("Any", _TlsConnection)


def _find_fault(url: str) -> str:
    """Return the reason why a URL is not requested; empty if it is."""
    if not _WEB.match(url):
        return "is not http:// or https://"
    if len(url) > _MAX_URL_LENGTH:
        return f"is longer than {_MAX_URL_LENGTH} characters"
    if _CONTROL.search(url):
        return "has spaces or control characters"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return "is not a valid URL"
    if "@" in parts.netloc:
        return "has credentials in it"
    return "" if parts.hostname else "has no host"


def _make_silent_error(host: str, reason: str) -> _FailedTryError:
    """Return the error for a host that does not answer."""
    return _FailedTryError(reason, Contact.SILENT, host=host, is_transient=True)


def _translate_error(error: Exception) -> _FailedTryError:
    match error:
        case ReadTimeoutError():
            reason = "its server stopped sending"
        case SSLError() if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return _FailedTryError("the certificate of its server is not trusted")
        case LocationParseError() | InvalidURL() | UnicodeError():
            return _FailedTryError("is not a valid URL")
        case ValueError() | InvalidHeader():
            return _FailedTryError(_NO_HTTP)
        case ProtocolError(args=(_, HTTPException() as cause)) if not isinstance(
            cause, RemoteDisconnected | IncompleteRead
        ):
            reason = _NO_HTTP
        case _:
            reason = "the connection was cut"
    return _FailedTryError(reason, is_transient=True)
