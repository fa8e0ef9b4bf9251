"""Retention: what may go goes, and what somebody may need never does."""

import gc
import json
import os
import time
import tracemalloc
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace import deletion, errors, records
from millrace.checkpoints import (
    RetentionSettings,
    Saver,
    SaveSettings,
    StoreDestination,
    VerifyDepth,
    apply_retention,
    copy_checkpoint,
    find,
    find_newest_verified,
    load,
    pin,
    plan_retention,
    quarantine,
    read_checkpoint,
    retention,
    saving,
    unpin,
    verify,
)
from millrace.checkpoints.find import commit_checkpoint, iterate_checkpoints
from millrace.checkpoints.progress_events import PartStored
from millrace.cli import main
from millrace.deletion import PlannedObject
from millrace.keys.checkpoints import CheckpointKeys
from millrace.progress import Event
from millrace.records import Commit, commit_once
from millrace.schemas.checkpoint import Checkpoint, EpochRecord, Pin
from millrace.storage import Store, StoreSpec, create, delete, list_objects, open_store, put, read

KEYS = CheckpointKeys("job")
NOW = RetentionSettings(last=1, grace=timedelta(0))


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    url = tmp_path.as_uri() if request.param == "folder" else f"memory://{tmp_path.name}"
    return open_store(StoreSpec(url=url))


def save(store: Store, numbers: list[int], *, refer: bool = False) -> None:
    """A checkpoint for each step: the same embedding, and a head of its own."""
    with Saver(store, KEYS.job, SaveSettings(part_bytes=4096, refer=refer)) as saver:
        for step in numbers:
            state = {"embed": torch.arange(1000), "head": torch.full((1000,), step)}
            saver.save(state, step=step).result()


def kept(store: Store) -> list[int]:
    return sorted(checkpoint.step for checkpoint in iterate_checkpoints(store, KEYS.job))


def there(store: Store) -> list[int]:
    """The steps of which there is any object: a folder keeps its empty folders."""
    folders = {stat.key.removeprefix(KEYS.prefix).partition("/")[0] for stat in list_objects(store)}
    return sorted(step for name in folders if (step := KEYS.parse_folder(name)) is not None)


def test_the_last_and_each_of_so_many_stay(store):
    save(store, [1, 2, 3, 4, 5, 6, 7])
    plan = plan_retention(store, KEYS.job, RetentionSettings(last=2, every=3))
    assert plan.removed == (1, 2, 4, 5)
    assert plan.kept == {
        7: "the newest verified checkpoint",
        6: "one of the last 2",
        3: "every 3 steps",
    }
    assert kept(store) == [1, 2, 3, 4, 5, 6, 7]
    before = sum(stat.size for stat in list_objects(store))
    done = apply_retention(store, plan)
    assert kept(store) == [3, 6, 7]
    assert (
        done.deleted_bytes == plan.size == before - sum(stat.size for stat in list_objects(store))
    )
    assert not done.failures
    assert there(store) == [3, 6, 7]
    assert all(verify(store, found) == {} for found in iterate_checkpoints(store, KEYS.job))


def test_what_is_pinned_or_named_by_an_epoch_stays(store):
    save(store, [1, 2, 3, 4])
    pin(store, KEYS.job, 1, "the baseline")
    root = next(found.root for found in iterate_checkpoints(store, KEYS.job) if found.step == 2)
    commit_once(
        store, KEYS.make_epoch_key(0), EpochRecord(job=KEYS.job, epoch=0, step=2, root=root)
    )
    plan = plan_retention(store, KEYS.job, NOW)
    assert (plan.kept[1], plan.kept[2]) == ("pinned: the baseline", "epoch 0 names it")
    apply_retention(store, plan)
    assert kept(store) == [1, 2, 4]
    unpin(store, KEYS.job, 1)
    apply_retention(store, plan_retention(store, KEYS.job, NOW))
    assert kept(store) == [2, 4]
    with pytest.raises(errors.NotFoundError):
        pin(store, KEYS.job, 1, "too late")


def test_a_plan_holds_the_metadata_of_one_checkpoint(tmp_path):
    def measure_plan(folder: Path, count: int) -> int:
        store = open_store(StoreSpec(url=folder.as_uri()))
        with Saver(store, KEYS.job) as saver:
            for step in range(count):
                state = {str(n): torch.full((4,), step) for n in range(1000)}
                saver.save(state, step=step).result()
        gc.collect()
        tracemalloc.start()
        try:
            assert len(plan_retention(store, KEYS.job, NOW).removed) == count - 1
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    measure_plan(tmp_path / "imports", 2)
    assert measure_plan(tmp_path / "many", 16) < 2 * measure_plan(tmp_path / "few", 2)


