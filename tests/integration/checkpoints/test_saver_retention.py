"""A saver that removes old checkpoints after its saves."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

from millrace import errors
from millrace.checkpoints import (
    PendingSave,
    Ranks,
    RetentionSettings,
    Saver,
    SaveSettings,
    load,
    pin,
    retention,
    saving,
    verify,
)
from millrace.checkpoints.find import commit_checkpoint, iterate_checkpoints, read_checkpoint
from millrace.checkpoints.progress_events import CheckpointSaved, PartStored
from millrace.checkpoints.retention import RetentionPlan, apply_retention, plan_retention
from millrace.deletion import DeletionResult
from millrace.keys.checkpoints import CheckpointKeys
from millrace.progress import Event, ignore_event
from millrace.records import Commit
from millrace.schemas.checkpoint import Checkpoint
from millrace.storage import Store, delete, list_objects, open_store, put
from millrace.storage.clients import make_full_key
from millrace.testing.rgw import RGW
from tests.oracle import judge_checkpoints
from tests.stores import make_spec, open_folder
from tests.support.fork_server import get_fork_server
from tests.support.policies import open_without

KEYS = CheckpointKeys("job")
SMALL = SaveSettings(part_bytes=4096, ranks_within=timedelta(seconds=20))
LAST = RetentionSettings(last=1)


def begin(saver: Saver, step: int) -> PendingSave:
    """Save the same embedding, and a head of the step."""
    state = {"embed": torch.arange(1000), "head": torch.full((1000,), step)}
    return saver.save(state, step=step)


def save(store: Store, *steps: int, **options: Any) -> None:
    with Saver(store, KEYS.job, SMALL, **options) as saver:
        for step in steps:
            begin(saver, step).result()


def list_kept(store: Store) -> list[int]:
    """Return the steps of the checkpoints, all of which are intact."""
    found = sorted(iterate_checkpoints(store, KEYS.job), key=lambda one: one.step)
    assert [verify(store, one) for one in found] == [{}] * len(found)
    return [one.step for one in found]


def list_folders(store: Store) -> list[int]:
    """Return the steps that have any object."""
    names = {stat.key.removeprefix(KEYS.prefix).split("/")[0] for stat in list_objects(store)}
    return sorted(step for name in names if (step := KEYS.parse_folder(name)) is not None)


def test_a_saver_keeps_the_checkpoints_of_its_rules_and_no_other_object(store):
    save(store, 1, 2, 3, 4, 5, 6, 7, retention=RetentionSettings(last=2, every=3))
    assert list_kept(store) == list_folders(store) == [3, 6, 7]
    save(store, 8, 9)
    assert list_kept(store) == [3, 6, 7, 8, 9]


def test_a_trainer_goes_on_while_old_checkpoints_are_removed(folder, monkeypatch):
    release, waits = threading.Event(), list[bool]()

    def wait_and_apply(store: Store, plan: RetentionPlan) -> DeletionResult:
        waits.append(release.wait(20))
        return apply_retention(store, plan)

    monkeypatch.setattr(retention, "apply_retention", wait_and_apply)
    with Saver(folder, KEYS.job, SMALL, retention=LAST) as saver:
        for step in (1, 2, 3, 4):
            begin(saver, step).result()
        assert list_kept(folder) == [1, 2, 3, 4]
        assert waits == []
        release.set()
    assert list_kept(folder) == [4]


def test_a_retention_keeps_a_checkpoint_that_is_saved_while_it_plans(folder, monkeypatch):
    release, planning = threading.Event(), threading.Event()

    def wait_and_plan(*arguments: Any, **options: Any) -> RetentionPlan:
        planning.set()
        assert release.wait(60)
        return plan_retention(*arguments, **options)

    save(folder, 100, 200, 300)
    monkeypatch.setattr(retention, "plan_retention", wait_and_plan)
    with Saver(folder, KEYS.job, SMALL, retention=LAST) as saver:
        begin(saver, 7).result()
        assert planning.wait(60)
        begin(saver, 8).result()
        release.set()
    assert list_kept(folder) == [8, 300]


def test_a_step_that_is_saved_again_during_its_removal_is_saved(folder, monkeypatch):
    begun, release, stored = threading.Event(), threading.Event(), threading.Event()
    order: list[str] = []

    def wait_and_apply(store: Store, plan: RetentionPlan) -> DeletionResult:
        begun.set()
        assert release.wait(60)
        done = apply_retention(store, plan)
        order.append(f"removed {plan.removed}")
        return done

    def commit(store: Store, made: Checkpoint) -> Commit[Checkpoint]:
        order.append(f"committed {made.step}")
        return commit_checkpoint(store, made)

    def hear(event: Event) -> None:
        if isinstance(event, PartStored):
            stored.set()

    save(folder, 1)
    monkeypatch.setattr(retention, "apply_retention", wait_and_apply)
    monkeypatch.setattr(saving, "commit_checkpoint", commit)
    with Saver(folder, KEYS.job, SMALL, retention=LAST, progress=hear) as saver:
        begin(saver, 2).result()
        assert begun.wait(60)
        stored.clear()
        again = begin(saver, 1)
        assert stored.wait(60)
        release.set()
        assert verify(folder, again.result()) == {}
    assert order == ["committed 2", "removed (1,)", "committed 1"]
    assert list_kept(folder) == [1, 2]


KILLED = """
import os, signal, sys
import torch
from millrace import deletion
from millrace.checkpoints import RetentionSettings, Saver
from millrace.checkpoints.progress_events import CheckpointSaved
from millrace.storage import open_store

