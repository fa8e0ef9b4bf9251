"""Execution of plans on real stores: deleted objects, and objects that stay."""

import json
import os
import re
import secrets
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from pydantic import ValidationError

from millrace import deletion, errors
from millrace.campaigns import (
    Training,
    TrainingOptions,
    commit_training,
    hold_campaign_lease,
)
from millrace.checkpoints import Saver, SaveSettings, read_checkpoint, verify
from millrace.cleanup import (
    CleanupBucketPreset,
    CleanupKind,
    CleanupSettings,
    CleanVersionsPreset,
    DeleteGatherPreset,
    Rule,
    S3ManagerPreset,
    WorkerJunk,
    execute,
    make_plan,
    plan_wipe,
    read_plan,
)
from millrace.cleanup.plans import open_plan
from millrace.cli import main
from millrace.deletion import ObjectsDeleted
from millrace.keys.campaigns import CampaignKeys
from millrace.keys.cleanup import make_cleaning_outcome_key
from millrace.keys.datasets import CommitName, DatasetKeys
from millrace.keys.gradients import ChainKeys
from millrace.keys.leases import LeaseKeys
from millrace.progress import Event
from millrace.storage import (
    Right,
    StoreSpec,
    delete,
    list_objects,
    open_scoped_store,
    open_store,
    put,
    read,
)
from millrace.storage.clients import make_boto3_client, make_full_key
from millrace.testing.credentials import make_credentials
from millrace.testing.key import Key
from millrace.testing.process import find_free_ports
from tasks.cleaning import describe_cleaning, describe_plan
from tests.stores import make_spec
from tests.support.cleanup.judge import parse_key
from tests.support.cleanup.material import BucketBuilder, compute_hex_digest

NOW = timedelta(0)
ALL = Rule(
    kinds=tuple(set(CleanupKind) - {CleanupKind.OTHER, CleanupKind.TEMPORARY}), older_than=NOW
)
PRESETS = [
    CleanupBucketPreset(older_than=NOW, keep_checkpoints=1),
    DeleteGatherPreset(version="0.2.1"),
    DeleteGatherPreset(version=">=0"),
    CleanVersionsPreset(current_version="0.2.11"),
    S3ManagerPreset(older_than=timedelta(0)),
    S3ManagerPreset(older_than=timedelta(0), suffix=".safetensors"),
    S3ManagerPreset(older_than=timedelta(0), prefix="run/"),
]
CHANGED = "it was written since the plan was made"
BEFORE = "objects that have to be deleted before it are still there"


@pytest.fixture(params=["local", "memory", "rgw", "r2", "gcs"])
def place(request: pytest.FixtureRequest) -> BucketBuilder:
    return BucketBuilder(open_store(make_spec(request.param, request)))


@pytest.fixture
def folder(tmp_path: Path) -> BucketBuilder:
    return BucketBuilder(open_store((tmp_path / "bucket").as_uri()))


def config_of(place: BucketBuilder, *some: Any, **more: Any) -> CleanupSettings:
    return CleanupSettings(store=place.store.spec, rules=some or (ALL,), **more)


def keys_of(place: BucketBuilder) -> set[str]:
    return {stat.key for stat in list_objects(place.store) if not stat.key.startswith("_clean/")}


def planned(config: CleanupSettings) -> set[str]:
    with open_plan(open_store(config.store), make_plan(config).name) as (_, entries):
        return {entry.stat.key for entry in entries}


def denied(rgw: Any, bucket: str, *keys: str) -> None:
    """Nobody may delete these objects of a bucket."""
    deny = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": ["s3:DeleteObject"],
        "Resource": [f"arn:aws:s3:::{bucket}/below/here/{key}" for key in keys],
    }
    policy = json.dumps({"Version": "2012-10-17", "Statement": [deny]})
    rgw.make_client(rgw.full).put_bucket_policy(Bucket=bucket, Policy=policy)


def test_what_was_written_since_the_plan_survives_on_every_store(place):
    keys = [place.put_gradient("run", "w1", window, "1") for window in range(5)]
    plan = make_plan(config_of(place))
    assert plan.objects == 5
    put(place.store, keys[1], b"others..")  # as many bytes
    put(place.store, keys[2], b"more bytes than before")
    assert not delete(place.store, [keys[3]])
    since = place.put_gradient("run", "w1", 7, "1")
    done = execute(config_of(place), plan.name)
    assert (done.deleted_objects, done.missing, done.skipped) == (2, 1, {CHANGED: 2})
    assert keys_of(place) == {keys[1], keys[2], since}
    outcome = json.loads(read(place.store, make_cleaning_outcome_key(plan.name)))
    assert (outcome["objects"], outcome["missing"], outcome["skipped"]) == (
        {"0": 2},
        1,
        {CHANGED: 2},
    )