def test_a_damaged_pin_stops_no_plan_and_pins(store):
    save(store, [1, 2, 3, 4])
    put(store, KEYS.make_pin_key(1), b"nonsense")
    put(store, f"{KEYS.epochs}notes.txt", b"no record of Millrace's")
    plan = plan_retention(store, KEYS.job, NOW)
    assert plan.kept[1] == "it has a pin that cannot be read"
    assert plan.removed == (2, 3)


@pytest.mark.parametrize("kind", ["damaged", "of a later version"])
def test_an_epoch_that_cannot_be_read_keeps_everything(store, kind):
    save(store, [1, 2, 3])
    root = read_checkpoint(store, KEYS.job, 1).root
    key = KEYS.make_epoch_key(0)
    commit_once(store, key, EpochRecord(job=KEYS.job, epoch=0, step=1, root=root))
    assert plan_retention(store, KEYS.job, NOW).removed == (2,)
    version = b'"version":%d' % EpochRecord.record_version
    later = read(store, key).replace(version, b'"version":99')
    put(store, key, later if kind == "of a later version" else b"nonsense")
    plan = plan_retention(store, KEYS.job, NOW)
    assert (plan.removed, plan.removals) == ((), ())
    assert plan.kept[1].startswith("the end of epoch 0 cannot be read")
    delete(store, [key])
    assert plan_retention(store, KEYS.job, NOW).removed == (1, 2)


def test_the_last_that_is_verified_stays_whatever_the_rules_say(store):
    save(store, [1, 2, 3])
    for found in iterate_checkpoints(store, KEYS.job):
        if found.step > 1:
            put(store, KEYS.make_part_key(found.step, found.parts[0].digest), b"damaged")
    plan = plan_retention(store, KEYS.job, NOW)
    assert set(plan.kept) == {1, 2, 3}
    assert plan.removed == ()
    assert apply_retention(store, plan).deleted_objects == 0
    found = find_newest_verified(store, KEYS.job)
    assert found is not None
    assert found.step == 1


def test_if_none_is_verified_none_goes(store):
    save(store, [1, 2, 3])
    for found in iterate_checkpoints(store, KEYS.job):
        put(store, KEYS.make_part_key(found.step, found.parts[0].digest), b"damaged")
    assert plan_retention(store, KEYS.job, NOW).removals == ()


def test_a_step_that_is_removed_while_it_is_pinned_is_not_called_pinned(store, monkeypatch):
    save(store, [1, 2])

    def remove_and_commit(where: Store, key: str, record: Pin) -> Commit[Pin]:
        apply_retention(store, plan_retention(store, KEYS.job, NOW))
        return commit_once(where, key, record)

    monkeypatch.setattr(retention, "commit_once", remove_and_commit)
    with pytest.raises(errors.NotFoundError, match="was removed before it was pinned"):
        pin(store, KEYS.job, 1, "the baseline")
    assert there(store) == [2]


def test_files_that_a_kept_one_refers_to_stay(store):
    save(store, [1, 2, 3], refer=True)
    plan = plan_retention(store, KEYS.job, NOW)
    apply_retention(store, plan)
    assert kept(store) == [3]
    assert there(store) == [1, 3]
    assert torch.equal(load(store, KEYS.job).state["embed"], torch.arange(1000))
    save(store, [4])  # which refers to nothing
    apply_retention(store, plan_retention(store, KEYS.job, NOW))
    assert there(store) == [4]


def test_what_was_saved_since_the_plan_is_looked_at_again(store):
    save(store, [1, 2])
    plan = plan_retention(store, KEYS.job, NOW)
    assert plan.removed == (1,)
    pin(store, KEYS.job, 1, "just now")
    done = apply_retention(store, plan)
    assert done.deleted_objects == 0
    assert done.skipped == {"a rule or a checkpoint needs it by now": len(plan.removals)}
    assert kept(store) == [1, 2]


def test_files_stay_whose_metadata_was_written_since_the_plan(store):
    save(store, [1, 2])
    plan = plan_retention(store, KEYS.job, NOW)
    put(store, KEYS.make_metadata_key(1), read(store, KEYS.make_metadata_key(1)))
    done = apply_retention(store, plan)
    assert (done.deleted_objects, sum(done.skipped.values())) == (0, len(plan.removals))
    assert kept(store) == [1, 2]
    assert all(verify(store, found) == {} for found in iterate_checkpoints(store, KEYS.job))


