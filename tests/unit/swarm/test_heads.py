"""Heads of HTTP messages: what is read, and what is refused with a sentence."""

import http.client
import io
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from millrace.swarm.agent import Agent
from millrace.swarm.heads import (
    NODE_LIMITS,
    STORE_LIMITS,
    HeadError,
    get_length,
    keeps_alive,
    parse_request,
    parse_response,
    read_request,
)
from millrace.swarm.protocol import ConnectionPool, Endpoint, HttpStatusError

OK = b"HTTP/1.1 200 OK\r\n"
GET = b"GET /a?b=c HTTP/1.1\r\n"

MALFORMED_HEADERS = {
    b" folded: 1": "malformed",
    b"A: 1\r\n folded": "malformed",
    b"A: 1\r\n\tfolded": "malformed",
    b"A : 1": "malformed",
    b"A\t: 1": "malformed",
    b": no name": "malformed",
    b"no colon": "malformed",
    b"": "malformed",
    b"A: 1\nB: 2": "malformed",
    b"A: 1\rB: 2": "malformed",
    b"A: 1\0": "malformed",
    b"A: \x7f": "malformed",
    b"\xc3\xa9: 1": "malformed",
    b"A\xa0: 1": "malformed",
    b"(A): 1": "malformed",
}
ONLY_OF_NODES = {
    b"A: \xc3\xa9": "malformed",
    b"A: \xa0": "malformed",
    b"A: 1\r\nA: 1": "the header a is repeated",
    b"A: 1\r\na: 2": "the header a is repeated",
    b"Content-Length: 4\r\nContent-Length: 4": "the header content-length is repeated",
    b"Content-Length: 4\r\ncontent-length: 5": "the header content-length is repeated",
}
LENGTHS = [b"", b"-1", b"+4", b"4 4", b"4, 4", b"4,5", b"0x4", b"4_0", b"4.0", b"\xb2", b"9" * 16]


def test_headers_are_read_by_lower_case_names():
    head = OK + b'Content-Length:4\r\nETag: \t"a b" \t\r\nEmpty:\r\nX-A:  b: c'
    for rules in (NODE_LIMITS, STORE_LIMITS):
        status, headers = parse_response(head, rules)
        assert status == 200
        assert headers == {"content-length": "4", "etag": '"a b"', "empty": "", "x-a": "b: c"}


@pytest.mark.parametrize(
    "first", [b"HTTP/1.1 206 Partial Content", b"HTTP/1.1 404 ", b"HTTP/1.1 503"]
)
def test_the_reason_of_a_status_may_be_empty(first):
    assert parse_response(first, NODE_LIMITS) == (int(first[9:12]), {})


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"HTTP/1.0 200 OK",
        b"HTTP/2 200",
        b"http/1.1 200 OK",
        b"HTTP/1.1  200 OK",
        b"HTTP/1.1 20 OK",
        b"HTTP/1.1 2000 OK",
        b"HTTP/1.1 600 OK",
        b"HTTP/1.1 \xb2\xb2\xb2 OK",
        b"HTTP/1.1 200\tOK",
        b"HTTP/1.1 200 O\0K",
        b"HTTP/1.1 200 O\nK",
        b" HTTP/1.1 200 OK",
        b"no HTTP at all",
    ],
)
def test_an_answer_that_does_not_begin_with_a_status_is_none(first):
    for rules in (NODE_LIMITS, STORE_LIMITS):
        with pytest.raises(http.client.BadStatusLine):
            parse_response(first + b"\r\nContent-Length: 4", rules)


@pytest.mark.parametrize(("lines", "reason"), MALFORMED_HEADERS.items())
def test_a_malformed_header_is_an_error(lines, reason):
    for rules in (NODE_LIMITS, STORE_LIMITS):
        with pytest.raises(HeadError, match=reason):
            parse_response(OK + lines, rules)
    with pytest.raises(HeadError, match=reason) as refused:
        parse_request(GET + lines)
    assert refused.value.status == 400


@pytest.mark.parametrize(("lines", "reason"), ONLY_OF_NODES.items())
def test_of_nodes_each_header_comes_once_and_in_ascii(lines, reason):
    with pytest.raises(HeadError, match=reason):
        parse_response(OK + lines, NODE_LIMITS)
    with pytest.raises(HeadError, match=reason):
        parse_request(GET + lines)
    parse_response(OK + lines, STORE_LIMITS)


def test_repeated_headers_of_a_store_are_joined_and_so_is_a_repeated_length():
    _, headers = parse_response(OK + b"Vary: a\r\nVary: b\r\nX: \xe9", STORE_LIMITS)
    assert headers == {"vary": "a, b", "x": "\xe9"}
    for other in (b"4", b"5"):
        lengths = b"Content-Length: 4\r\nContent-Length: " + other
        with pytest.raises(HeadError, match="not a size"):
            get_length(parse_response(OK + lengths, STORE_LIMITS)[1])


