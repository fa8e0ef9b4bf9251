"""Planned objects are deleted as they were planned, or not at all."""

from pathlib import Path

import pytest

from millrace.deletion import (
    DeletionPhase,
    DeletionResult,
    PlannedObject,
    abort_uploads,
    delete_planned,
    find_stale_uploads,
)
from millrace.lease import Holder, StoreClock
from millrace.storage import Store, delete, list_objects, open_store, put


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    url = tmp_path.as_uri() if request.param == "folder" else f"memory://{tmp_path.name}"
    return open_store(url)


def plan(store: Store, *keys: str) -> list[PlannedObject]:
    for key in keys:
        put(store, key, key.encode())
    return [PlannedObject(stat) for stat in list_objects(store)]


def keys_of(store: Store) -> list[str]:
    return sorted(stat.key for stat in list_objects(store))


class Keep:
    """Check that keeps one object, and counts the batches."""

    def __init__(self, key: str) -> None:
        self.key, self.batches = key, 0

    def refresh_leases(self) -> None:
        self.batches += 1

    def __call__(self, planned: PlannedObject, /) -> str:
        return "it is needed" if planned.key == self.key else ""


def test_new_changed_and_kept_objects_stay(store):
    planned = plan(store, "changed", "kept", "missing", "unchanged")
    put(store, "changed", b"by another")
    put(store, "new", b"new")
    delete(store, ["missing"])
    counted: list[str] = []
    check = Keep("kept")
    done = delete_planned(store, planned, check=check, count=lambda one: counted.append(one.key))
    assert done == DeletionResult(
        deleted_objects=1,
        deleted_bytes=len("unchanged"),
        missing=1,
        skipped={"it is needed": 1, "it was written since the plan was made": 1},
        failures=(),
        has_given_up=False,
    )
    assert counted == ["unchanged"]
    assert check.batches == 1
    assert keys_of(store) == ["changed", "kept", "new"]


def test_later_phases_of_a_unit_stay_while_an_object_of_an_earlier_one_does(store):
    planned = plan(store, "one/first", "one/then", "two/first", "two/then")
    done = delete_planned(
        store,
        sorted(planned, key=lambda one: one.key),
        check=Keep("one/first"),
        find_phase=lambda one: DeletionPhase(*_split(one.key)),
    )
    assert done.deleted_objects == 2
    assert done.skipped == {
        "it is needed": 1,
        "objects that have to be deleted before it are still there": 1,
    }
    assert keys_of(store) == ["one/first", "one/then"]


def _split(key: str) -> tuple[str, int]:
    unit, _, part = key.partition("/")
    return unit, int(part == "then")


def test_only_the_uploads_that_were_found_are_aborted(tmp_path):
    store = open_store(tmp_path.as_uri())
    (tmp_path / "found#1").write_bytes(b"half")
    clock = StoreClock.read(store, "run", Holder.describe_this_process())
    found = find_stale_uploads(store, clock.now())
    (tmp_path / "later#1").write_bytes(b"half")
    assert [(one.key, one.size) for one in found.uploads] == [("found", 4)]
    done = abort_uploads(store, found)
    assert (done.is_aborted, done.failures, done.size) == (True, (), 4)
    assert [path.name for path in tmp_path.glob("*#*")] == ["later#1"]
