"""The deployment prewarm, by a worker on a machine of a Ray cluster; cancelled, and begun again."""

import io
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from boto3.s3.transfer import TransferConfig

from benchmarks.rig.store import FaultKind, RigFault, RigStore
from blocks import Bucket, BucketRole
from millrace.formatting import format_size
from millrace.testing.rgw import RGW
from tests.prefect_server import PrefectServer, Worker, wait_until
from tests.ray_cluster import DISK, RayCluster
from tests.support.flows.fixtures import MakeBlock, make_aws_credentials
from tests.support.swarm.swarms import read_files

PREWARM = "prewarm/prewarm"


@pytest.mark.soak
def test_every_node_is_warmed_with_credentials_from_a_block(
    deployed: PrefectServer,
    ray_worker: Worker,
    ray_cluster: RayCluster,
    rgw: RGW,
    bucket: str,
    block: MakeBlock,
) -> None:
    contents = {"model/a.bin": os.urandom(3 << 20), "model/b/c.txt": b"c"}
    for key, body in contents.items():
        # The small one in parts, so that its ETag is no MD5.
        config = TransferConfig(multipart_threshold=1 if body == b"c" else 8 << 20)
        rgw.make_client(rgw.full).upload_fileobj(io.BytesIO(body), bucket, key, Config=config)

    done = deployed.start(
        PREWARM,
        files=[{"bucket": block(bucket, read=rgw.read_only), "prefix": "model"}],
        root=f"${DISK}/flow",
    )

    assert done.code == 0, done.output
    wanted = {key.removeprefix("model/"): body for key, body in contents.items()}
    artifacts = deployed.read_artifacts(done.run)
    report = artifacts["prewarm"]
    assert [read_files(disk / "flow") for disk in ray_cluster.disks] == [wanted] * 3, report
    assert artifacts["progress-prewarm"] == 100.0
    assert "**3 of 3 nodes** have all of 2 files, 3.1 MB" in report
    assert "1 file unverified at the source" in report
    assert len(re.findall(r"\| yes \|", report)) == 3
    assert "data:image/svg+xml;base64," in report
    gets = [line for line in rgw.list_requests() if f"GET /{bucket}/model/a.bin" in line]
    assert len(gets) in {3, 4}  # of 1 MiB each; a busy machine may be late with one
    assert f"{format_size((len(gets) << 20) + 1)} left the store" in report


@pytest.fixture
def counted(
    prefect_api: PrefectServer, tmp_path: Path
) -> Iterator[tuple[RigStore, dict[str, object]]]:
    """A store that counts and stalls, and the parameter that refers to its block."""
    with RigStore.start(tmp_path / "objects") as store:
        name = f"bucket-{uuid.uuid4().hex[:8]}"
        pair = make_aws_credentials(store.key, store.endpoint)
        pair.save(f"{name}-read")
        block = Bucket(role=BucketRole.DATASET, url=f"s3://{store.bucket}", read_credentials=pair)
        block.save(name)
        yield store, {"bucket": {"$ref": {"block_document_slug": f"millrace-bucket/{name}"}}}


@pytest.mark.soak
def test_a_cancelled_run_stops_and_the_next_one_fetches_what_is_missing(
    deployed: PrefectServer,
    ray_worker: Worker,
    ray_cluster: RayCluster,
    counted: tuple[RigStore, dict[str, object]],
) -> None:
    store, files = counted
    body = os.urandom(8 << 20)
    store.put("large.bin", body)
    store.inject_fault(RigFault(FaultKind.STALL, offset=7 << 20, times=None, seconds=60))

    first = deployed.start(PREWARM, watch=False, files=[files], root=f"${DISK}/cancelled")
    wait_until(
        lambda: store.read_counts().bytes >= 7 << 20, "all pieces but the one that is stalled"
    )
    processes = ray_worker.list_descendants()
    said = deployed.run_prefect("flow-run", "cancel", str(first.run))
    assert said.returncode == 0, said.stdout + said.stderr
    deployed.wait(first.run, "Cancelled")
    assert psutil.wait_procs(processes, timeout=60)[1] == []
    assert read_files(ray_cluster.disks[1] / "cancelled") == {}

    store.reset()
    second = deployed.start(PREWARM, files=[files], root=f"${DISK}/cancelled")
    assert second.code == 0, second.output
    assert [read_files(disk / "cancelled") for disk in ray_cluster.disks] == [
        {"large.bin": body}
    ] * 3
    assert store.read_counts().bytes < len(body) / 2
