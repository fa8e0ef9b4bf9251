"""Shard partitions concurrently in worker processes. A run holds a lease of each open partition.

Runs on several machines share the partitions of a dataset by these leases. A run skips a partition
that another run holds, and takes the partition over when the lease ends. A worker that dies is
replaced, and its partition continues from the ledger.
"""

import contextlib
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import IO, Any

import orjson

from millrace import errors
from millrace.datasets.progress_events import (
    PartitionsPending,
    ShardCommitted,
    WorkerLost,
    decode_partition_event,
)
from millrace.datasets.worker import PartitionJob, run_job
from millrace.keys.datasets import DatasetKeys
from millrace.keys.leases import LeaseKeys
from millrace.lease import Heartbeat, HeldLease, Holder, Lease, StoreClock, acquire
from millrace.progress import Event, Progress
from millrace.schemas.dataset import PartitionEnd
from millrace.storage import Store, exists, list_objects

logger = logging.getLogger(__name__)

_POLL_INTERVAL = 1.0  # seconds between two checks of partitions that other runs hold
_WORKER_CODE = "from millrace.datasets.worker import main; main()"
_MAX_DEATHS = 3  # workers that may die in one partition without a commit in between

# By default, glibc returns freed memory to the system at once, and a worker needs the memory again
# for the next rows. Without these values, a worker spends most of its system time on page faults.
_MALLOC_ENVIRONMENT = {
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
}


def shard_all_partitions(
    store: Store,
    keys: DatasetKeys,
    jobs: list[PartitionJob],
    *,
    workers: int,
    lease_timeout: timedelta,
    progress: Progress,
) -> None:
    """Shard the partitions that have not ended, and return when every partition has ended.

    The call also waits for the partitions that other runs hold.

    Args:
        store: Store of the dataset.
        keys: Names of the dataset.
        jobs: One job for each partition.
        workers: Number of worker processes; 0 shards in this process.
        lease_timeout: Time after which the lease of a dead holder ends.
        progress: Called in this thread; without workers, in one thread at a time.

    Raises:
        WorkerError: Several workers in a row died in one partition.
        MillraceError: A worker raised this error. The other workers are stopped; a later run
            continues.
    """
    pending = _PendingPartitions(store, keys, jobs)
    progress(PartitionsPending(partitions=len(pending)))
    holder = Holder.describe_this_process()
    clock = StoreClock.read(store, keys.dataset, holder)
    with Heartbeat(lease_timeout) as heartbeat:
        leases = _PartitionLeases(store, keys, holder, lease_timeout, clock, heartbeat)
        if workers == 0:
            _run_in_process(pending, leases, progress)
        else:
            with _WorkerPool(min(workers, max(1, len(jobs)))) as pool:
                _Driver(pool, pending, leases, progress).run()


@dataclass(slots=True)
class _PartitionLeases:
    """Leases of this process on partitions, renewed by one heartbeat."""

    store: Store
    keys: DatasetKeys
    holder: Holder
    ttl: timedelta
    clock: StoreClock
    heartbeat: Heartbeat

    def claim(self, partition: str) -> Lease | HeldLease:
        keys = LeaseKeys(self.keys.dataset, partition)
        lease = acquire(self.store, keys, self.holder, self.ttl, self.clock)
        if isinstance(lease, Lease):
            self.heartbeat.keep(lease)
        return lease


class _PendingPartitions:
    """Partitions that no worker of this process has begun."""

    def __init__(self, store: Store, keys: DatasetKeys, jobs: list[PartitionJob]) -> None:
        self._store, self._keys = store, keys
        self._jobs = deque(jobs)
        self._held_elsewhere: list[PartitionJob] = []
        self.drop_ended()

    def __len__(self) -> int:
        return len(self._jobs) + len(self._held_elsewhere)

    def drop_ended(self) -> None:
        """Drop the partitions that have ended. Lists the whole ledger."""
        ended = {self._keys.parse_end(s.key) for s in list_objects(self._store, self._keys.commits)}
        self._jobs = deque(job for job in self._jobs if job.partition.name not in ended)

    def requeue_held(self) -> None:
        """Drop the held partitions that have ended, and queue the others again."""
        held, self._held_elsewhere = self._held_elsewhere, []
        for job in held:
            if not exists(self._store, self._keys.make_end_key(job.partition.name)):
                self._jobs.append(job)

    def put_back(self, job: PartitionJob) -> None:
        self._jobs.appendleft(job)

    def claim_next(self, leases: _PartitionLeases) -> tuple[PartitionJob, Lease] | None:
        """Claim the next free partition; return its job and lease, or None if there is none."""
        while self._jobs:
            job = self._jobs.popleft()
            lease = leases.claim(job.partition.name)
            if isinstance(lease, Lease):
                return job, lease
            logger.info(
                "%s is held by %s until %s", job.partition.name, lease.holder.host, lease.until
            )
            self._held_elsewhere.append(job)
        return None


def _run_in_process(
    pending: _PendingPartitions, leases: _PartitionLeases, progress: Progress
) -> None:
    pause, lock = threading.Event(), threading.Lock()

    def report_event(event: Event) -> None:
        with lock:
            progress(event)

    while pending:
        claimed = pending.claim_next(leases)
        if claimed is None:
            pause.wait(_POLL_INTERVAL)
            pending.requeue_held()
            continue
        job, lease = claimed
        run_job(job, report_event)
        leases.heartbeat.release(lease)