@pytest.mark.parametrize("preset", PRESETS, ids=lambda one: one.preset)
def test_a_live_run_survives_every_preset_and_so_does_what_only_looks_like_ours(folder, preset):
    for scope, name in (
        (ChainKeys("run", "0.2.1").job, "aggregator"),
        ("job", "members/m1"),
        ("words", "train-00000"),
    ):
        folder.put_lease(scope, name)
    for window in range(7, 11):  # not merged yet
        folder.put_gradient("run", "w1", window, "0.2.1", 100)
    folder.put_start_window("run", "w1", 7, "0.2.1", 100)
    folder.put_chain("run", "0.2.1", 6, {1: 100, 4: 100}, 100)
    for step in (1, 2, 3):
        folder.put_checkpoint("job", step, [b"%d" % step], hours=100)
    folder.put(f"job/checkpoints/step_000000001/parts/{'a' * 64}.safetensors", hours=100)
    folder.put_dataset("words", 2, is_complete=False, orphans=1, hours=100)
    for key in (
        "w1/gradient-000000001-w1-v0.2.1.safetensors",
        "gradient-000000001-w1-v0.2.1.safetensors",
        "run/w1/gradient-000000001-w2-v0.2.1.safetensors",
        "run/w1/gradient-1-w1-v0.2.1.safetensors",
        f"gathers/0.2.1/000000001-{'a' * 64}.safetensors",
        "gathers/0.2.1/chain/000000001.json",
        "checkpoints/step_000000001/metadata.json",
        f"checkpoints/step_000000001/parts/{'a' * 64}.safetensors",
        "shards/webdataset/train/train-00000-000000.tar",
        "mine/shards/webdataset/train/train-00000-000000.tar",
        "manifest.json",
        "plan.json",
        "mine/plan.json",
        "run/notes.txt",
        "run/v0.2.1/model.safetensors",
        "run/w1/notes.txt",
    ):
        folder.put(key, hours=100)
    before = keys_of(folder)
    over = {folder.put_gradient("run", "w1", window, "0.2.10", 100) for window in range(4)}
    plan = make_plan(config_of(folder, preset))
    done = execute(config_of(folder, preset), plan.name)
    assert not done.failures
    assert keys_of(folder) - over == before
    assert (keys_of(folder) == before) is not isinstance(preset, DeleteGatherPreset)


def test_a_run_that_is_live_in_another_bucket_is_so_here(folder, tmp_path):
    beside = BucketBuilder(open_store((tmp_path / "aggregator").as_uri()))
    mine = folder.put_gradient("run", "w1", 0, "1")
    other = folder.put_gradient("run", "w1", 0, "2")
    beside.put_lease(ChainKeys("run", "1").job, "aggregator")
    assert planned(config_of(folder, related_stores=(beside.store.spec,))) == {other}
    assert planned(config_of(folder)) == {other, mine}


def test_a_lease_that_cannot_be_read_is_not_taken_for_none(folder):
    folder.put_gradient("run", "w1", 0, "1")
    (port,) = find_free_ports(1)
    dead = StoreSpec(
        url="s3://none",
        endpoint=f"http://127.0.0.1:{port}",
        credentials=make_credentials(Key("a", "b")),
        retry_timeout=timedelta(seconds=0.5),
    )
    with pytest.raises(errors.UnavailableError):
        make_plan(config_of(folder, related_stores=(dead,)))
    folder.put("run/lease/somebody/000000.json", b"not a record")
    assert make_plan(config_of(folder)).objects == 0


def test_a_run_that_has_come_alive_since_the_plan_stays(place):
    keys = {place.put_gradient("run", "w1", window, "1") for window in range(3)}
    plan = make_plan(config_of(place))
    assert plan.objects == 3
    place.put_lease(ChainKeys("run", "1").job, "aggregator")
    done = execute(config_of(place), plan.name)
    assert done.deleted_objects == 0
    assert keys < keys_of(place)
    assert list(done.skipped) == ["run/gathers/1 is worked on by elsewhere (process 1)"]


def test_a_checkpoint_that_is_needed_since_the_plan_stays_whole(place):
    for step in (1, 2, 3):
        homes = {b"same": 1} if step > 1 else {}
        place.put_checkpoint("job", step, [b"%d" % step, b"same"], homes=homes)
    before = keys_of(place)
    plan = make_plan(config_of(place))
    assert plan.objects == 4  # the metadata and a file of each of two
    place.put_epoch("job", 0, 2)
    done = execute(config_of(place), plan.name)
    assert done.skipped == {"a checkpoint or a run needs it by now": 1, BEFORE: 2}
    assert before - keys_of(place) == {"job/checkpoints/step_000000001/metadata.json"}
    done = execute(config_of(place), make_plan(config_of(place)).name)
    assert done.deleted_objects == 1  # the file that only the first had
    kept = {key for key in before if "step_000000002" in key or "step_000000003" in key}
    same = next(key for key in before if compute_hex_digest(b"same") in key)
    assert keys_of(place) == {*kept, same, "job/epochs/000000.json"}


def test_a_new_checkpoint_that_names_an_old_file_keeps_it(place):
    for step in (1, 2):
        place.put_checkpoint("job", step, [b"%d" % step])
    stray = place.put(
        f"job/checkpoints/step_000000001/parts/{compute_hex_digest(b'new')}.safetensors", b"new"
    )
    rule = Rule(kinds=(CleanupKind.CHECKPOINT_ORPHANS,), older_than=NOW)
    plan = make_plan(config_of(place, rule))
    assert plan.objects == 1
    whole = place.put_checkpoint("job", 3, [b"new"], homes={b"new": 1}, missing=0)
    assert whole is None
    done = execute(config_of(place, rule), plan.name)
    assert (done.deleted_objects, done.skipped) == (0, {"a checkpoint or a run needs it by now": 1})
    assert stray in keys_of(place)


