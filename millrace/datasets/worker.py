"""Worker process of a sharding run: it shards the partitions that its driver sends.

Driver and worker send lines of JSON through two pipes. Nothing is unpickled, and neither the
arguments nor the environment of the worker contain credentials. After each event, the worker waits
for the driver's acknowledgement. When the driver's end of the pipe closes, the worker exits at
once. A later run continues from the worker's commits.

When the rows of a partition are read, the driver may send the next partition. The worker writes it
while the last shards of the one before are uploaded.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import IO, Any

import orjson
from pydantic import BaseModel, ConfigDict

from millrace import errors
from millrace.datasets.partition import ShardBuffers, write_partition
from millrace.datasets.progress_events import (
    LocationFailed,
    PartitionEvent,
    SourceRead,
    encode_partition_event,
)
from millrace.datasets.sources import (
    DownloadSettings,
    MirroredFiles,
    SourceFiles,
    StoredDigests,
    open_files,
    open_mirrored_files,
)
from millrace.datasets.stall_watch import RowNotes
from millrace.datasets.transforms import open_transformed_source
from millrace.datasets.writers import check_writers
from millrace.keys.datasets import DatasetKeys
from millrace.memory import keep_freed_memory
from millrace.processes import end_with_parent
from millrace.progress import Event, Progress
from millrace.schemas.dataset import Partition, PartitionEnd, ShardLayout, SourceRecord
from millrace.storage import Store, StoreSpec, open_store


class PartitionJob(BaseModel):
    """Settings and records that a worker needs to shard one partition."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dataset: str
    plan_digest: str
    layout: ShardLayout
    source: SourceRecord
    source_store: StoreSpec
    mirrors: tuple[StoreSpec, ...] = ()
    allow_private: bool = False
    downloads: DownloadSettings = DownloadSettings()
    store: StoreSpec
    partition: Partition
    uploads: int

    def reveal(self) -> dict[str, Any]:
        """Return the job as plain JSON values, secrets included, for a worker."""
        data = self.model_dump(mode="json")
        data["store"] = self.store.reveal_secrets()
        data["source_store"] = self.source_store.reveal_secrets()
        data["mirrors"] = [spec.reveal_secrets() for spec in self.mirrors]
        return data


@dataclass(frozen=True, slots=True)
class PartitionJobs:
    """Jobs of the partitions of a plan. Each job is made when needed, since there may be very many.

    Attributes:
        make: Function that returns the job of a partition.
        partitions: Partitions in the order of the plan.
    """

    make: Callable[[Partition], PartitionJob]
    partitions: Sequence[Partition]


class JobRunner:
    """Shards partitions one after the other, and keeps the buffers of their shards.

    Args:
        notes: Notes of this process about the rows.
    """

    def __init__(self, notes: RowNotes) -> None:
        self._notes = notes
        self._buffers: ShardBuffers | None = None

    def write_partition(self, job: PartitionJob, progress: Progress) -> Callable[[], PartitionEnd]:
        """Read and upload the rows of a partition, and return the function that commits its end.

        The function can be called in another thread, while this one writes the next partition.

        Raises:
            ConfigurationError: This process would make other bytes than the plan means.
            MillraceError: The errors of `write_partition`.
        """
        self._notes.begin_partition()
        check_writers(job.dataset, job.layout, job.source.kind, job.partition)
        store, keys = open_store(job.store), DatasetKeys(job.dataset)
        files = _open_source_files(job, store, keys, progress)
        source = open_transformed_source(
            job.source,
            files,
            store,
            types=job.layout.fields,
            downloads=job.downloads,
            allow_private=job.allow_private,
        )
        buffers, self._buffers = self._buffers, None  # not used again after an error
        if buffers is None or (buffers.layout, buffers.uploads) != (job.layout, job.uploads):
            buffers = ShardBuffers(job.layout, job.uploads)

        def report_read() -> None:
            if isinstance(files, MirroredFiles):
                progress(SourceRead(partition=job.partition.name, served=files.served))

        try:
            finish = write_partition(
                store,
                source,
                keys,
                buffers,
                job.partition,
                plan_digest=job.plan_digest,
                progress=progress,
                notes=self._notes,
                is_reproducible=job.source.is_reproducible,
            )
        except BaseException:
            report_read()
            raise
        self._buffers = buffers

        def finish_and_report() -> PartitionEnd:
            try:
                return finish()
            finally:
                report_read()

        return finish_and_report


