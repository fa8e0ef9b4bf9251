"""The deployment prewarm, on a Ray cluster, with credentials from a block."""

import io
import os
import re
from pathlib import Path

from boto3.s3.transfer import TransferConfig
from prefect.blocks.system import Secret

from millrace.testing.rgw import RGW
from tests.prefect_server import PrefectServer, Worker
from tests.ray_cluster import DISK, RayCluster
from tests.support.flows.fixtures import MakeBlock
from tests.support.swarm.swarms import KEY, files_below, running

PREWARM = "prewarm/prewarm"


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
        rgw.client(rgw.full).upload_fileobj(io.BytesIO(body), bucket, key, Config=config)

    done = deployed.start(
        PREWARM,
        files=[{"bucket": block(bucket, read=rgw.read_only), "prefix": "model"}],
        root=f"${DISK}/flow",
    )

    assert done.code == 0, done.output
    wanted = {key.removeprefix("model/"): body for key, body in contents.items()}
    assert [files_below(disk / "flow") for disk in ray_cluster.disks] == [wanted] * 3
    artifacts = deployed.artifacts(done.run)
    assert artifacts["progress-prewarm"] == 100.0
    report = artifacts["prewarm"]
    assert "**3 of 3 nodes** have all of 2 files, 3.1 MB" in report
    assert "3.1 MB left the store" in report
    assert "1 file unverified at the source" in report
    assert len(re.findall(r"\| yes \|", report)) == 3
    assert "data:image/svg+xml;base64," in report
    gets = [line for line in rgw.requests() if f"GET /{bucket}/model/a.bin" in line]
    assert len(gets) == 3  # of 1 MiB each


def test_hosts_are_warmed_with_the_key_of_a_block(
    deployed: PrefectServer, prefect_api: PrefectServer, worker: Worker, tmp_path: Path
) -> None:
    Secret(value=KEY).save("node-key")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.bin").write_bytes(os.urandom(100_000))
    with running(tmp_path, 2) as agents:
        done = deployed.command(
            PREWARM,
            files=[{"url": (tmp_path / "source").as_uri()}],
            root="/as/the/agents/say",
            cluster={
                "hosts": [{"url": agent.url, "name": agent.name} for agent in agents],
                "key": {"$ref": {"block_document_slug": "secret/node-key"}},
            },
        )
    assert done.code == 0, done.output
    assert KEY not in done.output
    assert "**2 of 2 nodes** have all of 1 file" in deployed.artifacts(done.run)["prewarm"]
    wanted = files_below(tmp_path / "source")
    assert [files_below(agent.root) for agent in agents] == [wanted] * 2


def test_wrong_credentials_are_refused_before_a_node_is_touched(
    deployed: PrefectServer,
    ray_worker: Worker,
    ray_cluster: RayCluster,
    rgw: RGW,
    bucket: str,
    block: MakeBlock,
) -> None:
    done = deployed.start(
        PREWARM, files=[{"bucket": block(bucket, write=rgw.full)}], root=f"${DISK}/refused"
    )
    assert done.code == 1
    state = deployed.flow_run(done.run).state
    assert state is not None
    assert "read credentials" in (state.message or "")
    assert not (ray_cluster.disks[0] / "refused").exists()
