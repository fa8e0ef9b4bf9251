"""Runs of an agent, one after another."""

import resource
import threading

import pytest

from millrace.swarm import agent as agents
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
