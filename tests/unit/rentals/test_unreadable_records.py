"""A record that cannot be read leaves no machine uncounted, and releases no detached one."""

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from millrace import errors
from millrace.cli.machine import describe_machine
from millrace.keys.rentals import MachineKeys, RentalKeys
from millrace.records import commit_once
from millrace.rentals import (
    LedgerSettings,
    VastClient,
    list_rentals,
    owner_monitor,
    reap,
    reaper,
    release_rental,
)
from millrace.rentals.labels import Label
from millrace.rentals.ledger import ensure_installation, list_attempts
from millrace.schemas.rental import Contract, ReleaseReason
from millrace.storage import put, read
from tests.support.rentals.parts import HOUR, START, make_attempt, make_offer_row, make_settings
from tests.unit.rentals.test_rental import KEYS, Bench, abandon


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def get_ledger(bench: Bench) -> tuple[LedgerSettings, VastClient]:
    return make_settings(bench.folder).ledger, cast("VastClient", bench.vast)


def add_field(bench: Bench, key: str) -> None:
    """Write a record as a later version does, with another field."""
    body = json.loads(read(bench.store, key, max_size=1 << 20))
    body["record"]["new_field"] = 1
    put(bench.store, key, json.dumps(body, separators=(",", ":")).encode())


@pytest.mark.parametrize("damage", ["later version", "damaged"])
def test_a_detached_machine_whose_intent_cannot_be_read_stays_until_its_deadline(
    bench: Bench, damage: str
) -> None:
    with bench.rent(detached=True) as rental:
        rental.wait_until_ready()
    if damage == "damaged":
        put(bench.store, KEYS.make_intent_key(0), b"junk")
    else:
        add_field(bench, KEYS.make_intent_key(0))
    settings, vast = get_ledger(bench)
    assert not reap(settings, vast=vast).released
    (listed,) = list_rentals(settings, vast=vast)
    assert describe_machine(listed).endswith("its record of the intent cannot be read.")
    bench.vast.clock.sleep(100 * HOUR.total_seconds())
    (released,) = reap(settings, vast=vast).released
    assert released.release_reason.startswith("the deadline was")
    assert not bench.vast.instances


def test_a_detached_machine_whose_intent_cannot_be_read_is_released_after_its_program(
    bench: Bench,
) -> None:
    with bench.rent(detached=True) as rental:
        rental.wait_until_ready()
    put(bench.store, KEYS.make_intent_key(0), b"junk")
    put(bench.store, MachineKeys(KEYS.make_machine_prefix(0)).program_exit, b'{"code": 0}')
    settings, vast = get_ledger(bench)
    (released,) = reap(settings, vast=vast).released
    assert released.release_reason == "the program has ended"


def test_a_machine_whose_intent_cannot_be_read_is_released_without_an_owner(bench: Bench) -> None:
    abandon(bench)
    put(bench.store, KEYS.make_intent_key(0), b"junk")
    settings, vast = get_ledger(bench)
    (released,) = reap(settings, vast=vast).released
    assert released.release_reason == "the machine has no living owner"


@pytest.mark.parametrize("machines", [1, 2])
def test_a_machine_whose_intent_cannot_be_read_is_released_with_its_rental(
    bench: Bench, machines: int
) -> None:
    abandon(bench, machines=machines)
    put(bench.store, KEYS.make_intent_key(0), b"junk")
    settings, vast = get_ledger(bench)
    assert release_rental(settings, "fleet", vast=vast) == machines
    assert not bench.vast.instances


def test_a_detached_machine_whose_intent_cannot_be_read_stays_when_others_are_released(
    bench: Bench,
) -> None:
    with bench.rent(detached=True) as rental:
        rental.wait_until_ready()
    put(bench.store, KEYS.make_intent_key(0), b"junk")
    settings, vast = get_ledger(bench)
    bench.vast.add(8, bench.vast.creates[0].replace("/fleet/", "/other/"))
    with pytest.raises(errors.NotFoundError, match="has no rental 'fleet'"):
        release_rental(settings, "fleet", vast=vast, include_detached=False)
    assert set(bench.vast.instances) == {1, 8}
    assert release_rental(settings, "fleet", vast=vast) == 1
    assert set(bench.vast.instances) == {8}


def test_a_machine_that_is_listed_after_its_release_is_released_with_its_rental(
    bench: Bench,
) -> None:
    with bench.rent() as rental:
        rental.wait_until_ready()
    bench.vast.add(1, bench.vast.creates[0])
    settings, vast = get_ledger(bench)
    assert release_rental(settings, "fleet", vast=vast) == 1
    assert not bench.vast.instances


@pytest.mark.parametrize(
    "key", [KEYS.make_intent_key(0), KEYS.make_contract_key(0), KEYS.make_detached_key(0)]
)
def test_a_rental_of_a_later_version_is_neither_continued_nor_released(
    bench: Bench, key: str
) -> None:
    with bench.rent(detached=True) as rental:
        rental.wait_until_ready()
    add_field(bench, key)
    settings, vast = get_ledger(bench)
    with pytest.raises(errors.VersionError, match="a later version wrote it"):
        bench.rent().__enter__()
    with pytest.raises(errors.VersionError, match="a later version wrote it"):
        release_rental(settings, "fleet", vast=vast)
    assert len(bench.vast.instances) == 1
    assert not reap(settings, vast=vast).released


