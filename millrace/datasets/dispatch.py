"""Shard partitions concurrently. A run holds a lease of each open partition.

The workers are processes of this machine, or tasks on the nodes of a Ray cluster. Runs on several
machines share the partitions of a dataset by their leases. A run skips a partition that another
run holds, and takes the partition over when the lease ends. A worker that dies is replaced, and
its partition continues from the ledger.
"""

import logging
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import copy_context
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from millrace import errors
from millrace.datasets.plan import check_still_committed
from millrace.datasets.progress_events import (
    PartitionEnded,
    PartitionsPending,
    PartitionStalled,
    ShardCommitted,
    WorkerLost,
    decode_partition_event,
)
from millrace.datasets.ray_tasks import connect_pool
from millrace.datasets.settings import ExecutionSettings
from millrace.datasets.stall_watch import RowNotes, watch_in_thread
from millrace.datasets.worker import JobRunner, PartitionJob, PartitionJobs
from millrace.datasets.worker_pool import Assignment, PartitionWorker, WorkerPool
from millrace.datasets.worker_processes import ProcessPool
from millrace.formatting import format_count
from millrace.keys.datasets import DatasetKeys
from millrace.keys.leases import COLLECTOR, PLAN_REMOVAL, LeaseKeys, make_run_lease_name
from millrace.lease import (
    Heartbeat,
    HeldLease,
    Holder,
    Lease,
    StoreClock,
    acquire,
    find_holder,
)
from millrace.progress import Event, Progress, serialize_events
from millrace.records import read_records
from millrace.schemas.dataset import DatasetPlan, Partition, PartitionEnd
from millrace.storage import Store, exists, list_objects

logger = logging.getLogger(__name__)

_POLL_INTERVAL = 1.0  # seconds between two checks of partitions that other runs hold
_LISTED_OBJECTS = 1000  # objects in one answer of a listing
_MAX_DEATHS = 3  # workers that may die in one partition without a commit in between


def shard_all_partitions(
    store: Store,
    keys: DatasetKeys,
    jobs: PartitionJobs,
    *,
    plan: DatasetPlan,
    execution: ExecutionSettings,
    progress: Progress,
    prepare: Callable[[], object] = lambda: None,
    wait: bool = True,
) -> None:
    """Shard the partitions that have not ended, and return when every partition has ended.

    Args:
        store: Store of the dataset.
        keys: Names of the dataset.
        jobs: Jobs of all partitions.
        plan: Plan of the dataset, which must still be committed.
        execution: Number and place of the workers, and the time after which the lease of a dead
            holder ends.
        progress: Called in this thread; with `workers: 0`, in one thread at a time.
        prepare: Function that is called before the first partition. No other run replaces the plan
            while it is called.
        wait: Whether to wait for the partitions that other runs hold.

    Raises:
        ConflictError: Another run has replaced the plan.
        HeldError: `wait` is false, and other runs work on all partitions that have not ended.
        WorkerError: Several workers in a row died in one partition.
        MillraceError: A worker raised this error. The other workers are stopped; a later run
            continues.
    """
    progress = serialize_events(progress)
    pending = _PendingPartitions(store, keys, jobs, progress, wait=wait)
    progress(PartitionsPending(partitions=len(pending)))
    holder = Holder.describe_this_process()
    clock = StoreClock.read(store, keys.dataset, holder)
    ttl = execution.lease_timeout
    with Heartbeat(ttl) as heartbeat:
        leases = _PartitionLeases(store, keys, holder, ttl, clock, heartbeat)
        if pending:
            leases.begin_run(plan)
        prepare()
        if execution.ray:
            with connect_pool(execution.ray, execution.workers) as pool:
                _Driver(pool, pending, leases, progress).run()
        elif workers := min(execution.count_workers(), max(1, len(jobs.partitions))):
            with ProcessPool(workers) as pool:
                _Driver(pool, pending, leases, progress).run()
        else:
            _run_in_process(pending, leases, progress)


