"""Worker processes on this machine. Each end of a pair of pipes sends lines of JSON."""

import contextlib
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, Self

import orjson

from millrace.datasets import stall_watch
from millrace.datasets.progress_events import PartitionStalled, encode_partition_event
from millrace.datasets.stall_watch import RowNotes, StallWatch
from millrace.datasets.worker import PartitionJob
from millrace.datasets.worker_pool import Assignment, PartitionWorker, WorkerExit, WorkerPool
from millrace.lease import Lease

_OWN_EVENT = -1  # number of an event that the process has not sent
_WORKER_CODE = """
import sys
sys.path[:] = sys.argv[3:] or sys.path
from millrace.datasets.worker import main
main()
"""


class WorkerProcess(PartitionWorker):
    """Worker in a process of this machine.

    Args:
        process: Process of the worker.
        output: Pipe with the messages of the worker.
        notes: Notes of the worker about its rows.
    """

    def __init__(
        self, process: "subprocess.Popen[bytes]", output: IO[bytes], notes: RowNotes
    ) -> None:
        self.pid = process.pid
        self._process, self._output, self._notes = process, output, notes
        self._listener: threading.Thread | None = None
        self._watched: tuple[str, StallWatch] | None = None  # partition of the job, and its watch
        self._last_ended = ""  # partition

    def start(self, job: PartitionJob, lease: Lease) -> None:
        """Start to shard a partition."""
        self.reading = Assignment(job, lease)
        self.send_job(job)

    def send_job(self, job: PartitionJob) -> None:
        """Let the process shard a partition."""
        self._last_ended = ""  # the partition of another run can have the same name
        self._watched = job.partition.name, StallWatch(self._notes)
        self._send({"job": job.reveal()})

    def acknowledge(self, number: int) -> None:
        """Let the worker continue after an event."""
        if number != _OWN_EVENT:
            self._send({"acknowledged": number})

    def listen(self, forward: Callable[["WorkerProcess", dict[str, Any]], None]) -> None:
        """Start a thread that forwards each message, and an empty one after the last."""

        def forward_all() -> None:
            try:
                for message in self.iterate_messages():
                    forward(self, message)
            finally:
                forward(self, {})

        self._listener = threading.Thread(target=forward_all, name="worker-output", daemon=True)
        self._listener.start()

    def iterate_messages(self) -> Iterator[dict[str, Any]]:
        """Yield the messages of the process until its end, and events while it gets no rows."""
        waiting, rest = select.poll(), b""
        waiting.register(self._output, select.POLLIN)
        while True:
            if not waiting.poll(stall_watch.STALL_TIMEOUT * 1000):
                yield from self._look_for_stall()
                continue
            received = os.read(self._output.fileno(), 1 << 16)
            if not received:
                return
            # Without its end, the last line is of a process that died while it wrote.
            *lines, rest = (rest + received).split(b"\n")
            for line in lines:
                message = orjson.loads(line)
                if "ended" in message:
                    self._last_ended = message["ended"]["partition"]
                yield message

    def _look_for_stall(self) -> Iterator[dict[str, Any]]:
        if self._watched is None:
            return
        partition, watch = self._watched
        if partition != self._last_ended and (stall := watch.look()):
            event = PartitionStalled(partition=partition, pid=self.pid, **stall._asdict())
            yield {"event": [_OWN_EVENT, encode_partition_event(event)]}

    def wait_for_exit(self) -> WorkerExit:
        """Return the end of the process."""
        code = self._process.wait()
        if code < 0:
            signal_name = signal.Signals(-code).name
            return WorkerExit(f"was killed by {signal_name}", code == -signal.SIGKILL)
        return WorkerExit(f"exited with code {code}", may_lack_memory=False)

    def stop(self) -> None:
        """End the process, and wait for its end."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # the worker exits at once
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._listener:
            self._listener.join()
        self._output.close()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the end of the output pipe shows the death
            self._process.stdin.write(orjson.dumps(message) + b"\n")
            self._process.stdin.flush()


def start_worker(import_path: Sequence[str] = ()) -> WorkerProcess:
    """Start a worker process.

    Args:
        import_path: Folders that the process imports modules from; by default those of Python. The
            working directory is not among these: a file there must not be imported as a module.
    """
    mine, theirs = os.pipe()
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(os.fdopen(mine, "rb", buffering=0))
        with os.fdopen(theirs, "wb"), os.fdopen(os.memfd_create("rows"), "wb") as memory:
            memory.truncate(RowNotes.SIZE)
            notes = RowNotes(memory.fileno())
            passed = theirs, memory.fileno()
            # The driver stops its workers. Ctrl-C must not reach one before its main function.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _WORKER_CODE, *map(str, passed), *import_path],
                    stdin=subprocess.PIPE,
                    stdout=sys.__stderr__,
                    pass_fds=passed,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        stack.pop_all()
    return WorkerProcess(process, output, notes)


class ProcessPool(WorkerPool):
    """Worker processes, and one queue of their messages.

    Args:
        size: Number of processes.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._messages: queue.SimpleQueue[tuple[WorkerProcess, dict[str, Any]]] = (
            queue.SimpleQueue()
        )
        self._workers: list[WorkerProcess] = []

    def __enter__(self) -> Self:
        """Start the processes. If one cannot be started, the others are stopped."""
        with contextlib.ExitStack() as stack:
            stack.push(self)
            for _ in range(self._size):
                self._start_worker()
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the processes."""
        for worker in self._workers:
            worker.stop()

    @property
    def is_busy(self) -> bool:
        """True if a worker has a partition."""
        return any(worker.is_busy for worker in self._workers)

    def find_idle(self) -> WorkerProcess | None:
        """Return a worker that can read a partition, or None if there is none."""
        idle = (worker for worker in self._workers if not worker.reading)
        return min(idle, key=lambda worker: worker.is_busy, default=None)

    def receive(self, timeout: float | None) -> tuple[PartitionWorker, dict[str, Any]] | None:
        """Return the next message of a worker; an empty message means that the worker has ended."""
        try:
            worker, message = self._messages.get(timeout=timeout)
        except queue.Empty:
            return None
        return (worker, message) if worker in self._workers else None

    def replace(self, worker: PartitionWorker) -> None:
        """Replace a worker that has ended."""
        assert isinstance(worker, WorkerProcess)
        self._workers.remove(worker)
        worker.stop()
        self._start_worker()

    def _start_worker(self) -> None:
        worker = start_worker()
        self._workers.append(worker)
        worker.listen(lambda sender, message: self._messages.put((sender, message)))
