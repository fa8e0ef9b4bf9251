"""The parent's end: starts a driver in a session of its own, hears its events, kills it."""

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
"""Modules that a driver needs."""
HANGS = 120.0  # seconds without a word from a driver: it never comes


class HungError(Exception):
    """A driver said nothing for too long."""


@dataclass(frozen=True, slots=True)
class Said:
    """An event that a driver announced; it waits for `Child.go`.

    Attributes:
        kind: Kind of the event.
        partition: Name of the event's partition; empty if it has none.
        pid: Process that the event came from, or that was lost.
    """

    kind: str
    partition: str
    pid: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A driver is no more.

    Attributes:
        code: Its exit code; -9 for a SIGKILL.
        report: What it said at its end, if it came to that.
        tail: The end of what it wrote to standard error.
    """

    code: int
    report: dict[str, Any] | None
    tail: str


class Child:
    """A driver, and whatever it starts: they share a session.

    Args:
        settings: For ``tests.soak.driver``.
        folder: Made for this child: its empty working directory, and its log beside that.
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
        self._rest = b""
        self._report: dict[str, Any] | None = None
        self._send(json.dumps(settings).encode() + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.kill_group()  # else what it left alive is for `find_orphans` to find
        self._process.wait()
        self._in.close()
        self._out.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Return the descriptor that is readable when the driver has sent a line."""
        return self._out.fileno()

    def hear(self, patience: float = HANGS) -> Said | Ended | None:
        """Return the driver's next line or its end; None if nothing comes in time."""
        deadline = time.monotonic() + patience
        while b"\n" not in self._rest:
            rest = max(0.0, deadline - time.monotonic())
            if not select.select([self._out], [], [], rest)[0]:
                if patience == HANGS:
                    raise HungError(f"nothing was heard for {HANGS:g} s:\n{self.read_tail()}")
                return None
            data = os.read(self._out.fileno(), 65536)
            if not data:
                return Ended(self._process.wait(), self._report, self.read_tail())
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        message = json.loads(line)
        if "done" in message:
            self._report = message["done"]
            return self.hear(patience)
        return Said(**message)

    def go(self) -> None:
        """Let it go on after an event."""
        self._send(b".")

    def kill(self, pid: int) -> None:
        """SIGKILL for one process: the driver, or a worker of it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def kill_group(self) -> None:
        """SIGKILL for all of it."""
        self.signal_group(signal.SIGKILL)

    def stop(self, *, workers_too: bool) -> None:
        """SIGSTOP for the driver, or all of it."""
        if workers_too:
            self.signal_group(signal.SIGSTOP)
        else:
            os.kill(self.pid, signal.SIGSTOP)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the driver and its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def find_orphans(self, patience: float = 10.0) -> list[int]:
        """Processes of its session that still live, after some time to be gone by themselves."""
        deadline = time.monotonic() + patience
        while living := session(self.pid):
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    watch = os.pidfd_open(pid)
                    try:
                        rest = max(0.0, deadline - time.monotonic())
                        if not select.select([watch], [], [], rest)[0]:
                            return living
                    finally:
                        os.close(watch)
        return []

    def list_leftovers(self) -> list[str]:
        """List the files that the process left on the machine's disk."""
        return sorted(path.name for path in self.staging.iterdir())

    def read_tail(self) -> str:
        """The end of what it, and its workers, wrote to standard error."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-12:])

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._in.write(data)


def session(leader: int) -> list[int]:
    """The living processes of a session."""
    living = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, _, its = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(its) == leader and state not in "ZX":
                    living.append(int(entry.name))
    return living
