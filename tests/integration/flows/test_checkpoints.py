"""The flow verify-checkpoints, on a bucket with credentials from a block."""

import torch

from flows.verify_checkpoints import verify_checkpoints
from millrace.checkpoints import Saver, SaveSettings, find_newest
from millrace.keys.checkpoints import CheckpointKeys
from millrace.storage import Credentials, StoreSpec, open_store, put
from millrace.testing.rgw import RGW
from tasks.reports import escape
from tests.prefect_server import PrefectServer
from tests.support.flows.fixtures import MakeBlock

JOB = "team/a/b/c/d/e/f/g/job"  # jobs of many folders are found, too


def test_damage_fails_the_flow_and_the_report_names_it(
    prefect_api: PrefectServer, rgw: RGW, bucket: str, block: MakeBlock
) -> None:
    pair = Credentials.model_validate(
        {
            "access_key_id": rgw.full.access_key_id,
            "secret_access_key": rgw.full.secret_access_key,
        }
    )
    spec = StoreSpec(url=f"s3://{bucket}", endpoint=rgw.endpoint, credentials=pair)
    store = open_store(spec)
    with Saver(store, JOB, SaveSettings(part_bytes=1024)) as saver:
        for step in (1, 2):
            saver.save({"w": torch.full((1000,), float(step))}, step=step).result()
    asked = {"bucket": block(bucket, read=rgw.read_only), "jobs": [JOB]}

    done = prefect_api.call(verify_checkpoints, **asked)
    assert done.code == 0, done.output
    report = prefect_api.read_artifacts(done.run)["verified-checkpoints"]
    assert "2 checkpoints, all as they were saved; every byte was read" in report

    done = prefect_api.call(verify_checkpoints, **{**asked, "jobs": [JOB, "typo"]})
    assert done.code == 1
    assert "has no checkpoint of typo" in done.output

    found = find_newest(store, JOB)
    assert found is not None
    part = found.parts[0]
    key = CheckpointKeys(JOB).make_part_key(2, part.digest)
    put(store, key, b"x" * part.size)
    done = prefect_api.call(verify_checkpoints, bucket=asked["bucket"])  # all jobs
    assert done.code == 1
    state = prefect_api.read_flow_run(done.run).state
    assert state is not None
    assert ": 1 checkpoint (" in (state.message or "")
    assert f"{JOB} step 2" in (state.message or "")
    report = prefect_api.read_artifacts(done.run)["verified-checkpoints"]
    assert "**1 damaged**" in report
    assert (
        escape(f"{key}: its bytes are not those that were written (the digest differs)") in report
    )
