"""Tasks and actors of Ray whose node gets their files before they run."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rig.store import RigStore
from millrace.errors import ConfigurationError
from millrace.swarm import Host, Hosts, PrewarmSettings, RayNodes, Request, needs_files
from tests.ray_cluster import DISK, RayCluster
from tests.support.swarm.swarms import make_spec, read_files, reveal_settings

DRIVER = """
import json, os, sys
from pathlib import Path

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from millrace.swarm import PrewarmSettings, needs_files

asked = json.loads(sys.stdin.read())
settings = PrewarmSettings.model_validate(asked["settings"])
ray.init(address=asked["address"], log_to_driver=False)
needed = needs_files(settings)
nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]

def on(node):
    return NodeAffinitySchedulingStrategy(node, soft=False)

def read_file():
    return (needed.warm() / "model.bin").read_bytes().hex()

@ray.remote(num_cpus=0)
@needed
def run_task():
    return read_file()

@ray.remote(num_cpus=0)
@needed
def iterate():
    yield read_file()

@ray.remote(num_cpus=0)
@needed
class Reader:
    def __init__(self):
        self.body = read_file()

    def read(self):
        return self.body
"""

EVERYWHERE = """
secret = asked["settings"]["stores"]["s"]["credentials"]["secret_access_key"].encode()
assert secret in cloudpickle.dumps(settings)
assert secret not in cloudpickle.dumps(run_task._function)
tasks = [run_task.options(scheduling_strategy=on(node)).remote() for node in nodes]
bodies = ray.get(tasks)
bodies += [ray.get(one) for one in iterate.options(scheduling_strategy=on(nodes[0])).remote()]
reader = Reader.options(scheduling_strategy=on(nodes[-1])).remote()
bodies.append(ray.get(reader.read.remote()))
print(json.dumps(bodies))
"""

AGAIN = """
import shutil, signal

@ray.remote(num_cpus=0)
@needed
class Plain:
    def read(self):
        return read_file()

here = ray.get_runtime_context().get_node_id()
on_this = {"scheduling_strategy": on(here)}
bodies = [ray.get(run_task.options(**on_this).remote())]

@ray.remote(num_cpus=0)
def remove():
    shutil.rmtree(os.path.expandvars(asked["settings"]["root"]))

ray.get(remove.options(**on_this).remote())
bodies.append(ray.get(Plain.options(**on_this).remote().read.remote()))

pids = [int(one.parts[2]) for one in Path("/proc").glob("[0-9]*/cmdline")
        if one.read_bytes().startswith(b"ray::NodeWarmer")]
for pid in pids:
    os.kill(pid, signal.SIGKILL)
assert pids
bodies.append(ray.get(Plain.options(**on_this).remote().read.remote()))
print(json.dumps(bodies))
"""

FAILING = """
said = set()
here = ray.get_runtime_context().get_node_id()  # a dead node may still be listed
for task in [run_task.options(scheduling_strategy=on(here)).remote() for _ in range(3)]:
    try:
        ray.get(task)
    except Exception as error:
        said.add(str(error).splitlines()[-1])
print(json.dumps(sorted(said)))
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RigStore]:
    with RigStore.start(tmp_path_factory.mktemp("objects")) as store:
        yield store


def drive(cluster: RayCluster, store: RigStore, root: str, code: str, **request: Any) -> list[str]:
    """Run a driver whose tasks need the files of a store."""
    settings = PrewarmSettings(
        requests=(Request(**(request or {"prefix": ""})),),
        stores={"s": make_spec(store)},
        root=Path(root),
    )
    asked = {"settings": reveal_settings(settings), "address": cluster.address}
    return cluster.run_driver(DRIVER + code, asked)


@pytest.mark.soak  # the guide to the swarm runs a task on each node
def test_the_node_of_each_task_and_actor_has_its_files(ray_cluster, store):
    body = os.urandom(5 << 20)
    store.put("model.bin", body)
    store.reset()
    bodies = drive(ray_cluster, store, f"${DISK}/needed", EVERYWHERE)
    assert bodies == [body.hex()] * 5
    assert store.read_counts().bytes == len(body)


@pytest.mark.soak
def test_a_node_that_has_joined_gets_the_files_from_the_others(ray_cluster, store):
    body = os.urandom(5 << 20)
    store.put("model.bin", body)
    drive(ray_cluster, store, f"${DISK}/joined", EVERYWHERE)
    store.reset()
    new = ray_cluster.join()
    try:
        bodies = drive(ray_cluster, store, f"${DISK}/joined", EVERYWHERE)
        assert bodies == [body.hex()] * 6
        assert read_files(new / "joined") == {"model.bin": body}
        assert store.read_counts().bytes == 0
    finally:
        ray_cluster.kill(new)
        ray_cluster.disks.remove(new)


@pytest.mark.soak
def test_files_that_are_gone_and_a_killed_actor_are_replaced(ray_cluster, store):
    body = os.urandom(1 << 20)
    store.put("model.bin", body)
    assert drive(ray_cluster, store, f"${DISK}/again", AGAIN) == [body.hex()] * 3


@pytest.mark.soak
def test_files_that_are_not_there_fail_each_task_with_one_sentence(ray_cluster, store):
    store.reset()
    said = drive(ray_cluster, store, f"${DISK}/missing", FAILING, key="nowhere.bin")
    assert len(said) == 1
    assert "nowhere.bin" in said[0]
    assert sum(store.read_counts().requests.values()) < 10


def test_hosts_and_functions_outside_of_ray_are_refused(tmp_path):
    hosts = Hosts(hosts=(Host(url="http://127.0.0.1:7000"),), key="0123456789abcdef")
    files = {"requests": (Request(prefix=""),), "stores": {"s": {"url": tmp_path.as_uri()}}}
    with pytest.raises(ConfigurationError, match="leave out `hosts`"):
        needs_files(PrewarmSettings(**files, nodes=hosts))
    needed = needs_files(PrewarmSettings(**files, root=tmp_path, nodes=RayNodes()))
    with pytest.raises(ConfigurationError, match=r"call `ray\.init`"):
        needed(lambda: None)()
