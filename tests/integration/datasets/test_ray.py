"""Partitions that the nodes of a Ray cluster shard."""

import errno
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from millrace import cluster
from millrace.datasets import (
    PipelineSettings,
    dispatch,
    plan_dataset,
    preflight_dataset,
    ray_tasks,
    shard_dataset,
    verify_dataset,
)
from millrace.datasets.plan import commit_plan, make_plan
from millrace.datasets.plan_digest import compute_plan_digest
from millrace.datasets.ray_tasks import RayPool, shard_on_node
from millrace.datasets.worker import PartitionJob
from millrace.keys.datasets import DatasetKeys
from millrace.keys.leases import LeaseKeys
from millrace.lease import Holder, LeaseTerm
from millrace.records import commit_once
from millrace.schemas.dataset import DatasetPlan
from millrace.storage import list_objects, open_store, read
from millrace.testing.process import find_free_ports
from tests.ray_cluster import DISK, RayCluster

NODE = "10.0.0.2-ab12cd"
TERM_KEY = LeaseKeys("sets/one", "train-00000").make_term_key(0)
DRIVER = """
import json, os, sys
from millrace import errors
from millrace.datasets import PipelineSettings, shard_dataset
from millrace.progress import Event

settings = PipelineSettings.model_validate_json(sys.stdin.readline())

def tell(event):
    told = {"kind": event.kind, "pid": getattr(event, "pid", 0)}
    print(json.dumps(told), flush=True)
    if event.kind == os.environ.get("STOP_AT"):
        sys.stdin.readline()

try:
    report = shard_dataset(settings, progress=tell)
except errors.MillraceError as error:
    print(json.dumps({"kind": "error", "type": type(error).__name__, "text": str(error)}))
else:
    print(json.dumps({"kind": "report", "samples": report.samples}))
"""


