"""Start drivers as child processes, read their events, and send signals to them."""

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.support.fork_server import RUN_MODULE, get_fork_server

REPOSITORY = Path(__file__).resolve().parents[2]
IMPORTED = ("millrace.datasets", "millrace.datasets.pipeline", "millrace.storage")
"""Modules that the fork server imports for the drivers."""
_STAYING = ("millrace-datasets-", "millrace-hosts-")  # beginnings of names
HANG_SECONDS = 120.0  # seconds without a message after which a driver hangs


class HungError(Exception):
    """A driver sent no message in time."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """Event that a driver announced. The process waits for `Child.release`.

    Attributes:
        kind: Kind of the event.
        partition: Name of the event's partition; empty if it has none.
        pid: ID of the process that reported the event, or that was lost.
    """

    kind: str
    partition: str
    pid: int


@dataclass(frozen=True, slots=True)
class DriverExit:
    """End of a driver.

    Attributes:
        code: Exit code; -9 after a SIGKILL.
        report: Report of the driver; None if it did not send one.
        tail: Last lines of the standard error.
    """

    code: int
    report: dict[str, Any] | None
    tail: str


class Child:
    """Driver in a child process. The driver and its workers have a session of their own.

    Args:
        settings: Settings of ``tests.soak.driver``.
        folder: New folder for the working directory and the log of the driver.
    """

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self.staging = folder / "staging"
        self.staging.mkdir(parents=True)
        self._log = folder / "stderr"
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(REPOSITORY),
            "TMPDIR": str(self.staging),
            "HOME": str(self.staging),
            "HF_HOME": str(folder / "huggingface"),
            "HF_HUB_DISABLE_XET": "1",  # the Hub of the tests has no bridge to Xet
        }
        with self._log.open("wb") as log:
            self._process = get_fork_server(*IMPORTED).start(
                RUN_MODULE,
                "tests.soak.driver",
                env=environment,
                cwd=self.staging,
                stdin=True,
                stderr=log,
                text=False,
                new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._unread = b""
        self._report: dict[str, Any] | None = None
        self._send(json.dumps(settings).encode() + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.kill_group()  # without an error, `wait_for_orphans` checks the workers
        self._process.wait()
        self._in.close()
        self._out.close()

    @property
    def pid(self) -> int:
        """ID of the driver's process, and of its session."""
        return self._process.pid

    def fileno(self) -> int:
        """Return the descriptor that is readable when the driver has sent a line."""
        return self._out.fileno()

    def read_message(self, timeout: float = HANG_SECONDS) -> Announcement | DriverExit | None:
        """Return the next announcement of the driver, or its end. None if no message comes in time.

        Raises:
            HungError: No message came in `HANG_SECONDS`, and the timeout is the default.
        """
        deadline = time.monotonic() + timeout
        while b"\n" not in self._unread:
            remaining = max(0.0, deadline - time.monotonic())
            if not select.select([self._out], [], [], remaining)[0]:
                if timeout == HANG_SECONDS:
                    raise HungError(f"no message came for {HANG_SECONDS:g} s:\n{self.read_tail()}")
                return None
            data = os.read(self._out.fileno(), 65536)
            if not data:
                return DriverExit(self._process.wait(), self._report, self.read_tail())
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        message = json.loads(line)
        if "done" in message:
            self._report = message["done"]
            return self.read_message(timeout)
        return Announcement(**message)

    def release(self) -> None:
        """Let the process that announced an event continue."""
        self._send(b".")

    def kill(self, pid: int) -> None:
        """Send SIGKILL to one process: the driver, or one of its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def kill_group(self) -> None:
        """Send SIGKILL to the driver and its workers."""
        self.signal_group(signal.SIGKILL)

    def stop(self, *, workers_too: bool) -> None:
        """Send SIGSTOP to the driver, and to its workers if ``workers_too``."""
        if workers_too:
            self.signal_group(signal.SIGSTOP)
        else:
            os.kill(self.pid, signal.SIGSTOP)

    def signal_group(self, signal_number: signal.Signals) -> None:
        """Send a signal to the driver and its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal_number)

    def wait_for_orphans(self, timeout: float = 10.0) -> list[int]:
        """Return the IDs of the processes in the session that do not end within a timeout."""
        deadline = time.monotonic() + timeout
        while living := list_session(self.pid):
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    descriptor = os.pidfd_open(pid)
                    try:
                        remaining = max(0.0, deadline - time.monotonic())
                        if not select.select([descriptor], [], [], remaining)[0]:
                            return living
                    finally:
                        os.close(descriptor)
        return []

    def list_leftovers(self) -> list[str]:
        """Return the names of the files that the driver left in its working directory.

        A process that is killed while it opens a dataset of the Hub leaves a small folder. The
        limits on requests to hosts have a folder, which all processes of a machine share.
        """
        names = sorted(path.name for path in self.staging.iterdir())
        return [name for name in names if not name.startswith(_STAYING)]

    def read_tail(self) -> str:
        """Return the last lines that the driver and its workers wrote to standard error."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-12:])

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._in.write(data)


def list_session(leader: int) -> list[int]:
    """Return the IDs of the living processes of a session."""
    living = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == leader and state not in "ZX":
                    living.append(int(entry.name))
    return living
