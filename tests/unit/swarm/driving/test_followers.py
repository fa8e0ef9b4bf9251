"""Followers of nodes that say more than there is to say."""

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from millrace.swarm.driving import followers
from millrace.swarm.driving.followers import NodeFollowers
from millrace.swarm.messages import NodeEvent, ReadRetried
from millrace.swarm.nodes import Node
from millrace.swarm.protocol import HttpStatusError
from tests.unit.swarm.driving.runs import SIZE, Run, make_member


def test_a_node_that_floods_the_driver_with_events_keeps_no_other_waiting(monkeypatch):
    """Others get the lock every few events, and the node is asked again only after a pause."""
    run = Run("ab")
    run.state.news.release()
    now, handled, asked = [0.0], [0], list[tuple[int, float]]()
    seen_by_others: list[int] = []

    def look() -> None:
        with run.state.news:
            seen_by_others.append(handled[0])

    def sleep(seconds: float) -> None:
        now[0] += seconds
        other = threading.Thread(target=look)
        other.start()
        other.join(10)

    def poll_events(_: Any, after: int) -> list[NodeEvent]:
        asked.append((after, now[0]))
        if after:
            run.state.is_ending = True
            return []
        return [ReadRetried("slow")] * 3_000

    def handle(*_: Any) -> None:
        handled[0] += 1

    monkeypatch.setattr(followers, "_EVENT_BURST", 2_000)
    monkeypatch.setattr(followers, "_EVENT_RATE", 100)
    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: now[0])
    monkeypatch.setattr(followers, "time", clock)
    client: Any = SimpleNamespace(poll_events=poll_events, answer_timeout=1.0)
    follower = NodeFollowers(
        run.state, client, b"", [SIZE] * 2, on_event=handle, list_void=lambda: ()
    )
    follower._receive_events(run["a"])

    assert [seen for seen in seen_by_others if seen < 3_000] == [500, 1_000, 1_500, 2_000, 2_500]
    assert [after for after, _ in asked] == [0, 3_000]
    assert asked[1][1] >= 10  # seconds for the thousand events above the burst


def test_a_node_that_answers_late_and_refuses_is_lost_with_its_reason(monkeypatch):
    """Its agent starts after the first request, and has another key."""
    monkeypatch.setattr(followers, "_RETRY_INTERVAL", 0)
    run = Run("a")
    member = make_member("b")
    run.state.members.add(member)
    run.state.news.release()
    answers = iter([ConnectionRefusedError("refused"), HttpStatusError(403, "another key")])

    def identify(_: Any) -> Any:
        raise next(answers)

    client: Any = SimpleNamespace(identify=identify, answer_timeout=1.0)
    follower = NodeFollowers(run.state, client, b"", [SIZE] * 2, on_event=print, list_void=tuple)
    assert not follower._connect(member)
    with run.state.news:
        assert "another key" in run["b"].lost_reason
        assert run.state.members.absent == {}
        assert not run.state.members.has_awaited()


class CheckingNodes:
    """Client of agents that check their files until the run ends.

    Attributes:
        ended: Names of the nodes that were told that the run has ended.
        checking: Released once for each node that checks its files.
    """

    answer_timeout = 1000.0

    def __init__(self, *, stubborn: bool = False) -> None:
        self.ended: list[str] = []
        self.checking = threading.Semaphore(0)
        self.canceled = threading.Event()
        self.may_end = threading.Event()
        self._stubborn = stubborn

    def identify(self, node: Node) -> Node:
        return replace(node, endpoint=replace(node.endpoint, identity=node.id))

    def start_run(self, *_: Any) -> None:
        self.checking.release()
        (self.may_end if self._stubborn else self.canceled).wait(60)
        raise ConnectionAbortedError

    def cancel_starts(self) -> None:
        self.canceled.set()

    def end_run(self, node: Node) -> None:
        self.ended.append(node.name)


def follow_checking(client: Any, names: str) -> NodeFollowers:
    run = Run("")
    run.state.news.release()
    follower = NodeFollowers(run.state, client, b"", [SIZE] * 2, on_event=print, list_void=tuple)
    for name in names:
        follower.add(make_member(name).node)
    for _ in names:
        assert client.checking.acquire(timeout=60)
    return follower


def test_nodes_that_check_their_files_are_told_that_the_run_has_ended():
    client = CheckingNodes()
    follower = follow_checking(client, "abc")
    follower.end_runs()
    assert sorted(client.ended) == ["a", "b", "c"]
    assert not any(thread.is_alive() for thread in follower._threads)


def test_all_nodes_that_do_not_end_have_one_deadline(monkeypatch):
    client = CheckingNodes(stubborn=True)
    follower = follow_checking(client, "abc")
    times = iter([0.0, *[1000.0] * 100])
    monkeypatch.setattr(followers, "time", SimpleNamespace(monotonic=lambda: next(times)))
    follower.end_runs()
    assert all(thread.is_alive() for thread in follower._threads)
    client.may_end.set()
    for thread in follower._threads:
        thread.join(60)
