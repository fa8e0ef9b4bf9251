"""A node that reads pieces slowly, over many connections, keeps no other node from an agent."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import pytest

from millrace.digest import make_local_etag
from millrace.swarm.archives.limits import UnpackLimits
from millrace.swarm.cache_index import CacheCheck
from millrace.swarm.catalogue import File, build_catalogue
from millrace.swarm.messages import FetchPiece, encode_message
from millrace.swarm.protocol import AUTH_HEADER, ConnectionPool, Endpoint, HttpStatusError, sign
from millrace.swarm.run_spec import RunSpec, encode_start_body
from millrace.swarm.uploads import _SHARE
from tests.support.swarm.swarms import KEY, start_agent, stop

CONTENT = bytes(range(256)) * (16 << 10)  # more than the buffers of a connection hold
RUN_KEY = b"the key of the run"
PIECE = "/runs/x/pieces/0"
MAX_FILES = 256
FEW_FILES = f"""
import resource
import millrace.swarm.server as server

resource.setrlimit(resource.RLIMIT_NOFILE, ({MAX_FILES}, {MAX_FILES}))
server._STALL_TIMEOUT = 3600.0
"""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Endpoint]:
    """An agent that may open 256 files, ends no upload that stalls, and has a piece of 4 MiB."""
    source = tmp_path / "object"
    source.write_bytes(CONTENT)
    file = File("a", len(CONTENT), make_local_etag(source.stat()), source.as_uri(), "")
    catalogue = build_catalogue([file], len(CONTENT))
    limits = UnpackLimits(bytes=10, members=1)
    spec = RunSpec(catalogue, [str(source)], RUN_KEY, CacheCheck.FULL, 4, None, limits)
    started = start_agent("n", tmp_path / "n", code=FEW_FILES)
    try:
        endpoint, _ = Endpoint.parse_url(started.url)
        with urlopen(f"{started.url}/agent", timeout=30) as answer:
            endpoint = replace(endpoint, identity=json.load(answer)["identity"])
        request(endpoint, "PUT", "/runs/x", b"".join(encode_start_body({}, spec.encode())))
        orders = json.dumps([encode_message(FetchPiece(0, "", ""))])
        request(endpoint, "POST", "/runs/x/orders", orders.encode())
        while not count_events(endpoint):
            pass  # each request waits for an event
        yield endpoint
    finally:
        stop(started)


def request(endpoint: Endpoint, method: str, path: str, body: bytes = b"") -> bytes:
    """Make a request of the driver."""
    headers = {AUTH_HEADER: sign(KEY.encode(), method, path, body, to=endpoint.identity)}
    with closing(ConnectionPool(30.0)) as connections:
        return connections.request(endpoint, method, path, headers, body, longest=100_000)


def count_events(endpoint: Endpoint) -> int:
    events = json.loads(request(endpoint, "GET", "/runs/x/events?after=0"))
    return sum(event["type"] == "piece-written" for event in events)


def begin_upload(endpoint: Endpoint, address: str) -> socket.socket:
    """Request the piece from an address of this machine, and read the first bytes of the answer."""
    header = sign(RUN_KEY, "GET", PIECE, to=endpoint.identity)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(5.0)
    try:
        connection.bind((address, 0))
        connection.connect((endpoint.host, endpoint.port))
        connection.sendall(
            f"GET {PIECE} HTTP/1.1\r\nHost: a\r\n{AUTH_HEADER}: {header}\r\n\r\n".encode()
        )
        assert connection.recv(12) == b"HTTP/1.1 200"
    except BaseException:
        connection.close()
        raise
    return connection


def read_rest(connection: socket.socket) -> bytes:
    connection.settimeout(30.0)
    with connection.makefile("rb") as answer:
        while answer.readline() != b"\r\n":
            pass
        return answer.read(len(CONTENT))


def test_many_slow_reads_of_one_node_keep_no_other_node_from_an_agent(agent):
    begun = 0
    with ExitStack() as stack:
        earlier = stack.enter_context(begin_upload(agent, "127.0.0.3"))
        with suppress(OSError):  # an agent without a free descriptor answers no more
            for _ in range(300):
                stack.enter_context(begin_upload(agent, "127.0.0.2"))
                begun += 1
        assert 2 * begun > _SHARE * MAX_FILES  # each has a connection and a file
        into = bytearray(len(CONTENT))
        headers = {AUTH_HEADER: sign(RUN_KEY, "GET", PIECE, to=agent.identity)}
        with closing(ConnectionPool(20.0)) as connections:
            connections.read_into(agent, PIECE, headers, memoryview(into))
        assert bytes(into) == CONTENT
        assert count_events(agent) == 1  # the driver is answered, too
        assert read_rest(earlier) == CONTENT


def test_a_request_for_a_piece_is_answered_once(agent):
    headers = {AUTH_HEADER: sign(RUN_KEY, "GET", PIECE, to=agent.identity)}
    into = memoryview(bytearray(len(CONTENT)))
    with closing(ConnectionPool(20.0)) as connections:
        connections.read_into(agent, PIECE, headers, into)
        with pytest.raises(HttpStatusError, match="used before"):
            connections.read_into(agent, PIECE, headers, into)