def test_files_of_a_step_that_is_saved_again_between_two_batches_stay(folder, monkeypatch):
    monkeypatch.setattr(deletion, "_BATCH", 2)
    monkeypatch.setattr(deletion, "_MAX_BATCHES", 1)

    def save(step: int) -> None:
        with Saver(folder.store, "job", SaveSettings(part_bytes=1024)) as saver:
            saver.save({"w": torch.full((1000,), step)}, step=step).result()

    def save_again(event: Event) -> None:
        assert isinstance(event, ObjectsDeleted)
        if event.objects == 3:  # the metadata, and two files
            save(1)

    save(1)
    save(2)
    rule = Rule(kinds=(CleanupKind.CHECKPOINTS,), older_than=NOW)
    plan = make_plan(config_of(folder, rule))
    done = execute(config_of(folder, rule), plan.name, progress=save_again)
    assert verify(folder.store, read_checkpoint(folder.store, "job", 1)) == {}
    assert (done.deleted_objects, sum(done.skipped.values())) == (3, plan.objects - 3)


def test_a_dataset_goes_whole_its_manifest_first_and_its_plan_last(place):
    place.put_dataset("old", 3)
    place.put_dataset("new", 2)
    rule = Rule(kinds=(CleanupKind.DATASETS,), name="old", older_than=NOW)
    config = config_of(place, rule)
    with open_plan(place.store, make_plan(config).name) as (_, entries):
        order = [entry.stat.key.removeprefix("old/") for entry in entries]
    assert order[0] == "manifest.json"
    assert order[-1] == "plan.json"
    assert [key.partition("/")[0] for key in order[1:-1]] == ["commits"] * 3 + ["shards"] * 3
    left = {key for key in keys_of(place) if key.startswith("new/")}
    assert execute(config, make_plan(config).name).deleted_objects == 8
    assert keys_of(place) == left


def test_a_key_that_cannot_be_deleted_is_said_and_the_others_go(rgw, bucket, request):
    place = BucketBuilder(open_store(make_spec("rgw", request)))
    keys = [place.put_gradient("run", "w1", window, "1") for window in range(5)]
    place.put_checkpoint("job", 1, [b"1"])
    place.put_checkpoint("job", 2, [b"2"])
    metadata = "job/checkpoints/step_000000001/metadata.json"
    denied(rgw, bucket, keys[2], metadata)
    plan = make_plan(config_of(place))
    done = execute(config_of(place), plan.name)
    assert {failure.key for failure in done.failures} == {keys[2], metadata}
    assert all("refuses" in failure.reason for failure in done.failures)
    assert done.deleted_objects == 4
    assert done.skipped == {BEFORE: 1}  # the file of the checkpoint whose metadata is there
    rgw.make_client(rgw.full).delete_bucket_policy(Bucket=bucket)
    again = execute(config_of(place), plan.name)
    assert (again.deleted_objects, again.missing, again.failures) == (3, 4, ())


def test_a_store_that_takes_no_deletes_of_many_is_cleaned_too(rgw, bucket):
    key = StoreSpec(
        url=f"s3://{bucket}", endpoint=rgw.endpoint, credentials=make_credentials(rgw.full)
    )
    role = rgw.create_role(f"role-{secrets.token_hex(4)}")
    ttl = timedelta(minutes=15)
    # A session's policy makes RGW refuse DeleteObjects.
    mine = open_scoped_store(open_store(key), "mine/", ttl, access=Right.WRITE, role_arn=role).spec
    place = BucketBuilder(open_store(mine.model_copy(update={"url": f"s3://{bucket}/mine"})))
    for window in range(12):
        place.put_gradient("run", "w1", window, "1")
    done = execute(config_of(place), make_plan(config_of(place)).name)
    assert (done.deleted_objects, done.failures) == (12, ())
    assert not keys_of(place)


def test_credentials_for_the_folder_of_a_job_see_its_lease_and_take_no_checkpoint(rgw, bucket):
    role = rgw.create_role(f"role-{secrets.token_hex(4)}")
    owner = StoreSpec(
        url=f"s3://{bucket}", endpoint=rgw.endpoint, credentials=make_credentials(rgw.full)
    )
    place = BucketBuilder(open_store(owner))
    place.put_checkpoint("team/my-job", 1, [b"weights"])
    place.put_pin("team/my-job", 1)
    ttl = timedelta(minutes=15)
    scoped = open_scoped_store(
        place.store, "team/my-job/", ttl, access=Right.WRITE, role_arn=role
    ).spec
    job = BucketBuilder(open_store(scoped.model_copy(update={"url": f"s3://{bucket}/team/my-job"})))
    mine = job.put("notes.txt")
    config = config_of(job, Rule(kinds=(CleanupKind.OTHER,), match="*", older_than=NOW))
    assert planned(config) == {mine}
    place.put_lease("team/my-job", "members/a")
    assert not planned(config)
    with pytest.raises(errors.HeldError, match="my-job is worked on by elsewhere"):
        plan_wipe(job.store.spec)


@pytest.mark.soak
def test_what_cannot_be_deleted_at_all_is_not_tried_for_ever(rgw, bucket, request):
    with ThreadPoolExecutor(16) as pool:
        place = BucketBuilder(open_store(make_spec("rgw", request)), pool)
        for window in range(1500):
            place.put_gradient("run", "w1", window, "1")
        place.wait_for_writes()
    denied(rgw, bucket, "run/*")
    plan = make_plan(config_of(place))
    done = execute(config_of(place), plan.name)
    assert done.has_given_up
    assert done.deleted_objects == 0
    assert len(keys_of(place)) == 1500


def test_gathers_since_the_newest_good_checkpoint_stay(folder):
    folder.put_chain("run", "1", 6, {2: 0, 4: 0})
    gone = planned(config_of(folder, DeleteGatherPreset(version="1")))
    assert sorted(parse_key(key).number for key in gone) == [1, 1, 2, 2, 3, 3, 4]
    job = ChainKeys("run", "1").job
    weights = next(key for key in keys_of(folder) if f"{job}/checkpoints/step_000000004/p" in key)
    folder.put(weights, b"damaged")
    gone = planned(config_of(folder, DeleteGatherPreset(version="1")))
    assert sorted(parse_key(key).number for key in gone) == [1, 1, 2]


