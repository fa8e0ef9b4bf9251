"""Agents that Ray starts, on the living nodes of a cluster."""

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rig.store import RigStore
from millrace.swarm import PrewarmSettings, RayNodes, Request
from tests.ray_cluster import DISK, RayCluster
from tests.support.swarm.swarms import make_spec, read_files, reveal_settings

WARM = """
import json, sys
from dataclasses import asdict
from millrace.swarm import PrewarmSettings, prewarm
settings = PrewarmSettings.model_validate_json(sys.stdin.read())
print(json.dumps(asdict(prewarm(settings))))
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RigStore]:
    with RigStore.start(tmp_path_factory.mktemp("objects")) as store:
        yield store


ALIKE = """
import millrace.cluster
millrace.cluster.make_node_name = lambda node: "node"
"""
"""Gives all nodes of the cluster the same name."""


def warm(
    cluster: RayCluster,
    store: RigStore,
    root: str,
    *,
    code: str = "",
    start_timeout: timedelta = timedelta(seconds=100),
    **more: Any,
) -> dict[str, Any]:
    """Warm the nodes of a cluster, and return the report."""
    settings = PrewarmSettings(
        start_timeout=start_timeout,
        requests=(Request(prefix=""),),
        stores={"s": make_spec(store)},
        root=Path(root),
        nodes=RayNodes(address=cluster.address, **more),
    )
    return cluster.run_driver(code + WARM, reveal_settings(settings))


def test_every_living_node_is_warmed_also_a_head_without_cpus(ray_cluster, store):
    body = os.urandom(5 << 20)
    store.put("model.bin", body)
    store.reset()
    report = warm(ray_cluster, store, f"${DISK}/first")
    assert [node["ready"] for node in report["nodes"]] == [True] * 3, report
    assert [read_files(disk / "first") for disk in ray_cluster.disks] == [{"model.bin": body}] * 3
    assert store.read_counts().bytes == len(body)


@pytest.mark.soak
def test_a_node_that_died_before_and_is_still_listed_is_left_out(ray_cluster, store):
    body = os.urandom(1 << 20)
    store.put("model.bin", body)
    disk = ray_cluster.join()
    ray_cluster.kill(disk)
    ray_cluster.disks.remove(disk)
    report = warm(ray_cluster, store, f"${DISK}/dead")
    ready = [node["ready"] for node in report["nodes"]]
    assert ready.count(True) == 3, report
    assert read_files(ray_cluster.disks[2] / "dead") == {"model.bin": body}


@pytest.mark.soak
def test_agents_that_are_kept_are_used_again(ray_cluster, store):
    store.put("model.bin", b"1")
    first = warm(ray_cluster, store, f"${DISK}/kept", keep=True)
    store.put("model.bin", b"22")
    second = warm(ray_cluster, store, f"${DISK}/kept", keep=True)
    assert [node["ready"] for node in second["nodes"]] == [True] * 3, (first, second)
    assert read_files(ray_cluster.disks[1] / "kept") == {"model.bin": b"22"}


LATER = """
import millrace.swarm.nodes as nodes
nodes._digest_code = lambda: "0" * 8
"""
"""Stands for the code of another version of Millrace."""

LIST = """
import json, sys, ray
ray.init(address=json.loads(sys.stdin.read()), log_to_driver=False)
print(json.dumps([one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]))
"""


@pytest.mark.soak
def test_agents_that_another_version_has_kept_are_replaced(ray_cluster, store):
    store.put("model.bin", b"1")
    warm(ray_cluster, store, f"${DISK}/replaced", keep=True)
    before = set(ray_cluster.run_driver(LIST, ray_cluster.address))
    report = warm(ray_cluster, store, f"${DISK}/replaced", keep=True, code=LATER)
    after = set(ray_cluster.run_driver(LIST, ray_cluster.address))
    assert [node["ready"] for node in report["nodes"]] == [True] * 3, report
    assert len(before - after) == 3, (before, after)
    assert len(after - before) == 3, (before, after)


@pytest.mark.soak
def test_nodes_of_one_name_are_all_warmed_and_reported(ray_cluster, store):
    body = os.urandom(5 << 20)
    store.put("model.bin", body)
    store.reset()
    report = warm(ray_cluster, store, f"${DISK}/alike", code=ALIKE)
    assert [node["ready"] for node in report["nodes"]] == [True] * 3, report
    assert len({node["name"] for node in report["nodes"]}) == 3, report
    assert [read_files(disk / "alike") for disk in ray_cluster.disks] == [{"model.bin": body}] * 3
    assert store.read_counts().bytes == len(body)


SLOW = """
import os, time
import millrace.swarm.nodes as nodes

class SlowActor(nodes.Actor):
    def start(self, *arguments):
        if os.environ[{variable!r}] == {disk!r}:
            time.sleep(600)
        return super().start(*arguments)

nodes.Actor = SlowActor
"""
"""Lets the agent of one node start too late."""


@pytest.mark.soak
def test_a_node_whose_agent_starts_too_late_is_in_the_report(ray_cluster, store):
    store.put("model.bin", b"1")
    disk = ray_cluster.disks[1]
    report = warm(
        ray_cluster,
        store,
        f"${DISK}/late",
        code=SLOW.format(variable=DISK, disk=str(disk)),
        start_timeout=timedelta(seconds=20),
    )
    assert sorted(node["ready"] for node in report["nodes"]) == [False, True, True], report
    (late,) = [node for node in report["nodes"] if not node["ready"]]
    assert late["reason"] == "its agent had not started when the other nodes were ready"
    assert not (disk / "late").exists()


@pytest.mark.soak
def test_nodes_of_one_name_that_cannot_start_are_all_named(ray_cluster, store):
    store.put("model.bin", b"1")
    with pytest.raises(AssertionError, match=r"lost.*node \(\w+\): .*; node \(\w+\): "):
        warm(ray_cluster, store, "$NO_SUCH_VARIABLE/x", code=ALIKE)


@pytest.mark.soak
def test_a_root_with_an_unknown_variable_fails_with_a_sentence(ray_cluster, store):
    store.put("model.bin", b"1")
    with pytest.raises(AssertionError, match="names a variable that is not set here"):
        warm(ray_cluster, store, "$NO_SUCH_VARIABLE/x")
