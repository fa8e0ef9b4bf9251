"""Protection of the files of rented machines, and of scores."""

from datetime import timedelta

import pytest

from millrace.checkpoints import VerifyDepth
from millrace.cleanup import (
    CleanupBucketPreset,
    CleanupKind,
    CleanupSettings,
    Rule,
    execute,
    make_plan,
)
from millrace.cleanup.protection import ProtectionPolicy
from millrace.keys.campaigns import CampaignKeys
from millrace.keys.gradients import ChainKeys
from millrace.keys.rentals import RentalKeys
from millrace.lease import StoreClock
from millrace.storage import exists, open_store
from tasks.cleaning import describe_cleaning
from tests.support.cleanup.material import BucketBuilder

KEYS = RentalKeys("fleet")
OPEN, CLOSED, LATE = (f"{KEYS.make_machine_prefix(one)}files.json" for one in range(3))


@pytest.fixture
def bucket(tmp_path) -> BucketBuilder:
    """A bucket with the old files of a machine that runs, of one that is gone, and of no machine.

    The machines are detached: no process has its lease.
    """
    bucket = BucketBuilder(open_store((tmp_path / "bucket").as_uri()))
    for number in range(2):
        bucket.put(KEYS.make_intent_key(number), hours=60)
        bucket.put(KEYS.make_contract_key(number), hours=60)
        bucket.put(KEYS.make_detached_key(number), hours=60)
    bucket.put(KEYS.make_released_key(1), hours=50)
    for key in (OPEN, CLOSED, LATE):
        bucket.put(key, hours=60)
    return bucket


def make_settings(bucket: BucketBuilder) -> CleanupSettings:
    return CleanupSettings(store=bucket.store.spec, rules=(CleanupBucketPreset(),))


def test_the_files_of_a_detached_machine_stay_until_its_release(bucket):
    plan = make_plan(make_settings(bucket))
    assert plan.totals.kept == {"a machine of fleet that is not released uses it": 1}
    done = execute(make_settings(bucket), plan.name)
    assert (done.deleted_objects, done.failures) == (2, ())
    assert exists(bucket.store, OPEN)
    assert not exists(bucket.store, CLOSED)
    bucket.put(KEYS.make_released_key(0))
    execute(make_settings(bucket), make_plan(make_settings(bucket)).name)
    assert not exists(bucket.store, OPEN)


def test_files_whose_machine_was_rented_since_the_plan_stay(bucket):
    plan = make_plan(make_settings(bucket))
    bucket.put(KEYS.make_intent_key(2))
    done = execute(make_settings(bucket), plan.name)
    assert done.skipped == {"a machine of fleet that is not released uses it": 1}
    assert exists(bucket.store, LATE)
    report = describe_cleaning(plan, done)  # of the one that the plan kept, and of this one
    assert "| a machine of fleet that is not released uses it | 2 |" in report


def test_the_scores_that_the_next_ones_follow_from_stay(tmp_path):
    bucket = BucketBuilder(open_store((tmp_path / "bucket").as_uri()))
    bucket.put_chain("run", "1", 6, {4: 100}, hours=100)
    keys = ChainKeys("run", "1")
    scores = [bucket.put(keys.make_scores_key(window), b"{}", hours=100) for window in range(1, 4)]
    rules = (Rule(kinds=(CleanupKind.GATHERS,), older_than=timedelta(days=2)),)
    settings = CleanupSettings(store=bucket.store.spec, rules=rules)
    plan = make_plan(settings)
    assert plan.totals.kept["the next scores of run follow from it"] == 1
    execute(settings, plan.name)
    assert [exists(bucket.store, key) for key in scores] == [False, False, True]


@pytest.mark.parametrize("is_related", [False, True])
def test_a_live_aggregator_needs_no_gradient_of_a_window_that_it_has_merged(tmp_path, is_related):
    bucket = BucketBuilder(open_store((tmp_path / "bucket").as_uri()))
    chain = BucketBuilder(open_store((tmp_path / "chain").as_uri())) if is_related else bucket
    chain.put_chain("exp/run", "1", 5, {4: 100}, hours=100)
    chain.put_lease(ChainKeys("exp/run", "1").job, "aggregator")
    merged = [bucket.put_gradient("exp/run", "w1", window, "1", hours=100) for window in (3, 5)]
    merged.append(bucket.put_start_window("exp/run", "w1", 5, "1", hours=100))
    opened = bucket.put_gradient("exp/run", "w1", 6, "1", hours=100)
    other = bucket.put_gradient("exp/run", "w1", 3, "2", hours=100)  # of no chain, and no lease
    kinds = (CleanupKind.GRADIENTS, CleanupKind.START_WINDOWS, CleanupKind.GATHERS)
    settings = CleanupSettings(
        store=bucket.store.spec,
        related_stores=(chain.store.spec,) if is_related else (),
        rules=(Rule(kinds=kinds, older_than=timedelta(days=2)),),
    )
    bucket.put_lease("exp", "lead")  # of a campaign
    plan = make_plan(settings)
    assert plan.objects == 0
    bucket.put_lease("exp", "lead", ended=True)
    done = execute(settings, make_plan(settings).name)
    assert done.deleted_objects == 4
    assert not any(exists(bucket.store, key) for key in [*merged, other])
    assert exists(bucket.store, opened)
    assert exists(chain.store, ChainKeys("exp/run", "1").make_link_key(1))


def test_any_number_of_folders_costs_a_cleaning_memory_for_some(bucket, monkeypatch):
    monkeypatch.setattr("millrace.cleanup.protection._MAX_SCOPES", 8)
    clock = StoreClock.read_machine_clock()
    policy = ProtectionPolicy([bucket.store], (), VerifyDepth.SIZES, clock)
    bucket.put_lease("users/3", "owner")
    for _ in range(2):
        held = [number for number in range(50) if policy.describe_holder(f"users/{number}")]
        assert held == [3]
    assert len(policy._lease_cache) == policy._open_census.cache_info().currsize == 8
    assert next(reversed(policy._lease_cache)) == "users/49"
    assert "users" in policy._lease_cache  # above all of them, and asked for each time


@pytest.mark.parametrize("held_in", ["the store", "a related store"])
def test_the_lease_of_the_folder_that_a_url_names_protects_all_below_it(tmp_path, held_in):
    """A campaign's leader holds its lease, and the URL is the campaign's own folder."""
    urls = [f"{(tmp_path / one).as_uri()}/small" for one in ("bucket", "beside")]
    place, beside = (BucketBuilder(open_store(url)) for url in urls)
    gradient = place.put_gradient("run", "worker-1", 1, "1", 60)
    notes = place.put("notes.txt", hours=60)
    kinds = (CleanupKind.GRADIENTS, CleanupKind.OTHER)
    settings = CleanupSettings(
        store=place.store.spec,
        related_stores=(beside.store.spec,),
        rules=(Rule(kinds=kinds, match="*"),),
    )
    plan = make_plan(settings)
    assert plan.objects == 2
    leader = CampaignKeys("small").lease
    folder = tmp_path / ("bucket" if held_in == "the store" else "beside")
    BucketBuilder(open_store(folder.as_uri())).put_lease(leader.scope, leader.name)
    reason = "small is worked on by elsewhere (process 1)"
    assert execute(settings, plan.name).skipped == {reason: 2}
    assert make_plan(settings).totals.kept == {reason: 2}
    assert exists(place.store, gradient)
    assert exists(place.store, notes)
