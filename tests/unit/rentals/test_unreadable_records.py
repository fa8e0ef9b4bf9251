"""A record that cannot be read leaves no machine uncounted, and releases no detached one."""

import json
from pathlib import Path
from typing import cast

import pytest

from millrace import errors
from millrace.cli.machine import describe_machine
from millrace.keys.rentals import MachineKeys
from millrace.records import commit_once
from millrace.rentals import LedgerSettings, VastClient, list_rentals, reap, release_rental
from millrace.rentals.ledger import list_attempts
from millrace.schemas.rental import ReleaseReason
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
