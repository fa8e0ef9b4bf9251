"""Splits side by side: worker processes on this machine, each split claimed by a lease.

Runs on several machines share a dataset by these leases: a split that another holds is left to
it, and taken over if it is not heard of. A worker that dies is replaced, and its split goes on
from the ledger.
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
from dataclasses import dataclass, field
from datetime import timedelta
from typing import IO, Any

import orjson

from millrace import errors
from millrace.datasets.worker import Job, run_job
from millrace.keys import DatasetKeys, LeaseKeys
from millrace.lease import Heartbeat, HeldLease, Holder, Lease, StoreClock, acquire
from millrace.progress import Event, Progress
from millrace.schemas.dataset import SplitEnd
from millrace.storage import Store, exists, list_objects

logger = logging.getLogger(__name__)

_LOOK_AGAIN = 1.0  # seconds until splits that others hold are looked at again
_WORKER = "from millrace.datasets.worker import main; main()"
_LIVES = 3  # workers that may die over one split without a commit of it

# glibc gives freed memory back to the system eagerly, and a worker asks for as much again with
# the next rows: without these, most of its system time goes into pages that it had a moment ago.
_MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(64 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}


def run_splits(
    store: Store,
    keys: DatasetKeys,
    jobs: list[Job],
    *,
    workers: int,
    lease: timedelta,
    progress: Progress,
) -> None:
    """Cut every split that has not ended, here or by whoever holds it, and return when all have.

    Args:
        store: Where the dataset is.
        keys: Its names.
        jobs: One a split.
        workers: Processes side by side; 0 works in this one.
        lease: How long a claim outlives its holder.
        progress: Called in this thread; with no workers, in one thread at a time.

    Raises:
        WorkerError: Workers keep dying over a split.
        MillraceError: What a worker raised. The others are stopped; a later run goes on.
    """
    waiting = _Waiting(store, keys, jobs)
    progress(Event("splits.left", figures={"splits": len(waiting)}))
    holder = Holder.this_process()
    clock = StoreClock.read(store, keys.dataset, holder)
    with Heartbeat(lease) as heartbeat:
        claims = _Claims(store, keys, holder, lease, clock, heartbeat)
        if workers == 0:
            _in_this_process(waiting, claims, progress)
        else:
            with _Crew(min(workers, max(1, len(jobs)))) as crew:
                _Driver(crew, waiting, claims, progress).run()


@dataclass(slots=True)
class _Claims:
    """Our leases on splits."""

    store: Store
    keys: DatasetKeys
    holder: Holder
    ttl: timedelta
    clock: StoreClock
    heartbeat: Heartbeat

    def claim(self, split: str) -> Lease | HeldLease:
        keys = LeaseKeys(self.keys.dataset, split)
        lease = acquire(self.store, keys, self.holder, self.ttl, self.clock)
        if isinstance(lease, Lease):
            self.heartbeat.keep(lease)
        return lease


class _Waiting:
    """The splits that nobody here works on yet."""

    def __init__(self, store: Store, keys: DatasetKeys, jobs: list[Job]) -> None:
        self._store, self._keys = store, keys
        self._jobs = deque(jobs)
        self._elsewhere: list[Job] = []
        self.drop_ended()

    def __len__(self) -> int:
        return len(self._jobs) + len(self._elsewhere)

    def drop_ended(self) -> None:
        """Forget those that have ended. Lists the whole ledger."""
        ended = {self._keys.parse_end(s.key) for s in list_objects(self._store, self._keys.commits)}
        self._jobs = deque(job for job in self._jobs if job.split.name not in ended)

    def look_again(self) -> None:
        """See whether those that others hold have ended; the rest may be claimable by now."""
        elsewhere, self._elsewhere = self._elsewhere, []
        for job in elsewhere:
            if not exists(self._store, self._keys.end(job.split.name)):
                self._jobs.append(job)

    def put_back(self, job: Job) -> None:
        self._jobs.appendleft(job)

    def claimable(self, claims: _Claims) -> tuple[Job, Lease] | None:
        """Return the next split that nobody holds, with our lease on it."""
        while self._jobs:
            job = self._jobs.popleft()
            lease = claims.claim(job.split.name)
            if isinstance(lease, Lease):
                return job, lease
            logger.info("%s is held by %s until %s", job.split.name, lease.holder.host, lease.until)
            self._elsewhere.append(job)
        return None


def _in_this_process(waiting: _Waiting, claims: _Claims, progress: Progress) -> None:
    pause, lock = threading.Event(), threading.Lock()

    def one_at_a_time(event: Event) -> None:
        with lock:
            progress(event)

    while waiting:
        claimed = waiting.claimable(claims)
        if claimed is None:
            pause.wait(_LOOK_AGAIN)
            waiting.look_again()
            continue
        job, lease = claimed
        run_job(job, one_at_a_time)
        claims.heartbeat.release(lease)


class _Driver:
    """Hands splits to workers, and acts on what they say."""

    def __init__(
        self, crew: "_Crew", waiting: _Waiting, claims: _Claims, progress: Progress
    ) -> None:
        self._crew, self._waiting, self._claims = crew, waiting, claims
        self._progress = progress
        self._deaths: Counter[str] = Counter()

    def run(self) -> None:
        looked = time.monotonic()
        while self._waiting or self._crew.busy:
            for worker in self._crew.idle():
                claimed = self._waiting.claimable(self._claims)
                if claimed is None:
                    break
                worker.start(*claimed)
            # What others hold ends in the bucket: only then is there no event to wait for.
            all_elsewhere = bool(self._waiting and self._crew.idle())
            heard = self._crew.hear(timeout=_LOOK_AGAIN if all_elsewhere else None)
            if all_elsewhere and time.monotonic() - looked > _LOOK_AGAIN:
                self._waiting.look_again()
                looked = time.monotonic()
            if heard is not None:
                self._act(*heard)

    def _act(self, worker: "_Worker", message: dict[str, Any]) -> None:
        match message:
            case {"event": [number, name, subject, figures]}:
                if name == "shard.committed" and worker.task:
                    self._deaths.pop(worker.task[0].split.name, None)
                self._progress(Event(name, subject, {**figures, "pid": worker.pid}))
                worker.say({"acknowledged": number})
            case {"ended": end}:
                SplitEnd.model_validate(end)
                _, lease = worker.finish()
                self._claims.heartbeat.release(lease)
            case {"failed": [kind, text]}:
                raise getattr(errors, kind, errors.WorkerError)(text)
            case _:
                self._bury(worker)

    def _bury(self, worker: "_Worker") -> None:
        how = worker.how_it_ended()
        killed = worker.process.returncode == -signal.SIGKILL
        self._crew.replace(worker)
        self._progress(Event("worker.lost", figures={"pid": worker.pid, "how": how}))
        logger.warning("worker %d %s; another takes its place", worker.pid, how)
        if worker.task is None:
            return
        job, lease = worker.finish()
        split = job.split.name
        self._claims.heartbeat.release(lease)
        self._deaths[split] += 1
        if self._deaths[split] >= _LIVES:
            raise errors.WorkerError(
                f"{_LIVES} workers in a row died over {split}; the last {how}. "
                + ("If that was for memory, lower shard_bytes, uploads or workers. " * killed)
                + "Run it again: it goes on from the last commit."
            )
        self._waiting.put_back(job)


@dataclass(slots=True, eq=False)
class _Worker:
    """One worker process, as its driver sees it."""

    process: "subprocess.Popen[bytes]"
    said: IO[bytes]
    listener: threading.Thread | None = None
    task: tuple[Job, Lease] | None = field(default=None, repr=False)

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self, job: Job, lease: Lease) -> None:
        self.task = job, lease
        self.say({"job": job.reveal()})

    def finish(self) -> tuple[Job, Lease]:
        assert self.task is not None, "a worker without a split said that it ended one"
        task, self.task = self.task, None
        return task

    def say(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead, as its own pipe will say
            self.process.stdin.write(orjson.dumps(message) + b"\n")
            self.process.stdin.flush()

    def lines(self) -> Iterator[dict[str, Any]]:
        for line in self.said:
            if line.endswith(b"\n"):
                yield orjson.loads(line)

    def how_it_ended(self) -> str:
        code = self.process.wait()
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def stop(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()  # it takes that as the end, at once
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.listener:
            self.listener.join()
        self.said.close()


class _Crew:
    """The workers, and one queue of what they say."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._said: queue.SimpleQueue[tuple[_Worker, dict[str, Any]]] = queue.SimpleQueue()
        self._workers: list[_Worker] = []

    def __enter__(self) -> "_Crew":
        for _ in range(self._size):
            self._hire()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.stop()

    @property
    def busy(self) -> bool:
        return any(worker.task for worker in self._workers)

    def idle(self) -> list[_Worker]:
        return [worker for worker in self._workers if not worker.task]

    def hear(self, timeout: float | None) -> tuple[_Worker, dict[str, Any]] | None:
        """Return a worker's next message; an empty message means that the worker is gone."""
        try:
            worker, message = self._said.get(timeout=timeout)
        except queue.Empty:
            return None
        return (worker, message) if worker in self._workers else None

    def replace(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.stop()
        self._hire()

    def _hire(self) -> None:
        mine, theirs = os.pipe()
        with os.fdopen(theirs, "wb"):
            said = os.fdopen(mine, "rb")
            process = subprocess.Popen(
                # -P: a file beside the settings must not pass for a module.
                [sys.executable, "-P", "-c", _WORKER, str(theirs)],
                stdin=subprocess.PIPE,
                stdout=sys.__stderr__,
                pass_fds=[theirs],
                env={**_MALLOC, **os.environ},
            )
        worker = _Worker(process, said)
        self._workers.append(worker)
        worker.listener = threading.Thread(
            target=self._listen, args=(worker,), name="crew", daemon=True
        )
        worker.listener.start()

    def _listen(self, worker: _Worker) -> None:
        try:
            for message in worker.lines():
                self._said.put((worker, message))
        finally:
            self._said.put((worker, {}))
