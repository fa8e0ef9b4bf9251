"""Reads of an answer: no more than is expected, and never less than was announced."""

import http.client
import itertools
import select
import socket
import threading
import time
from contextlib import closing, suppress
from types import SimpleNamespace

import pytest

from millrace.swarm import protocol
from millrace.swarm.catalogue import File, build_catalogue
from millrace.swarm.piece_readers import FetchError, StoreReader
from millrace.swarm.protocol import ConnectionPool, Endpoint, HttpStatusError


@pytest.fixture
def answered():
    """Serve one request with an answer, close the connection, and return what is read of it."""
    servers: list[socket.socket] = []

    def serve(server: socket.socket, answer: bytes) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(answer)

    def read(announced: int, body: bytes, longest: int) -> bytes:
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % announced + body
        threading.Thread(target=serve, args=(server, answer), daemon=True).start()
        endpoint = Endpoint("http", "127.0.0.1", server.getsockname()[1])
        with closing(ConnectionPool(10.0)) as connections:
            return connections.request(endpoint, "GET", "/", longest=longest)

    yield read
    for server in servers:
        server.close()


@pytest.mark.parametrize("came", [0, 1, 99])
def test_an_answer_that_breaks_off_is_no_answer(answered, came):
    with pytest.raises(http.client.IncompleteRead):
        answered(100, b"x" * came, 1000)


@pytest.mark.parametrize("longest", [50, 99])
def test_of_a_longer_answer_than_expected_one_byte_more_is_read(answered, longest):
    assert answered(100, b"x" * 100, longest) == b"x" * (longest + 1)


@pytest.mark.parametrize(("size", "longest"), [(0, 0), (0, 10), (10, 10), (10, 11)])
def test_a_whole_answer_is_read(answered, size, longest):
    assert answered(size, b"x" * size, longest) == b"x" * size


@pytest.fixture
def dripping():
    """A server that answers a request with these bytes at once, and then with one at a time."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def start(answer: bytes) -> Endpoint:
            def serve() -> None:
                connection, _ = server.accept()
                with connection, suppress(OSError):
                    connection.recv(65536)
                    connection.sendall(answer)
                    while True:
                        connection.sendall(b"x")
                        select.select([], [], [], 0.01)

            threading.Thread(target=serve, daemon=True).start()
            return Endpoint("http", "127.0.0.1", server.getsockname()[1])

        yield start


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"], ids=["head", "body"]
)
def test_what_comes_a_byte_at_a_time_has_failed_after_a_while(dripping, monkeypatch, answer):
    monkeypatch.setattr(protocol, "_GRACE", 0.2)
    with (
        closing(ConnectionPool(10.0)) as connections,
        pytest.raises(TimeoutError, match="bytes in"),
    ):
        connections.read_into(dripping(answer), "/a", {}, memoryview(bytearray(1_000_000)))


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"], ids=["head", "body"]
)
def test_an_agent_states_its_identity_in_time(dripping, monkeypatch, answer):
    clock = SimpleNamespace(time=time.time, monotonic=itertools.count().__next__)
    monkeypatch.setattr(protocol, "time", clock)  # a second for each read
    with pytest.raises(TimeoutError):
        protocol.identify(dripping(answer), b"key", 20.0)


def test_what_is_of_no_use_any_more_is_read_no_further(dripping):
    endpoint = dripping(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    into, asked = bytearray(1_000_000), iter([False] * 3)
    with closing(ConnectionPool(10.0)) as connections, pytest.raises(http.client.HTTPException):
        connections.read_into(
            endpoint, "/a", {}, memoryview(into), is_over=lambda: next(asked, True)
        )
    assert into.count(b"x") < 1000


@pytest.mark.parametrize(
    ("url", "endpoint", "target"),
    [
        ("http://a", Endpoint("http", "a", 80), "/"),
        ("https://a/", Endpoint("https", "a", 443), "/"),
        ("http://a:7000?b=c", Endpoint("http", "a", 7000), "/?b=c"),
        ("http://A.b/c/%2F?d=e/f?g&h=:@#i", Endpoint("http", "a.b", 80), "/c/%2F?d=e/f?g&h=:@"),
        ("http://[::1]:9/c", Endpoint("http", "::1", 9), "/c"),
        ("HTTPS://a//c", Endpoint("https", "a", 443), "//c"),
    ],
)
def test_a_url_is_split_into_its_server_and_the_rest(url, endpoint, target):
    assert Endpoint.parse_url(url) == (endpoint, target)


@pytest.mark.parametrize(
    "url", ["", "a", "/a", "//a/b", "http:///a", "http://a:x/", "http://a:99999/"]
)
def test_a_url_without_a_server_is_an_error(url):
    with pytest.raises(ValueError, match=r"URL|[Pp]ort"):
        Endpoint.parse_url(url)


class FailingConnections(ConnectionPool):
    """Connections that fail for one object, and read the other one until the piece has failed."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.reading, self.returned = threading.Event(), threading.Event()
        self.finished = threading.Event()
        self.was_read_later = False

    def read_into(self, endpoint, path, headers, into, **more):
        if path == "/fails":
            self.reading.wait(10)
            raise HttpStatusError(404, "")
        self.reading.set()
        self.was_read_later = self.returned.wait(0.2)
        self.finished.set()
        return {}


def test_a_piece_fails_only_when_no_thread_writes_into_its_buffer_any_more():
    files = [File(name, 4, '"e"', f"s3://a/{name}") for name in ("fails", "slow")]
    connections = FailingConnections()
    sources = [f"http://a/{file.path}" for file in files]
    reader = StoreReader(build_catalogue(files), sources, connections, lambda reason: None)
    try:
        with pytest.raises(FetchError, match="404"):
            reader.read_piece(0, memoryview(bytearray(8)))
    finally:
        connections.returned.set()
        reader.close()
    assert connections.finished.wait(10)
    assert not connections.was_read_later