def test_the_execution_of_what_is_no_plan_deletes_nothing(folder, tmp_path):
    keys = {folder.put_gradient("run", "w1", window, "1") for window in range(3)}
    config = config_of(folder)
    with pytest.raises(errors.NotFoundError):
        execute(config, "none")
    plan = make_plan(config)
    other = BucketBuilder(open_store((tmp_path / "other").as_uri()))
    put(other.store, plan.key, read(folder.store, plan.key))
    with pytest.raises(errors.ConfigurationError, match="was copied here"):
        execute(config_of(other), plan.name)
    whole = read(folder.store, plan.key)
    for body in (b"", b"hello\n", b"{}"):
        put(folder.store, plan.key, body)
        with pytest.raises(errors.CorruptError, match="is no plan"):
            execute(config, plan.name)
    wiping = plan_wipe(folder.store.spec)
    with pytest.raises(errors.ConfigurationError, match="asks for its name"):
        execute(config, wiping.name)
    assert keys == keys_of(folder)
    put(folder.store, plan.key, b"".join(whole.splitlines(keepends=True)[:-2]))
    with pytest.raises(errors.CorruptError, match="has no end"):
        execute(config, plan.name)


def test_probes_and_old_plans_go_and_a_young_one_stays(folder):
    nonce = "0123456789abcdef"
    names = (
        f"_probe-{nonce}",
        f"run/_audit-{nonce}-put",
        f"job/lease/clock/{nonce}",
        "_clean/20260101T000000-01234567/plan.jsonl",
        "_machines/gone/000000/log/000000.txt",
    )
    old = {folder.put(key, hours=60) for key in names}
    folder.put(f"_probe-{nonce[::-1]}", hours=1)
    folder.put_lease("_rentals/fleet", "owner")
    folder.put("_machines/fleet/000000/beat.json", hours=60)
    for key in (
        "_audit-2024-report.pdf",
        "mine/_probe-1.csv",
        "_clean/train/part-0.parquet",
        "cam/lease/clock/photo.jpg",
        "a/shards/checkpoints/step_000001000/model.bin",
    ):
        folder.put(key, hours=60)
    assert planned(config_of(folder, Rule(kinds=(CleanupKind.TEMPORARY,)))) == old


def test_the_command_shows_the_very_plan_that_it_executes(folder, tmp_path):
    for window in range(5):
        folder.put_gradient("run", "w1", window, "0.2.1", 100)
    file = tmp_path / "clean.yaml"
    file.write_text(
        f"store: {{url: '{folder.store.url}'}}\npins: [runs/paper]\n"
        "rules:\n  - {kinds: [gradients], older_than: 2d, keep_last: 1}\n"
        "  - {preset: clean_versions, current_version: 0.2.1}\n"
    )
    told = CliRunner().invoke(main, ["bucket", "clean", str(file), "--keys", "--dry-run"])
    assert told.exit_code == 0, told.output
    assert "run/w1/gradient-000000000-w1-v0.2.1.safetensors  8 bytes  rule 1" in told.output
    assert "The pin runs/paper protects nothing: there is no object of its name." in told.output
    name = re.search(r"--plan (\S+)", told.output)
    assert name is not None
    assert len(keys_of(folder)) == 5
    done = CliRunner().invoke(main, ["bucket", "clean", str(file), "--plan", name[1], "--yes"])
    assert done.exit_code == 0, done.output
    assert "Deleted 4 objects, 32 bytes" in done.output
    assert len(keys_of(folder)) == 1
    again = CliRunner().invoke(main, ["bucket", "clean", str(file), "--yes"])
    assert "Deleted 0 objects" in again.output
    wrong = CliRunner().invoke(main, ["bucket", "clean", str(file), "--plan", "none", "--yes"])
    assert wrong.exit_code == 1


def test_the_command_says_what_could_not_be_deleted(rgw, bucket, request, tmp_path):
    place = BucketBuilder(open_store(make_spec("rgw", request)))
    key = place.put_gradient("run", "w1", 0, "1")
    denied(rgw, bucket, key)
    file = tmp_path / "clean.yaml"
    file.write_text(
        f"store:\n  url: '{place.store.url}'\n  endpoint: {rgw.endpoint}\n  credentials:\n"
        f"    access_key_id: {rgw.full.access_key_id}\n"
        f"    secret_access_key: {rgw.full.secret_access_key}\n"
        "rules:\n  - {kinds: [gradients], older_than: 0h}\n"
    )
    done = CliRunner().invoke(main, ["bucket", "clean", str(file), "--yes"])
    assert done.exit_code == 1
    assert key in done.output
    assert "1 could not be deleted" in done.output
    assert rgw.full.secret_access_key not in done.output


def test_a_dataset_that_somebody_has_gone_on_with_since_the_plan_stays(folder):
    folder.put_dataset("words", 2, is_complete=False, hours=100)
    rule = Rule(kinds=(CleanupKind.DATASETS,))
    plan = make_plan(config_of(folder, rule))
    assert plan.objects == 5
    before = keys_of(folder)
    late = (
        Path(folder.store.location.bucket) / "words/shards/webdataset/train/train-00000-000002.tar"
    )
    late.write_bytes(b"new")
    ahead = (datetime.now(UTC) + timedelta(minutes=1)).timestamp()
    os.utime(late, (ahead, ahead))
    done = execute(config_of(folder, rule), plan.name)
    assert done.deleted_objects == 0
    assert before < keys_of(folder)