@pytest.mark.parametrize("length", LENGTHS)
def test_a_length_that_is_no_number_is_an_error(length):
    with pytest.raises(HeadError, match="not a size"):
        get_length({"content-length": length.decode("latin-1")})


def test_the_length_is_known_or_not():
    assert get_length({}) is None
    assert get_length({"content-length": "0"}) == 0
    assert get_length({"content-length": "9" * 15}) == 10**15 - 1


@pytest.mark.parametrize("encoding", ["chunked", "identity", "", "gzip, chunked"])
def test_a_transfer_encoding_is_an_error_with_and_without_a_length(encoding):
    for headers in ({}, {"content-length": "4"}):
        with pytest.raises(HeadError, match="transfer encoding"):
            get_length({"transfer-encoding": encoding, **headers})


@pytest.mark.parametrize(
    ("connection", "stays"),
    [
        (None, True),
        ("", True),
        ("keep-alive", True),
        ("close", False),
        ("Keep-Alive, CLOSE", False),
    ],
)
def test_a_connection_stays_open_unless_it_is_said_to_close(connection, stays):
    assert keeps_alive({} if connection is None else {"connection": connection}) is stays


@pytest.mark.parametrize("rules", [NODE_LIMITS, STORE_LIMITS], ids=["node", "store"])
def test_the_head_has_limits(rules):
    line = b"A: " + b"x" * (rules.max_line - 3)
    assert parse_response(OK + line, rules)[1]["a"]
    with pytest.raises(HeadError, match="too large: a header has more than"):
        parse_response(OK + line + b"x", rules)
    many = b"\r\n".join(b"A%d: 1" % number for number in range(rules.max_headers))
    assert len(parse_response(OK + many, rules)[1]) == rules.max_headers
    with pytest.raises(HeadError, match="too large: more than"):
        parse_response(OK + many + b"\r\nB: 1", rules)


# -- requests


def test_a_request_is_read_up_to_its_body():
    file = io.BytesIO(b"POST /runs/x?a=b HTTP/1.1\r\nHost: a\r\nX-A: b\r\n\r\nbody")
    head = read_request(file)
    assert head is not None
    assert (head.method, head.path, head.headers) == (
        "POST",
        "/runs/x?a=b",
        {"host": "a", "x-a": "b"},
    )
    assert file.read() == b"body"


def test_a_connection_that_ends_before_a_request_has_none():
    assert read_request(io.BytesIO(b"")) is None


