"""Followers of nodes that say more than there is to say."""

import threading
import time
from types import SimpleNamespace
from typing import Any

from millrace.swarm.driving import followers
from millrace.swarm.driving.followers import NodeFollowers
from millrace.swarm.messages import ReadRetried
from tests.unit.swarm.driving.runs import SIZE, Run


def test_a_node_that_floods_the_driver_with_events_keeps_no_other_waiting(monkeypatch):
    monkeypatch.setattr(followers, "_EVENT_BURST", 2_000)
    monkeypatch.setattr(followers, "_EVENT_RATE", 100)
    run = Run("ab")
    run.state.news.release()
    asked: list[int] = []
    handled: list[float] = []

    def poll_events(_: Any, after: int) -> list[dict[str, Any]]:
        asked.append(after)
        return [ReadRetried("slow")] * 3_000

    def handle(*_: Any) -> None:
        handled.append(time.monotonic())
        time.sleep(1e-4)

    client: Any = SimpleNamespace(poll_events=poll_events, answer_timeout=1.0)
    follower = NodeFollowers(
        run.state, client, b"", [SIZE] * 2, on_event=handle, list_void=lambda: ()
    )
    thread = threading.Thread(target=follower._receive_events, args=(run["a"],))
    thread.start()
    waited: list[float] = []
    while len(handled) < 3_000:
        began = time.monotonic()
        with run.state.news:
            waited.append(time.monotonic() - began)
        time.sleep(0.01)
    time.sleep(0.5)
    with run.state.news:
        run.state.is_ending = True
    thread.join(10)
    assert not thread.is_alive()
    assert asked == [0]  # the next answer would be asked for ten seconds later
    assert len(waited) > 2
    assert max(waited) < max(handled) - min(handled)
