"""The deployments of prefect.yaml, on a real server with a real worker."""

import base64
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
import yaml
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId

from millrace.checkpoints import Saver
from millrace.storage import open_store
from millrace.testing.process import REPOSITORY
from millrace.testing.rgw import RGW
from tests.integration.flows.test_aggregate import RUN as RUN_OF_TRAINING
from tests.integration.flows.test_aggregate import UIDS
from tests.oracle import S3Bucket
from tests.prefect_server import PrefectServer, Worker, wait_until
from tests.support.flows.fixtures import (
    RUN,
    SHARD,
    SHARDING,
    MakeBlock,
    make_jsonl,
    make_texts,
    read_texts,
)
from tests.support.flows.renting import RENT


def test_a_dataset_is_sharded_with_credentials_from_blocks(
    deployed: PrefectServer, worker: Worker, rgw: RGW, bucket: str, block: MakeBlock
) -> None:
    source = rgw.create_bucket(f"{bucket}-source")
    client = rgw.make_client(rgw.full)
    client.put_object(Bucket=source, Key="raw/rows.jsonl", Body=make_jsonl(make_texts()))

    done = deployed.start_by_command(
        SHARD,
        dataset="words",
        source={
            "bucket": block(source, read=rgw.read_only),
            "prefix": "raw",
            "columns": {"txt": "text"},
        },
        destination=block(bucket, write=rgw.full),
        sharding=SHARDING | {"holdout": 0.25},
        execution=RUN,
    )

    assert done.code == 0, done.output
    assert read_texts(S3Bucket(client, bucket, "words")) == Counter(make_texts())
    run = deployed.read_flow_run(done.run)
    assert run.name == "shard-words"
    assert {"millrace"} <= set(run.tags)
    artifacts = deployed.read_artifacts(done.run)
    assert artifacts["progress-words"] == 100.0
    report = artifacts["shards-words"]
    assert "**words** is complete: 4,000 samples in" in report
    assert "| Manifest | `words/manifest.json` |" in report
    assert "Samples in `val`" in report
    _is_a_picture_with_axes(report)


def _is_a_picture_with_axes(report: str) -> None:
    found = re.search(r"!\[[^]]*\]\(data:image/svg\+xml;base64,([^)]+)\)", report)
    assert found
    svg = ET.fromstring(base64.b64decode(found[1]))
    words = {element.text for element in svg.iter() if element.text}
    assert {"MB/s", "seconds since the start"} <= words


def test_wrong_values_are_refused_before_there_is_a_run(deployed: PrefectServer) -> None:
    said = deployed.run_prefect(
        "deployment", "run", SHARD, "-p", "dataset=words", "-p", 'source={"url": "file:///x"}',
        "-p", "destination=file:///y", "-p", 'sharding={"holdout": 3}',
    )  # fmt: skip
    assert said.returncode == 1
    assert "holdout" in said.stdout + said.stderr or "0.9" in said.stdout + said.stderr


@pytest.mark.parametrize("name", ["verify-datasets", "verify-checkpoints", "audit-access"])
def test_a_cron_deployment_gets_its_scheduled_run(deployed: PrefectServer, name: str) -> None:
    with deployed.make_client() as client:
        deployment = client.read_deployment_by_name(f"{name}/{name}")
        assert [schedule.active for schedule in deployment.schedules] == [True]

        def scheduled() -> bool:
            runs = client.read_flow_runs(
                deployment_filter=None,
                flow_run_filter=FlowRunFilter(
                    deployment_id=FlowRunFilterDeploymentId(any_=[deployment.id])
                ),
            )
            return any(run.auto_scheduled and run.state_name == "Scheduled" for run in runs)

        wait_until(scheduled, "a scheduled run")


ELSEWHERE = {"shard-dataset"}
"""Deployments that other tests of this folder run, and `make test` too."""
ENDS = {
    "aggregate-gradients": "has no link: the run has not begun",
    "campaign": "absent is not complete",
    "cooldown": "Epoch 0 of job has not ended",
    "import-gradients": "has no link: the run has not begun",
    "prewarm": "Name `root`",
    "release-machines": "has no rental 'fleet'",
    "score-gradients": "has no link: the run has not begun",
}
"""Messages of runs that cannot do more here: a value of the form has reached the engine."""


