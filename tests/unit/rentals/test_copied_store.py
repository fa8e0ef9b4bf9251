"""No process with a copy of a store touches the machines that the store has rented."""

import shutil
from pathlib import Path
from typing import cast

import pytest

from millrace import errors
from millrace.cleanup import copy_objects
from millrace.cli.machine import describe_machine
from millrace.keys.rentals import INSTALLATION, RentalKeys
from millrace.records import commit_once
from millrace.rentals import Rental, VastClient, list_rentals, reap, release_rental
from millrace.rentals.labels import Label
from millrace.rentals.ledger import describe_location, ensure_installation, list_attempts
from millrace.schemas.rental import Contract, Installation
from millrace.storage import Store, StoreSpec, delete, open_store
from tests.support.rentals.parts import (
    HOUR,
    START,
    FakeVast,
    make_attempt,
    make_offer_row,
    make_settings,
)

KEYS = RentalKeys("fleet")
ACCOUNT = "0123456789abcdef0123456789abcdef"


class Bench:
    """Store that has rented a machine, whose owner is gone, and an account in memory."""

    def __init__(self, folder: Path) -> None:
        self.original, self.copy = folder / "original", folder / "copy"
        self.account = FakeVast(offers=[make_offer_row(1)])
        self.account.clock.sleep(HOUR.total_seconds())
        store = open_store(self.original.as_uri())
        label = str(Label(ensure_installation(store), "fleet", 0, START + 10 * HOUR))
        commit_once(store, KEYS.make_intent_key(0), make_attempt(label=label).intent)
        commit_once(store, KEYS.make_contract_key(0), Contract(instance_id=1))
        self.account.add(1, label)

    @property
    def vast(self) -> VastClient:
        return cast("VastClient", self.account)

    def copy_store(self) -> Store:
        """Copy the store as `millrace bucket copy` does."""
        store = open_store(self.copy.as_uri())
        copy_objects(open_store(self.original.as_uri()), store)
        return store


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_the_reaper_of_a_copy_releases_no_machine_of_the_original(bench: Bench) -> None:
    bench.copy_store()
    copy = make_settings(bench.copy).ledger
    assert not reap(copy, vast=bench.vast).released
    (listed,) = list_rentals(copy, vast=bench.vast)
    assert describe_machine(listed).endswith("its label is damaged, or of another store.")
    original = make_settings(bench.original).ledger
    assert len(reap(original, vast=bench.vast).released) == 1
    assert not bench.account.instances


def test_a_copy_is_not_rented_with_the_machines_of_the_original(bench: Bench) -> None:
    store = bench.copy_store()
    settings = make_settings(bench.copy)
    message = "records of 1 machine of fleet that another store has rented"
    with pytest.raises(errors.ConfigurationError, match=message):
        release_rental(settings.ledger, "fleet", vast=bench.vast)
    with pytest.raises(errors.ConfigurationError, match=message):
        Rental(settings, vast=bench.vast).__enter__()
    assert set(bench.account.instances) == {1}
    release_rental(make_settings(bench.original).ledger, "fleet", vast=bench.vast)
    assert reap(settings.ledger, vast=bench.vast).closed_attempts == 1
    assert all(one.release_record for one in list_attempts(store, "fleet"))
    with Rental(settings, vast=bench.vast):
        pass


def test_an_identity_that_another_program_has_copied_is_refused(bench: Bench) -> None:
    shutil.copytree(bench.original, bench.copy)
    settings = make_settings(bench.copy)
    for use in (
        lambda: reap(settings.ledger, vast=bench.vast),
        lambda: list_rentals(settings.ledger, vast=bench.vast),
        lambda: release_rental(settings.ledger, "fleet", vast=bench.vast),
        lambda: Rental(settings, vast=bench.vast).__enter__(),
    ):
        with pytest.raises(errors.ConfigurationError, match="delete that object here") as caught:
            use()
        assert str(bench.original) in str(caught.value)
    assert set(bench.account.instances) == {1}
    delete(open_store(bench.copy.as_uri()), [INSTALLATION])
    assert not reap(settings.ledger, vast=bench.vast).released


def test_a_folder_is_one_store_by_all_its_paths(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(bench.original)
    settings = make_settings(tmp_path / "link").ledger
    assert len(reap(settings, vast=bench.vast).released) == 1


def test_a_bucket_is_one_store_by_all_its_urls() -> None:
    urls = (
        StoreSpec(url=f"r2://{ACCOUNT}/bucket/runs/a"),
        StoreSpec(url="r2://bucket/runs/a/", account_id=ACCOUNT),
        StoreSpec(
            url="s3://bucket/runs%2Fa", endpoint=f"https://{ACCOUNT}.r2.cloudflarestorage.com"
        ),
        StoreSpec(url="s3://bucket/runs/a", endpoint="http://localhost:9000", region="auto"),
    )
    assert {describe_location(open_store(one)) for one in urls} == {"bucket/runs/a"}
    assert describe_location(open_store("s3://bucket")) == "bucket"


def test_an_identity_without_a_location_is_accepted(tmp_path: Path) -> None:
    """Earlier versions have written such records."""
    store = open_store(tmp_path.as_uri())
    commit_once(store, INSTALLATION, Installation(id="0123456789ab"))
    assert ensure_installation(store) == "0123456789ab"