def test_a_monitor_does_not_try_again_to_release_a_rental_of_a_later_version(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: float) -> None:
        raise AssertionError("the monitor waits for another try")

    abandon(bench)
    add_field(bench, KEYS.make_contract_key(0))
    monkeypatch.setattr(owner_monitor.time, "sleep", refuse)
    settings, _ = get_ledger(bench)
    owner_monitor._release_rental({"ledger": settings.reveal_secrets(), "rental": "fleet"})
    assert len(bench.vast.instances) == 1


def test_an_owner_destroys_the_machine_of_a_damaged_intent_before_it_rents_another(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.vast.offers = [make_offer_row(one) for one in (1, 2, 3)]
    abandon(bench)
    put(bench.store, KEYS.make_intent_key(0), b"junk")
    with bench.rent() as rental:
        rental.wait_until_ready()
        assert set(bench.vast.instances) == {2}
        rental.wait_until_ready()
        assert set(bench.vast.instances) == {2}
    assert "000000-intent.json cannot be read: machine 1 of this attempt is destroyed" in (
        caplog.text
    )
    assert not bench.vast.instances
    (attempt,) = list_attempts(bench.store, "fleet")
    assert attempt.number == 1
    assert attempt.release_record is not None
    assert attempt.release_record.reason is ReleaseReason.UNNEEDED


def test_a_destroy_request_that_failed_is_repeated_by_the_next_poll(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise errors.UnavailableError("503")

    abandon(bench)
    put(bench.store, KEYS.make_intent_key(0), b"junk")
    with bench.rent() as rental:
        with monkeypatch.context() as patch:
            patch.setattr(bench.vast, "destroy_instance", fail)
            rental.wait_until_ready()
        assert set(bench.vast.instances) == {1, 2}
        rental.wait_until_ready()
        assert set(bench.vast.instances) == {2}


@pytest.mark.parametrize("is_later_version", [False, True])
def test_an_owner_that_was_superseded_destroys_no_machine_of_the_next_one(
    bench: Bench, is_later_version: bool
) -> None:
    """It may list the machines before it sees that its lease is lost."""
    with bench.rent() as rental:
        rental.wait_until_ready()
        label = bench.vast.creates[0].replace("/000000/", "/000001/")
        commit_once(
            bench.store, KEYS.make_intent_key(1), make_attempt(label=label, started_at=START).intent
        )
        if is_later_version:
            add_field(bench, KEYS.make_intent_key(1))
        bench.vast.add(7, label)
        bench.vast.add(8, bench.vast.creates[0].replace("/fleet/", "/other/"))
        rental.wait_until_ready()
        assert set(bench.vast.instances) == {1, 7, 8}


def abandon_with_unreadable_lease(bench: Bench) -> Path:
    """Abandon `fleet`, and the rental `broken` with a damaged lease; return the lease's folder."""
    abandon(bench)
    keys = RentalKeys("broken")
    label = str(Label(ensure_installation(bench.store), "broken", 0, START + 10 * HOUR))
    intent = make_attempt(label=label, rental="broken").intent
    commit_once(bench.store, keys.make_intent_key(0), intent)
    commit_once(bench.store, keys.make_contract_key(0), Contract(instance_id=9))
    bench.vast.add(9, label)
    bench.vast.clock.sleep(HOUR.total_seconds())
    put(bench.store, keys.lease.make_term_key(0), b"junk")
    return bench.folder / keys.lease.prefix


def test_an_unreadable_lease_stops_the_release_of_no_other_rental(bench: Bench) -> None:
    abandon_with_unreadable_lease(bench)
    settings, vast = get_ledger(bench)
    assert {one.owner for one in list_rentals(settings, vast=vast)} == {"", "an unknown process"}
    (planned,) = reap(settings, dry_run=True, vast=vast).released
    assert planned.rental == "fleet"
    with pytest.raises(errors.CorruptError, match="The leases of broken cannot be read"):
        reap(settings, vast=vast)
    assert set(bench.vast.instances) == {9}
    bench.vast.clock.sleep(10 * HOUR.total_seconds())
    with pytest.raises(errors.CorruptError, match="The leases of broken cannot be read"):
        reap(settings, vast=vast)
    assert not bench.vast.instances  # its deadline has passed


def test_a_machine_whose_lease_was_unreadable_for_an_hour_is_released(bench: Bench) -> None:
    lease = abandon_with_unreadable_lease(bench)
    for path in lease.iterdir():
        os.utime(path, (0, 0))
    settings, vast = get_ledger(bench)
    assert len(reap(settings, vast=vast).released) == 2
    assert not bench.vast.instances


def test_a_lease_that_becomes_unreadable_before_the_takeover_stops_no_other_rental(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = abandon_with_unreadable_lease(bench)
    for path in lease.iterdir():
        os.utime(path, (0, 0))
    original = reaper._OwnerLookup.take_over

    def damage_and_take_over(self: Any, rental: str, stack: ExitStack) -> None:
        put(bench.store, RentalKeys("broken").lease.make_term_key(1), b"junk")
        original(self, rental, stack)

    monkeypatch.setattr(reaper._OwnerLookup, "take_over", damage_and_take_over)
    settings, vast = get_ledger(bench)
    with pytest.raises(errors.CorruptError, match="The leases of broken cannot be read"):
        reap(settings, vast=vast)
    assert set(bench.vast.instances) == {9}
