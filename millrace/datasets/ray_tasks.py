"""Shard partitions on the nodes of a Ray cluster, each partition in a task that needs one CPU.

A task runs its partition in a worker process of the node, and yields the messages of the process
as JSON. It waits at each message until the driver has taken it. So code of users runs in the main
thread of a process, as without Ray, and whatever ends the process does not end the task. Ray sends
the credentials of a job to the nodes, so use a cluster with token authentication.
"""

import logging
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import orjson
from pydantic import ValidationError

from millrace import cluster, errors
from millrace.datasets.worker import PartitionJob
from millrace.datasets.worker_pool import Assignment, PartitionWorker, WorkerExit, WorkerPool
from millrace.datasets.worker_processes import WorkerProcess, start_worker
from millrace.lease import Lease, LeaseTerm
from millrace.records import fetch
from millrace.storage import open_store

logger = logging.getLogger(__name__)

_REFRESH_INTERVAL = 5.0  # seconds between two looks at the size of the cluster
_WARNING_INTERVAL = 60.0  # seconds between two warnings that no task starts
_MAX_QUEUED = 2  # tasks that may wait for CPUs which are not free
_START_TRIES, _START_INTERVAL = 13, 5.0  # tries of a node to start a process, and seconds between
_HINT = "Install the driver's version of Millrace, with its extras, on every node."


class RayTask(PartitionWorker):
    """Task of Ray that shards one partition.

    Attributes:
        node: Name of the task's node; empty before the task's first message.
        messages: Generator of the task's messages; None before the task is started.
        error: Error of Ray that ended the task.
        exit: End of the worker process, if the task has seen it.
    """

    def __init__(self, pool: "RayPool") -> None:
        self._pool = pool
        self.node = ""
        self.messages: Any = None
        self.error: BaseException | None = None
        self.exit: WorkerExit | None = None

    def start(self, job: PartitionJob, lease: Lease) -> None:
        """Start to shard a partition."""
        self.reading = Assignment(job, lease)
        self._pool.submit(self, job, lease)

    def acknowledge(self, number: int) -> None:
        """Do nothing: the task continues when its message is taken."""

    def wait_for_exit(self) -> WorkerExit:
        """Return the end of the task, or of its process."""
        if self.exit:
            return WorkerExit(f"{self.exit.cause} on {self.node}", self.exit.may_lack_memory)
        where = f"on {self.node}" if self.node else "before it ran"
        cause = errors.format_error(self.error) if self.error else "without an error"
        return WorkerExit(f"was lost {where} ({cause})", may_lack_memory=True)


