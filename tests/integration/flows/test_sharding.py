"""The flows shard-dataset and verify-datasets, with credentials from blocks."""

from pathlib import Path
from typing import Any

from flows.shard_dataset import shard_dataset
from flows.verify_datasets import verify_datasets
from millrace.testing.rgw import RGW
from tests.oracle import Folder
from tests.prefect_server import PrefectServer
from tests.support.flows.fixtures import RUN, SHARDING, MakeBlock, make_jsonl, make_texts


def test_read_only_credentials_are_refused_before_anything_is_read(
    prefect_api: PrefectServer, rgw: RGW, bucket: str, block: MakeBlock
) -> None:
    source = rgw.create_bucket(f"{bucket}-source")
    rgw.make_client(rgw.full).put_object(
        Bucket=source, Key="rows.jsonl", Body=make_jsonl(make_texts())
    )
    before = len(rgw.list_requests())

    done = prefect_api.call(
        shard_dataset,
        dataset="words",
        source={"bucket": block(source, read=rgw.full)},
        destination=block(bucket, write=rgw.read_only),
    )

    assert done.code == 1
    state = prefect_api.read_flow_run(done.run).state
    assert state is not None
    assert state.name == "Failed"
    assert "does not let these credentials create objects" in (state.message or "")
    seen = rgw.list_requests()[before:]
    assert any(f"PUT /{bucket}/words/" in line for line in seen)
    assert not [line for line in seen if f"/{source}" in line]
    assert rgw.make_client(rgw.full).list_objects_v2(Bucket=bucket)["KeyCount"] == 0


def test_a_block_without_write_credentials_is_refused(
    prefect_api: PrefectServer, rgw: RGW, bucket: str, block: MakeBlock,
    folder_source: dict[str, Any],
) -> None:  # fmt: skip
    done = prefect_api.call(
        shard_dataset,
        dataset="words",
        source=folder_source,
        destination=block(bucket, read=rgw.full),
    )
    assert done.code == 1
    state = prefect_api.read_flow_run(done.run).state
    assert state is not None
    assert "write credentials are needed" in (state.message or "")


def test_verification_finds_a_shard_that_is_gone_and_a_repair_makes_it_again(
    prefect_api: PrefectServer, tmp_path: Path, folder_source: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    made = prefect_api.call(
        shard_dataset,
        dataset="words",
        source=folder_source,
        destination=out.as_uri(),
        sharding=SHARDING,
        execution=RUN,
    )
    assert made.code == 0, made.output
    log = prefect_api.read_logs(made.run).splitlines()
    assert any("partitions ended" in line for line in log)
    assert log.count("Finished in state Completed()") == 1, "a line for the run, none for its tasks"
    good = prefect_api.call(verify_datasets, bucket=out.as_uri(), depth="digests")
    assert good.code == 0, good.output
    assert (
        "1 complete dataset, every shard is there"
        in prefect_api.read_artifacts(good.run)["verified-datasets"]
    )

    lost = next(name for name in Folder(out).list_names() if name.endswith(".tar"))
    content = (out / lost).read_bytes()
    (out / lost).unlink()

    bad = prefect_api.call(verify_datasets, bucket=out.as_uri())
    assert bad.code == 1
    assert f"| `{lost}` | missing |" in prefect_api.read_artifacts(bad.run)["verified-datasets"]

    repaired = prefect_api.call(
        shard_dataset,
        dataset="words",
        source=folder_source,
        destination=out.as_uri(),
        sharding=SHARDING,
        execution=RUN,
        repair=True,
    )
    assert repaired.code == 0, repaired.output
    assert (out / lost).read_bytes() == content
