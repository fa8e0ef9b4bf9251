"""Common parts of the benchmarks: measuring a process tree, interleaving, the table, the rows."""

import argparse
import json
import multiprocessing
import os
import platform
import resource
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

_PAGE = os.sysconf("SC_PAGE_SIZE")
_SAMPLED_EVERY = 0.02  # seconds


@dataclass(frozen=True, slots=True)
class Row:
    """One figure that a run measured.

    Attributes:
        work: What was done (``20 KB``).
        system: Who did it: ``millrace``, ``floor`` or the peer's name.
        metric: What was measured, with its unit (``MB/s``).
        value: The median.
        n: Of how many runs.
    """

    work: str
    system: str
    metric: str
    value: float
    n: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Cost of one run of one system.

    Attributes:
        figures: What the system's own process reported: metric → value.
        peak_rss: Bytes: the largest sum of the resident sets of its process tree, sampled every
            20 ms. A page that several processes share is counted in each.
    """

    figures: dict[str, float]
    peak_rss: int


class Cpu:
    """CPU seconds, user and system, of this process and of its children that have ended."""

    def __init__(self) -> None:
        self._begun = self._now()

    def spent(self) -> float:
        """Seconds since this was made."""
        return self._now() - self._begun

    @staticmethod
    def _now() -> float:
        used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in used)


def measured(run: Callable[..., dict[str, float]], *arguments: Any) -> Measured:
    """Call a function in a fresh process, and watch the memory of that process and its children.

    Args:
        run: A module's function; it returns the figures that it measured of itself.
        arguments: What it is called with.

    Raises:
        RuntimeError: It raised, or its process died.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_call, args=(theirs, run, arguments))
    process.start()
    theirs.close()
    assert process.pid is not None
    with _Memory(process.pid) as memory:
        try:
            figures, fault = ours.recv()
        except EOFError:
            figures, fault = {}, "its process died"
    process.join()
    if fault:
        raise RuntimeError(f"{run.__name__} failed: {fault}")
    return Measured(figures, memory.peak)


def _call(
    answer: Connection, run: Callable[..., dict[str, float]], arguments: tuple[Any, ...]
) -> None:
    try:
        answer.send((run(*arguments), ""))
    except BaseException as error:
        answer.send(({}, f"{type(error).__name__}: {error}"))
        raise


class _Memory:
    """Samples the resident sets of a process tree in a thread."""

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "_Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLED_EVERY):
            self.peak = max(self.peak, sum(_resident(pid) for pid in tree(self._pid)))


def tree(pid: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    yield pid
    for task in _listed(Path(f"/proc/{pid}/task")):
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        for child in children:
            yield from tree(int(child))


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def rotated(systems: Sequence[str], repeat: int) -> tuple[str, ...]:
    """Return the order in which the systems run: another one first in each repeat."""
    first = repeat % len(systems)
    return (*systems[first:], *systems[:first])


@dataclass(slots=True)
class Results:
    """Every figure of a benchmark, by work, system and metric, one value a repeat."""

    name: str
    values: dict[tuple[str, str, str], list[float]] = field(
        default_factory=dict[tuple[str, str, str], list[float]]
    )

    def add(self, work: str, system: str, metric: str, value: float) -> None:
        """Note one value, and say it at once: a run may be ended before its table."""
        print(f"{work} | {system} | {metric} | {value:.4g}", file=sys.stderr, flush=True)
        self.values.setdefault((work, system, metric), []).append(value)

    def rows(self) -> list[Row]:
        """Return the medians."""
        return [Row(*key, value=median(v), n=len(v)) for key, v in self.values.items()]

    def ratio(self, work: str, system: str, other: str, metric: str) -> float:
        """Return the median, over the repeats, of one system's value divided by another's."""
        pairs = zip(
            self.values[work, system, metric], self.values[work, other, metric], strict=True
        )
        return median(a / b for a, b in pairs)

    def save(self, path: Path | None) -> None:
        """Write the rows as JSON. Without a path, nothing is written."""
        if path is None:
            return
        rows = [{**asdict(row), "value": round(row.value, 4)} for row in self.rows()]
        body = {"name": self.name, "machine": machine(), "rows": rows}
        path.write_text(json.dumps(body, indent=1) + "\n")


def machine() -> str:
    """Describe the machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.machine()
    memory = os.sysconf("SC_PHYS_PAGES") * _PAGE / 2**30
    return (
        f"{len(os.sched_getaffinity(0))} cores of {model}, {memory:.0f} GiB, "
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    )


def show(header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table: the first column to the left, the others to the right."""
    widths = [max(len(line[i]) for line in (header, *lines)) for i in range(len(header))]
    for line in (header, ["-" * width for width in widths], *lines):
        padded = zip(line, widths, strict=True)
        cells = [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(padded)]
        print("  ".join(cells).rstrip(), flush=True)


@dataclass(frozen=True, slots=True)
class Options:
    """Options that every benchmark has.

    Attributes:
        quick: Less data, one run of each.
        file: Where the JSON rows go.
        device: Where tensors are.
        only: The parts to run.
        plot: Where the picture goes.
    """

    quick: bool
    file: Path | None
    device: str = "cpu"
    only: Sequence[str] = ()
    plot: Path | None = None


def options(
    name: str,
    description: str | None,
    *,
    device: bool = False,
    plot: bool = False,
    parts: Sequence[str] = (),
) -> Options:
    """Read the command line of a benchmark.

    Args:
        name: Of the benchmark.
        description: Docstring of its module, whose first paragraph is shown.
        device: It can put its tensors elsewhere than on the processor.
        plot: It can draw its losses.
        parts: Names of its parts, of which some can be chosen.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=(description or "").partition("\n\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="less data, one run of each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    if device:
        parser.add_argument("--device", default="cpu", help="where tensors are, such as cuda")
    if plot:
        parser.add_argument(
            "--plot", type=Path, metavar="FILE", help="draw the losses here, as SVG"
        )
    if parts:
        parser.add_argument(
            "--only",
            nargs="+",
            choices=parts,
            default=list(parts),
            metavar="PART",
            help=f"parts to run, of {', '.join(parts)}",
        )
    parsed = parser.parse_args()
    return Options(
        parsed.quick,
        parsed.json,
        parsed.device if device else "cpu",
        parsed.only if parts else (),
        parsed.plot if plot else None,
    )
