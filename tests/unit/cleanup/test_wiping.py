"""Wipes of a store that has the stores of others below it."""

from datetime import timedelta

import pytest

from millrace import errors
from millrace.cleanup import (
    CleanupBucketPreset,
    CleanupSettings,
    find_stale_uploads,
    make_plan,
    plan_wipe,
    survey_wipe,
    wipe,
)
from millrace.cleanup.wiping import check_confirmation
from millrace.deletion import ObjectsDeleted
from millrace.keys.gradients import GradientKeys
from millrace.keys.leases import LeaseKeys
from millrace.keys.rentals import RentalKeys
from millrace.progress import Event
from millrace.storage import Location, StoreSpec, exists, list_objects, open_store, put
from tests.support.cleanup.material import BucketBuilder

KEYS = RentalKeys("fleet")


@pytest.fixture
def outer(tmp_path) -> BucketBuilder:
    return BucketBuilder(open_store((tmp_path / "bucket").as_uri()))


@pytest.fixture
def inner(outer, tmp_path) -> BucketBuilder:
    """A store that is a prefix of the other one."""
    return BucketBuilder(open_store((tmp_path / "bucket/team/a").as_uri()))


def test_a_wipe_above_a_ledger_of_rented_machines_is_refused(outer, inner):
    inner.put(KEYS.make_released_key(1))
    inner.put(KEYS.make_intent_key(1))
    inner.put(KEYS.make_intent_key(0))
    outer.put(KEYS.make_released_key(0))  # of another rental with the same name
    for look in (survey_wipe, plan_wipe):
        with pytest.raises(errors.HeldError, match="holds the ledger of fleet below team/a/"):
            look(outer.store.spec)
    inner.put(KEYS.make_released_key(0))
    wipe(outer.store.spec, plan_wipe(outer.store.spec).name, confirm="bucket")
    assert not list(list_objects(outer.store))


def test_a_wipe_above_a_rental_with_an_owner_is_refused(outer, inner):
    inner.put_lease(KEYS.scope, "owner")
    with pytest.raises(errors.HeldError, match="team/a/_rentals/fleet is worked on by elsewhere"):
        plan_wipe(outer.store.spec)


@pytest.mark.parametrize("prefix", ["my data", "checkpoints", "_stores/a"])
def test_a_wipe_above_a_store_with_a_prefix_that_no_name_has_is_refused(outer, prefix):
    BucketBuilder(open_store(f"{outer.store.url}/{prefix}")).put_lease("words", "train-00000")
    with pytest.raises(errors.HeldError, match=f"{prefix}/words is worked on by elsewhere"):
        plan_wipe(outer.store.spec)


@pytest.mark.parametrize(
    ("folder", "scope", "name"),
    [
        ("my-job", "my-job", "members/a"),
        ("team/my-job", "team/my-job", "members/a"),
        ("words", "words", "runs/x"),
        ("small", "small", "campaign"),
        ("run", "run/gathers/1", "aggregator"),
        ("run/gathers/1", "run/gathers/1", "aggregator"),
        ("_rentals", KEYS.scope, "owner"),
        ("_rentals/fleet", KEYS.scope, "owner"),
    ],
)
def test_a_wipe_of_the_folder_of_a_held_lease_is_refused(outer, folder, scope, name):
    outer.put(f"{folder}/x")
    outer.put(f"{folder}/lease/notes.txt")
    spec = StoreSpec(url=f"{outer.store.url}/{folder}")
    before = plan_wipe(spec)
    outer.put_lease(scope, name)
    last = folder.rpartition("/")[2]
    for call in (
        lambda: survey_wipe(spec),
        lambda: plan_wipe(spec),
        lambda: wipe(spec, before.name, confirm=last),
    ):
        with pytest.raises(errors.HeldError, match="is worked on by elsewhere"):
            call()
    outer.put(LeaseKeys(scope, name).make_end_key(0), b"elsewhere")
    assert wipe(spec, plan_wipe(spec).name, confirm=last).deleted_objects == 5
    assert not list(list_objects(open_store(spec)))