@dataclass(slots=True)
class _PartitionLeases:
    """Leases of this process on the run and on partitions, renewed by one heartbeat."""

    store: Store
    keys: DatasetKeys
    holder: Holder
    ttl: timedelta
    clock: StoreClock
    heartbeat: Heartbeat

    def begin_run(self, plan: DatasetPlan) -> None:
        """Take the lease of this run. Wait as long as a process collects garbage or removes a plan.

        The collector takes its lease first, and then looks for leases of runs. So one of the two
        processes finds the lease of the other. The first look spares a collector that has begun the
        sight of a lease, which would stop it.

        This answer holds for all partitions of the run: a collector that begins later finds the
        run's lease. If this process is suspended, the lease ends, and a collector may begin. The
        next heartbeat renews the lease, since no other process takes a lease of this name. So the
        collector stops before its next batch. Objects that are deleted until then are not lost: a
        commit uploads missing ones again, and a dataset is finalized after a listing of its shards.

        A run that removes the plan also takes its lease first, and then looks for leases of runs.
        If it has not found this run's lease, the plan is read again after the removal.

        Raises:
            ConflictError: Another run has replaced the plan.
        """
        name = make_run_lease_name(self.holder.id)
        keys = LeaseKeys(self.keys.dataset, name)
        while True:
            if not self._is_held(COLLECTOR):
                lease = acquire(self.store, keys, self.holder, self.ttl, self.clock)
                assert isinstance(lease, Lease), "another process has the holder id of this one"
                self.heartbeat.keep(lease)
                if not self._is_held(COLLECTOR):
                    break
                self.heartbeat.release(lease)
            logger.info("%s waits for the end of the collection of garbage", self.keys.dataset)
            time.sleep(_POLL_INTERVAL)
        while self._is_held(PLAN_REMOVAL):
            logger.info("%s waits for the end of the removal of a plan", self.keys.dataset)
            time.sleep(_POLL_INTERVAL)
        check_still_committed(self.store, self.keys, plan)

    def claim(self, partition: str) -> Lease | HeldLease:
        """Take the lease of a partition; return the lease of another holder if there is one."""
        keys = LeaseKeys(self.keys.dataset, partition)
        lease = acquire(self.store, keys, self.holder, self.ttl, self.clock)
        if isinstance(lease, Lease):
            self.heartbeat.keep(lease)
        return lease

    def _is_held(self, name: str) -> bool:
        """Decide whether a process holds a lease of the dataset. One listing."""
        keys = LeaseKeys(self.keys.dataset, name)
        return find_holder(self.store, keys, self.clock) is not None


