"""Garbage is collected beside any number of leases, and never beside a run."""

import json
import secrets
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest

from millrace import deletion, errors
from millrace import lease as leases
from millrace.datasets import (
    PipelineSettings,
    delete_garbage,
    dispatch,
    garbage,
    plan_dataset,
    plan_garbage,
    shard_dataset,
)
from millrace.datasets.plan import commit_plan
from millrace.datasets.progress_events import ShardCommitted
from millrace.deletion import ObjectsDeleted
from millrace.keys.datasets import DatasetKeys
from millrace.keys.leases import COLLECTOR, PLAN_REMOVAL, LeaseKeys, make_run_lease_name
from millrace.lease import Holder, Lease, StoreClock, acquire
from millrace.progress import Event
from millrace.storage import Store, list_fairly, list_objects, open_store, put

ANY_AGE = timedelta(seconds=-60)
PARTITIONS, ORPHANS, BATCH = 100, 1000, 10


@pytest.fixture
def settings(tmp_path: Path) -> PipelineSettings:
    """A dataset in memory, whose partitions have one row each."""
    (tmp_path / "source").mkdir()
    rows = (json.dumps({"text": f"{number:09d}".ljust(1000)}) for number in range(PARTITIONS))
    (tmp_path / "source" / "rows.jsonl").write_text("".join(f"{row:1023}\n" for row in rows))
    return PipelineSettings.model_validate(
        {
            "dataset": "rows",
            "source": {"url": (tmp_path / "source").as_uri(), "columns": {"txt": "text"}},
            "store": {"url": f"memory://{secrets.token_hex(8)}"},
            "sharding": {"partition_bytes": 1024, "shard_bytes": 1 << 16},
            "execution": {"workers": 0},
        }
    )


@pytest.fixture
def store(settings: PipelineSettings, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store with a plan, the released leases of all partitions, and garbage."""
    monkeypatch.setattr(deletion, "_BATCH", BATCH)
    monkeypatch.setattr(garbage, "_LISTED_PER_BATCH", BATCH)
    store, plan = open_store(settings.store), plan_dataset(settings)
    assert len(plan.partitions) == PARTITIONS
    commit_plan(store, DatasetKeys("rows"), plan, {})
    for partition in plan.partitions:
        keys = LeaseKeys("rows", partition.name)
        for key in (keys.make_term_key(0), keys.make_beat_key(0), keys.make_end_key(0)):
            put(store, key, b"")
    for number in range(ORPHANS):
        put(store, f"rows/shards/webdataset/train/train-09999-{number:06d}.tar", b"orphan")
    return store


def count_garbage(store: Store) -> int:
    return sum(1 for _ in list_objects(store, "rows/shards/webdataset/train/train-09999-"))


def take_lease(store: Store, name: str, holder: Holder) -> None:
    clock = StoreClock.read(store, "rows", holder)
    lease = acquire(store, LeaseKeys("rows", name), holder, leases.MAX_TTL, clock)
    assert isinstance(lease, Lease)


def test_the_leases_that_are_listed_grow_with_the_batches_only(store, monkeypatch):
    listed: list[str] = []

    def count(*args, **options):
        for stat in list_fairly(*args, **options):
            listed.append(stat.key)
            yield stat

    plan = plan_garbage(store, "rows", min_age=ANY_AGE)
    monkeypatch.setattr(leases, "list_fairly", count)
    result = delete_garbage(store, plan)
    assert result.deletion.deleted_objects == ORPHANS
    assert any("/lease/runs/" in key for key in listed)
    # A listing of the leases of all partitions for each batch would have 30,000 objects.
    assert len(listed) < 3 * ORPHANS


def test_a_run_that_begins_between_two_batches_ends_the_collecting_at_once(store):
    def begin_run(event: Event) -> None:
        if isinstance(event, ObjectsDeleted) and event.objects == BATCH:
            holder = Holder.describe_this_process()
            take_lease(store, make_run_lease_name(holder.id), holder)

    plan = plan_garbage(store, "rows", min_age=ANY_AGE)
    with pytest.raises(errors.ConflictError, match="works on rows"):
        delete_garbage(store, plan, progress=begin_run)
    assert count_garbage(store) == ORPHANS - BATCH


def test_a_lease_of_a_partition_ends_the_collecting_at_the_next_listing_of_all(store):
    def take(event: Event) -> None:
        if isinstance(event, ObjectsDeleted) and event.objects == BATCH:
            take_lease(store, "train-00007", Holder.describe_this_process())

    plan = plan_garbage(store, "rows", min_age=ANY_AGE)
    with pytest.raises(errors.ConflictError, match="works on rows"):
        delete_garbage(store, plan, progress=take)
    assert ORPHANS // 2 < count_garbage(store) < ORPHANS


def test_a_run_looks_for_the_collector_once_at_any_number_of_partitions(settings, monkeypatch):
    looks: list[str] = []

    def count(store, keys, clock):
        looks.append(keys.name)
        return leases.find_holder(store, keys, clock)

    monkeypatch.setattr(dispatch, "find_holder", count)
    assert shard_dataset(settings).partitions == PARTITIONS
    # Before and after the lease of the run is taken.
    assert looks == [COLLECTOR, COLLECTOR, PLAN_REMOVAL]


def test_a_run_that_ends_leaves_no_held_lease(settings):
    shard_dataset(settings)
    store = open_store(settings.store)
    clock = StoreClock.read(store, "rows", Holder.describe_this_process())
    assert leases.Census(store, "rows", "", clock).find_holders() == {}


class StoppedByTestError(Exception):
    """Stop of a run after some commits."""


@pytest.mark.parametrize("is_complete", [False, True])
def test_shards_of_an_earlier_version_are_no_garbage(
    settings: PipelineSettings, tmp_path: Path, is_complete: bool
) -> None:
    location = settings.store.model_copy(update={"url": (tmp_path / "out").as_uri()})
    settings = settings.model_copy(update={"store": location})
    commits = 0

    def stop(event: Event) -> None:
        nonlocal commits
        commits += isinstance(event, ShardCommitted)
        if commits == 3 and not is_complete:
            raise StoppedByTestError

    with nullcontext() if is_complete else pytest.raises(StoppedByTestError):
        shard_dataset(settings, progress=stop)
    for path in (tmp_path / "out/rows/commits").glob("*/*.json"):
        path.rename(path.parent.with_name(f"{path.parent.name}-{path.name}"))
    store = open_store(settings.store)
    with pytest.raises(errors.ConflictError, match="a record of an earlier version of Millrace"):
        plan_garbage(store, "rows", min_age=ANY_AGE)
    if is_complete:
        assert shard_dataset(settings).was_complete
    else:
        with pytest.raises(errors.ConflictError, match="a record of an earlier version"):
            shard_dataset(settings)
