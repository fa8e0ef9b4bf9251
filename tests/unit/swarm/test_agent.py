"""Runs of an agent, one after another."""

import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from millrace.errors import ConfigurationError, ConflictError, StoppedError
from millrace.swarm import agent as agents
from millrace.swarm import node_run
from millrace.swarm.archives.limits import UnpackLimits
from millrace.swarm.assembly import leftovers
from millrace.swarm.cache_index import CacheCheck
from millrace.swarm.catalogue import File, build_catalogue
from millrace.swarm.driving import agent_client
from millrace.swarm.driving.agent_client import AgentClient
from millrace.swarm.event_checker import EventChecker
from millrace.swarm.nodes import Node
from millrace.swarm.protocol import Endpoint
from millrace.swarm.run_spec import RunSpec, encode_start_body
from millrace.swarm.server import BusyAgentError
from tests.unit.swarm.test_messages import make_body


class SlowRun(agents.NodeRun):
    """A run whose end takes as long as the test wants."""

    closing = threading.Event()
    may_end = threading.Event()

    def close(self) -> None:
        self.closing.set()
        assert self.may_end.wait(60)
        super().close()


def test_an_agent_is_busy_while_it_ends_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(agents, "NodeRun", SlowRun)
    agent = agents.Agent(tmp_path, b"key", host="127.0.0.1")
    agent.start()
    try:
        agent.start_run("first", make_body())
        ender = threading.Thread(target=agent.end_run, args=("first",))
        ender.start()
        assert SlowRun.closing.wait(60)
        with pytest.raises(BusyAgentError, match="is being ended"):
            agent.start_run("second", make_body())
        SlowRun.may_end.set()
        ender.join()
        assert agent.start_run("second", make_body()) == []
    finally:
        SlowRun.may_end.set()
        agent.close()


def test_a_run_ends_two_minutes_after_the_last_request_of_its_driver(tmp_path, monkeypatch):
    """Only then may another agent put files below the same root."""
    now, last_request = 1000.0, 1600.0
    ends: list[float] = []
    for module in (agents, node_run):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(node_run, "_LONG_POLL_TIMEOUT", 0.0)
    agent, other = (agents.Agent(tmp_path, b"key", host="127.0.0.1") for _ in range(2))
    agent.start_run("first", make_body())
    run = agent.get_run("first")
    close = run.close

    def end() -> None:
        ends.append(now)
        close()

    def wait(seconds: float) -> bool:
        """Let time pass for the watch of the driver, which has made requests until a time."""
        nonlocal now
        now += seconds
        if now <= last_request:
            run.poll_events(0)
        elif not ends:
            with pytest.raises(ConflictError, match="Another agent is putting files"):
                other.start_run("second", make_body())
        return now > last_request + 200

    monkeypatch.setattr(run, "close", end)
    monkeypatch.setattr(agent.ended, "wait", wait)
    agent._watch_driver()
    assert len(ends) == 1
    assert 120 < ends[0] - last_request <= 135
    assert other.start_run("second", make_body()) == []
    other.close()
    agent.close()


def test_an_agent_whose_folder_cannot_be_made_is_refused_by_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigurationError, match=f"cannot make its folder {root} "):
            agents.Agent(root, b"key")


def test_an_agent_may_open_as_many_files_as_the_system_allows():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft // 2, hard))
    try:
        agents.raise_file_limit()
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    most = 1 << 16
    assert allowed == (most if hard == resource.RLIM_INFINITY else min(hard, most), hard)


def make_checks(root: Path) -> bytes:
    """Write two files, and return the body of a run that checks both."""
    files = [File(name, 1, "e", f"s3://b/{name}") for name in "ab"]
    for file in files:
        (root / file.path).write_bytes(b"x")
    spec = RunSpec(
        build_catalogue(files), ["url"] * 2, b"key", CacheCheck.FULL, 1, None, UnpackLimits()
    )
    return b"".join(encode_start_body({}, spec.encode()))


@pytest.fixture
def agent(tmp_path) -> Iterator[agents.Agent]:
    agent = agents.Agent(tmp_path, b"key", host="127.0.0.1")
    agent.start()
    yield agent
    agent.close()


def connect(agent: agents.Agent) -> tuple[AgentClient, Node]:
    """Return a client of the run `first`, and the node of an agent."""
    client = AgentClient("first", EventChecker([1, 1], 2, {}, {}))
    endpoint = Endpoint("http", "127.0.0.1", agent.port)
    return client, client.identify(Node("id", "name", endpoint, b"key"))


def test_a_body_in_parts_starts_a_run(agent):
    client, node = connect(agent)
    body = make_body()
    assert client.start_run(node, (body[:100], b"", body[100:])) == []
    assert agent.get_run("first")
    client.end_run(node)
    client.close()


def test_a_run_that_ends_while_a_node_checks_its_files_stops_before_the_next_file(
    tmp_path, agent, monkeypatch
):
    checked: list[str] = []

    def recognise(path: Path, *_: object) -> None:
        checked.append(path.name)
        agent.end_run("another")
        agent.end_run("first")

    monkeypatch.setattr(leftovers, "recognise_file", recognise)
    with pytest.raises(StoppedError):
        agent.start_run("first", make_checks(tmp_path))
    assert checked == ["a"]
    monkeypatch.undo()
    (tmp_path / "a").unlink()
    assert agent.start_run("second", make_body()) == []


def test_a_run_that_ends_after_the_last_file_was_checked_is_not_started(
    tmp_path, agent, monkeypatch
):
    begin = leftovers.Leftovers.begin_journal

    def end(found: leftovers.Leftovers) -> None:
        begin(found)
        agent.end_run("first")

    monkeypatch.setattr(leftovers.Leftovers, "begin_journal", end)
    with pytest.raises(StoppedError):
        agent.start_run("first", make_body())
    monkeypatch.undo()
    with pytest.raises(KeyError):
        agent.get_run("first")
    assert agent.start_run("second", make_body()) == []


def test_a_node_that_checks_its_files_for_too_long_is_given_up_with_this_reason(
    tmp_path, agent, monkeypatch
):
    may_end = threading.Event()
    monkeypatch.setattr(agent_client, "_START_TIMEOUT", 0.1)
    monkeypatch.setattr(leftovers, "recognise_file", lambda *_: may_end.wait(60))
    client, node = connect(agent)
    try:
        with pytest.raises(agent_client.StartTimeoutError, match="still checked its files after"):
            client.start_run(node, make_checks(tmp_path))
        client.end_run(node)
    finally:
        may_end.set()
        client.close()


def test_a_driver_that_ends_does_not_wait_for_a_node_that_checks_its_files(
    tmp_path, agent, monkeypatch
):
    checking, may_end = threading.Event(), threading.Event()
    failures: list[type[Exception]] = []

    def recognise(*_: object) -> None:
        checking.set()
        assert may_end.wait(60)

    monkeypatch.setattr(leftovers, "recognise_file", recognise)
    client, node = connect(agent)
    body = make_checks(tmp_path)

    def start() -> None:
        try:
            client.start_run(node, body)
        except OSError as error:
            failures.append(type(error))

    starting = threading.Thread(target=start)
    starting.start()
    try:
        assert checking.wait(60)
        client.cancel_starts()
        starting.join(60)
        start()  # as by a thread that was not so far
        client.end_run(node)
    finally:
        may_end.set()
        client.close()
    assert len(failures) == 2