@pytest.fixture
def settings(tmp_path: Path) -> PipelineSettings:
    """A dataset of 3,000 rows in a folder, in about 8 partitions of 3 shards."""
    rng = random.Random(0)
    (tmp_path / "source").mkdir()
    rows = ({"id": i, "text": "x" * rng.randrange(400)} for i in range(3000))
    (tmp_path / "source" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PipelineSettings.model_validate(
        {
            "dataset": "sets/one",
            "source": {
                "url": (tmp_path / "source").as_uri(),
                "columns": {"txt": "text", "id": "id"},
            },
            "store": {"url": (tmp_path / "store").as_uri()},
            "sharding": {"shard_bytes": 256 << 10, "partition_bytes": 80_000},
        }
    )


class Driver:
    """A driver in a process of its own, since a process connects to one cluster of Ray only."""

    def __init__(
        self, cluster: RayCluster, settings: PipelineSettings, stop_at: str = "", **execution: Any
    ) -> None:
        asked = settings.model_dump(mode="json", exclude={"execution"})
        asked["execution"] = {"ray": cluster.address, **execution}
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | cluster.environment | {"STOP_AT": stop_at},
            text=True,
        )
        self.events: list[dict[str, Any]] = []
        self.send(json.dumps(asked))

    def send(self, line: str = "") -> None:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def read_until(self, kind: str) -> dict[str, Any]:
        assert self.process.stdout
        for line in self.process.stdout:
            self.events.append(json.loads(line))
            if self.events[-1]["kind"] == kind:
                return self.events[-1]
        raise AssertionError(f"The driver ended without {kind}: {self.events[-3:]}")

    def kill(self) -> None:
        """Kill the driver's process."""
        with self.process:
            self.process.kill()

    def end(self) -> list[dict[str, Any]]:
        """Let the driver go on to its end, and return all events."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.events += map(json.loads, self.process.stdout)
        self.process.stdout.close()
        assert self.process.wait() == 0
        return self.events


def read_all(settings: PipelineSettings) -> dict[str, bytes]:
    store = open_store(settings.store)
    return {stat.key: read(store, stat.key) for stat in list_objects(store, "sets/one/shards")}


def is_on(disk: Path, pid: int) -> bool:
    """Return whether a process belongs to a node."""
    return f"{DISK}={disk}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


@pytest.fixture
def expected(settings: PipelineSettings, tmp_path: Path) -> dict[str, bytes]:
    """The shards of a run of this machine."""
    local = settings.model_copy(
        update={"store": settings.store.model_copy(update={"url": (tmp_path / "local").as_uri()})}
    )
    shard_dataset(local)
    return read_all(local)


def test_the_nodes_of_a_cluster_make_the_shards_that_one_machine_makes(
    ray_cluster: RayCluster, settings: PipelineSettings, expected: dict[str, bytes]
) -> None:
    events = Driver(ray_cluster, settings).end()
    assert events[-1] == {"kind": "report", "samples": 3000}
    assert read_all(settings) == expected
    assert verify_dataset(open_store(settings.store), "sets/one").is_intact
    pids = {event["pid"] for event in events if event["kind"] == "partition.opened"}
    assert len(pids) == 2  # one for each CPU of the cluster
    assert os.getpid() not in pids


@pytest.mark.soak
def test_a_limit_of_one_worker_shards_one_partition_at_a_time(
    ray_cluster: RayCluster, settings: PipelineSettings
) -> None:
    events = Driver(ray_cluster, settings, workers=1).end()
    kinds = [e["kind"] for e in events if e["kind"] in {"partition.opened", "partition.ended"}]
    assert kinds == ["partition.opened", "partition.ended"] * (len(kinds) // 2)


def test_a_task_that_is_killed_costs_its_partition_a_retry(
    ray_cluster: RayCluster, settings: PipelineSettings, expected: dict[str, bytes]
) -> None:
    driver = Driver(ray_cluster, settings, stop_at="shard.encoded")
    pid = driver.read_until("shard.encoded")["pid"]
    os.kill(pid, 9)
    events = driver.end()
    assert [e["pid"] for e in events if e["kind"] == "worker.lost"] == [pid]
    assert events[-1] == {"kind": "report", "samples": 3000}
    assert read_all(settings) == expected


@pytest.mark.soak
def test_a_node_that_is_killed_costs_its_partitions_a_retry(
    ray_cluster: RayCluster, settings: PipelineSettings, expected: dict[str, bytes]
) -> None:
    disk = ray_cluster.join()
    driver = Driver(ray_cluster, settings, stop_at="partition.opened")
    while not is_on(disk, driver.read_until("partition.opened")["pid"]):
        driver.send()
    ray_cluster.kill(disk)
    ray_cluster.disks.remove(disk)
    events = driver.end()
    assert "worker.lost" in {event["kind"] for event in events}
    assert events[-1] == {"kind": "report", "samples": 3000}
    assert read_all(settings) == expected


@pytest.mark.soak
def test_a_killed_driver_takes_its_tasks_along_and_another_run_continues(
    ray_cluster: RayCluster, settings: PipelineSettings, expected: dict[str, bytes]
) -> None:
    driver = Driver(ray_cluster, settings, stop_at="shard.committed", lease_timeout="5s")
    driver.read_until("shard.committed")
    driver.kill()
    report = shard_dataset(settings)
    assert report.samples == 3000
    assert report.new_samples < 3000
    assert read_all(settings) == expected


@pytest.mark.soak
def test_an_error_of_a_task_is_the_error_of_the_run(
    ray_cluster: RayCluster, settings: PipelineSettings, tmp_path: Path
) -> None:
    driver = Driver(ray_cluster, settings, stop_at="plan.committed")
    driver.read_until("plan.committed")
    with (tmp_path / "source" / "a.jsonl").open("a") as file:
        file.write("{}\n")
    last = driver.end()[-1]
    assert last["type"] == "ChangedError"


def make_job(settings: PipelineSettings, plan: DatasetPlan) -> bytes:
    """The job of the first partition, as the driver sends it."""
    job = PartitionJob(
        dataset=plan.dataset,
        plan_digest=compute_plan_digest(plan),
        layout=plan.layout,
        source=plan.source,
        source_store=settings.source.store,
        store=settings.store,
        partition=plan.partitions[0],
        uploads=1,
    )
    return orjson.dumps(job.reveal())


def begin_run(settings: PipelineSettings, holder: str) -> DatasetPlan:
    """Commit the plan and a lease of the first partition, as a driver does."""
    store, keys = open_store(settings.store), DatasetKeys("sets/one")
    files = settings.source.open_files()
    plan, partitioned = make_plan(keys, settings.source, files, settings.sharding, store)
    commit_plan(store, keys, plan, partitioned.objects)
    by = Holder.describe_this_process().model_copy(update={"id": holder})
    commit_once(store, TERM_KEY, LeaseTerm(holder=by, ttl=settings.execution.lease_timeout))
    return plan


@pytest.mark.parametrize("has_folder", [False, True])
def test_a_node_that_does_not_see_the_destination_says_so(
    settings: PipelineSettings, tmp_path: Path, has_folder: bool
) -> None:
    if has_folder:
        (tmp_path / "store").mkdir()
    job = make_job(settings, plan_dataset(settings))
    (message,) = shard_on_node(job, TERM_KEY, "00aa", NODE)
    kind, text = message["failed"]
    assert kind == "ConfigurationError"
    assert text.startswith(f"{NODE} does not see this run of sets/one in file:///")
    assert not list((tmp_path / "store").glob("*"))


def test_a_node_with_an_earlier_state_of_the_destination_says_so(
    settings: PipelineSettings,
) -> None:
    plan = begin_run(settings, "00bb")
    (message,) = shard_on_node(make_job(settings, plan), TERM_KEY, "00aa", NODE)
    kind, text = message["failed"]
    assert kind == "ConfigurationError"
    assert text.startswith(f"{NODE} does not see this run of sets/one in file:///")
    assert read_all(settings) == {}


def test_a_node_with_another_version_of_millrace_says_so() -> None:
    (message,) = shard_on_node(b'{"new_field": 1}', TERM_KEY, "00aa", NODE)
    kind, text = message["failed"]
    assert kind == "ConfigurationError"
    assert f"{NODE} has another version of Millrace" in text


@pytest.fixture
def no_idle_workers() -> Iterator[None]:
    """Stops the processes that wait for the next task."""
    yield
    while ray_tasks._idle_workers:
        ray_tasks._idle_workers.pop().stop()


def run_on_node(settings: PipelineSettings, work: str, folder: Path) -> list[dict[str, Any]]:
    """The messages of a node that shards the first partition with a function."""
    (folder / "code.py").write_text(f"import os, signal\n\ndef work(sample):\n{work}\n")
    asked = settings.model_dump()
    function = {"kind": "function", "function": f"{folder}/code.py:work"}
    asked["sharding"]["transforms"] = [function]
    asked["store"]["url"] = (folder / "store").as_uri()
    settings = PipelineSettings.model_validate(asked)
    plan = begin_run(settings, "00aa")
    return list(shard_on_node(make_job(settings, plan), TERM_KEY, "00aa", NODE))


@pytest.mark.usefixtures("no_idle_workers")
def test_functions_of_a_node_run_in_the_main_thread_of_one_process(
    settings: PipelineSettings, tmp_path: Path
) -> None:
    pids: set[int] = set()
    for name in "ab":
        (tmp_path / name).mkdir()
        alarm = "    signal.signal(signal.SIGALRM, signal.SIG_IGN)\n    return sample"
        messages = run_on_node(settings, alarm, tmp_path / name)
        assert messages[-1]["ended"]["quarantined"] == 0
        pids.add(messages[0]["started"][1])
    assert len(pids) == 1
    assert os.getpid() not in pids


@pytest.mark.usefixtures("no_idle_workers")
@pytest.mark.parametrize(
    ("work", "last"),
    [
        (
            "    raise KeyboardInterrupt('of Rust')",
            {"failed": ["WorkerError", f"{NODE}: train-00000: KeyboardInterrupt: of Rust"]},
        ),
        ("    os._exit(3)", {"exited": ["exited with code 3", False]}),
        ("    os.kill(os.getpid(), 9)", {"exited": ["was killed by SIGKILL", True]}),
    ],
    ids=["raises", "exits", "is killed"],
)  # fmt: skip
def test_whatever_ends_the_work_of_a_node_is_the_last_message_of_its_task(
    settings: PipelineSettings, tmp_path: Path, work: str, last: dict[str, Any]
) -> None:
    assert run_on_node(settings, work, tmp_path)[-1] == last


def test_a_node_that_cannot_start_a_process_loses_a_worker_and_not_the_run(
    settings: PipelineSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    slept: list[float] = []
    monkeypatch.setattr(ray_tasks, "start_worker", fail)
    monkeypatch.setattr(ray_tasks, "time", SimpleNamespace(sleep=slept.append))
    assert run_on_node(settings, "    return sample", tmp_path) == [
        {"started": [NODE, 0]},
        {"exited": ["could not be started ([Errno 12] Cannot allocate memory)", True]},
    ]
    assert sum(slept) == 60


@pytest.mark.usefixtures("no_idle_workers")
def test_a_node_whose_packages_make_other_bytes_than_the_plan_says_so(
    settings: PipelineSettings,
) -> None:
    plan = begin_run(settings, "00aa")
    job = orjson.loads(make_job(settings, plan))
    job["layout"]["writer"] |= {"webdataset": "ustar-0", "pyarrow": "99.0"}
    *_, message = shard_on_node(orjson.dumps(job), TERM_KEY, "00aa", NODE)
    kind, text = message["failed"]
    assert kind == "ConfigurationError"
    assert text.startswith(
        f"{NODE}: The dataset {settings.dataset} was planned with other versions of its writers "
        "(pyarrow 99.0, now none; webdataset ustar-0, now ustar-1). Install pyarrow==99.0 and the "
        "version of Millrace that planned it on this machine."
    )
    assert read_all(settings) == {}


@pytest.mark.usefixtures("no_idle_workers")
def test_a_task_that_is_stopped_in_the_middle_ends_its_process(settings: PipelineSettings) -> None:
    plan = begin_run(settings, "00aa")
    messages = shard_on_node(make_job(settings, plan), TERM_KEY, "00aa", NODE)
    pid = next(messages)["started"][1]
    assert "event" in next(messages)
    messages.close()
    assert not Path(f"/proc/{pid}").exists()


class BusyRay:
    """Stand-in for Ray whose tasks wait for CPUs that other jobs use."""

    def __init__(self, processors: int, *, free: int) -> None:
        self.cluster_resources = lambda: {"CPU": float(processors)}
        self.available_resources = lambda: {"CPU": float(free)} if free else {}

    def remote(self, _: Any) -> Any:
        shard = SimpleNamespace(remote=lambda *_: object())
        return SimpleNamespace(options=lambda **_: shard)

    def wait(self, tasks: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return [], tasks


@pytest.mark.parametrize(("processors", "limit", "tasks"), [(2, 6, 2), (2, 1, 1), (2, None, 2)])
def test_no_partition_is_claimed_for_which_a_cluster_has_no_cpu(
    processors: int, limit: int | None, tasks: int
) -> None:
    pool = RayPool(BusyRay(processors, free=processors), limit)
    for number in range(tasks):
        task = pool.find_idle()
        assert task
        pool._tasks[number] = task
    assert pool.find_idle() is None


def fill(pool: RayPool) -> int:
    """Give partitions to a pool, as many as it takes, and return their number."""
    job: Any = SimpleNamespace(reveal=dict)
    lease: Any = SimpleNamespace(
        keys=LeaseKeys("sets/one", "train-00000"), term=0, holder=SimpleNamespace(id="00aa")
    )
    count = 0
    while task := pool.find_idle():
        task.start(job, lease)
        count += 1
    return count


@pytest.mark.parametrize(("free", "claimed"), [(8, 8), (5, 5), (1, 2), (0, 2)])
def test_few_partitions_are_claimed_for_cpus_that_other_jobs_use(free: int, claimed: int) -> None:
    assert fill(RayPool(BusyRay(8, free=free), None)) == claimed


def test_the_cpu_of_a_task_that_has_started_is_no_reason_to_claim_fewer() -> None:
    pool = RayPool(BusyRay(8, free=0), None)
    fill(pool)
    for task in pool._tasks.values():
        task.node = NODE
    assert fill(pool) == 2


class Clock:
    """Clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleep: Any = None

    def monotonic(self) -> float:
        return self.now