def test_an_orphan_that_its_dataset_names_by_now_stays(folder):
    folder.put_dataset("words", 2, orphans=1, hours=100)
    rule = Rule(kinds=(CleanupKind.DATASET_ORPHANS,))
    plan = make_plan(config_of(folder, rule))
    assert plan.objects == 1
    folder.put_dataset("words", 3)
    done = execute(config_of(folder, rule), plan.name)
    assert done.deleted_objects == 0


def test_a_kill_between_the_phases_of_a_checkpoint_is_gone_on_from(place):
    for step in (1, 2, 3):
        place.put_checkpoint("job", step, [b"%d" % step])
    rule = Rule(kinds=(CleanupKind.CHECKPOINTS,), older_than=NOW)
    plan = make_plan(config_of(place, rule))
    assert plan.objects == 4
    metadata = [f"job/checkpoints/step_00000000{step}/metadata.json" for step in (1, 2)]
    assert not delete(place.store, metadata)  # as the first phase had done
    done = execute(config_of(place, rule), plan.name)
    assert (done.deleted_objects, done.missing, done.skipped) == (2, 2, {})
    assert {key.split("/")[2] for key in keys_of(place)} == {"step_000000003"}


def test_a_file_of_a_step_that_is_being_saved_again_is_not_old(folder):
    folder.put_checkpoint("job", 1, [b"1"], hours=100)
    adopted = f"job/checkpoints/step_000000002/parts/{compute_hex_digest(b'a')}.safetensors"
    folder.put(adopted, hours=100)
    rule = Rule(kinds=(CleanupKind.CHECKPOINT_ORPHANS,))
    assert planned(config_of(folder, rule)) == {adopted}
    plan = make_plan(config_of(folder, rule))
    folder.put(f"job/checkpoints/step_000000002/parts/{compute_hex_digest(b'b')}.safetensors")
    assert planned(config_of(folder, rule)) == set()
    late = Path(folder.store.location.bucket) / adopted
    ahead = (datetime.now(UTC) + timedelta(minutes=1)).timestamp()
    os.utime(late.with_name(f"{compute_hex_digest(b'b')}.safetensors"), (ahead, ahead))
    assert execute(config_of(folder, rule), plan.name).deleted_objects == 0


def test_a_plan_that_was_made_with_another_place_beside_it_asks_for_that(folder, tmp_path):
    beside = BucketBuilder(open_store((tmp_path / "aggregator").as_uri()))
    folder.put_gradient("run", "w1", 0, "1")
    plan = make_plan(config_of(folder, related_stores=(beside.store.spec,)))
    with pytest.raises(errors.ConfigurationError, match=r"related stores .*aggregator, whose"):
        execute(config_of(folder), plan.name)


@pytest.mark.parametrize("wrong", [">=0.2.11", "<0.2", "0.2.11.", "0.2 .1", "", "!=0.2"])
def test_a_current_version_that_is_a_range_is_refused(wrong):
    with pytest.raises(ValidationError):
        CleanVersionsPreset(current_version=wrong)


@pytest.mark.parametrize("wrong", ["!=0.2<0.3", ">=0.2,<0.3,foo,", ">=0.2,<0.3,!", ">=x", ">="])
def test_a_wrong_range_of_versions_is_refused_at_once(wrong):
    with pytest.raises(ValidationError):
        Rule(kinds=(CleanupKind.GRADIENTS,), version=wrong)


@pytest.mark.parametrize("age", ["99999999999w", "6000w", "-1h", "soon"])
def test_a_wrong_age_is_refused(age):
    with pytest.raises(ValidationError):
        Rule.model_validate({"kinds": ["gradients"], "older_than": age})


def test_a_pin_holds_what_is_below_it(folder):
    mine = folder.put_gradient("run", "w1", 0, "1")
    other = folder.put_gradient("run2", "w1", 0, "1")
    for pin in ("run", "run/", "run/w1", mine):
        assert planned(config_of(folder, pins=(pin,))) == {other}
    with pytest.raises(ValidationError):
        config_of(folder, pins=("/run",))


def test_a_pin_of_no_object_is_named(place):
    odd = "other//odd" if place.store.is_s3_compatible else "other/odd"
    if place.store.is_s3_compatible:
        make_boto3_client(place.store).put_object(
            Bucket=place.store.location.bucket, Key=make_full_key(place.store, odd), Body=b"1"
        )
    else:
        put(place.store, odd, b"1")
    put(place.store, "run/a-1", b"1")
    wrong = ("runs/", "run/a", "run/a-1/", "ru", "other/odd/odd")
    pins = ("run", "run/", "run/a-1", odd, *wrong)
    plan = make_plan(config_of(place, pins=pins))
    assert plan.totals.unmatched_pins == wrong
    done = execute(config_of(place), plan.name)
    for text in (describe_plan(plan, []), describe_cleaning(plan, done)):
        assert "Pin that protects nothing" in text
        assert "`run/a`" in text
        assert "`run/a-1`" not in text


