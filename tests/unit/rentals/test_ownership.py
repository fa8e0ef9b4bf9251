"""A rental has one owner, whose heartbeat its machines read."""

import contextlib
from datetime import timedelta
from pathlib import Path

import pytest

from millrace import errors
from millrace.keys.rentals import RentalKeys
from millrace.lease import Lease
from millrace.rentals.guest.watchdog import DETACHED
from millrace.rentals.ownership import Ownership
from millrace.storage import Store, StoreSpec, exists, open_store, read

KEYS = RentalKeys("fleet")
TIMEOUT = timedelta(minutes=5)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(StoreSpec(url=tmp_path.as_uri()))


def test_a_second_owner_is_refused_until_the_first_has_left(store: Store) -> None:
    with contextlib.ExitStack() as stack:
        Ownership(store, KEYS, TIMEOUT).acquire(stack)
        with pytest.raises(errors.HeldError, match="fleet is held by"):
            Ownership(store, KEYS, TIMEOUT).acquire(contextlib.ExitStack())
    with contextlib.ExitStack() as stack:
        Ownership(store, KEYS, TIMEOUT).acquire(stack)


def test_machines_read_a_heartbeat_and_later_that_they_are_detached(store: Store) -> None:
    with contextlib.ExitStack() as stack:
        ownership = Ownership(store, KEYS, TIMEOUT)
        ownership.acquire(stack)
        assert not exists(store, KEYS.owner)
        ownership.start_heartbeat(stack)
        assert read(store, KEYS.owner, max_size=100) != DETACHED
        ownership.detach()
        assert read(store, KEYS.owner, max_size=100) == DETACHED
    assert read(store, KEYS.owner, max_size=100) == DETACHED


def test_an_owner_that_was_superseded_stops(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as stack:
        ownership = Ownership(store, KEYS, TIMEOUT)
        ownership.acquire(stack)
        ownership.refuse_if_superseded()
        assert not ownership.is_superseded
        monkeypatch.setattr(Lease, "is_superseded", lambda _: True)
        with pytest.raises(errors.HeldError, match="Another process has taken over fleet"):
            ownership.refuse_if_superseded()
        assert ownership.is_superseded
