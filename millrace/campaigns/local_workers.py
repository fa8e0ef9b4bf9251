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
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import IO, Self

from millrace.campaigns.campaign import Training
from millrace.campaigns.progress_events import (
    LocalWorkerFailed,
    LocalWorkerLate,
    LocalWorkerPrinted,
)
from millrace.campaigns.settings import LocalWorkerOptions
from millrace.campaigns.worker import (
    make_worker_environment,
    make_worker_path,
    render_worker_settings,
)
from millrace.campaigns.worker.settings import SETTINGS_VARIABLE
from millrace.errors import WorkerError
from millrace.processes import kill_by_environment
from millrace.progress import Event, Progress, ignore_event

_EXIT_TIMEOUT = 5.0  # seconds that a process has to end after a signal
_MAX_LINE_LENGTH = 2000  # bytes of a logged line
_TAIL_LINES = 10  # last lines of a failed worker, in the message


class LocalWorkerProcesses:
    """Processes that train while the block lasts; they end with this process.

    Args:
        training: Training that the workers carry out.
        progress: Receives `LocalWorkerPrinted`, `LocalWorkerLate` and `LocalWorkerFailed`.
    """

    def __init__(self, training: Training, *, progress: Progress = ignore_event) -> None:
        machines = training.options.machines
        assert isinstance(machines, LocalWorkerOptions)
        self._training, self._folder = training, machines.folder
        self._environment = {
            **os.environ, "PATH": make_worker_path(),
            **make_worker_environment(
                training.read_store, training.write_store, training.mirrors
            ),
        }  # fmt: skip
        self._progress, self._progress_lock = progress, threading.Lock()
        self._settings_folder = tempfile.TemporaryDirectory(prefix="millrace-workers-")
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._readers: dict[str, threading.Thread] = {}
        self._tails: dict[str, deque[str]] = {}

    def __enter__(self) -> Self:
        """Start the workers."""
        try:
            for number, uid in enumerate(self._training.uids):
                self._start_worker(number, uid)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + _EXIT_TIMEOUT
            for process in self._processes.values():
                if process.poll() is not None:  # another group may have its number by now
                    continue
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()
        # A worker that has ended or was killed may have left processes.
        kill_by_environment(SETTINGS_VARIABLE, self._settings_folder.name)
        for thread in self._readers.values():  # a process of the script may still hold the pipe
            thread.join(_EXIT_TIMEOUT)
        self._settings_folder.cleanup()

    @property
    def is_over(self) -> bool:
        """True if all workers have ended."""
        return all(process.poll() is not None for process in self._processes.values())

    def raise_failure(self) -> None:
        """Raise if all workers have failed.

        Raises:
            WorkerError: All have failed; the message has the last lines of one of them.
        """
        if all(process.poll() for process in self._processes.values()):
            raise WorkerError(f"All workers have failed: {self.describe_end()}")

    def describe_end(self) -> str:
        """Return how the workers ended, and the last lines that one of them printed."""
        codes = {uid: process.poll() for uid, process in self._processes.items()}
        ends = ", ".join(f"{uid} ended with {code}" for uid, code in codes.items())
        uid = max(codes, key=lambda uid: bool(codes[uid]))
        self._readers[uid].join(_EXIT_TIMEOUT)  # the last lines may still be in the pipe
        lines = "\n".join(self._tails[uid])
        return f"{ends}. The last lines of {uid}:\n{lines}" if lines else f"{ends}, with no output."

    def wait_until_done(self, timeout: timedelta) -> None:
        """Wait until all workers have ended by themselves.

        Args:
            timeout: Longest wait.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        for uid, process in self._processes.items():
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._report(LocalWorkerLate(uid=uid, timeout=timeout))
                continue
            if code:
                self._report(LocalWorkerFailed(uid=uid, code=code))

    def _start_worker(self, number: int, uid: str) -> None:
        training = self._training
        file = Path(self._settings_folder.name) / f"{uid}.yaml"
        file.write_text(
            render_worker_settings(
                training.worker_settings,
                training.read_store,
                training.write_store,
                number,
                training.mirrors,
            ),
            encoding="utf-8",
        )
        main = "from millrace.cli import main; main()"
        command = [sys.executable, "-c", main, "campaign", "worker", str(file), "--attached"]
        process = subprocess.Popen(
            command,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.PIPE,  # closed when this process ends
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._processes[uid] = process
        self._tails[uid] = deque(maxlen=_TAIL_LINES)
        assert process.stdout is not None
        context = contextvars.copy_context()
        thread = threading.Thread(
            target=context.run, args=(self._read_output, uid, process.stdout), daemon=True
        )
        thread.start()
        self._readers[uid] = thread

    def _read_output(self, uid: str, printed: IO[bytes]) -> None:
        with printed:
            for text in iterate_printed_lines(printed):
                self._tails[uid].append(text)
                self._report(LocalWorkerPrinted(uid=uid, text=text))

    def _report(self, event: Event) -> None:
        with self._progress_lock:  # an event at a time, though each worker has a reader
            self._progress(event)


def iterate_printed_lines(printed: IO[bytes]) -> Iterator[str]:
    """Yield the lines that a process prints, without the part of a line after 2,000 bytes.

    A progress bar overwrites its line after a carriage return. Of 2,000 bytes of such a line, the
    newest complete text is yielded, while the process still prints the line.
    """
    is_cut = False  # whether the line before was cut, so that its rest follows
    for piece in iter(lambda: printed.readline(_MAX_LINE_LENGTH), b""):
        is_rest, is_cut = is_cut, not piece.endswith(b"\n")
        *before, last = (piece if is_cut else piece.rstrip()).split(b"\r")
        if is_rest and not before:
            continue
        texts = [text for text in before[is_rest:] if text.strip()]
        if not texts or not is_cut:
            texts.append(last)
        yield texts[-1].decode(errors="replace").rstrip()