def many(place: BucketBuilder, kind: str) -> tuple[Rule, str, str]:  # noqa: PLR0911 - one for each kind
    """Fill a place with more than two batches; the rule that takes them, and a lease's names."""
    match kind:
        case "gradients":
            for window in range(30):
                place.put_gradient("run", "w1", window, "1")
            return (
                Rule(kinds=(CleanupKind.GRADIENTS,), older_than=NOW),
                ChainKeys("run", "1").job,
                "who",
            )
        case "gathers":
            place.put_chain("run", "1", 30, {30: 0})
            return (
                Rule(kinds=(CleanupKind.GATHERS,), older_than=NOW),
                ChainKeys("run", "1").job,
                "who",
            )
        case "checkpoints":
            for step in range(30):
                place.put_checkpoint("job", step, [b"%d" % step])
            return Rule(kinds=(CleanupKind.CHECKPOINTS,), older_than=NOW), "job", "members/m1"
        case "shards":
            place.put_dataset("words", 30)
            return Rule(kinds=(CleanupKind.DATASETS,), older_than=NOW), "words", "train-00000"
        case "trained on":
            place.put_dataset("words", 30)
            commit_training(trained_on(place.store.spec, "words"))
            return Rule(kinds=(CleanupKind.DATASETS,), older_than=NOW), "small", "campaign"
        case "orphans":
            place.put_dataset("words", 1, orphans=30)
            return (
                Rule(kinds=(CleanupKind.DATASET_ORPHANS,), older_than=NOW),
                "words",
                "train-00000",
            )
        case "junk":
            place.put_chain("run", "1", 0, {})
            place.put_start_window("run", "w1", 0, "1")
            for number in range(30):
                place.put(f"run/w1/{number}")
            return Rule(kinds=(CleanupKind.JUNK,), older_than=NOW), ChainKeys("run", "1").job, "who"
        case _:
            for number in range(30):
                place.put(f"mine/{number:02d}.txt")
            return Rule(kinds=(CleanupKind.OTHER,), older_than=NOW, prefix="mine/"), "mine", "who"


@pytest.mark.parametrize("when", ["before the plan", "after the plan"])
def test_a_damaged_commit_keeps_its_datasets_orphans_and_costs_no_other(folder, when):
    for name in ("others", "words"):
        folder.put_dataset(name, 2, orphans=1)
    key = DatasetKeys("words").make_commit_key(CommitName("train-00000", 1))
    config = config_of(folder, Rule(kinds=(CleanupKind.DATASET_ORPHANS,), older_than=NOW))
    before = keys_of(folder)
    if when == "before the plan":
        put(folder.store, key, b"nonsense")
    plan = make_plan(config)
    put(folder.store, key, b"nonsense")
    done = execute(config, plan.name)
    gone = DatasetKeys("others").make_shard_key(
        "webdataset", "train", CommitName("train-00000", 2), "tar"
    )
    assert before - keys_of(folder) == {gone}
    kept = plan.totals.kept if when == "before the plan" else done.skipped
    assert any("1 of 2 records" in why and key in why for why in kept)


def trained_on(spec: StoreSpec, dataset: str, campaign: str = "small") -> Training:
    settings = {"command": ("true",), "initial_weights": {"job": "first"}}
    return Training(campaign, dataset, TrainingOptions.model_validate(settings), spec, spec)


@pytest.mark.parametrize(
    "kind",
    ["gradients", "gathers", "checkpoints", "shards", "trained on", "orphans", "junk", "other"],
)
def test_a_lease_that_appears_between_two_batches_ends_the_deleting(folder, monkeypatch, kind):
    monkeypatch.setattr(deletion, "_BATCH", 10)
    monkeypatch.setattr(
        deletion, "_MAX_BATCHES", 1
    )  # each batch is settled before the next is chosen
    rule, scope, name = many(folder, kind)
    plan = make_plan(config_of(folder, rule))
    there = keys_of(folder)
    before: list[int] = []

    def take_lease(event: Event) -> None:
        assert isinstance(event, ObjectsDeleted)
        before.append(event.objects)
        if len(before) == 2:  # the dataset's first batch is its manifest alone
            folder.put_lease(scope, name)

    done = execute(config_of(folder, rule), plan.name, progress=take_lease)
    assert not done.failures
    assert 0 < done.deleted_objects == before[1] < plan.objects
    assert len(there - keys_of(folder)) == done.deleted_objects
    assert any("is worked on by elsewhere (process 1)" in why for why in done.skipped)


def test_the_dataset_of_a_campaign_that_is_led_stays(folder, tmp_path):
    for name in ("words", "others"):
        folder.put_dataset(name, 2)
    beside = BucketBuilder(open_store((tmp_path / "beside").as_uri()))
    rule = Rule(kinds=(CleanupKind.DATASETS,), older_than=NOW)
    for place, campaign in ((folder, "exp/small"), (beside, "large")):
        commit_training(trained_on(place.store.spec, "words", campaign))
        config = config_of(folder, rule, related_stores=(beside.store.spec,))
        assert len(planned(config)) == 2 * 6  # the plan alone protects nothing
        with hold_campaign_lease(place.store.spec, campaign):
            assert {key.partition("/")[0] for key in planned(config)} == {"others"}
            plan = make_plan(config)
            (why,) = plan.totals.kept
            assert why.startswith(f"the campaign {campaign} trains on it: {campaign} is worked on")


def test_the_dataset_of_a_campaign_whose_workers_go_on_without_a_leader_stays(folder):
    folder.put_dataset("words", 2)
    commit_training(trained_on(folder.store.spec, "words"))
    folder.put_lease(CampaignKeys("small").job, "members/worker-3")
    assert not planned(config_of(folder, Rule(kinds=(CleanupKind.DATASETS,), older_than=NOW)))


