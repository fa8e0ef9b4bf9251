"""Log of a node's events: what a driver that polls it receives."""

import threading
import time

from millrace.swarm.event_log import EventLog
from millrace.swarm.messages import BytesReceived, FilesReady, NodeFailed


def test_a_poll_returns_the_events_after_those_that_were_received():
    log = EventLog(lambda: 0, timeout=0.0)
    first, second = FilesReady([0]), NodeFailed("full")
    log.append(first)
    log.append(second)
    assert log.poll(0) == [first, second]
    assert log.poll(1) == [second]
    assert log.poll(2) == []


def test_an_answer_has_a_thousand_events_at_most_and_the_next_one_has_the_rest():
    log = EventLog(lambda: 0, timeout=0.0)
    for number in range(1_500):
        log.append(FilesReady([number]))
    assert [len(log.poll(after)) for after in (0, 1_000)] == [1_000, 500]


def test_bytes_without_an_event_are_reported_once():
    received = 5
    log = EventLog(lambda: received, timeout=0.0)
    assert log.poll(0) == [BytesReceived(5)]
    assert log.poll(1) == []
    received = 9
    log.append(FilesReady([0]))
    assert log.poll(1) == [FilesReady([0])]
    assert log.poll(2) == []  # an event has told the driver that the node goes on


def test_an_event_ends_a_poll_that_waits():
    log, answers = EventLog(lambda: 0, timeout=60.0), list[object]()
    thread = threading.Thread(target=lambda: answers.append(log.poll(0)))
    thread.start()
    time.sleep(0.05)
    log.append(FilesReady([0]))
    thread.join(30)
    assert answers == [[FilesReady([0])]]
