"""Peak memory of the processes on the nodes of a rig."""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from benchmarks.rig.hosts import Rig

SAMPLE_INTERVAL = 0.1  # seconds; the kernel records the peak of each process
SEARCH_INTERVAL = 10  # samples
KIB = 1024


def is_ray_worker(command: str) -> bool:
    """Decide whether a command line is that of an actor or a task of Ray."""
    return command.startswith("ray::")


def is_any_process(command: str) -> bool:
    """Accept the command line of every process that is still running."""
    return bool(command)


class PeakMemory:
    """Thread that measures processes on the nodes during a ``with`` statement.

    Attributes:
        peak: Largest resident set of a single process in bytes. It includes shared pages, such as
            those of Ray's object store.

    Args:
        rig: Rig with the nodes.
        is_measured: Function that selects the processes to measure by their command lines.
    """

    def __init__(self, rig: Rig, is_measured: Callable[[str], bool]) -> None:
        self.peak = 0
        self._rig, self._is_measured = rig, is_measured
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        pids: list[int] = []
        samples = 0
        while not self._stop.wait(SAMPLE_INTERVAL):
            if samples % SEARCH_INTERVAL == 0:  # a search takes longer than a sample
                pids = [
                    pid
                    for host in self._rig.nodes
                    for pid in host.list_pids()
                    if self._is_measured(_read_command(pid))
                ]
            samples += 1
            self.peak = max(self.peak, *map(_read_peak_size, pids), 0)


def _read_command(pid: int) -> str:
    """Return the command line of a process, or an empty string if it has ended."""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return command.replace(b"\0", b" ").decode(errors="replace")
    return ""


def _read_peak_size(pid: int) -> int:
    """Return the peak resident set of a process in bytes, or 0 if it has ended."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        line = next(line for line in lines if line.startswith("VmHWM:"))
        return int(line.split()[1]) * KIB
    return 0