def test_tasks_that_do_not_start_have_a_claim_to_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray adds up halves of CPUs on several nodes, on which no task can start."""
    clock = Clock()
    monkeypatch.setattr(ray_tasks, "time", clock)
    pool = RayPool(BusyRay(8, free=4), None)
    claimed = [fill(pool)]
    for _ in range(3):
        clock.now += 6
        claimed.append(fill(pool))
    assert claimed == [4, 0, 0, 0]


def test_a_run_whose_tasks_do_not_start_says_so_each_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    monkeypatch.setattr(ray_tasks, "time", clock)
    pool = RayPool(BusyRay(8, free=0), None)
    fill(pool)
    said: list[int] = []
    for _ in range(4):
        clock.now += 31
        assert pool.find_idle() is None
        said.append(len(caplog.messages))
    assert said == [0, 1, 1, 2]
    assert "no task has started on the Ray cluster for a minute" in caplog.text
    next(iter(pool._tasks.values())).node = NODE
    clock.now += 100
    pool.find_idle()
    assert len(caplog.messages) == 2


def test_a_run_without_a_cpu_ends_when_other_runs_have_ended_its_partitions(
    settings: PipelineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        assert len(waits) < 5
        waits.append(seconds)
        if len(waits) == 2:
            shard_dataset(settings)

    clock.sleep = sleep
    monkeypatch.setattr(ray_tasks, "time", clock)
    pool = RayPool(BusyRay(0, free=0), None)
    monkeypatch.setattr(dispatch, "connect_pool", lambda *_: nullcontext(pool))
    monkeypatch.setattr(cluster, "check_reachable", lambda _: None)
    execution = settings.execution.model_copy(update={"ray": "auto"})
    report = shard_dataset(settings.model_copy(update={"execution": execution}))
    assert (report.samples, report.new_samples) == (3000, 0)


def test_a_cluster_that_does_not_answer_is_a_reason_why_the_run_would_refuse(
    settings: PipelineSettings,
) -> None:
    (port,) = find_free_ports(1)
    execution = settings.execution.model_copy(update={"ray": f"127.0.0.1:{port}"})
    _, preflight = preflight_dataset(settings.model_copy(update={"execution": execution}))
    assert f"There is no Ray cluster at 127.0.0.1:{port}" in preflight.refusals[0]