class _PendingPartitions:
    """Partitions that no worker of this process has begun.

    A run takes them in the order of the plan. When it meets the work of another run, it goes on at
    a random partition, so that the runs do not follow each other through the plan.

    Args:
        store: Store of the dataset.
        keys: Names of the dataset.
        jobs: Jobs of all partitions.
        progress: Called at each end of a partition that this object finds, but for the first ones.
        wait: Whether this run waits for the partitions that other runs hold.
    """

    def __init__(
        self,
        store: Store,
        keys: DatasetKeys,
        jobs: PartitionJobs,
        progress: Progress,
        *,
        wait: bool,
    ) -> None:
        self._store, self._keys, self._progress = store, keys, progress
        self._wait = wait
        self._make_job = jobs.make
        self._held_elsewhere: list[Partition] = []
        self._first_leases: dict[str, HeldLease] = {}  # as this run met them
        self._renewed = set[str]()  # partitions whose holders have shown since that they live
        self._listing_requests = 0
        self._ends_met = 0  # since the last listing
        ended = self._list_ended()
        self._partitions = deque(one for one in jobs.partitions if one.name not in ended)

    def __len__(self) -> int:
        return len(self._partitions) + len(self._held_elsewhere)

    def requeue_held(self) -> None:
        """Drop the held partitions that have ended, and queue the others again."""
        held, self._held_elsewhere = self._held_elsewhere, []
        ended = {one.name for one in held if self._has_ended(one)}
        self._partitions.extend(one for one in held if one.name not in ended)
        self._report_ends(ended)

    def drop_ended(self) -> None:
        """Drop partitions that other runs have ended, held or not. One request if none has.

        This is for a run whose Ray cluster has no CPU now, so that it claims no partition and meets
        no ends.
        """
        self._partitions.extend(self._held_elsewhere)
        self._held_elsewhere.clear()
        while self._partitions and self._has_ended(self._partitions[0]):
            self._drop_ended(self._partitions.popleft())
        self._partitions.rotate(-1)

    def refuse_to_wait(self) -> None:
        """Refuse to wait for other runs, unless this run waits or may take a partition over.

        The lease of a dead holder is not renewed, and this run takes it at its end.

        Raises:
            HeldError: Other runs hold all partitions, and have renewed each lease.
        """
        held = self._held_elsewhere
        is_needed = self._partitions or any(one.name not in self._renewed for one in held)
        if self._wait or is_needed or not held:
            return
        raise errors.HeldError(
            f"Other runs work on {format_count(len(held), 'open partition')} of "
            f"{self._store.make_url(self._keys.dataset)}, and none is left for this run."
        )

    def put_back(self, partition: Partition) -> None:
        self._partitions.appendleft(partition)

    def claim_next(self, leases: _PartitionLeases) -> tuple[PartitionJob, Lease] | None:
        """Claim the next free partition; return its job and lease, or None if there is none."""
        while self._partitions:
            partition = self._partitions.popleft()
            lease = leases.claim(partition.name)
            if isinstance(lease, HeldLease):
                logger.info(
                    "%s is held by %s until %s", partition.name, lease.holder.host, lease.until
                )
                self._held_elsewhere.append(partition)
                first = self._first_leases.setdefault(partition.name, lease)
                if (lease.holder.id, lease.until) != (first.holder.id, first.until):
                    self._renewed.add(partition.name)
            elif lease.term and self._has_ended(partition):  # the first holder meets no end
                leases.heartbeat.release(lease)
                self._drop_ended(partition)
            else:
                return self._make_job(partition), lease
            if self._partitions:
                self._partitions.rotate(random.randrange(len(self._partitions)))
        return None

    def _has_ended(self, partition: Partition) -> bool:
        return exists(self._store, self._keys.make_end_key(partition.name))

    def _drop_ended(self, met: Partition) -> None:
        """Drop a partition that another run has ended, and others that have ended.

        The ledger is listed again after as many of these ends as a listing has requests.
        """
        ended = {met.name}
        self._ends_met += 1
        if self._ends_met >= self._listing_requests:
            self._ends_met = 0
            listed = self._list_ended()
            ended |= {one.name for one in self._partitions if one.name in listed}
            self._partitions = deque(one for one in self._partitions if one.name not in ended)
        self._report_ends(ended)

    def _list_ended(self) -> set[str]:
        """Return the names of the partitions that have ended. Lists the whole ledger."""
        ended: set[str] = set()
        objects = 0
        for stat in list_objects(self._store, self._keys.commits):
            objects += 1
            if name := self._keys.parse_end(stat.key):
                ended.add(name)
        self._listing_requests = 1 + objects // _LISTED_OBJECTS
        return ended

    def _report_ends(self, partitions: Iterable[str]) -> None:
        """Send the event of each end. One request for each."""
        wanted = ((name, self._keys.make_end_key(name), PartitionEnd) for name in partitions)
        for _, end in read_records(self._store, wanted):
            if isinstance(end, PartitionEnd):  # otherwise `finalize_dataset` names the damage
                self._progress(PartitionEnded.describe(end))


def _run_in_process(
    pending: _PendingPartitions, leases: _PartitionLeases, progress: Progress
) -> None:
    pause, notes = threading.Event(), RowNotes()
    runner = JobRunner(notes)
    ending: Future[None] | None = None

    def report_unless_failed(event: Event) -> None:
        _raise_fault(ending)  # the error of one partition ends the reading of the next
        progress(event)

    def finish_partition(
        job: PartitionJob, lease: Lease, finish: Callable[[], object], last_row: str
    ) -> None:
        own_notes = RowNotes()  # `notes` has the rows of the next partition
        own_notes.note_row(last_row)
        with _watch_partition(job, own_notes, progress):
            finish()
        leases.heartbeat.release(lease)

    with ThreadPoolExecutor(1, thread_name_prefix="end") as pool:
        while pending or ending:
            claimed = pending.claim_next(leases)
            if claimed is None:
                if ending is None:
                    pending.refuse_to_wait()
                    pause.wait(_POLL_INTERVAL)
                    pending.requeue_held()
                else:
                    ending.result()
                    ending = None
                continue
            job, lease = claimed
            try:
                with _watch_partition(job, notes, progress):
                    finish = runner.write_partition(job, report_unless_failed)
            except BaseException:
                _raise_fault(ending)  # the first error
                raise
            context = copy_context()  # of the caller, whose `progress` may need it
            before, last_row = ending, notes.get_last()[1]
            ending = pool.submit(context.run, finish_partition, job, lease, finish, last_row)
            del finish  # with the source, which is not kept while the next one is read
            if before is not None:
                before.result()


