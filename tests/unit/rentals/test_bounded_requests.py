"""Requests to Vast.ai end at their deadline, and read answers up to a limit."""

import contextlib
import socket
import threading
from collections.abc import Generator
from datetime import timedelta

import pytest
from pydantic import SecretStr

from millrace import errors
from millrace.rentals.vast import api
from millrace.rentals.vast.api import VastClient
from tests.support.rentals.parts import ManualClock

ZERO = timedelta(0)
BODY = b'{"credit": 1.5}'
HEADERS = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
ROUNDS = 500  # bytes that are trickled: an answer that nobody ends comes nevertheless


class SlowApi:
    """Server that sends the first part of an answer at once, and the next part in trickles.

    Attributes:
        requests: Number of requests.
        ended: Set when a client has ended a connection during an answer.
    """

    def __init__(self, first: bytes, trickle: bytes, last: bytes) -> None:
        self._parts = first, trickle, last
        self._stop = threading.Event()
        self.requests, self.ended = 0, threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(60)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                self.requests += 1
                with connection:
                    self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        first, trickle, last = self._parts
        connection.recv(65536)
        try:
            connection.sendall(first)
            for _ in range(ROUNDS if trickle else 0):
                if self._stop.wait(0.02):
                    return
                connection.sendall(trickle)
            connection.sendall(last)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):  # to close it earlier could lose the answer
                pass
        except OSError:
            self.ended.set()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@contextlib.contextmanager
def serve(first: bytes, trickle: bytes = b"", last: bytes = b"") -> Generator[SlowApi]:
    server = SlowApi(first, trickle, last)
    try:
        yield server
    finally:
        server.close()


SIZED = b"Content-Length: %d\r\n" % (len(BODY) + ROUNDS)


@pytest.mark.parametrize(
    ("first", "trickle", "last"),
    [
        (HEADERS + SIZED + b"\r\n", b" ", BODY),
        (HEADERS + b"Connection: close\r\n\r\n", b" ", BODY),
        (HEADERS + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n",
         b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)),
        (HEADERS + b"X-Slow: ", b"x", b"\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)),
    ],
    ids=["body", "body without a length", "chunks", "header"],
)  # fmt: skip
def test_an_answer_that_trickles_ends_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch, clock: ManualClock, first: bytes, trickle: bytes, last: bytes
) -> None:
    monkeypatch.setattr(api, "_REQUEST_TIMEOUT", 0.5)
    with serve(first, trickle, last) as server:
        client = VastClient(SecretStr("key"), server.url, clock=clock, retry_timeout=ZERO)
        with pytest.raises(errors.UnavailableError, match=r"no complete answer within 0\.5 s"):
            client.read_credit()
        assert server.ended.wait(60)  # the connection is closed, so no thread stays
        assert server.requests == 1


def test_a_create_request_that_trickles_is_sent_once(
    monkeypatch: pytest.MonkeyPatch, clock: ManualClock
) -> None:
    monkeypatch.setattr(api, "_REQUEST_TIMEOUT", 0.5)
    body = b'{"success": true, "new_contract": 7}'
    end = b"\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with serve(HEADERS + b"X-Slow: ", b"x", end) as server:
        client = VastClient(SecretStr("key"), server.url, clock=clock)
        with pytest.raises(errors.UnavailableError, match="does not answer to create"):
            client.create_instance(1, image="x", disk=10, label="l")
        assert server.requests == 1


@pytest.mark.parametrize("length", [b"Content-Length: 1000000\r\n", b"Connection: close\r\n"])
def test_no_answer_is_read_beyond_a_limit(
    monkeypatch: pytest.MonkeyPatch, clock: ManualClock, length: bytes
) -> None:
    monkeypatch.setattr("millrace.rentals.vast.bounded_requests._MAX_ANSWER_BYTES", 1000)
    with serve(HEADERS + length + b"\r\n", last=BODY.rjust(1_000_000)) as server:
        client = VastClient(SecretStr("key"), server.url, clock=clock, retry_timeout=ZERO)
        with pytest.raises(errors.UnavailableError, match="more than 1000 bytes"):
            client.read_credit()


def test_an_answer_of_lists_in_lists_is_unreadable(clock: ManualClock) -> None:
    body = b"[" * 200_000
    head = HEADERS + b"Content-Length: %d\r\n\r\n" % len(body)
    with serve(head, last=body) as server:
        client = VastClient(SecretStr("key"), server.url, clock=clock, retry_timeout=ZERO)
        with pytest.raises(errors.UnavailableError, match="its answer cannot be read"):
            client.read_credit()


@pytest.mark.parametrize("is_brief", [True, False])
def test_a_listing_whose_pages_are_slow_ends(clock: ManualClock, *, is_brief: bool) -> None:
    client = VastClient(SecretStr("key"), "http://127.0.0.1:9", clock=clock)
    pages = 0

    def fetch(_: object, __: str) -> dict[str, object]:
        nonlocal pages
        pages += 1
        clock.sleep(55.0)
        machines = [api.Instance.from_row({"id": pages})]
        return {"instances": machines, "total": 1_000_000, "next_token": str(pages)}

    client._fetch_page = fetch
    began = clock.elapsed
    with pytest.raises(errors.UnavailableError, match="is incomplete"):
        client.list_instances(is_brief=is_brief)
    assert clock.elapsed - began < (95 if is_brief else 1800)
