"""The flows that clean, and the report that each of them leaves."""

import contextlib
import json
import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from blocks import Bucket, CleaningRules
from flows.abort_uploads import abort_uploads
from flows.clean_bucket import clean_bucket
from flows.clean_versions import clean_versions
from flows.delete_gathers import delete_gathers
from flows.wipe_bucket import wipe_bucket
from millrace.cleanup import CleanupKind, Rule
from millrace.keys.gradients import ChainKeys
from millrace.storage import Store, StoreSpec, list_objects, open_store
from millrace.testing.credentials import make_credentials
from millrace.testing.rgw import RGW
from tests.prefect_server import PrefectServer, Started, wait_until
from tests.support.cleanup.material import BucketBuilder
from tests.support.flows.fixtures import MakeBlock

RULES = [{"kinds": ["gradients"], "older_than": "0h", "keep_last": 1}]


@pytest.fixture
def store(rgw: RGW, bucket: str) -> Store:
    spec = StoreSpec(
        url=f"s3://{bucket}", endpoint=rgw.endpoint, credentials=make_credentials(rgw.full)
    )
    return open_store(spec)


def keys_of(store: Store) -> set[str]:
    return {stat.key for stat in list_objects(store) if not stat.key.startswith("_clean/")}


def fill(store: Store) -> list[str]:
    place = BucketBuilder(store)
    return [place.put_gradient("run", "w1", window, "0.2.1") for window in range(4)]


def test_a_dry_run_shows_the_plan_and_that_very_plan_is_executed(
    prefect_api: PrefectServer, rgw: RGW, bucket: str, block: MakeBlock, store: Store
) -> None:
    keys = fill(store)
    given: dict[str, Any] = {"bucket": block(bucket, write=rgw.full), "related_buckets": []}
    CleaningRules(rules=[Rule.model_validate(rule) for rule in RULES]).save("mine", overwrite=True)
    rules = {"$ref": {"block_document_slug": "millrace-cleaning-rules/mine"}}
    dry = prefect_api.call(clean_bucket, **given, rules=rules)
    assert dry.code == 0, dry.output
    report = prefect_api.read_artifacts(dry.run)["cleaning"]
    assert "**Nothing was deleted.**" in report
    assert "would delete 3 objects, 24 bytes" in report
    assert f"| `{keys[0]}` | 8 bytes |" in report
    assert keys_of(store) == set(keys)
    name = report.partition("Plan `")[2].partition("`")[0]
    later = BucketBuilder(store).put_gradient("run", "w1", 9, "0.2.1")

    done = prefect_api.call(clean_bucket, **given, plan=name, dry_run=False)
    assert done.code == 0, done.output
    report = prefect_api.read_artifacts(done.run)["cleaning"]
    assert "3 objects deleted, 24 bytes" in report
    assert "no errors" in report
    assert "a month at R2's prices" in report
    assert "| gradients, of any age, but for the last 1 | 3 | 24 bytes | $0.00 |" in report
    assert keys_of(store) == {keys[3], later}


def test_what_could_not_be_deleted_fails_the_run_and_is_named(
    prefect_api: PrefectServer, rgw: RGW, bucket: str, block: MakeBlock, store: Store
) -> None:
    keys = fill(store)
    deny = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": ["s3:DeleteObject"],
        "Resource": [f"arn:aws:s3:::{bucket}/{keys[1]}"],
    }
    policy = json.dumps({"Version": "2012-10-17", "Statement": [deny]})
    rgw.make_client(rgw.full).put_bucket_policy(Bucket=bucket, Policy=policy)
    done = prefect_api.call(
        clean_bucket,
        bucket=block(bucket, write=rgw.full),
        related_buckets=[],
        rules=RULES,
        dry_run=False,
    )
    assert done.code == 1
    state = prefect_api.read_flow_run(done.run).state
    assert state is not None
    assert "1 object of" in (state.message or "")
    report = prefect_api.read_artifacts(done.run)["cleaning"]
    assert "2 objects deleted" in report
    assert "**1 error**" in report
    assert f"| `{keys[1]}` |" in report
    assert rgw.full.secret_access_key not in report