def test_files_of_a_step_that_is_saved_again_during_the_removal_stay(store, monkeypatch):
    """The step is saved again after its metadata is deleted, and before its files are."""
    save(store, [1, 2, 3])
    plan = plan_retention(store, KEYS.job, NOW)
    delete_batch, batches = deletion._delete_batch, []

    def delete_and_save(store: Store, planned: list[PlannedObject]) -> object:
        done = delete_batch(store, planned)
        batches.append(sorted(one.key for one in planned))
        if len(batches) == 1:
            save(store, [1])
        return done

    monkeypatch.setattr(deletion, "_delete_batch", delete_and_save)
    done = apply_retention(store, plan)
    assert batches[0] == [KEYS.make_metadata_key(step) for step in (1, 2)]
    assert done.skipped == {"a rule or a checkpoint needs it by now": 5}
    assert kept(store) == there(store) == [1, 3]
    assert all(verify(store, found) == {} for found in iterate_checkpoints(store, KEYS.job))


def test_a_step_that_is_removed_during_its_commit_is_committed(store, monkeypatch):
    save(store, [1, 2])
    there_were: list[str] = []

    def create_and_remove(where: Store, key: str, body: bytes) -> None:
        try:
            create(where, key, body)
        except errors.ExistsError:
            there_were.append(key)
            apply_retention(store, plan_retention(store, KEYS.job, NOW))
            raise

    monkeypatch.setattr(records, "create", create_and_remove)
    save(store, [1])
    assert there_were == [KEYS.make_metadata_key(1)]
    assert kept(store) == [1, 2]
    assert all(verify(store, found) == {} for found in iterate_checkpoints(store, KEYS.job))


def test_files_that_no_checkpoint_names_go_when_they_are_old(store):
    save(store, [1])
    create(
        store,
        KEYS.make_part_key(2, "blake3:" + "0" * 64),
        b"of a saver that was killed, or is still at it",
    )
    young = plan_retention(store, KEYS.job, RetentionSettings(grace=timedelta(hours=1)))
    assert young.removals == ()
    old = plan_retention(store, KEYS.job, RetentionSettings(grace=timedelta(days=-1)))
    assert [removal.key for removal in old.removals] == [
        KEYS.make_part_key(2, "blake3:" + "0" * 64)
    ]
    apply_retention(store, old)
    assert there(store) == [1]


def make_old(folder: Path, prefix: str) -> None:
    """Make the files below a prefix three days old."""
    for file in (folder / prefix).rglob("*"):
        if file.is_file():
            os.utime(file, (time.time() - 3 * 86400,) * 2)


def test_old_files_of_a_step_that_is_being_saved_stay(tmp_path):
    store = open_store(StoreSpec(url=tmp_path.as_uri()))
    save(store, [1, 2])
    delete(store, [KEYS.make_metadata_key(2)])
    make_old(tmp_path, KEYS.make_folder_prefix(2))
    assert len(plan_retention(store, KEYS.job).removals) == 5
    put(store, KEYS.make_part_key(2, "blake3:" + "0" * 64), b"of a saver that is at it")
    assert plan_retention(store, KEYS.job).removals == ()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_file_that_retention_deletes_after_its_reuse_is_uploaded_again(tmp_path, in_place):
    store = open_store(StoreSpec(url=tmp_path.as_uri()))
    save(store, [1, 2])
    delete(store, [KEYS.make_metadata_key(2)])
    make_old(tmp_path, KEYS.make_folder_prefix(2))
    sent: list[int] = []

    def retain(event: Event) -> None:
        if isinstance(event, PartStored):
            sent.append(event.sent)
            if len(sent) == 5:
                plan = plan_retention(store, KEYS.job)
                assert apply_retention(store, plan).deleted_objects == 5

    state = {"embed": torch.arange(1000), "head": torch.full((1000,), 2)}
    with Saver(store, KEYS.job, SaveSettings(part_bytes=4096), progress=retain) as saver:
        saved = saver.save(state, step=2, in_place=in_place).result()
    assert sent == [0] * 5
    assert verify(store, saved) == {}
    assert load(store, KEYS.job).checkpoint.step == 2


