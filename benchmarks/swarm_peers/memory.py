"""The most memory that a process of a rig's nodes took."""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from benchmarks.rig.hosts import Rig

SAMPLED_EVERY = 0.1  # seconds: the kernel keeps the peak itself
LOOKED_EVERY = 10  # samples
KIB = 1024


def of_ray(command: str) -> bool:
    """Tell whether a command line is that of an actor or a task of Ray."""
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
        carriers: list[int] = []
        looks = 0
        while not self._stop.wait(SAMPLED_EVERY):
            if looks % LOOKED_EVERY == 0:  # to look through all processes takes a while itself
                carriers = [
                    pid
                    for host in self._rig.nodes
                    for pid in host.list_pids()
                    if self._carries(_command(pid))
                ]
            looks += 1
            self.peak = max(self.peak, *map(_resident, carriers), 0)


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return command.replace(b"\0", b" ").decode(errors="replace")
    return ""


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        line = next(line for line in lines if line.startswith("VmHWM:"))
        return int(line.split()[1]) * KIB
    return 0