def test_a_bucket_without_a_block_is_left_alone_and_that_is_said(
    deployed: PrefectServer, prefect_api: PrefectServer
) -> None:
    """The server has no blocks: a person has changed no name of the deployment."""
    for name in ("gradients", "aggregator", "dataset"):
        with contextlib.suppress(ValueError):
            Bucket.delete(name)
    done = deployed.run_here("clean-bucket/clean-bucket", dry_run=False)
    assert done.code == 0, done.output
    assert "cleaning" not in prefect_api.read_artifacts(done.run)
    none = "There is no Millrace Bucket block"
    said = f"{none} gradients and no Millrace Bucket block aggregator: nothing was looked at"
    wait_until(lambda: said in prefect_api.read_logs(done.run) or None, "that there is no block")
    done = deployed.run_here("abort-uploads/abort-uploads", dry_run=False)
    assert done.code == 0, done.output
    said = "Millrace Bucket block dataset and no"
    wait_until(lambda: said in prefect_api.read_logs(done.run) or None, "that there is no block")


def test_a_missing_related_bucket_fails_the_run(prefect_api: PrefectServer, tmp_path: Path) -> None:
    """The deployment names one by default, whatever bucket is cleaned."""
    none = f"none-{uuid4().hex[:8]}"
    done = prefect_api.call(clean_bucket, bucket=str(tmp_path), related_buckets=[none])
    assert done.code == 1
    assert f"There is no Millrace Bucket block {none} (`related_buckets`)" in done.output
    assert "set `related_buckets: []` if no other bucket belongs to these runs" in done.output


def test_uploads_are_aborted_in_the_buckets_after_one_that_fails(
    prefect_api: PrefectServer, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.joinpath("words").mkdir(parents=True)
        half = folder / "words/manifest.json#12345678901234567890"
        half.write_bytes(b"x")
        os.utime(half, (1, 1))
    buckets = [str(first), str(tmp_path / "none"), str(tmp_path / "neither"), str(second)]
    done = prefect_api.call(abort_uploads, buckets=buckets, dry_run=False)
    assert done.code == 1
    assert "2 buckets failed." in done.output
    assert all(bucket in done.output for bucket in buckets[1:3])
    assert list(tmp_path.rglob("*#*")) == []
    report = prefect_api.read_artifacts(done.run)["unfinished-uploads"]
    assert "2 unfinished uploads aborted" in report
    assert "| Bucket that failed | Error |" in report
    assert f"| `{tmp_path / 'none'}` |" in report


def test_schedules_delete_and_what_is_started_by_hand_does_not(deployed: PrefectServer) -> None:
    """But for wiping, and what needs to be told a version: those have no schedule."""
    scheduled: dict[str, set[str]] = {}
    with deployed.make_client() as client:
        for name in (
            "clean-bucket", "clean-versions", "delete-gathers", "wipe-bucket", "abort-uploads",
        ):  # fmt: skip
            deployment = client.read_deployment_by_name(f"{name}/{name}")
            schema = deployment.parameter_openapi_schema or {}
            assert schema["properties"]["dry_run"]["default"] is True
            assert deployment.parameters.get("dry_run", True) is True
            scheduled[name] = {str(s.parameters.get("dry_run")) for s in deployment.schedules}
    assert scheduled == {
        "clean-bucket": {"False"},
        "abort-uploads": {"False"},
        "clean-versions": set(),
        "delete-gathers": set(),
        "wipe-bucket": set(),
    }


def test_versions_gathers_and_uploads_are_cleaned_by_flows_of_their_own(
    prefect_api: PrefectServer, rgw: RGW, bucket: str, block: MakeBlock, store: Store
) -> None:
    keys = fill(store)
    place = BucketBuilder(store)
    other = place.put_gradient("run", "w1", 1, "0.2.10")
    place.put_chain("run", "0.2.1", 3, {2: 0})
    place.put_lease(ChainKeys("run", "0.2.10").job, "aggregator")
    given = {"bucket": block(bucket, write=rgw.full), "dry_run": False}

    done = prefect_api.call(delete_gathers, version="0.2.1", **given)
    assert done.code == 0, done.output
    assert "3 objects deleted" in prefect_api.read_artifacts(done.run)["cleaning"]

    done = prefect_api.call(clean_versions, current_version="0.2.11", related_buckets=[], **given)
    assert done.code == 0, done.output
    report = prefect_api.read_artifacts(done.run)["cleaning"]
    assert "4 objects deleted" in report
    assert "run/gathers/0.2.10 is worked on by elsewhere" in report
    assert other in keys_of(store)
    assert not set(keys) & keys_of(store)

    client = rgw.make_client(rgw.full)
    client.create_multipart_upload(Bucket=bucket, Key="half")
    done = prefect_api.call(abort_uploads, buckets=[given["bucket"]])
    assert done.code == 0, done.output
    report = prefect_api.read_artifacts(done.run)["unfinished-uploads"]
    assert "| 0 | 0 bytes | 1 | 0 |" in report
    assert len(client.list_multipart_uploads(Bucket=bucket)["Uploads"]) == 1


def wipe(server: PrefectServer, given: Any, name: str, **settings: Any) -> Started:
    """Wipe a bucket, with the name that a person types."""
    running = server.begin(wipe_bucket, bucket=given, dry_run=False, **settings)
    server.wait(running.run, "Paused")
    with server.make_client() as client:
        client.resume_flow_run(running.run, run_input={"bucket_name": name})
    return running.wait_for_result()


def test_a_wiping_that_nobody_confirms_deletes_nothing(
    prefect_api: PrefectServer, rgw: RGW, bucket: str, block: MakeBlock, store: Store
) -> None:
    keys = fill(store)
    given = block(bucket, write=rgw.full)
    dry = prefect_api.call(wipe_bucket, bucket=given)
    assert dry.code == 0, dry.output
    assert "**Nothing was deleted.**" in prefect_api.read_artifacts(dry.run)["cleaning"]
    assert "holds 4 objects" in prefect_api.read_artifacts(dry.run)["cleaning"]
    done = wipe(prefect_api, given, f"{bucket}x")
    assert done.output.startswith("Failed: ")
    assert "nothing was deleted" in done.output
    assert keys_of(store) == set(keys)
    assert not [one.key for one in list_objects(store, "_clean/") if "plan" in one.key]


def test_a_wiping_is_asked_for_again_when_its_run_is_retried(
    prefect_api: PrefectServer, tmp_path: Path
) -> None:
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "one").write_text("1")
    given = {"bucket": str(folder), "dry_run": False}
    running = prefect_api.begin(wipe_bucket, **given)
    for name in ("wrong", "precious"):
        prefect_api.wait(running.run, "Paused")
        with prefect_api.make_client() as client:
            client.resume_flow_run(running.run, run_input={"bucket_name": name})
        done = running.wait_for_result()
        if name == "wrong":
            assert done.output.startswith("Failed: ")
            assert [one.name for one in folder.rglob("*") if one.is_file()] == ["one"]
            running = prefect_api.retry(wipe_bucket, done.run, **given)
    assert done.code == 0, done.output
    assert not (folder / "one").exists()