@pytest.fixture
def values(
    rgw: RGW, bucket: str, block: MakeBlock, payer: Any, tmp_path: Path
) -> dict[str, dict[str, Any]]:
    """Values of each other deployment's form."""
    store = (tmp_path / "store").as_uri()
    with Saver(open_store(store), "job") as saver:
        saver.save({"w": torch.zeros(10)}, step=3).result()
    torch.save({"w": torch.zeros(10)}, tmp_path / "model.bin")
    weights = (tmp_path / "model.bin").as_uri()
    both = block(bucket, read=rgw.read_only, write=rgw.full)
    rented = {"bucket": store, "vast": payer}
    asked: dict[str, dict[str, Any]] = {
        "abort-uploads": {"buckets": [both]},
        "aggregate-gradients": {
            "bucket": store, "gradients_bucket": store, "workers": UIDS,
            "run": RUN_OF_TRAINING.model_dump(mode="json"),
        },
        "audit-access": {"buckets": [{"bucket": both}]},
        "campaign": {"plan": {"name": "a", "bucket": store, "data": {"dataset": "absent"}}},
        "clean-bucket": {"bucket": both, "related_buckets": []},
        "clean-versions": {"bucket": store, "current_version": "0.2.1", "related_buckets": []},
        "cooldown": {"bucket": both, "job": "job", "epoch": 0, "timeout": "1s"},
        "copy-bucket": {"source": both, "destination": (tmp_path / "backup").as_uri()},
        "delete-gathers": {"bucket": store, "version": "0.2.1"},
        "import-checkpoint": {"source": {"url": weights}, "job": "imported", "bucket": both},
        "import-gradients": {
            "bucket": store, "run": {"run": "runs/imported"},
            "templar": {
                "bucket": store, "version": "2.1.28", "first_window": 1, "last_window": 2, "k": 64,
            },
        },
        "list-machines": rented,
        "prewarm": {"files": [{"bucket": store}]},
        "reap-machines": rented,
        "release-machines": {**rented, "name": "fleet"},
        "rent-machines": {**rented, "name": "fleet", "settings": RENT},
        "save-checkpoint": {"source": {"url": store, "job": "job"}, "job": "copy", "bucket": both},
        "score-gradients": {"bucket": store, "run": "runs/one", "loss": "unittest.mock:Mock"},
        "verify-checkpoints": {"bucket": store},
        "verify-datasets": {"bucket": store},
        "wipe-bucket": {"bucket": both},
    }  # fmt: skip
    made = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]
    assert asked.keys() | ELSEWHERE == {one["name"] for one in made}
    return asked


def check_ends(ends: Mapping[str, str]) -> None:
    """Check how each deployment's run ended, given as its state and the message of this state."""
    wrong = {
        name: end
        for name, end in ends.items()
        if not end.startswith("Failed" if name in ENDS else "Completed")
        or ENDS.get(name, "") not in end
    }
    assert wrong == {}


def test_each_other_deployment_runs_its_flow(
    deployed: PrefectServer, prefect_api: PrefectServer, values: dict[str, dict[str, Any]]
) -> None:
    """Each flow is loaded and gets its values, as in the process of a worker."""
    assert deployed is prefect_api
    check_ends(
        {
            name: prefect_api.run_here(f"{name}/{name}", **given).output
            for name, given in values.items()
        }
    )


@pytest.mark.soak
def test_a_worker_runs_each_other_deployment(
    deployed: PrefectServer, worker: Worker, values: dict[str, dict[str, Any]]
) -> None:
    runs = {
        name: deployed.start(f"{name}/{name}", watch=False, **given).run
        for name, given in values.items()
    }
    states = {
        name: deployed.wait(run, "Completed", "Failed", "Crashed").state
        for name, run in runs.items()
    }
    check_ends({name: f"{s.name}: {s.message}" if s else "" for name, s in states.items()})
