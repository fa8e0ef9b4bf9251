"""Shard partitions on the nodes of a Ray cluster, each partition in a task that needs one CPU.

A task yields its messages as JSON. It waits at each message until the driver has taken it. Ray
sends the credentials of a job to the nodes, so use a cluster with token authentication.
"""

import os
import queue
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import orjson
from pydantic import ValidationError

from millrace import cluster, errors
from millrace.datasets.progress_events import PartitionEvent, encode_partition_event
from millrace.datasets.worker import PartitionJob, catch_errors, run_job
from millrace.datasets.worker_pool import Assignment, PartitionWorker, WorkerExit, WorkerPool
from millrace.keys.datasets import DatasetKeys
from millrace.lease import Lease
from millrace.memory import keep_freed_memory
from millrace.progress import Event, Progress
from millrace.storage import exists, open_store

_REFRESH_INTERVAL = 5.0  # seconds between two looks at the size of the cluster
_HINT = "Install the driver's version of Millrace, with its extras, on every node."


class RayTask(PartitionWorker):
    """Task of Ray that shards one partition.

    Attributes:
        node: Name of the task's node; empty before the task's first message.
        messages: Generator of the task's messages; None before the task is started.
        error: Error of Ray that ended the task.
    """

    def __init__(self, pool: "RayPool") -> None:
        self._pool = pool
        self.node = ""
        self.messages: Any = None
        self.error: BaseException | None = None

    def start(self, job: PartitionJob, lease: Lease) -> None:
        """Start to shard a partition."""
        self.assignment = Assignment(job, lease)
        self._pool.submit(self, job)

    def acknowledge(self, number: int) -> None:
        """Do nothing: the task continues when its message is taken."""

    def wait_for_exit(self) -> WorkerExit:
        """Return the end of the task."""
        where = f"on {self.node}" if self.node else "before it ran"
        cause = errors.format_error(self.error) if self.error else "without an error"
        return WorkerExit(f"was lost {where} ({cause})", may_lack_memory=True)


class RayPool(WorkerPool):
    """Tasks on a Ray cluster.

    Args:
        ray: Module ``ray``, which is connected to the cluster.
        limit: Largest number of tasks at a time; None for one for each CPU of the cluster. Then
            nodes that join the cluster get tasks, too.
    """

    def __init__(self, ray: Any, limit: int | None) -> None:
        self._ray, self._limit = ray, limit
        self._shard = ray.remote(shard_in_task).options(
            num_cpus=1,
            max_retries=0,  # the driver starts another task
            num_returns="streaming",
            _generator_backpressure_num_objects=1,
        )
        self._tasks: dict[Any, RayTask] = {}
        self._slots = self._count_slots()
        self._counted_at = time.monotonic()

    @property
    def is_busy(self) -> bool:
        """True if there is a task."""
        return bool(self._tasks)

    def find_idle(self) -> RayTask | None:
        """Return a new worker if the cluster has room for one."""
        if time.monotonic() - self._counted_at > _REFRESH_INTERVAL:
            self._slots, self._counted_at = self._count_slots(), time.monotonic()
        return RayTask(self) if len(self._tasks) < self._slots else None

    def submit(self, task: RayTask, job: PartitionJob) -> None:
        """Start a task."""
        task.messages = self._shard.remote(orjson.dumps(job.reveal()))
        self._tasks[task.messages] = task

    def receive(self, timeout: float | None) -> tuple[PartitionWorker, dict[str, Any]] | None:
        """Return the next message of a task; an empty message means that the task is lost."""
        wait = _REFRESH_INTERVAL if timeout is None else timeout
        if not self._tasks:
            time.sleep(wait)
            return None
        ready, _ = self._ray.wait(list(self._tasks), num_returns=1, timeout=wait)
        if not ready:
            return None
        task = self._tasks.pop(ready[0])
        message = self._take_message(task)
        if "started" in message:
            task.node, task.pid = message["started"]
        if message.keys() & {"started", "event"}:
            self._tasks[ready[0]] = task  # at the end, so that each task has its turn
        return None if "started" in message else (task, message)

    def replace(self, worker: PartitionWorker) -> None:
        """Do nothing: a lost task has left its place."""

    def stop(self) -> None:
        """End the processes of all tasks."""
        for messages in self._tasks:
            with suppress(Exception):  # a task that is lost has ended
                self._ray.cancel(messages, force=True)

    def _take_message(self, task: RayTask) -> dict[str, Any]:
        try:
            return orjson.loads(self._ray.get(next(task.messages)))
        except StopIteration:
            return {}
        except self._ray.exceptions.RayTaskError as error:
            where = f" on {task.node}" if task.node else ""
            return {"failed": ["WorkerError", f"A task of Ray failed{where}: {error}. {_HINT}"]}
        except self._ray.exceptions.RayError as error:
            task.error = error
            return {}

    def _count_slots(self) -> int:
        if self._limit is not None:
            return self._limit
        return _count_processors(self._ray)