def _raise_fault(ending: "Future[None] | None") -> None:
    """Raise the error of a partition's end, if it is there by now."""
    if ending is not None and ending.done():
        ending.result()


def _watch_partition(
    job: PartitionJob, notes: RowNotes, progress: Progress
) -> AbstractContextManager[None]:
    """Watch a partition that this process shards, and report each time without a row."""
    partition = job.partition.name
    return watch_in_thread(
        notes, lambda stall: progress(PartitionStalled(partition=partition, **stall._asdict()))
    )


class _Driver:
    """Assigns partitions to workers, and handles their messages."""

    def __init__(
        self,
        pool: WorkerPool,
        pending: _PendingPartitions,
        leases: _PartitionLeases,
        progress: Progress,
    ) -> None:
        self._pool, self._pending, self._leases = pool, pending, leases
        self._progress = progress
        self._deaths: Counter[str] = Counter()
        # Partitions with an end in the ledger, whose worker has not sent its last message.
        self._unconfirmed_ends: set[str] = set()

    def run(self) -> None:
        last_poll = time.monotonic()
        while self._pending or self._pool.is_busy:
            while worker := self._pool.find_idle():
                claimed = self._pending.claim_next(self._leases)
                if claimed is None:
                    break
                worker.start(*claimed)
            if not (self._pending or self._pool.is_busy):
                return  # other runs have ended the rest
            if not self._pool.is_busy:
                self._pending.refuse_to_wait()
            # No worker reports the end of a partition of another run, so the bucket is polled.
            all_held_elsewhere = bool(self._pending and self._pool.find_idle())
            has_no_worker = not (all_held_elsewhere or self._pool.is_busy)
            received = self._pool.receive(timeout=_POLL_INTERVAL if all_held_elsewhere else None)
            if all_held_elsewhere and time.monotonic() - last_poll > _POLL_INTERVAL:
                self._pending.requeue_held()
                last_poll = time.monotonic()
            if has_no_worker:
                self._pending.drop_ended()
            if received is not None:
                self._handle_message(*received)

    def _handle_message(self, worker: PartitionWorker, message: dict[str, Any]) -> None:
        match message:
            case {"event": [number, data]}:
                event = decode_partition_event(data)
                if worker.pid:
                    event = replace(event, pid=worker.pid)
                if isinstance(event, ShardCommitted):
                    self._deaths.pop(event.partition, None)
                if isinstance(event, PartitionEnded):
                    self._unconfirmed_ends.add(event.partition)
                self._progress(event)
                worker.acknowledge(number)
            case {"read": _}:
                worker.note_read()
            case {"ended": end}:
                PartitionEnd.model_validate(end)  # raises for a damaged message
                job, lease = worker.finish()
                self._unconfirmed_ends.discard(job.partition.name)
                self._leases.heartbeat.release(lease)
            case {"failed": [kind, text]}:
                raise getattr(errors, kind, errors.WorkerError)(text)
            case _:
                self._replace_dead_worker(worker)

    def _replace_dead_worker(self, worker: PartitionWorker) -> None:
        cause, may_lack_memory = worker.wait_for_exit()
        self._pool.replace(worker)
        self._progress(WorkerLost(pid=worker.pid, cause=cause))
        logger.warning("worker %d %s; another takes its place", worker.pid, cause)
        while worker.is_busy:
            self._put_back(worker.finish(), cause, may_lack_memory=may_lack_memory)

    def _put_back(self, assignment: Assignment, cause: str, *, may_lack_memory: bool) -> None:
        """Let another worker have the partition of a worker that died.

        Raises:
            WorkerError: Too many workers died over the partition.
        """
        job, lease = assignment
        partition = job.partition.name
        self._leases.heartbeat.release(lease)
        if partition in self._unconfirmed_ends:
            return
        self._deaths[partition] += 1
        if self._deaths[partition] >= _MAX_DEATHS:
            remedy = (
                "If memory was short, lower shard_bytes, uploads or workers"
                if may_lack_memory
                else "Correct what ends the process, such as a function or a library"
            )
            raise errors.WorkerError(
                f"{_MAX_DEATHS} workers in a row died over {partition}; the last {cause}. "
                f"{remedy}, and run it again: the run continues from the last commit."
            )
        self._pending.put_back(job.partition)