def test_keys_of_others_that_end_in_a_slash_go_by_a_rule_for_them_and_no_shard_goes(rgw, request):
    place = BucketBuilder(open_store(make_spec("rgw", request)))
    place.put_dataset("words", 2)
    there = keys_of(place)
    shard = DatasetKeys("words").make_shard_key(
        "webdataset", "train", CommitName("train-00000", 0), "tar"
    )
    others = {f"{shard}/", "words/shards/x.npz/"}
    for key in others:
        rgw.make_client(rgw.full).put_object(
            Bucket=place.store.location.bucket, Key=f"below/here/{key}", Body=b"junk"
        )
    orphans = Rule(kinds=(CleanupKind.DATASET_ORPHANS,), older_than=NOW)
    assert not planned(config_of(place, orphans))
    config = config_of(place, Rule(kinds=(CleanupKind.OTHER,), prefix="words/", older_than=NOW))
    assert planned(config) == others
    assert execute(config, make_plan(config).name).deleted_objects == 2
    assert keys_of(place) == there


def test_what_lies_in_the_folders_of_a_dataset_without_its_names_outlives_it(folder):
    folder.put_dataset("words", 2, hours=100)
    own = keys_of(folder) | {folder.put(f"words/transforms/{'a' * 64}.py", hours=100)}
    for key in (
        "transforms/lower/plan.json",
        "transforms/lower/manifest.json",
        "transforms/lower/shards/webdataset/train/train-00000-000000.tar",
        "transforms/notes.txt",
        "shards/notes.txt",
        "quarantine/notes.txt",
        "partitions/notes.txt",
        "lease/notes.txt",
    ):
        folder.put(f"words/{key}", hours=100)
    others = keys_of(folder) - own
    for night in (1, 2):
        config = config_of(folder, CleanupBucketPreset())
        assert execute(config, make_plan(config).name).deleted_objects == (night == 1)
    config = config_of(folder, Rule(kinds=(CleanupKind.DATASETS,), name="words"))
    execute(config, make_plan(config).name)
    assert keys_of(folder) == others


STEPS = Rule(kinds=(CleanupKind.CHECKPOINTS,), keep_last=1, older_than=NOW)


def checkpoints_of(place: BucketBuilder, *jobs: str) -> None:
    for job in jobs:
        for step in (1, 2, 3):
            place.put_checkpoint(job, step, [f"{job} {step}".encode()])


def steps_taken(place: BucketBuilder) -> set[str]:
    """The checkpoints that the rule `STEPS` takes, by their folders."""
    return {
        key.removesuffix("/metadata.json").replace("/checkpoints/step_00000000", " ")
        for key in planned(config_of(place, STEPS))
        if key.endswith("/metadata.json")
    }


@pytest.mark.parametrize(
    "body",
    [b"", b"nonsense", b"[" * 100_000, b'{"kind": 1}', b"9" * 2**21],
    ids=["empty", "text", "deep", "other", "large"],
)
def test_an_unreadable_start_of_a_run_that_nobody_works_on_keeps_only_what_is_below_it(
    folder, body
):
    checkpoints_of(folder, "job", "evil/job", ChainKeys("evil", "1").job)
    folder.put(ChainKeys("evil", "1").make_link_key(0), body)
    assert steps_taken(folder) == {"job 1", "job 2"}
    (*_, why) = make_plan(config_of(folder, STEPS)).totals.kept
    assert "evil/gathers/1/chain/000000000.json cannot be read" in why


@pytest.mark.parametrize(
    "evil", ["run/w1", "run/w1/x", "small/run/worker-1", "small/model/members/worker-1", "small/x"]
)
def test_a_worker_keeps_no_checkpoint_of_others_by_a_start_and_a_lease_of_its_own(folder, evil):
    folder.put_chain("run", "1", 1, {})
    commit_training(trained_on(folder.store.spec, "words"))
    checkpoints_of(folder, "job")
    folder.put(ChainKeys(evil, "1").make_link_key(0), b"nonsense")
    folder.put_lease(ChainKeys(evil, "1").job, "aggregator")
    assert steps_taken(folder) == {"job 1", "job 2"}


def test_no_checkpoint_goes_while_the_start_of_a_run_that_is_worked_on_cannot_be_read(folder):
    keys = ChainKeys("run", "1")
    checkpoints_of(folder, "job")
    folder.put_chain("run", "1", 1, {})
    folder.put(keys.make_link_key(0), b"nonsense")
    assert steps_taken(folder) == {"job 1", "job 2"}
    folder.put_lease(keys.job, "aggregator")
    assert not steps_taken(folder)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_no_checkpoint_goes_while_the_start_of_a_campaigns_run_cannot_be_read(
    folder, tmp_path, elsewhere
):
    checkpoints_of(folder, "job")
    place = BucketBuilder(open_store((tmp_path / "beside").as_uri())) if elsewhere else folder
    commit_training(trained_on(place.store.spec, "words"))
    place.put(ChainKeys(CampaignKeys("small").run, "1").make_link_key(0), b"nonsense")
    config = config_of(folder, STEPS, related_stores=(place.store.spec,) if elsewhere else ())
    assert not planned(config)


def test_the_checkpoint_stays_that_a_start_of_a_later_version_names(folder):
    checkpoints_of(folder, "job")
    begun = {"run": "run", "job": "job", "step": 2, "more": []}
    start = {"kind": "chain-start", "version": 1000, "nonce": "", "record": begun}
    folder.put(ChainKeys("run", "1").make_link_key(0), json.dumps(start).encode())
    assert steps_taken(folder) == {"job 1"}


