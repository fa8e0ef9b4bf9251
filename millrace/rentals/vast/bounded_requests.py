"""Requests of Vast's SDK, each with a deadline, and with a limit on the size of its answer.

The timeout of `requests` is the longest time between two bytes. So an answer with a byte every few
seconds has no end. Here, each request runs in a thread. At its deadline, its connections are shut
down, and so the thread ends, too.
"""

import contextlib
import socket
from concurrent.futures import wait
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from vastai.api.client import VastSession  # pyright: ignore[reportMissingTypeStubs]

from millrace.threads import DaemonThreadPool

_MAX_ANSWER_BYTES = 8 << 20  # a page of 25 machines with the longest environments has 1 MiB
_BLOCK_SIZE = 64 << 10
_MAX_REQUESTS = 8  # concurrent requests of a sender, among them those that cannot be shut down


class LimitExceededError(requests.RequestException):
    """Answer that was not complete at its deadline, or is too large."""


class BoundedSender:
    """Sender of the requests of an SDK client.

    Args:
        server_url: URL of the API.
        timeout: Seconds after which a request without a complete answer fails.
    """

    def __init__(self, server_url: str, timeout: float) -> None:
        self._server_url, self._timeout = server_url, timeout
        self._pool = DaemonThreadPool(_MAX_REQUESTS, "vast")

    def send(
        self, method: str, url: str, headers: dict[str, str], json_data: Any = None, **_: Any
    ) -> requests.Response:
        """Send a request once, and return its answer. Takes the arguments of the SDK.

        Raises:
            LimitExceededError: The answer is not complete at the deadline, or is too large.
            RequestException: The request failed.
        """
        adapter = _BoundedAdapter()
        future = self._pool.submit(self._send, adapter, method, url, headers, json_data)
        try:
            wait([future], self._timeout)
            if not future.done():
                raise LimitExceededError(f"no complete answer within {self._timeout:g} s")
            return future.result()
        finally:  # also after an interrupt
            future.cancel()  # a request that still waits for a thread is not sent later
            adapter.shut_down()

    def _send(
        self,
        adapter: "_BoundedAdapter",
        method: str,
        url: str,
        headers: dict[str, str],
        json_data: Any,
    ) -> requests.Response:
        with VastSession(self._server_url) as session:
            session.mount("https://", adapter)
            session.mount("http://", adapter)
            request = requests.Request(method=method, url=url, headers=headers, json=json_data)
            return session.send(session.prepare_request(request), timeout=self._timeout)


class _BoundedAdapter(HTTPAdapter):
    """Adapter of one request, whose connections another thread can shut down."""

    def __init__(self) -> None:
        super().__init__()
        self._size = 0  # of the answers, with those that redirect
        self._connections: list[Any] = []
        self._sockets: list[Any] = []
        self._is_shut_down = False

    def shut_down(self) -> None:
        """Shut down all connections, also those that are still being made."""
        self._is_shut_down = True
        for one in [*self._sockets, *(one.sock for one in self._connections)]:
            if isinstance(one, socket.socket):
                with contextlib.suppress(OSError):  # closed already
                    socket.socket.shutdown(one, socket.SHUT_RDWR)  # below TLS, which would wait

    def get_connection_with_tls_context(self, *args: Any, **options: Any) -> Any:
        """Return a pool whose connections are remembered."""
        pool: Any = super().get_connection_with_tls_context(*args, **options)
        pool.ConnectionCls = self._make_connection_class(pool.ConnectionCls)
        return pool

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Send a request, and read its whole answer, up to the limit."""
        options["stream"] = True
        response = super().send(request, **options)
        body = bytearray()
        for block in response.iter_content(_BLOCK_SIZE):
            body += block
            self._size += len(block)
            if self._size > _MAX_ANSWER_BYTES:
                response.close()
                raise LimitExceededError(f"its answer has more than {_MAX_ANSWER_BYTES} bytes")
        response._content = bytes(body)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        return response

    def _make_connection_class(self, base: Any) -> Any:
        adapter = self

        class Connection(base):
            def connect(self) -> None:
                adapter._connections.append(self)
                super().connect()  # pyright: ignore[reportUnknownMemberType]
                adapter._sockets.append(self.sock)  # an answer without a length forgets its socket
                if adapter._is_shut_down:
                    adapter.shut_down()  # so the request is not sent after its deadline

        return Connection
