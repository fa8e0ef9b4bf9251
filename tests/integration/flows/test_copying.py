"""The flow that copies buckets, with credentials from blocks."""

from pathlib import Path

from flows.copy_bucket import copy_bucket
from millrace.storage import open_store, read
from millrace.testing.rgw import RGW
from tests.prefect_server import PrefectServer
from tests.support.flows.fixtures import MakeBlock


def test_a_bucket_is_copied_and_what_differs_fails_the_run(
    prefect_api: PrefectServer, rgw: RGW, bucket: str, block: MakeBlock, tmp_path: Path
) -> None:
    client, target = rgw.make_client(rgw.full), rgw.create_bucket(f"{bucket}-copy")
    for number in range(3):
        client.put_object(Bucket=bucket, Key=f"runs/{number}.pt", Body=b"%d" % number)
    client.put_object(Bucket=bucket, Key="other", Body=b"other")
    given = {
        "source": block(bucket, read=rgw.read_only),
        "destination": block(target, write=rgw.full),
    }

    done = prefect_api.call(copy_bucket, **given, pattern="runs/*", dry_run=True)
    assert done.code == 0, done.output
    assert "**would be copied** to" in prefect_api.read_artifacts(done.run)["copied-objects"]
    assert client.list_objects_v2(Bucket=target)["KeyCount"] == 0

    done = prefect_api.call(copy_bucket, **given, pattern="runs/*")
    assert done.code == 0, done.output
    artifacts = prefect_api.read_artifacts(done.run)
    assert "3 objects of" in artifacts["copied-objects"]
    assert "by itself" in artifacts["copied-objects"]
    assert artifacts["progress-copy"] == 100.0
    listed = client.list_objects_v2(Bucket=target)["Contents"]
    assert [one["Key"] for one in listed] == [f"runs/{number}.pt" for number in range(3)]

    client.put_object(Bucket=target, Key="runs/1.pt", Body=b"x")
    done = prefect_api.call(copy_bucket, **given)
    assert done.code == 1
    assert "1 object of" in done.output
    report = prefect_api.read_artifacts(done.run)["copied-objects"]
    assert "| `runs/1.pt` |" in report
    assert rgw.full.secret_access_key not in report
    done = prefect_api.call(copy_bucket, **given, overwrite=True)
    assert done.code == 0, done.output
    assert client.get_object(Bucket=target, Key="runs/1.pt")["Body"].read() == b"1"
    assert client.get_object(Bucket=target, Key="other")["Body"].read() == b"other"

    folder = (tmp_path / "backup").as_uri()
    done = prefect_api.call(copy_bucket, source=given["source"], destination=folder, dry_run=True)
    assert done.code == 0, done.output
    assert not (tmp_path / "backup").exists()
    whole = {"source": given["source"], "destination": folder}
    done = prefect_api.call(copy_bucket, **whole, exclude=["oth*", "*/1.pt"])
    assert done.code == 0, done.output
    assert read(open_store(folder), "runs/2.pt") == b"2"
    assert sorted(one.name for one in (tmp_path / "backup").rglob("*.*")) == ["0.pt", "2.pt"]
    assert not (tmp_path / "backup/other").exists()