@pytest.mark.parametrize("body", [b"", b"nonsense", b"[]", b'{"record": 1}', b"9" * (1 << 21)])
def test_a_damaged_plan_of_a_campaign_stops_no_cleaning(folder, body):
    folder.put_dataset("words", 2)
    folder.put("small/campaign/training.json", body)
    folder.put_lease("small", "campaign")
    assert len(planned(config_of(folder, Rule(kinds=(CleanupKind.DATASETS,), older_than=NOW)))) == 6


JUNK = Rule(kinds=(CleanupKind.JUNK,), older_than=NOW)


def test_a_workers_junk_goes_from_every_store_and_is_counted(place):
    odd = "run/w1/x|[a](b)"
    place.put_start_window("run", "w1", 0, "1")
    place.put_gradient("run", "w2", 0, "1")
    stays = keys_of(place) | {place.put(key) for key in ("run/notes.txt", "run/w3/x", "mine/x")}
    junk = {odd: 1, "run/w1/a/b/c": 7, "run/w2/gradient-000000000-w1-v1.safetensors": 20}
    for key, size in junk.items():
        place.put(key, b"x" * size)
    assert planned(config_of(place, JUNK)) == set(junk)
    plan = make_plan(config_of(place, JUNK))
    tally = (WorkerJunk("run", "w2", 1, 20), WorkerJunk("run", "w1", 2, 8))
    assert plan.totals.junk == tally
    assert read_plan(place.store, plan.name).totals.junk == tally
    done = execute(config_of(place, JUNK), plan.name)
    assert (done.deleted_objects, done.skipped, done.failures, done.junk) == (3, {}, (), tally)
    assert keys_of(place) == stays
    assert not execute(config_of(place, JUNK), plan.name).junk
    assert json.loads(read(place.store, make_cleaning_outcome_key(plan.name)))["junk"] == []


def test_junk_with_names_that_no_store_of_ours_writes_is_removed(rgw, bucket, request):
    place = BucketBuilder(open_store(make_spec("rgw", request)))
    place.put_start_window("run", "w1", 0, "1")
    odd = ["run/w1//x", "run/w1/a//b", "run/w1/../y", "run/w1/\x01", "run/w1/z/"]
    client = rgw.make_client(rgw.full)
    for key in odd:
        client.put_object(Bucket=bucket, Key=f"below/here/{key}", Body=b"x")
    plan = make_plan(config_of(place, JUNK))
    done = execute(config_of(place, JUNK), plan.name)
    assert (done.deleted_objects, done.failures) == (len(odd), ())
    assert done.junk == (WorkerJunk("run", "w1", len(odd), len(odd)),)


def test_junk_of_a_campaigns_workers_goes_though_its_plan_is_in_another_bucket(folder, tmp_path):
    beside = BucketBuilder(open_store((tmp_path / "beside").as_uri()))
    commit_training(trained_on(beside.store.spec, "words"))
    junk = {folder.put(f"{prefix}x") for prefix in CampaignKeys("small").list_write_prefixes(3)}
    folder.put("small/run/worker-x/x")
    assert not planned(config_of(folder, JUNK))
    assert planned(config_of(folder, JUNK, related_stores=(beside.store.spec,))) == junk


@pytest.mark.parametrize("where", ["here", "beside"])
def test_junk_stays_while_its_run_is_worked_on_is_pinned_or_is_young(folder, tmp_path, where):
    folder.put_start_window("run", "w1", 0, "1")
    key, young = folder.put("run/w1/x", hours=5), folder.put("run/w1/y")
    beside = BucketBuilder(open_store((tmp_path / "beside").as_uri()))
    of_chain = folder if where == "here" else beside
    of_chain.put_chain("run", "2", 0, {})
    old = Rule(kinds=(CleanupKind.JUNK,), older_than=timedelta(hours=2))
    config = config_of(folder, old, related_stores=(beside.store.spec,))
    assert not planned(config_of(folder, old, pins=("run/w1",)))
    plan = make_plan(config)
    assert plan.objects == 1
    of_chain.put_lease(ChainKeys("run", "2").job, "aggregator")
    assert not planned(config)
    assert not execute(config, plan.name).deleted_objects
    put(
        of_chain.store,
        LeaseKeys(ChainKeys("run", "2").job, "aggregator").make_end_key(0),
        b"elsewhere",
    )
    assert execute(config, plan.name).deleted_objects == 1
    assert key not in keys_of(folder)
    assert young in keys_of(folder)


def test_a_plan_of_junk_is_gone_on_from_when_what_proved_its_worker_is_gone(folder):
    proof = folder.put_start_window("run", "w1", 0, "1")
    junk = folder.put("run/w1/x")
    plan = make_plan(config_of(folder, JUNK))
    delete(folder.store, [proof])
    assert execute(config_of(folder, JUNK), plan.name).deleted_objects == 1
    assert junk not in keys_of(folder)


def test_the_reports_of_junk_name_each_worker_the_largest_first(folder, tmp_path):
    bad = "w|<img src=x>"
    for uid, size in (("small-one", 10), ("large-one", 2000), (bad, 30)):
        folder.put(f"job/members/{uid}/cooldowns/000000/vote.json")
        folder.put(f"job/members/{uid}/x", b"x" * size)
    plan = make_plan(config_of(folder, JUNK))
    done = execute(config_of(folder, JUNK), plan.name)
    for text in (describe_plan(plan, []), describe_cleaning(plan, done)):
        places = [text.index(uid) for uid in ("large-one", "img src", "small-one")]
        assert places == sorted(places)
        assert bad not in text
