"""The most memory that a process of a rig's nodes took."""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from benchmarks.rig.hosts import Rig

SAMPLED_EVERY = 0.2  # seconds: the kernel keeps the peak itself
KIB = 1024


def of_ray(command: str) -> bool:
    """Whether a command line is that of an actor or a task of Ray's."""
    return command.startswith("ray::")


def any_process(command: str) -> bool:
    """Every process."""
    return bool(command)


class PeakMemory:
    """Watches the nodes from a thread, as a context manager.

    Attributes:
        peak: Bytes: the largest resident set that one process ever had. Pages that it shares with
            others (Ray's object store) are counted.

    Args:
        rig: Whose nodes.
        carries: Tells from its command line whether a process carries the bytes.
    """

    def __init__(self, rig: Rig, carries: Callable[[str], bool]) -> None:
        self.peak = 0
        self._rig, self._carries = rig, carries
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLED_EVERY):
            for host in self._rig.nodes:
                self.peak = max(self.peak, *map(self._resident, host.pids()), 0)

    def _resident(self, pid: int) -> int:
        with contextlib.suppress(OSError, StopIteration):
            folder = Path(f"/proc/{pid}")
            command = (
                (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
            if self._carries(command):
                lines = (folder / "status").read_text().splitlines()
                line = next(line for line in lines if line.startswith("VmHWM:"))
                return int(line.split()[1]) * KIB
        return 0