def test_a_lease_that_is_taken_during_a_wipe_of_its_folder_stops_it(outer, monkeypatch):
    monkeypatch.setattr("millrace.deletion._BATCH", 1)
    monkeypatch.setattr("millrace.deletion._MAX_BATCHES", 1)
    outer.put_checkpoint("my-job", 1, [b"weights"])
    spec = StoreSpec(url=f"{outer.store.url}/my-job")
    plan = plan_wipe(spec)
    with pytest.raises(errors.HeldError, match=r"my-job is worked on by elsewhere .* 1 objects"):
        wipe(
            spec, plan.name, confirm="my-job",
            progress=lambda _: outer.put_lease("my-job", "members/a"),
        )  # fmt: skip
    assert len(list(list_objects(outer.store, "my-job/checkpoints/"))) == 1


@pytest.mark.parametrize("folder", ["_rentals", "_rentals/fleet", "_rentals/fleet/attempts"])
def test_a_wipe_of_a_ledger_with_a_machine_is_refused(outer, folder):
    outer.put(KEYS.make_intent_key(0))
    spec = StoreSpec(url=f"{outer.store.url}/{folder}")
    for look in (survey_wipe, plan_wipe):
        with pytest.raises(errors.HeldError, match="holds the ledger of fleet, whose machines"):
            look(spec)
    outer.put(KEYS.make_released_key(0))
    assert plan_wipe(spec).objects == 2


def test_a_wipe_of_the_reports_of_a_machine_trusts_no_ledger_there(outer):
    prefix = KEYS.make_machine_prefix(0)
    outer.put(f"{prefix}{KEYS.make_intent_key(0)}")
    assert plan_wipe(StoreSpec(url=f"{outer.store.url}/{prefix}")).objects == 1


def test_a_lease_at_the_root_of_a_bucket_is_of_no_job(outer):
    store = open_store("memory://no-job")
    put(store, "lease/members/a/000000.json", b"x")
    assert survey_wipe(store.spec).objects == 1


@pytest.mark.parametrize("keys", [
    [KEYS.owner, KEYS.make_intent_key(0), KEYS.make_released_key(0)],
    [f"{KEYS.make_machine_prefix(0)}log/{number:06d}.txt" for number in range(3)],
])  # fmt: skip
def test_a_rental_that_gets_an_owner_during_a_wipe_above_stays(outer, inner, keys, monkeypatch):
    monkeypatch.setattr("millrace.deletion._BATCH", 1)
    monkeypatch.setattr("millrace.deletion._MAX_BATCHES", 1)
    for key in keys:
        inner.put(key)
    plan = plan_wipe(outer.store.spec)

    def take_lease(event: Event) -> None:
        assert isinstance(event, ObjectsDeleted)
        if not list(list_objects(inner.store, f"{KEYS.scope}/lease/")):
            inner.put_lease(KEYS.scope, "owner")

    with pytest.raises(errors.HeldError, match="team/a/_rentals/fleet is worked on by elsewhere"):
        wipe(outer.store.spec, plan.name, confirm="bucket", progress=take_lease)
    assert sum(exists(inner.store, key) for key in keys) == 2


def test_a_ledger_that_a_machine_or_a_worker_invents_stops_no_wipe(outer):
    outer.put(f"{KEYS.make_machine_prefix(0)}{KEYS.make_intent_key(0)}")
    outer.put(f"run/w1/{KEYS.make_intent_key(0)}")
    outer.put(GradientKeys("run", "1").make_gradient_key("w1", 0))
    wipe(outer.store.spec, plan_wipe(outer.store.spec).name, confirm="bucket")
    assert not list(list_objects(outer.store))


@pytest.mark.parametrize("url", ["file:///", "/", "//", "/..", "link"])
def test_of_the_root_of_the_file_system_nothing_is_deleted(url, tmp_path):
    (tmp_path / "link").symlink_to("/")
    spec = StoreSpec(url=str(tmp_path / "link") if url == "link" else url)
    settings = CleanupSettings(store=spec, rules=(CleanupBucketPreset(),))
    for call in (
        lambda: survey_wipe(spec),
        lambda: plan_wipe(spec),
        lambda: make_plan(settings),
        lambda: find_stale_uploads(spec, older_than=timedelta(0)),
    ):
        with pytest.raises(errors.ConfigurationError, match="root of the file system"):
            call()


@pytest.mark.parametrize("url", ["file:///", "memory://"])
def test_an_empty_name_confirms_nothing(url):
    with pytest.raises(errors.ConfigurationError, match="has no name"):
        check_confirmation(Location.parse(url), "")
