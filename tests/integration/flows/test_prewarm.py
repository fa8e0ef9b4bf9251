"""The flow prewarm, with credentials and keys from blocks."""

import os
from pathlib import Path

from prefect.blocks.system import Secret

from flows.prewarm import prewarm
from millrace.testing.rgw import RGW
from tests.prefect_server import PrefectServer
from tests.ray_cluster import DISK, RayCluster
from tests.support.flows.fixtures import MakeBlock
from tests.support.swarm.swarms import KEY, read_files, running


def test_hosts_are_warmed_with_the_key_of_a_block(
    prefect_api: PrefectServer, tmp_path: Path
) -> None:
    Secret(value=KEY).save("node-key")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.bin").write_bytes(os.urandom(100_000))
    with running(tmp_path, 2) as agents:
        done = prefect_api.call(
            prewarm,
            files=[{"url": (tmp_path / "source").as_uri()}],
            cluster={
                "hosts": [{"url": agent.url, "name": agent.name} for agent in agents],
                "node_key": {"$ref": {"block_document_slug": "secret/node-key"}},
            },
        )
    assert done.code == 0, done.output
    assert KEY not in done.output
    assert prefect_api.read_flow_run(done.run).name == "prewarm-source"
    assert "**2 of 2 nodes** have all of 1 file" in prefect_api.read_artifacts(done.run)["prewarm"]
    wanted = read_files(tmp_path / "source")
    assert [read_files(agent.root) for agent in agents] == [wanted] * 2


def test_wrong_credentials_are_refused_before_a_node_is_touched(
    prefect_api: PrefectServer,
    ray_cluster: RayCluster,
    rgw: RGW,
    bucket: str,
    block: MakeBlock,
) -> None:
    done = prefect_api.call(
        prewarm, files=[{"bucket": block(bucket, write=rgw.full)}], root=f"${DISK}/refused"
    )
    assert done.code == 1
    state = prefect_api.read_flow_run(done.run).state
    assert state is not None
    assert "read credentials" in (state.message or "")
    assert not (ray_cluster.disks[0] / "refused").exists()
