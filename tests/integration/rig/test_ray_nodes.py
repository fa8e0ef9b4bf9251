"""A Ray cluster over a rig's nodes: all are in it, no stranger is, and it goes at once."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.rig import Rig, RigError
from benchmarks.rig.ray_nodes import RigRayNodes

pytestmark = pytest.mark.soak

NODES = """
import json, ray
ray.init(address="auto", log_to_driver=False)
print(json.dumps({
    node["NodeManagerAddress"]: node["Resources"].get("CPU", 0)
    for node in ray.nodes() if node["Alive"]
}))
"""
WHERE = """
import ray
ray.init(address="auto", log_to_driver=False)
@ray.remote(num_cpus=1)
def where():
    import socket
    return socket.gethostname()
print(ray.get(where.remote()))
"""


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig.start(nodes=2) as rig:
        yield rig


@pytest.fixture(scope="module")
def cluster(rig: Rig) -> Iterator[RigRayNodes]:
    with RigRayNodes.start(rig, head_cpus=0, cpus=2) as cluster:
        yield cluster


def run(rig: Rig, cluster: RigRayNodes, script: str) -> str:
    return rig.nodes[0].run([sys.executable, "-c", script], env=cluster.environment)


def test_every_node_is_alive_with_its_processors(rig, cluster):
    one, other = rig.nodes
    assert json.loads(run(rig, cluster, NODES)) == {one.address: 0, other.address: 2}


def test_a_task_that_asks_for_a_processor_goes_to_the_node_that_has_one(rig, cluster):
    assert run(rig, cluster, WHERE) == "n1\n"


def test_only_who_has_the_token_is_let_in(rig, cluster):
    ask = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "health-check",
        f"--address={cluster.address}",
    ]
    rig.nodes[1].run(ask, env=cluster.environment)
    for token in ({}, {"RAY_AUTH_TOKEN": "0" * 64}):
        with pytest.raises(RigError, match=r"(?i)token"):
            rig.nodes[1].run(ask, env={"RAY_AUTH_MODE": "token", **token})


def test_it_stops_at_once_with_its_drivers_and_nothing_else(rig, cluster):
    bystander = rig.nodes[0].popen(["sleep", "60"])
    with rig.nodes[0].popen(
        ["sh", "-c", "echo begun; sleep 60"], env=cluster.environment, stdout=subprocess.PIPE
    ) as driver:
        driver.stdout.readline()
        cluster.stop()
    assert rig.nodes[0].list_pids() == [bystander.pid]
    assert rig.nodes[1].list_pids() == []
    rig.nodes[0].kill()