@pytest.mark.soak
def test_a_versioned_bucket_is_not_called_emptied(
    prefect_api: PrefectServer, rgw: RGW, bucket: str, block: MakeBlock, store: Store
) -> None:
    client = rgw.make_client(rgw.full)
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    for size in range(3):
        client.put_object(Bucket=bucket, Key="one", Body=b"x" * size)
    given = block(bucket, write=rgw.full)
    dry = prefect_api.call(wipe_bucket, bucket=given)
    assert dry.code == 0, dry.output
    report = prefect_api.read_artifacts(dry.run)["cleaning"]
    assert "and beside them 2 older versions (1 byte) and 0 delete markers" in report
    assert "Older versions and delete markers stay, and are billed, unless" in report

    done = wipe(prefect_api, given, bucket)
    assert done.code == 0, done.output
    report = prefect_api.read_artifacts(done.run)["cleaning"]
    assert re.search(r"[0-9]+ older versions .* are left, and billed", report)
    assert client.list_object_versions(Bucket=bucket)["Versions"]
    done = wipe(prefect_api, given, bucket, delete_versions=True)
    assert done.code == 0, done.output
    assert "are left" not in prefect_api.read_artifacts(done.run)["cleaning"]
    left = client.list_object_versions(Bucket=bucket)
    assert "Versions" not in left
    assert "DeleteMarkers" not in left


def test_an_age_is_what_a_person_writes() -> None:
    ages = ["90m", "48h", "2d", "3w", "P2D", "1.5h"]
    found = [
        Rule.model_validate({"kinds": [CleanupKind.CHECKPOINT_ORPHANS], "older_than": age})
        for age in ages
    ]
    assert [rule.older_than for rule in found] == [
        timedelta(minutes=90), timedelta(hours=48), timedelta(days=2), timedelta(weeks=3),
        timedelta(days=2), timedelta(hours=1.5),
    ]  # fmt: skip
