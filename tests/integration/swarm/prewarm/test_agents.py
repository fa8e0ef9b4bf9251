"""Addresses and connections of agents, and the drivers that share an agent."""

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from pydantic import SecretStr, ValidationError

from millrace import errors
from millrace.swarm import Host, Hosts, prewarm
from millrace.swarm import agent as agents
from millrace.swarm.protocol import Endpoint
from tests.support.swarm.prewarms import below, fill
from tests.support.swarm.swarms import KEY, Heard, make_settings, read_files, start_agent, stop


def test_two_addresses_of_one_agent_are_one_node(store, nodes):
    fill(store, "twins")
    twin = nodes[0].url.replace("127.0.0.1", "localhost")
    settings = make_settings(store, nodes[:2], **below("twins"))
    hosts = Hosts(hosts=(*settings.nodes.hosts, Host(url=twin, name="twin")), key=SecretStr(KEY))
    report = prewarm(settings.model_copy(update={"nodes": hosts}))
    assert sum(node.ready for node in report.nodes) == 2
    assert len(report.nodes) == 3
    assert any("leads to the agent of" in node.reason for node in report.nodes)


def test_a_second_driver_is_refused_while_the_first_one_works(store, nodes):
    contents = fill(store, "second")
    settings = make_settings(store, nodes, **below("second"))
    refused: list[str] = []

    def come() -> None:
        with pytest.raises(errors.WorkerError) as error:
            prewarm(settings.model_copy(update={"start_timeout": timedelta(seconds=1)}))
        refused.append(str(error.value))

    report = prewarm(settings, progress=Heard(0.05, come))
    assert [node.ready for node in report.nodes] == [True] * 3
    assert read_files(nodes[2].root) == contents
    assert "another run uses this node, since 2" in refused[0]


@pytest.mark.parametrize("url", ["127.0.0.1:7000", "http://127.0.0.1:99999", "https://a:1", "a"])
def test_an_address_that_is_none_is_a_sentence(url):
    with pytest.raises(ValidationError, match="is no agent's address"):
        Host(url=url)


def test_hosts_are_named_once():
    for hosts, what in (
        (("http://a:7000", "http://A:7000/"), "address http://a:7000"),
        (("http://a", "http://a:80"), "address http://a:80"),
    ):
        with pytest.raises(ValidationError, match=f"two hosts have the {what}"):
            Hosts(hosts=tuple(Host(url=url) for url in hosts), key=SecretStr(KEY))
    with pytest.raises(ValidationError, match="two hosts have the name a"):
        Hosts(hosts=(Host(url="http://x:1", name="a"), Host(url="http://x:2", name="a")), key=KEY)


def test_an_agent_listens_on_ipv6(store, nodes, tmp_path):
    contents = fill(store, "six")
    agent = agents.Agent(tmp_path / "six", KEY.encode(), host="::1")
    agent.start()
    try:
        host = Host(url=f"http://[::1]:{agent.port}")
        settings = make_settings(store, nodes, **below("six"))
        hosts = Hosts(hosts=(*settings.nodes.hosts, host), key=SecretStr(KEY))
        report = prewarm(settings.model_copy(update={"nodes": hosts}))
        assert [node.ready for node in report.nodes] == [True] * 4
    finally:
        agent.close()
    assert read_files(tmp_path / "six") == contents


def test_an_agent_that_cannot_listen_says_where(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            errors.ConfigurationError, match=f"cannot listen at 127.0.0.1, port {port}"
        ):
            agents.Agent(tmp_path, b"key", host="127.0.0.1", port=port)


MAX_FILES = 256
FEW_FILES = f"""
import resource

resource.setrlimit(resource.RLIMIT_NOFILE, ({MAX_FILES}, {MAX_FILES}))
"""
"""Lets an agent open few files."""

HALF_SENT = b"POST /runs/x/orders HTTP/1.1\r\nHost: a\r\nContent-Length: 200000000\r\n\r\n"


@contextmanager
def connecting(endpoint: Endpoint) -> Iterator[None]:
    """Open connections that send half of an unsigned request, one after another, meanwhile."""
    held: deque[socket.socket] = deque()
    many, ended = threading.Event(), threading.Event()

    def connect() -> None:
        while not ended.wait(0.005):
            with contextlib.suppress(OSError):
                held.append(socket.create_connection((endpoint.host, endpoint.port), timeout=1))
                held[-1].sendall(HALF_SENT)
            if len(held) > MAX_FILES:
                many.set()
            if len(held) > 900:
                held.popleft().close()

    thread = threading.Thread(target=connect)
    thread.start()
    try:
        assert many.wait(60)
        yield
    finally:
        ended.set()
        thread.join()
        for each in held:
            each.close()


def test_unsigned_requests_that_do_not_end_do_not_keep_the_agent_from_a_run(store, nodes):
    contents = fill(store, "half")
    endpoint, _ = Endpoint.parse_url(nodes[0].url)
    stop(nodes[0])
    nodes[0] = start_agent("n0", nodes[0].root, port=endpoint.port, code=FEW_FILES)
    with connecting(endpoint):
        report = prewarm(make_settings(store, nodes, **below("half")))
    assert [node.ready for node in report.nodes] == [True] * 3
    assert read_files(nodes[0].root) == contents


def test_idle_connections_do_not_keep_the_agent_from_a_run(store, nodes):
    contents = fill(store, "idle")
    endpoint, _ = Endpoint.parse_url(nodes[0].url)
    stop(nodes[0])
    nodes[0] = start_agent("n0", nodes[0].root, port=endpoint.port, code=FEW_FILES)
    idle = [
        socket.create_connection((endpoint.host, endpoint.port), timeout=30) for _ in range(300)
    ]
    try:
        report = prewarm(make_settings(store, nodes, **below("idle")))
        assert [node.ready for node in report.nodes] == [True] * 3
        assert read_files(nodes[0].root) == contents
    finally:
        for each in idle:
            each.close()