url, boundary = sys.argv[1:]
delete_batch = deletion._delete_batch

def delete_and_die(store, planned):
    delete_batch(store, planned)
    os.kill(os.getpid(), signal.SIGKILL)

def die(event):
    if isinstance(event, CheckpointSaved) and "step_000000003" in event.key:
        os.kill(os.getpid(), signal.SIGKILL)

if boundary == "metadata":
    deletion._delete_batch = delete_and_die
progress = {"progress": die} if boundary == "commit" else {}
rules = RetentionSettings(last=2)
with Saver(open_store(url), "job", retention=rules, **progress) as saver:
    for step in (1, 2, 3):
        saver.save({"w": torch.full((1000,), float(step))}, step=step).result()
"""
"""A saver that is killed after a commit, or after the removal of the metadata of step 1."""


@pytest.mark.parametrize(("boundary", "left"), [("commit", [1, 2, 3]), ("metadata", [2, 3])])
def test_after_a_kill_the_next_saver_removes_what_was_left(folder, boundary, left):
    child = get_fork_server("millrace.checkpoints", "torch").start(KILLED, folder.url, boundary)
    with child:
        assert child.wait(120) == -signal.SIGKILL
    assert list_folders(folder) == [1, 2, 3]
    assert list_kept(folder) == left
    assert judge_checkpoints(open_folder(folder), KEYS.job, is_cleaned=False) == []
    save(folder, 4, retention=RetentionSettings(last=2, grace=timedelta(0)))
    assert list_kept(folder) == list_folders(folder) == [3, 4]
    assert judge_checkpoints(open_folder(folder), KEYS.job, is_cleaned=True) == []


def test_of_several_ranks_the_first_removes(folder, monkeypatch):
    stores = [open_store(folder.url) for _ in range(2)]
    planners: list[Store] = []

    def note_and_plan(store: Store, *arguments: Any, **options: Any) -> RetentionPlan:
        planners.append(store)
        return plan_retention(store, *arguments, **options)

    monkeypatch.setattr(retention, "plan_retention", note_and_plan)

    def run(rank: int) -> None:
        with Saver(
            stores[rank], KEYS.job, SMALL, ranks=Ranks(rank, 2, "a"), retention=LAST
        ) as saver:
            for step in (1, 2):
                state = {"w": torch.full((1000,), step)}
                saver.save(state, step=step, own={"rank": rank}).result()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    assert list_kept(folder) == [2]
    assert load(folder, KEYS.job, rank=1).own == {"rank": 1}
    assert set(planners) == {stores[0]}


def test_a_save_succeeds_if_nothing_may_be_deleted(rgw: RGW, request, caplog):
    spec = make_spec("rgw", request)
    whole = open_store(spec)
    writer = open_without(rgw, spec, "s3:DeleteObject", [make_full_key(whole, KEYS.job)])
    save(writer, 1, 2, retention=LAST)
    (said,) = caplog.messages
    assert "1 object of old checkpoints" in said
    assert KEYS.make_metadata_key(1) in said
    assert list_kept(whole) == [1, 2]
    save(whole, 3, retention=LAST)
    assert list_kept(whole) == list_folders(whole) == [3]


def test_a_save_succeeds_if_its_retention_fails(folder, monkeypatch, caplog):
    def fail(*_: object, **__: object) -> RetentionPlan:
        raise errors.UnavailableError("The store does not answer.")

    save(folder, 1)
    monkeypatch.setattr(retention, "plan_retention", fail)
    save(folder, 2, retention=LAST)
    assert len(caplog.messages) == 1
    assert "could not be removed: The store does not answer. The next save" in caplog.messages[0]
    assert list_kept(folder) == [1, 2]


def test_an_older_checkpoint_stays_while_the_newest_lacks_a_file(folder):
    def damage(event: Event) -> None:
        if isinstance(event, CheckpointSaved) and event.key == KEYS.make_metadata_key(3):
            part = read_checkpoint(folder, KEYS.job, 3).parts[0]
            delete(folder, [KEYS.make_part_key(3, part.digest)])

    save(folder, 1, 2, 3, retention=LAST, progress=damage)
    assert [one.step for one in iterate_checkpoints(folder, KEYS.job)] == [3, 2]
    assert verify(folder, read_checkpoint(folder, KEYS.job, 2)) == {}


def test_nothing_is_removed_while_a_checkpoint_cannot_be_read(folder, caplog):
    save(folder, 1, 2)
    put(folder, KEYS.make_metadata_key(1), b"{}")
    save(folder, 3, 4, retention=LAST)
    assert list_kept(folder) == [2, 3, 4]
    assert len(caplog.messages) == 2
    assert "was removed: another checkpoint cannot be read" in caplog.messages[0]


def test_pinned_checkpoints_and_files_that_others_need_stay(folder):
    settings = SMALL.model_copy(update={"refer": True})
    with Saver(folder, KEYS.job, settings, retention=LAST) as saver:
        begin(saver, 1).result()
        pin(folder, KEYS.job, 1, "the baseline")
        for step in (2, 3, 4):
            begin(saver, step).result()
    assert list_kept(folder) == [1, 4]
    assert {part.step for part in read_checkpoint(folder, KEYS.job, 4).parts} == {1, 4}


def test_a_checkpoint_stays_that_was_just_saved_below_later_steps(folder):
    save(folder, 100, 200, 300)
    save(folder, 7, retention=RetentionSettings(last=2))
    assert list_kept(folder) == [7, 200, 300]


@pytest.mark.parametrize("moment", ["upload", "commit"])
def test_another_saver_of_the_job_that_refers_to_removed_files_uploads_them(
    folder, monkeypatch, moment
):
    """Its base is removed while it uploads, or just before its commit."""
    save(folder, 1)
    removed: list[int] = []

    def remove_base() -> None:
        if not removed:
            removed.append(1)
            save(folder, 2, retention=LAST)
            assert list_kept(folder) == [2]

    def commit(store: Store, made: Checkpoint) -> Commit[Checkpoint]:
        if made.step == 3:
            remove_base()
        return commit_checkpoint(store, made)

    def hear(event: Event) -> None:
        if isinstance(event, PartStored) and not event.sent:
            remove_base()

    if moment == "commit":
        monkeypatch.setattr(saving, "commit_checkpoint", commit)
    settings = SMALL.model_copy(update={"refer": True, "uploads": 1})
    progress = hear if moment == "upload" else ignore_event
    with Saver(folder, KEYS.job, settings, progress=progress) as saver:
        begin(saver, 3).result()
    assert removed
    assert list_kept(folder) == [2, 3]
