"""A warming that is cancelled, and the next that fetches only what is missing."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.rig.store import Fault, FaultKind, Store
from blocks import Bucket, BucketRole
from tests.integration.flows.test_prewarm import PREWARM
from tests.prefect_server import PrefectServer, Worker, until
from tests.ray_cluster import DISK, RayCluster
from tests.support.flows.fixtures import aws_credentials
from tests.support.swarm.swarms import files_below


@pytest.fixture
def counted(
    prefect_api: PrefectServer, tmp_path: Path
) -> Iterator[tuple[Store, dict[str, object]]]:
    """A store that counts and stalls, and the parameter that refers to its block."""
    with Store.start(tmp_path / "objects") as store:
        name = f"bucket-{uuid.uuid4().hex[:8]}"
        pair = aws_credentials(store.key, store.endpoint)
        pair.save(f"{name}-read")
        block = Bucket(role=BucketRole.DATASET, url=f"s3://{store.bucket}", read_credentials=pair)
        block.save(name)
        yield store, {"bucket": {"$ref": {"block_document_slug": f"millrace-bucket/{name}"}}}


def test_a_cancelled_run_stops_and_the_next_one_fetches_what_is_missing(
    deployed: PrefectServer,
    ray_worker: Worker,
    ray_cluster: RayCluster,
    counted: tuple[Store, dict[str, object]],
) -> None:
    store, files = counted
    body = os.urandom(8 << 20)
    store.put("large.bin", body)
    store.order(Fault(FaultKind.STALL, offset=7 << 20, times=None, seconds=60))

    first = deployed.start(PREWARM, watch=False, files=[files], root=f"${DISK}/cancelled")
    until(lambda: store.counts().bytes >= 7 << 20, "all pieces but the one that is stalled")
    processes = ray_worker.descendants()
    said = deployed.prefect("flow-run", "cancel", str(first.run))
    assert said.returncode == 0, said.stdout + said.stderr
    deployed.wait(first.run, "Cancelled")
    assert psutil.wait_procs(processes, timeout=60)[1] == []
    assert files_below(ray_cluster.disks[1] / "cancelled") == {}

    store.reset()
    second = deployed.start(PREWARM, files=[files], root=f"${DISK}/cancelled")
    assert second.code == 0, second.output
    assert [files_below(disk / "cancelled") for disk in ray_cluster.disks] == [
        {"large.bin": body}
    ] * 3
    assert store.counts().bytes < len(body) / 2