@pytest.mark.parametrize(
    "first",
    [
        b"\r\n",
        b"GET\r\n",
        b"GET /a\r\n",
        b"GET  /a HTTP/1.1\r\n",
        b"GET /a  HTTP/1.1\r\n",
        b"GET /a b HTTP/1.1\r\n",
        b" GET /a HTTP/1.1\r\n",
        b"get /a HTTP/1.1\r\n",
        b"GET a HTTP/1.1\r\n",
        b"GET http://a/ HTTP/1.1\r\n",
        b"GET /\xe9 HTTP/1.1\r\n",
        b"GET /\0 HTTP/1.1\r\n",
        b"GET /a HTTP/1.1 \r\n",
        b"GET /a http/1.1\r\n",
        b"GET /a HTTP/1\r\n",
        b"GET /a HTTP/1.1\n",
        b"GET /a\rHTTP/1.1\r\n",
        b"\x16\x03\x01\r\n",
    ],
)
def test_a_malformed_request_line_is_an_error(first):
    with pytest.raises(HeadError, match="malformed") as refused:
        read_request(io.BytesIO(first + b"Host: a\r\n\r\n"))
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("head", "status", "reason"),
    [
        (b"GET /a HTTP/1.0\r\n\r\n", 505, "takes HTTP/1.1"),
        (b"GET /a HTTP/2.0\r\n\r\n", 505, "takes HTTP/1.1"),
        (b"PUT /a HTTP/1.1\r\nExpect: 100-continue\r\n\r\n", 417, "without waiting"),
        (GET + b"A: 1\nB: 2\r\n\r\n", 400, "malformed"),
        (GET + b"A: 1\n\n\r\n", 400, "malformed"),
        (GET + b"A: 1", 400, "cut off"),
        (GET + b"A: 1\r\n", 400, "cut off"),
        (GET, 400, "cut off"),
        (b"GET /" + b"a" * NODE_LIMITS.max_line + b" HTTP/1.1\r\n\r\n", 431, "a line has more"),
        (GET + b"A: " + b"x" * NODE_LIMITS.max_line + b"\r\n\r\n", 431, "a line has more"),
        (GET + b"".join(b"A%d: 1\r\n" % each for each in range(33)) + b"\r\n", 431, "32 headers"),
        (GET + (b"A: " + b"x" * 4000 + b"\r\n") * 5 + b"\r\n", 431, "more than 16384 bytes"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_a_request_is_refused_with_a_status(head, status, reason):
    with pytest.raises(HeadError, match=reason) as refused:
        read_request(io.BytesIO(head))
    assert refused.value.status == status


def test_of_a_head_without_an_end_only_the_limit_is_read():
    for endless in (b"x" * 10**6, GET + b"A: 1\r\n" * 10**5):
        file = io.BytesIO(endless)
        with pytest.raises(HeadError, match="too large"):
            read_request(file)
        assert file.tell() <= NODE_LIMITS.max_size + NODE_LIMITS.max_line + 2


# -- answers on a connection


@pytest.fixture
def answering() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def read_answer(server: socket.socket, parts: list[bytes], *, identity: str) -> bytes:
    """Read a body of four bytes from an answer that arrives in these parts."""

    def serve() -> None:
        connection, _ = server.accept()
        with connection, suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.recv(65536)
            for part in parts:
                connection.sendall(part)

    thread = threading.Thread(target=serve)
    thread.start()
    into = bytearray(4)
    endpoint = Endpoint("http", "127.0.0.1", server.getsockname()[1], identity)
    try:
        with closing(ConnectionPool(10.0)) as connections:
            connections.read_into(endpoint, "/a", {}, memoryview(into))
    finally:
        thread.join()
    return bytes(into)


@pytest.mark.parametrize("identity", ["", "agent"])
def test_an_answer_may_arrive_a_byte_at_a_time(answering, identity):
    answer = OK + b"Content-Length: 4\r\n\r\nbody"
    assert read_answer(answering, [answer], identity=identity) == b"body"
    parts = [answer[at : at + 1] for at in range(len(answer))]
    assert read_answer(answering, parts, identity=identity) == b"body"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n", "transfer encoding"),
        (b"Content-Length: 4\r\nContent-Length: 4\r\n", "repeated"),
        (b"Content-Length: 4\r\nX: \xe9\r\n", "malformed"),
        (b"Content-Length: 4\r\n folded\r\n", "malformed"),
        (b"Content-Length: four\r\n", "not a size"),
        (b"X: " + b"x" * NODE_LIMITS.max_line + b"\r\n", "a header has more than"),
        (b"A: 1\r\n" * 10_000, "more than 16384 bytes"),
        (b"x" * 10**6, "more than 16384 bytes"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_a_malformed_answer_of_a_node_is_an_error(answering, lines, reason):
    with pytest.raises(HeadError, match=reason):
        read_answer(answering, [OK + lines + b"\r\nbody"], identity="agent")


def test_a_store_may_refuse_in_chunks_and_its_status_counts(answering):
    refusal = b"HTTP/1.1 412 Precondition Failed\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    with pytest.raises(HttpStatusError) as refused:
        read_answer(answering, [refusal], identity="")
    assert refused.value.status == 412


# -- an agent


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path, b"key", host="127.0.0.1")
    agent.start()
    yield agent
    agent.close()


def ask(agent: Agent, request: bytes) -> bytes:
    """Send bytes, and return everything that the agent sends until it closes."""
    with socket.create_connection(("127.0.0.1", agent.port), timeout=30) as sock:
        sock.sendall(request)
        sock.shutdown(socket.SHUT_WR)
        with sock.makefile("rb") as answer:
            return answer.read()


def test_an_agent_answers_several_requests_on_one_connection(agent):
    request = b"GET /agent HTTP/1.1\r\nHost: a\r\n\r\n"
    answers = ask(agent, request * 3)
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == 3
    assert answers.count(agent.identity.encode()) == 3
    assert b"Connection: close" not in answers


def test_an_agent_closes_a_connection_if_it_is_asked_to(agent):
    closing_request = b"GET /agent HTTP/1.1\r\nConnection: close\r\n\r\n"
    answers = ask(agent, closing_request * 2)
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == 1
    assert answers.count(b"\r\nConnection: close\r\n") == 1


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /agent HTTP/1.1\r\nContent-Length: 0\r\nContent-Length: 5\r\n\r\n", b"400"),
        (b"GET /agent HTTP/1.1\r\nContent-Length: x\r\n\r\n", b"400"),
        (b"GET /agent HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"GET /agent HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"501"),
        (b"GET /agent HTTP/1.1\r\nA: 1\r\n folded\r\n\r\n", b"400"),
        (b"GET /agent HTTP/1.1\r\nA: \xe9\r\n\r\n", b"400"),
        (b"GET /agent HTTP/1.1\n\n", b"400"),
        (b"GET /agent HTTP/1.0\r\n\r\n", b"505"),
        (b"HEAD /agent HTTP/1.1\r\n\r\n", b"501"),
        (b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"GET /agent HTTP/1.1\r\nContent-Length: 5\r\n\r\nbody!", b"403"),
        (b"no HTTP at all\r\n\r\n", b"400"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_an_agent_refuses_a_malformed_request_and_what_follows_it(agent, request_, status):
    answers = ask(agent, request_ + b"GET /agent HTTP/1.1\r\n\r\n")
    assert answers.startswith(b"HTTP/1.1 " + status + b" ")
    assert answers.count(b"\r\n\r\n") == 1
    assert b"\r\nConnection: close\r\n" in answers
    assert b'{"why": "' in answers
    assert agent.identity.encode() not in answers