class RayPool(WorkerPool):
    """Tasks on a Ray cluster.

    A task holds its partition from the submission on. So only a few tasks wait for CPUs that other
    jobs use: other runs can take the rest of the partitions.

    Args:
        ray: Module ``ray``, which is connected to the cluster.
        limit: Largest number of tasks at a time; None for no limit but the number of CPUs of the
            cluster. Nodes that join the cluster get tasks, too.
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
        self._free = self._count_free()  # CPUs without a task, as far as is known
        self._counted_at = self._moved_at = time.monotonic()

    @property
    def is_busy(self) -> bool:
        """True if there is a task."""
        return bool(self._tasks)

    def find_idle(self) -> RayTask | None:
        """Return a new worker if the cluster has room for one."""
        if time.monotonic() - self._counted_at > _REFRESH_INTERVAL:
            self._look_at_cluster()
        if len(self._tasks) >= self._slots:
            return None
        return RayTask(self) if self._free > 0 or self._count_queued() < _MAX_QUEUED else None

    def _look_at_cluster(self) -> None:
        had_slots = self._slots
        # A free CPU may be in halves on two nodes, so tasks that wait have a claim to what is free.
        self._slots, self._free = self._count_slots(), self._count_free() - self._count_queued()
        self._counted_at = time.monotonic()
        if had_slots and not self._slots:
            logger.warning(
                "the Ray cluster has no CPU left, so no task runs: start nodes with `ray start "
                "--address`, and the run goes on"
            )
        if not self._tasks or any(task.node for task in self._tasks.values()):
            self._moved_at = self._counted_at
        elif self._slots and self._counted_at - self._moved_at > _WARNING_INTERVAL:
            self._moved_at = self._counted_at
            logger.warning(
                "no task has started on the Ray cluster for a minute, since no CPU is free: wait "
                "for the cluster's other jobs, or start nodes with `ray start --address`"
            )

    def submit(self, task: RayTask, job: PartitionJob, lease: Lease) -> None:
        """Start a task."""
        term = lease.keys.make_term_key(lease.term)
        task.messages = self._shard.remote(orjson.dumps(job.reveal()), term, lease.holder.id)
        self._tasks[task.messages] = task
        self._free -= 1

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
        else:
            self._free += 1
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
            message = orjson.loads(self._ray.get(next(task.messages)))
        except StopIteration:
            return {}
        except self._ray.exceptions.RayTaskError as error:
            where = f" on {task.node}" if task.node else ""
            return {"failed": ["WorkerError", f"A task of Ray failed{where}: {error}. {_HINT}"]}
        except self._ray.exceptions.RayError as error:
            task.error = error
            return {}
        if "exited" in message:
            task.exit = WorkerExit(*message["exited"])
            return {}
        return message

    def _count_slots(self) -> int:
        processors = _count_processors(self._ray)
        return processors if self._limit is None else min(self._limit, processors)

    def _count_queued(self) -> int:
        """Return the number of tasks that have not started."""
        return sum(not task.node for task in self._tasks.values())

    def _count_free(self) -> int:
        return int(self._ray.available_resources().get("CPU", 0))


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


_idle_workers: list[WorkerProcess] = []  # at most one, since a process runs one task at a time


def shard_in_task(data: bytes, term_key: str, holder: str) -> Iterator[bytes]:
    """Shard one partition on a node, and yield the messages of a worker.

    Args:
        data: Job of the partition, as JSON.
        term_key: Key of the driver's lease of the partition.
        holder: Identifier of the driver as a holder of leases.

    Yields:
        Node and process, the events of the partition, and its end or its error; each as JSON.
    """
    node = cluster.get_own_node_name()
    for message in shard_on_node(data, term_key, holder, node):
        yield orjson.dumps(message)


def shard_on_node(
    data: bytes, term_key: str, holder: str, node: str
) -> Generator[dict[str, Any], None, None]:
    """Shard one partition in a worker process of this node, and yield the worker's messages.

    The process stays for the next task of this process, and ends with this process.

    Args:
        data: Job of the partition, as JSON.
        term_key: Key of the driver's lease of the partition.
        holder: Identifier of the driver as a holder of leases.
        node: Name of this node.
    """
    try:
        job = _read_job(data, term_key, holder, node)
    except errors.MillraceError as error:
        yield {"failed": [type(error).__name__, str(error)]}
        return
    try:
        worker = _idle_workers.pop() if _idle_workers else _start_patiently()
    except OSError as error:
        yield {"started": [node, 0]}  # names the node
        yield {"exited": [f"could not be started ({errors.format_error(error)})", True]}
        return
    is_idle = False
    try:
        yield {"started": [node, worker.pid]}
        worker.send_job(job)
        for message in worker.iterate_messages():
            match message:
                case {"event": [number, _]}:
                    yield message
                    worker.acknowledge(number)
                case {"read": _}:
                    pass  # a task has one partition
                case {"failed": [kind, text]}:
                    is_idle = True
                    yield {"failed": [kind, f"{node}: {text}"]}
                    return
                case _:
                    is_idle = True
                    yield message
                    return
        yield {"exited": list(worker.wait_for_exit())}
    finally:
        if is_idle:
            _idle_workers.append(worker)
        else:
            worker.stop()


def _start_patiently() -> WorkerProcess:
    """Start a worker process. If this node cannot, try for a minute.

    If the task ended at once, Ray would start the next one on the CPU that is free, so here.

    Raises:
        OSError: The last error of the system.
    """
    for _ in range(_START_TRIES - 1):
        with suppress(OSError):
            return start_worker(sys.path)  # Ray has added the driver's folders to the path
        time.sleep(_START_INTERVAL)
    return start_worker(sys.path)


def _read_job(data: bytes, term_key: str, holder: str, node: str) -> PartitionJob:
    """Return a job, and check that this node sees the driver's lease in the dataset's store.

    The folder of another machine may have the same path, and an older state of the dataset.

    Raises:
        ConfigurationError: The node has another version, or does not see the lease.
        MillraceError: The store cannot be read.
    """
    try:
        job = PartitionJob.model_validate_json(data)
    except ValidationError:
        raise errors.ConfigurationError(
            f"{node} has another version of Millrace. {_HINT}"
        ) from None
    is_same_store = False
    try:
        store = open_store(job.store, make_folder=False)
        is_same_store = fetch(store, term_key, LeaseTerm).holder.id == holder
    except errors.NotFoundError:
        pass
    except errors.MillraceError as error:
        raise type(error)(f"{node}: {error}") from error
    if not is_same_store:
        raise errors.ConfigurationError(
            f"{node} does not see this run of {job.dataset} in {job.store.url}: choose a bucket, "
            "or a folder that all nodes of the Ray cluster mount at the same path."
        )
    return job
