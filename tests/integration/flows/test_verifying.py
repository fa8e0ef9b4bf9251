"""The flows that verify datasets and checkpoints, in folders with damage."""

from pathlib import Path
from typing import Any

import torch

from flows.shard_dataset import shard_dataset
from flows.verify_checkpoints import verify_checkpoints
from flows.verify_datasets import verify_datasets
from millrace.checkpoints import Saver
from millrace.storage import open_store
from tests.prefect_server import PrefectServer
from tests.support.flows.fixtures import SHARDING

HERE: dict[str, Any] = {"workers": 0, "uploads": 1}


def test_a_damaged_manifest_ends_the_verification_of_no_other_dataset(
    prefect_api: PrefectServer, folder_source: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "sets"
    for name in ("a", "a/b"):
        shard_dataset(name, folder_source, str(folder), SHARDING, HERE)  # pyright: ignore[reportArgumentType]
    manifest = folder / "a/manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    shard = next((folder / "a/b/shards").rglob("*.tar"))
    shard.write_bytes(b"damaged")

    done = prefect_api.call(verify_datasets, bucket=str(folder))
    assert done.code == 1
    assert ": 2 objects. The report names each object." in done.output
    report = prefect_api.read_artifacts(done.run)["verified-datasets"]
    assert "2 complete datasets, 1 shard at fault, 1 other object at fault" in report
    assert "| `a/manifest.json` |" in report
    assert f"| `{shard.relative_to(folder)}` |" in report

    done = prefect_api.call(verify_datasets, bucket=str(folder), datasets=["a/b", "typo"])
    assert done.code == 1
    assert "typo has no manifest" in done.output
    report = prefect_api.read_artifacts(done.run)["verified-datasets"]
    assert "1 complete dataset, 1 shard at fault." in report
    assert "**The run ended before all was verified:**" in report


def test_checkpoints_that_were_verified_before_an_error_are_reported(
    prefect_api: PrefectServer, tmp_path: Path
) -> None:
    with Saver(open_store(tmp_path.as_uri()), "job") as saver:
        saver.save({"w": torch.zeros(10)}, step=3).result()
    done = prefect_api.call(verify_checkpoints, bucket=str(tmp_path), jobs=["job", "bad name"])
    assert done.code == 1
    report = prefect_api.read_artifacts(done.run)["verified-checkpoints"]
    assert "| `job` | 3 |" in report
    assert "**The run ended before all was verified:** The job's name 'bad name'" in report