def test_a_file_that_is_deleted_after_its_upload_is_uploaded_again(store):
    """A suspended saver continues after retention has deleted its files as those of nobody."""
    sent: list[int] = []

    def retain(event: Event) -> None:
        if isinstance(event, PartStored):
            sent.append(event.sent)
            if len(sent) == 3:
                rules = RetentionSettings(grace=timedelta(days=-1))
                plan = plan_retention(store, KEYS.job, rules)
                assert apply_retention(store, plan).deleted_objects == 3

    state = {"embed": torch.arange(1000), "head": torch.full((1000,), 2)}
    settings = SaveSettings(part_bytes=4096, uploads=1)
    with Saver(store, KEYS.job, settings, progress=retain) as saver:
        saved = saver.save(state, step=2).result()
    assert all(sent)
    assert verify(store, saved) == {}


def test_a_file_that_a_reader_moves_away_after_it_was_referred_to_is_uploaded_again(store):
    save(store, [1])
    damaged = read_checkpoint(store, KEYS.job, 1).parts[0]
    referred: list[int] = []

    def damage(event: Event) -> None:
        if isinstance(event, PartStored) and event.digest == damaged.digest:
            referred.append(event.sent)
            put(store, KEYS.make_part_key(1, damaged.digest), b"damaged")
            assert find_newest_verified(store, KEYS.job) is None

    settings = SaveSettings(part_bytes=4096, uploads=1, refer=True)
    with Saver(store, KEYS.job, settings, progress=damage) as saver:
        state = {"embed": torch.arange(1000), "head": torch.full((1000,), 2)}
        saved = saver.save(state, step=2).result()
    assert referred == [0]
    assert {part.step for part in saved.parts} == {1, 2}
    assert verify(store, saved) == {}


def test_a_file_that_is_deleted_during_the_commit_is_uploaded_again(store, monkeypatch):
    """A retention is suspended between its last look and its deletion."""

    def commit(store: Store, made: Checkpoint) -> Commit[Checkpoint]:
        delete(store, [KEYS.make_part_key(1, part.digest) for part in made.parts])
        return commit_checkpoint(store, made)

    monkeypatch.setattr(saving, "commit_checkpoint", commit)
    save(store, [1])
    assert verify(store, read_checkpoint(store, KEYS.job, 1)) == {}


@pytest.mark.parametrize("saved_by", ["saver", "copy"])
@pytest.mark.parametrize("kind", ["damaged", "missing"])
def test_a_bad_file_of_another_step_is_replaced_when_its_step_is_saved_again(
    store, tmp_path, saved_by, kind
):
    save(store, [1])
    save(store, [2], refer=True)
    first = read_checkpoint(store, KEYS.job, 2)
    part = next(part for part in first.parts if part.step == 1)
    key = KEYS.make_part_key(1, part.digest)
    whole = read(store, key)
    if kind == "damaged":
        put(store, key, b"x" * part.size)
    else:
        delete(store, [key])
    if saved_by == "saver":
        save(store, [2])
    else:
        origin = StoreDestination(open_store((tmp_path / "origin").as_uri()))
        save(origin.store, [2])
        found = origin.read_checkpoint(KEYS.job, 2)
        assert copy_checkpoint(origin, found, StoreDestination(store), KEYS.job) == first
    assert read_checkpoint(store, KEYS.job, 2) == first
    assert read(store, key) == whole
    assert not verify(store, first)


def test_a_file_that_is_deleted_during_the_commit_of_a_copy_is_uploaded_again(
    store, tmp_path, monkeypatch
):
    origin = StoreDestination(open_store((tmp_path / "origin").as_uri()))
    save(origin.store, [1])

    def commit(store: Store, made: Checkpoint) -> Commit[Checkpoint]:
        delete(store, [KEYS.make_part_key(1, part.digest) for part in made.parts])
        return commit_checkpoint(store, made)

    monkeypatch.setattr("millrace.checkpoints.find.commit_checkpoint", commit)
    found = origin.read_checkpoint(KEYS.job, 1)
    copied = copy_checkpoint(origin, found, StoreDestination(store), KEYS.job)
    assert verify(store, copied) == {}


def test_a_deleted_file_whose_state_has_changed_since_is_an_error(tmp_path):
    store = open_store(StoreSpec(url=tmp_path.as_uri()))
    state = {"head": torch.full((1000,), 2)}
    with Saver(store, KEYS.job) as saver:
        first = saver.save(state, step=2).result()
    delete(store, [KEYS.make_metadata_key(2)])

    def lose(event: Event) -> None:
        if isinstance(event, PartStored) and event.digest == first.parts[-1].digest:
            delete(store, [KEYS.make_part_key(2, part.digest) for part in first.parts])
            state["head"].add_(1)

    with Saver(store, KEYS.job, SaveSettings(uploads=1), progress=lose) as saver:
        pending = saver.save(state, step=2, in_place=True)
        with pytest.raises(errors.ChangedError, match="Save the step again"):
            pending.result()
    assert kept(store) == []