def _open_source_files(
    job: PartitionJob, store: Store, keys: DatasetKeys, progress: Progress
) -> SourceFiles:
    if not job.mirrors:
        return open_files(job.source_store, paths=(), allow_private=job.allow_private)

    def report_fault(location: str, reason: str, differs: bool) -> None:  # noqa: FBT001
        progress(
            LocationFailed(
                partition=job.partition.name, location=location, reason=reason, differs=differs
            )
        )

    return open_mirrored_files(
        (job.source_store, *job.mirrors),
        allow_private=job.allow_private,
        committed=job.source,
        digests=StoredDigests(store, keys),
        report=report_fault,
    )


def _describe_error(partition: str, error: BaseException) -> dict[str, Any]:
    """Return the worker's message about an error of a partition.

    A panic of Rust is no `Exception`. It is an error of the partition, too: another worker would
    meet it again. No signal that ends the process becomes an exception in a worker.
    """
    if isinstance(error, errors.MillraceError):
        return {"failed": [type(error).__name__, str(error)]}
    text = f"{partition}: {type(error).__name__}: {error}"  # the driver raises it, with its type
    return {"failed": ["WorkerError", text]}


class _DriverConnection:
    """The worker's end of the pipes."""

    def __init__(self, incoming: IO[bytes], outgoing: IO[bytes]) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._write_lock = threading.Lock()
        self._numbers = count()
        self._unacknowledged: dict[int, threading.Event] = {}
        self.jobs: list[PartitionJob] = []
        self.ready = threading.Semaphore(0)

    def listen(self) -> None:
        """Receive messages until the driver closes the pipe, and then exit."""
        try:
            for line in self._incoming:
                message = orjson.loads(line)
                if "acknowledged" in message:
                    self._unacknowledged.pop(message["acknowledged"]).set()
                else:
                    self.jobs.append(PartitionJob.model_validate(message["job"]))
                    self.ready.release()
        finally:
            os._exit(0)  # no clean-up: threads may still be uploading

    def send(self, message: dict[str, Any]) -> None:
        with self._write_lock:
            self._outgoing.write(orjson.dumps(message) + b"\n")
            self._outgoing.flush()

    def report(self, event: Event) -> None:
        assert isinstance(event, PartitionEvent), "a partition sends no other events"
        number, acknowledged = next(self._numbers), threading.Event()
        self._unacknowledged[number] = acknowledged
        self.send({"event": [number, encode_partition_event(event)]})
        acknowledged.wait()


def _open_pipes(outgoing: int) -> tuple[IO[bytes], IO[bytes]]:
    """Open the pipes to the driver, and keep them from the processes that this one starts.

    A thread reads the incoming one all the time, and so holds the lock of its file. A forked
    process closes `sys.stdin`, which needs this lock, so `sys.stdin` becomes an empty file. A
    process with the outgoing one would keep the driver from seeing the end of this process.
    """
    pipes = os.dup(sys.stdin.fileno()), os.dup(outgoing)  # not inheritable, as the originals are
    os.close(outgoing)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, sys.stdin.fileno())

    def close_in_child() -> None:
        for pipe in pipes:
            os.dup2(empty, pipe, inheritable=False)  # no other file gets the number of the pipe

    os.register_at_fork(after_in_child=close_in_child)
    return os.fdopen(pipes[0], "rb"), os.fdopen(pipes[1], "wb")


def main() -> None:
    """Serve a driver until it closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver stops its workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # blocked since the start
    end_with_parent()
    keep_freed_memory()
    pipe, memory = map(int, sys.argv[1:3])
    driver = _DriverConnection(*_open_pipes(pipe))  # not stdout: libraries print there
    notes = RowNotes(memory)
    os.close(memory)
    threading.Thread(target=driver.listen, name="listen", daemon=True).start()
    runner, ending = JobRunner(notes), Future[None]()
    ending.set_result(None)
    with ThreadPoolExecutor(1, thread_name_prefix="end") as pool:
        while True:
            driver.ready.acquire()
            job = driver.jobs.pop(0)
            partition = job.partition.name
            try:
                finish = runner.write_partition(job, driver.report)
            except BaseException as error:  # noqa: BLE001 - the driver raises it
                driver.send(_describe_error(partition, error))
                continue
            ending.result()
            driver.send({"read": partition})
            ending = pool.submit(_finish_partition, driver, partition, finish)
            del finish  # with the source, which is not kept while the next one is read


def _finish_partition(
    driver: _DriverConnection, partition: str, finish: Callable[[], PartitionEnd]
) -> None:
    """Finish a partition, and send the worker's last message about it: its end, or its error."""
    try:
        message = {"ended": finish().model_dump(mode="json")}
    except BaseException as error:  # noqa: BLE001 - the driver raises it
        message = _describe_error(partition, error)
    driver.send(message)
