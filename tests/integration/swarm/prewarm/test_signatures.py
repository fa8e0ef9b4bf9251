"""Signed requests to an agent, and its refusals."""

import json
import secrets
import socket
import time
from dataclasses import replace
from urllib.request import urlopen

import pytest
from pydantic import SecretStr

from millrace import errors
from millrace.swarm import prewarm
from millrace.swarm.protocol import (
    AUTH_HEADER,
    MAX_CLOCK_SKEW,
    ConnectionPool,
    Endpoint,
    HttpStatusError,
    sign,
)
from tests.support.swarm.prewarms import MIB, below, fill
from tests.support.swarm.swarms import KEY, make_settings


def agent_at(url: str) -> Endpoint:
    """The endpoint of an agent, with its identity, as a driver asks for it."""
    endpoint, _ = Endpoint.parse_url(url)
    with urlopen(f"{url}/agent", timeout=30) as answer:
        return replace(endpoint, identity=json.load(answer)["identity"])


def refusal(
    endpoint: Endpoint,
    key: bytes | None,
    method: str,
    path: str,
    headers: dict[str, str] | None = None,
    body: bytes = b"",
) -> int:
    """The status of an answer that is none."""
    signed = {AUTH_HEADER: sign(key, method, path, body, to=endpoint.identity)} if key else {}
    return answer_of(endpoint, method, path, signed | (headers or {}), body).status


def answer_of(
    endpoint: Endpoint, method: str, path: str, headers: dict[str, str], body: bytes = b""
) -> HttpStatusError:
    connections = ConnectionPool(10.0)
    try:
        with pytest.raises(HttpStatusError) as refused:
            connections.request(endpoint, method, path, headers, body, longest=100)
        return refused.value
    finally:
        connections.close()


def test_requests_that_nobody_signed_are_refused(store, nodes):
    endpoint = agent_at(nodes[0].url)
    ours, others = KEY.encode(), b"another key, long enough"
    for key in (others, None):
        for method, path in (
            ("PUT", "/runs/x"),
            ("POST", "/runs/x/orders"),
            ("GET", "/runs/x/events?after=0"),
            ("DELETE", "/runs/x"),
        ):
            assert refusal(endpoint, key, method, path) == 403
    assert refusal(endpoint, ours, "GET", "/runs/x/events?after=0") == 404
    for path in ("/", "/etc/passwd", "/runs", "/runs/x/pieces/../../../etc/passwd"):
        assert refusal(endpoint, ours, "GET", path) in {403, 404}


def test_a_signature_is_for_one_request_and_for_a_while(nodes):
    endpoint, key = agent_at(nodes[0].url), KEY.encode()
    path, to = "/runs/x/events?after=0", endpoint.identity
    old = sign(key, "GET", path, to=to, now=time.time() - 2 * MAX_CLOCK_SKEW)
    assert refusal(endpoint, None, "GET", path, {AUTH_HEADER: old}) == 403
    other = sign(key, "GET", "/runs/y/events?after=0", to=to)
    assert refusal(endpoint, None, "GET", path, {AUTH_HEADER: other}) == 403
    changed = sign(key, "POST", "/runs/x/orders", b"[]", to=to)
    assert refusal(endpoint, None, "POST", "/runs/x/orders", {AUTH_HEADER: changed}, b"[1]") == 403


def test_nothing_is_read_of_a_body_that_nobody_has_signed(nodes):
    endpoint, _ = Endpoint.parse_url(nodes[0].url)
    other = sign(secrets.token_bytes(16), "PUT", "/runs/x", b"", to="")
    for header, status in (
        ("", b"403"),
        (f"{AUTH_HEADER}: {other}\r\n", b"403"),
        (f"{AUTH_HEADER}: {time.time()}:0:0\r\n", b"403"),
        (f"{AUTH_HEADER}: {time.time()}:0:0:0\r\n", b"403"),
        (f"{AUTH_HEADER}: {time.time()}:0:é:é\r\n", b"400"),
    ):
        head = f"PUT /runs/x HTTP/1.1\r\n{header}Content-Length: {200 * MIB}\r\n\r\n"
        with socket.create_connection((endpoint.host, endpoint.port), timeout=30) as raw:
            raw.sendall(head.encode("latin-1"))  # and no byte of the body
            with raw.makefile("rb") as answer:
                assert answer.readline().split()[1] == status
                answer.read()  # it hangs up


def test_who_is_refused_while_sending_much_hears_why(nodes):
    endpoint, _ = Endpoint.parse_url(nodes[0].url)
    assert refusal(endpoint, secrets.token_bytes(16), "PUT", "/runs/x", body=bytes(20 * MIB)) == 403


def test_a_signature_is_for_one_agent(nodes):
    ours, others = (agent_at(node.url) for node in nodes[:2])
    path = "/runs/x/events?after=0"
    signed = {AUTH_HEADER: sign(KEY.encode(), "GET", path, to=others.identity)}
    assert refusal(others, None, "GET", path, signed) == 404  # accepted: there is no such run
    assert refusal(ours, None, "GET", path, signed) == 403


def test_who_is_refused_hears_whether_it_is_the_key_or_the_clock(nodes):
    endpoint, path = agent_at(nodes[0].url), "/runs/x/events?after=0"
    late = sign(
        KEY.encode(), "GET", path, to=endpoint.identity, now=time.time() - 2 * MAX_CLOCK_SKEW
    )
    said = answer_of(endpoint, "GET", path, {AUTH_HEADER: late})
    assert "the key is right, but the clocks of driver and agent differ by 600 s" in str(said)
    other = sign(b"another key, long enough", "GET", path, to=endpoint.identity)
    assert "signed with another key" in str(answer_of(endpoint, "GET", path, {AUTH_HEADER: other}))
    assert "not signed" in str(answer_of(endpoint, "GET", path, {}))


def test_the_report_of_a_run_with_the_wrong_key_names_the_key(store, nodes):
    fill(store, "key")
    settings = make_settings(store, nodes, **below("key"))
    wrong = settings.nodes.model_copy(update={"key": SecretStr("another key, long enough")})
    with pytest.raises(errors.WorkerError, match="signed with another key"):
        prewarm(settings.model_copy(update={"nodes": wrong}))