def test_metadata_that_cannot_be_read_keeps_everything(store):
    save(store, [1, 2, 3])
    put(store, KEYS.make_metadata_key(2), b"{}")
    plan = plan_retention(store, KEYS.job, NOW)
    assert plan.removals == ()
    assert "cannot be read" in plan.kept[2]
    assert "refer to its files" in plan.kept[1]


def test_the_commands_list_verify_and_retain(tmp_path):
    store = open_store(StoreSpec(url=tmp_path.as_uri()))
    save(store, [1, 2, 3])

    def millrace(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(main, [*words[:2], tmp_path.as_uri(), *words[2:]])
        return done.exit_code, done.output

    code, said = millrace("checkpoint", "list", "job")
    assert code == 0
    assert said.count("all files there") == 3
    code, said = millrace("checkpoint", "retain", "job", "--last", "1", "--dry-run")
    assert code == 0
    assert "step 3 stays: the newest verified checkpoint" in said
    assert "step 1 goes" in said
    assert "Would delete" in said
    assert kept(store) == [1, 2, 3]
    code, said = millrace("checkpoint", "retain", "job", "--last", "2", "--yes")
    assert code == 0
    assert "Deleted 6 objects" in said  # the metadata, four files of tensors, the skeleton
    assert kept(store) == [2, 3]
    part = next(iterate_checkpoints(store, "job")).parts[0]
    put(store, KEYS.make_part_key(3, part.digest), b"x" * part.size)
    assert millrace("checkpoint", "list", "job")[0] == 0
    code, said = millrace("checkpoint", "verify", "job")
    assert code == 1
    assert "damaged" in said
    assert "the digest differs" in said
    for words in (("list", "other"), ("retain", "other", "--yes")):
        code, said = millrace("checkpoint", *words)
        assert code == 1
        assert "has no checkpoint" in said


@pytest.mark.parametrize("command", ["list", "verify"])
@pytest.mark.parametrize("by", ["retention", "a reader"])
def test_the_commands_call_no_checkpoint_damaged_that_retention_removes_meanwhile(
    tmp_path, monkeypatch, command, by
):
    store = open_store(StoreSpec(url=tmp_path.as_uri()))
    save(store, [1, 2])

    def remove_and_verify(where: Store, found: Checkpoint, **options: VerifyDepth) -> object:
        if found.step == 1 and by == "retention":
            apply_retention(store, plan_retention(store, KEYS.job, NOW))
        if found.step == 1 and by == "a reader":
            put(store, KEYS.make_part_key(1, found.parts[0].digest), b"damaged")
            assert quarantine(store, found, verify(store, found))
        return verify(where, found, **options)

    monkeypatch.setattr(find, "verify", remove_and_verify)
    done = CliRunner().invoke(main, ["checkpoint", command, tmp_path.as_uri(), "job", "--json"])
    shown = json.loads(done.stdout)
    states = {row["step"]: row["state"] for row in shown}
    if by == "retention":
        assert (done.exit_code, states.keys()) == (0, {2}), done.output
    else:
        assert (done.exit_code, states[1]) == (1, "damaged"), done.output


@settings(max_examples=25, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 40), unique=True, min_size=1, max_size=6),
    last=st.integers(1, 4),
    every=st.one_of(st.none(), st.integers(1, 9)),
    refer=st.booleans(),
    broken=st.sets(st.integers(0, 5), max_size=3),
)
def test_whatever_the_rules_what_is_kept_can_be_loaded(numbers, last, every, refer, broken):
    store = open_store(StoreSpec(url=f"memory://{torch.randint(1 << 60, ()).item()}"))
    save(store, sorted(numbers), refer=refer)
    before = {found.step: found for found in iterate_checkpoints(store, KEYS.job)}
    for place in broken:
        if place < len(numbers):
            part = before[sorted(numbers)[place]].parts[-1]
            put(store, KEYS.make_part_key(part.step, part.digest), b"damaged")
    intact = [step for step, found in before.items() if not verify(store, found)]
    plan = plan_retention(store, KEYS.job, RetentionSettings(last=last, every=every))
    apply_retention(store, plan)
    after = {found.step: found for found in iterate_checkpoints(store, KEYS.job)}
    assert set(after) == set(plan.kept)
    assert all(step in intact for step in after if not verify(store, after[step]))
    assert all(not verify(store, after[step]) for step in intact if step in after)
    if intact:
        assert max(intact) in after
