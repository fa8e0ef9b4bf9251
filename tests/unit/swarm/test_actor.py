"""Agent in a worker of Ray, which several drivers may ask for at once."""

import threading
from typing import Any

import pytest

from millrace.swarm import actor as actors
from millrace.swarm import tls
from millrace.swarm.agent import Agent
from millrace.swarm.protocol import Endpoint, identify


@pytest.fixture
def actor():
    actor = actors.Actor()
    yield actor
    if actor._agent:
        actor._agent.close()


def test_two_drivers_that_start_an_agent_at_once_get_its_port_and_its_key(
    actor, tmp_path, monkeypatch
):
    came = threading.Event()  # the second driver, as far as it is let in

    class NotedLock:
        lock = threading.Lock()

        def __enter__(self) -> None:
            if not self.lock.acquire(blocking=False):
                came.set()
                self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    built: list[bytes] = []

    class SlowAgent(Agent):
        def __init__(self, root: Any, control: bytes, **options: Any) -> None:
            built.append(control)
            if len(built) == 1:
                other.start()
                assert came.wait(60)
            came.set()
            super().__init__(root, control, **options)

    def start(key: bytes) -> None:
        answers.append(actor.start(str(tmp_path), "127.0.0.1", key))

    answers: list[tuple[int, bytes]] = []
    monkeypatch.setattr(actors, "Agent", SlowAgent)
    actor._lock = NotedLock()
    other = threading.Thread(target=start, args=(b"second",))
    start(b"first")
    other.join()
    assert answers[0] == answers[1]
    for port, key in answers:
        assert identify(Endpoint("http", "127.0.0.1", port), key, 60).identity


def test_an_agent_whose_start_has_failed_is_started_by_the_next_call(actor, tmp_path, monkeypatch):
    def fail() -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tls, "make_certificate", fail)
        with pytest.raises(OSError, match="No space left"):
            actor.start(str(tmp_path), "", b"first")
    port, key = actor.start(str(tmp_path), "", b"second")
    assert key == b"second"
    assert identify(Endpoint("https", "127.0.0.1", port), key, 60).identity
