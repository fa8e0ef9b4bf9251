"""Workers of a campaign as processes of this machine."""

import contextlib
import contextvars
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import IO, Self

from prefect import get_run_logger

from millrace.campaigns.worker import TrainingPlan, worker_environment, worker_file, worker_path
from millrace.campaigns.worker.settings import FILE
from millrace.errors import WorkerError
from millrace.keys import CampaignKeys
from millrace.processes import kill_marked
from millrace.storage import StoreSpec

_LEAVING = 5.0  # seconds that those have to end that are asked to
_LONGEST = 2000  # characters of a line that is shown
_TAIL = 10  # lines of a worker that has failed, in the message


class Workers:
    """Processes that train, while the block lasts; they end with this one, however it ends.

    Args:
        plan: What they do.
        reads: The campaign's store, with what may read it.
        writes: Likewise with what may write.
        folder: In which they run.
    """

    def __init__(
        self, plan: TrainingPlan, reads: StoreSpec, writes: StoreSpec, folder: Path
    ) -> None:
        self._plan, self._store, self._folder = plan, writes, folder
        self._environment = {
            **os.environ, "PATH": worker_path(), **worker_environment(reads, writes),
        }  # fmt: skip
        self._log = get_run_logger()
        self._home = tempfile.TemporaryDirectory(prefix="millrace-workers-")
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._reading: dict[str, threading.Thread] = {}
        self._tails: dict[str, deque[str]] = {}

    def __enter__(self) -> Self:
        """Start them."""
        try:
            for number in range(self._plan.workers):
                self._start(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + _LEAVING
            for process in self._running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        kill_marked(FILE, self._home.name)  # what a worker that was killed has left
        for thread in self._reading.values():  # a process of the script may still hold the pipe
            thread.join(_LEAVING)
        self._home.cleanup()

    @property
    def over(self) -> bool:
        """True if all workers have ended."""
        return all(process.poll() is not None for process in self._running.values())

    def refuse(self) -> None:
        """Raise if all workers have failed.

        Raises:
            WorkerError: They have; the message has the last lines of one of them.
        """
        if all(process.poll() for process in self._running.values()):
            raise WorkerError(f"All workers have failed: {self.last_words()}")

    def last_words(self) -> str:
        """Return how the workers ended, and the last lines that one of them printed."""
        codes = {uid: process.poll() for uid, process in self._running.items()}
        ends = ", ".join(f"{uid} ended with {code}" for uid, code in codes.items())
        uid = max(codes, key=lambda uid: bool(codes[uid]))
        self._reading[uid].join(_LEAVING)  # its last lines may be on their way
        lines = "\n".join(self._tails[uid])
        return f"{ends}. The last lines of {uid}:\n{lines}" if lines else f"{ends}, with no output."

    def finish(self, patience: timedelta) -> None:
        """Wait until all have ended by themselves.

        Args:
            patience: Then those that are left are ended.
        """
        deadline = time.monotonic() + patience.total_seconds()
        for uid, process in self._running.items():
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._log.warning("%s has not ended in %s", uid, patience)
                continue
            if code:
                self._log.warning("%s ended with %d: the lines above say why", uid, code)

    def _start(self, number: int) -> None:
        uid = CampaignKeys(self._plan.campaign).uid(number)
        file = Path(self._home.name) / f"{uid}.yaml"
        file.write_text(worker_file(self._plan, self._store, number), encoding="utf-8")
        main = "from millrace.cli import main; main()"
        command = [sys.executable, "-c", main, "work", str(file), "--attached"]
        process = subprocess.Popen(
            command,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.PIPE,  # closed when this process ends
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._running[uid] = process
        self._tails[uid] = deque(maxlen=_TAIL)
        assert process.stdout is not None
        context = contextvars.copy_context()
        thread = threading.Thread(
            target=context.run, args=(self._show, uid, process.stdout), daemon=True
        )
        thread.start()
        self._reading[uid] = thread

    def _show(self, uid: str, printed: IO[bytes]) -> None:
        with printed:
            for line in printed:
                text = line[:_LONGEST].decode(errors="replace").rstrip()
                self._tails[uid].append(text)
                self._log.info("%s| %s", uid, text)