@contextmanager
def connect_pool(address: str, limit: int | None) -> Generator[RayPool]:
    """Connect to a Ray cluster, and yield a pool of tasks. At the end, the tasks are stopped.

    Args:
        address: Address of the cluster; ``auto`` for the cluster of this machine.
        limit: Largest number of tasks at a time; None for one for each CPU of the cluster.

    Raises:
        ConfigurationError: There is no such cluster, or it has no CPU.
    """
    with cluster.connect(address) as ray:
        if not _count_processors(ray):
            raise errors.ConfigurationError(
                f"The Ray cluster {address} has no CPU for a task: start nodes with `ray start "
                "--address`."
            )
        pool = RayPool(ray, limit)
        try:
            yield pool
        finally:
            pool.stop()


def count_ray_slots(address: str) -> int:
    """Return the number of CPUs of a Ray cluster, which is the number of tasks at a time."""
    with cluster.connect(address) as ray:
        return _count_processors(ray)


def _count_processors(ray: Any) -> int:
    return int(ray.cluster_resources().get("CPU", 0))


def shard_in_task(data: bytes) -> Iterator[bytes]:
    """Shard one partition on a node, and yield the messages of a worker.

    Args:
        data: Job of the partition, as JSON.

    Yields:
        Node and process, the events of the partition, and its end or its error; each as JSON.
    """
    node = cluster.get_own_node_name()
    messages: queue.SimpleQueue[tuple[dict[str, Any], threading.Event]] = queue.SimpleQueue()
    numbers = count()

    def send(message: dict[str, Any]) -> None:
        taken = threading.Event()
        messages.put((message, taken))
        taken.wait()

    def report_event(event: Event) -> None:
        assert isinstance(event, PartitionEvent), "a partition sends no other events"
        send({"event": [next(numbers), encode_partition_event(event)]})

    def shard() -> None:
        send({"started": [node, os.getpid()]})
        send(shard_on_node(data, node, report_event))

    keep_freed_memory()
    threading.Thread(target=shard, name="shard", daemon=True).start()
    while True:
        message, taken = messages.get()
        yield orjson.dumps(message)
        taken.set()
        if not message.keys() & {"started", "event"}:
            return


def shard_on_node(data: bytes, node: str, progress: Progress) -> dict[str, Any]:
    """Shard one partition in this process, and return the worker's last message.

    Args:
        data: Job of the partition, as JSON.
        node: Name of this node.
        progress: Called at each event.
    """
    return catch_errors(lambda: run_job(_read_job(data, node), progress))


def _read_job(data: bytes, node: str) -> PartitionJob:
    """Return a job, and check that this node sees the plan of its dataset.

    Raises:
        ConfigurationError: The node has another version, or does not see the plan.
        MillraceError: The store cannot be read.
    """
    try:
        job = PartitionJob.model_validate_json(data)
    except ValidationError:
        raise errors.ConfigurationError(
            f"{node} has another version of Millrace. {_HINT}"
        ) from None
    has_plan = False
    try:
        store = open_store(job.store, make_folder=False)
        has_plan = exists(store, DatasetKeys(job.dataset).plan)
    except errors.NotFoundError:
        pass
    except errors.MillraceError as error:
        raise type(error)(f"{node}: {error}") from error
    if not has_plan:
        raise errors.ConfigurationError(
            f"{node} does not see the plan of {job.dataset} in {job.store.url}: choose a bucket, "
            "or a folder that all nodes of the Ray cluster mount at the same path."
        )
    return job
