"""A rental has one owner, whose heartbeat its machines read."""

import contextlib
from concurrent.futures import wait
from datetime import timedelta
from pathlib import Path

import pytest

from millrace import errors
from millrace.keys.rentals import RentalKeys
from millrace.lease import Heartbeat, Holder, Lease, LeaseTerm
from millrace.records import commit_once
from millrace.rentals import ownership as ownership_module
from millrace.rentals.guest.watchdog import DETACHED
from millrace.rentals.ownership import OwnerHeartbeat, Ownership, StepTimer
from millrace.storage import Store, StoreSpec, exists, open_store, put, read

KEYS = RentalKeys("fleet")
TIMEOUT = timedelta(minutes=5)
STEP_TIMEOUT = timedelta(hours=1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(StoreSpec(url=tmp_path.as_uri()))


def make_ownership(store: Store) -> Ownership:
    return Ownership(store, KEYS, TIMEOUT, StepTimer(STEP_TIMEOUT))


def test_a_second_owner_is_refused_until_the_first_has_left(store: Store) -> None:
    with contextlib.ExitStack() as stack:
        make_ownership(store).acquire(stack)
        with pytest.raises(errors.HeldError, match="fleet is held by"):
            make_ownership(store).acquire(contextlib.ExitStack())
    with contextlib.ExitStack() as stack:
        make_ownership(store).acquire(stack)


def test_machines_read_a_heartbeat_and_later_that_they_are_detached(store: Store) -> None:
    with contextlib.ExitStack() as stack:
        ownership = make_ownership(store)
        ownership.acquire(stack)
        assert not exists(store, KEYS.owner)
        ownership.start_heartbeat(stack)
        assert read(store, KEYS.owner, max_size=100) != DETACHED
        ownership.detach()
        assert read(store, KEYS.owner, max_size=100) == DETACHED
    assert read(store, KEYS.owner, max_size=100) == DETACHED


def test_heartbeats_are_as_frequent_as_the_machines_of_the_owner_before_need(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeats: list[bytes] = []
    intervals: list[float] = []

    def wait(seconds: float) -> bool:
        heartbeats.append(read(store, KEYS.owner, max_size=100))
        intervals.append(seconds)
        return len(intervals) == 3

    with contextlib.ExitStack() as stack:
        ownership = make_ownership(store)
        ownership.acquire(stack)
        monkeypatch.setattr(ownership._heartbeat._stop, "wait", wait)
        ownership.start_heartbeat(stack, [timedelta(seconds=1), timedelta(hours=1)])
        ownership._heartbeat._thread.join()
    assert len(set(heartbeats)) == 3
    assert max(intervals) <= 0.5  # one may be lost within the second


def take_over(store: Store) -> None:
    """Commit the next term of the lease, as another owner does."""
    holder = Holder(id="other", host="elsewhere", machine="", pid=1, started="1")
    term = LeaseTerm(holder=holder, ttl=timedelta(minutes=3))
    commit_once(store, KEYS.lease.make_term_key(1), term)


def test_an_owner_that_was_superseded_stops(store: Store) -> None:
    with contextlib.ExitStack() as stack:
        ownership = make_ownership(store)
        ownership.acquire(stack)
        ownership.refuse_if_superseded()
        assert not ownership.is_superseded
        take_over(store)
        with pytest.raises(errors.HeldError, match="Another process has taken over fleet"):
            ownership.refuse_if_superseded()
        assert ownership.is_superseded


def test_a_superseded_owner_does_not_undo_what_the_next_one_tells_the_machines(
    store: Store,
) -> None:
    """It may have been suspended meanwhile, and the next owner may have detached the machines."""
    with contextlib.ExitStack() as stack:
        ownership = make_ownership(store)
        ownership.acquire(stack)
        ownership.start_heartbeat(stack)
        take_over(store)
        put(store, KEYS.owner, DETACHED)
        ownership._heartbeat._renew_heartbeat()
        assert read(store, KEYS.owner, max_size=100) == DETACHED


def test_an_owner_whose_lease_cannot_be_read_sends_heartbeats(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Lease) -> bool:
        raise errors.UnavailableError("503")

    with contextlib.ExitStack() as stack:
        ownership = make_ownership(store)
        ownership.acquire(stack)
        ownership.start_heartbeat(stack)
        before = read(store, KEYS.owner, max_size=100)
        monkeypatch.setattr(Lease, "is_superseded", fail)
        ownership._heartbeat._renew_heartbeat()
        assert read(store, KEYS.owner, max_size=100) != before


def test_an_owner_in_a_step_that_does_not_end_sends_no_heartbeat(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    elapsed = 0.0
    timer = StepTimer(STEP_TIMEOUT, lambda: elapsed)
    heartbeat = OwnerHeartbeat(store, KEYS, TIMEOUT, timer)

    def is_renewed() -> bool:
        before = read(store, KEYS.owner, max_size=100) if exists(store, KEYS.owner) else b""
        heartbeat._renew_heartbeat()
        return exists(store, KEYS.owner) and read(store, KEYS.owner, max_size=100) != before

    with timer.expect_steps():
        for _ in range(3):
            elapsed += 3600
            assert is_renewed()
            timer.note_step()
        elapsed += 3601
        assert not is_renewed()
        assert not is_renewed()
        assert [one.getMessage().partition(".")[0] for one in caplog.records] == [
            "The owner of fleet has not checked its machines for 1:00:00"
        ]
        timer.note_step()
        assert is_renewed()
        assert caplog.records[-1].getMessage() == "The owner of fleet sends heartbeats again."
    elapsed += 1e6  # no step is expected
    assert is_renewed()


def test_an_owner_in_a_step_that_does_not_end_loses_its_lease(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    elapsed, beats, started = 0.0, list[Lease](), list[Heartbeat]()

    class NotedHeartbeat(Heartbeat):
        def __enter__(self) -> Heartbeat:
            started.append(self)
            return super().__enter__()

    monkeypatch.setattr(ownership_module, "Heartbeat", NotedHeartbeat)
    monkeypatch.setattr(Lease, "beat", lambda lease: beats.append(lease))  # noqa: PLW0108 - a method
    timer = StepTimer(STEP_TIMEOUT, lambda: elapsed)

    def send() -> None:
        started[0]._send_heartbeats()
        wait([beat for _, beat in started[0]._under_way])

    with contextlib.ExitStack() as stack:
        Ownership(store, KEYS, TIMEOUT, timer).acquire(stack)
        with timer.expect_steps():
            elapsed = 3600.0
            send()
            assert len(beats) == 1
            elapsed = 3601.0
            send()
            assert len(beats) == 1
            timer.note_step()
            send()
            assert len(beats) == 2