class _Driver:
    """Assigns partitions to workers, and handles their messages."""

    def __init__(
        self,
        pool: "_WorkerPool",
        pending: _PendingPartitions,
        leases: _PartitionLeases,
        progress: Progress,
    ) -> None:
        self._pool, self._pending, self._leases = pool, pending, leases
        self._progress = progress
        self._deaths: Counter[str] = Counter()

    def run(self) -> None:
        last_poll = time.monotonic()
        while self._pending or self._pool.is_busy:
            for worker in self._pool.list_idle():
                claimed = self._pending.claim_next(self._leases)
                if claimed is None:
                    break
                worker.start(*claimed)
            # No worker reports the end of a partition of another run, so the bucket is polled.
            all_held_elsewhere = bool(self._pending and self._pool.list_idle())
            received = self._pool.receive(timeout=_POLL_INTERVAL if all_held_elsewhere else None)
            if all_held_elsewhere and time.monotonic() - last_poll > _POLL_INTERVAL:
                self._pending.requeue_held()
                last_poll = time.monotonic()
            if received is not None:
                self._handle_message(*received)

    def _handle_message(self, worker: "_WorkerProcess", message: dict[str, Any]) -> None:
        match message:
            case {"event": [number, data]}:
                event = replace(decode_partition_event(data), pid=worker.pid)
                if isinstance(event, ShardCommitted) and worker.assignment:
                    self._deaths.pop(worker.assignment[0].partition.name, None)
                self._progress(event)
                worker.send({"acknowledged": number})
            case {"ended": end}:
                PartitionEnd.model_validate(end)
                _, lease = worker.finish()
                self._leases.heartbeat.release(lease)
            case {"failed": [kind, text]}:
                raise getattr(errors, kind, errors.WorkerError)(text)
            case _:
                self._replace_dead_worker(worker)

    def _replace_dead_worker(self, worker: "_WorkerProcess") -> None:
        cause = worker.describe_exit()
        killed = worker.process.returncode == -signal.SIGKILL
        self._pool.replace(worker)
        self._progress(WorkerLost(pid=worker.pid, cause=cause))
        logger.warning("worker %d %s; another takes its place", worker.pid, cause)
        if worker.assignment is None:
            return
        job, lease = worker.finish()
        partition = job.partition.name
        self._leases.heartbeat.release(lease)
        self._deaths[partition] += 1
        if self._deaths[partition] >= _MAX_DEATHS:
            raise errors.WorkerError(
                f"{_MAX_DEATHS} workers in a row died over {partition}; the last {cause}. "
                + ("If memory was short, lower shard_bytes, uploads or workers. " * killed)
                + "Run it again: the run continues from the last commit."
            )
        self._pending.put_back(job)


@dataclass(slots=True, eq=False)
class _WorkerProcess:
    """One worker process, with the partition that it shards."""

    process: "subprocess.Popen[bytes]"
    output: IO[bytes]
    listener: threading.Thread | None = None
    assignment: tuple[PartitionJob, Lease] | None = field(default=None, repr=False)

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self, job: PartitionJob, lease: Lease) -> None:
        self.assignment = job, lease
        self.send({"job": job.reveal()})

    def finish(self) -> tuple[PartitionJob, Lease]:
        assert self.assignment is not None, "a worker without a partition reported an end"
        assignment, self.assignment = self.assignment, None
        return assignment

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the end of the output pipe shows the death
            self.process.stdin.write(orjson.dumps(message) + b"\n")
            self.process.stdin.flush()

    def iterate_messages(self) -> Iterator[dict[str, Any]]:
        for line in self.output:
            if line.endswith(b"\n"):
                yield orjson.loads(line)

    def describe_exit(self) -> str:
        code = self.process.wait()
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def stop(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()  # the worker exits at once
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.listener:
            self.listener.join()
        self.output.close()


class _WorkerPool:
    """The worker processes, and one queue of their messages."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._messages: queue.SimpleQueue[tuple[_WorkerProcess, dict[str, Any]]] = (
            queue.SimpleQueue()
        )
        self._workers: list[_WorkerProcess] = []

    def __enter__(self) -> "_WorkerPool":
        for _ in range(self._size):
            self._start_worker()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.stop()

    @property
    def is_busy(self) -> bool:
        return any(worker.assignment for worker in self._workers)

    def list_idle(self) -> list[_WorkerProcess]:
        return [worker for worker in self._workers if not worker.assignment]

    def receive(self, timeout: float | None) -> tuple[_WorkerProcess, dict[str, Any]] | None:
        """Return a worker's next message; an empty message means that the worker has ended."""
        try:
            worker, message = self._messages.get(timeout=timeout)
        except queue.Empty:
            return None
        return (worker, message) if worker in self._workers else None

    def replace(self, worker: _WorkerProcess) -> None:
        self._workers.remove(worker)
        worker.stop()
        self._start_worker()

    def _start_worker(self) -> None:
        mine, theirs = os.pipe()
        with os.fdopen(theirs, "wb"):
            output = os.fdopen(mine, "rb")
            process = subprocess.Popen(
                # -P: a file in the working directory must not be imported as a module.
                [sys.executable, "-P", "-c", _WORKER_CODE, str(theirs)],
                stdin=subprocess.PIPE,
                stdout=sys.__stderr__,
                pass_fds=[theirs],
                env={**_MALLOC_ENVIRONMENT, **os.environ},
            )
        worker = _WorkerProcess(process, output)
        self._workers.append(worker)
        worker.listener = threading.Thread(
            target=self._forward_messages, args=(worker,), name="worker-output", daemon=True
        )
        worker.listener.start()

    def _forward_messages(self, worker: _WorkerProcess) -> None:
        try:
            for message in worker.iterate_messages():
                self._messages.put((worker, message))
        finally:
            self._messages.put((worker, {}))
