"""Time until a killed run goes on: Millrace, and the usual way of reading again and skipping.

Run it with ``python -m benchmarks.resume [--quick] [--json FILE]``. One file of JSON lines is one
partition, so that going on is a seek inside it. A run is killed with SIGKILL, worker and all, when
it has committed 10, 50 and 90 % of the rows, and started again.

- ``millrace``: until ``shard.half`` is reported: 4 MiB of new samples are encoded, so the first
  one is.
- ``re-read and skip``: until the first new row is a sample: ``enumerate`` over the lines up to
  where it had come, as a reader without a cursor does.

Two figures each: ``s`` from the start of the process, ``s_after_call`` without the interpreter's
start and the imports. Once in a folder, once with source and shards on a Ceph RGW on loopback.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Results, parse_options, print_table, rotate_systems
from benchmarks.corpus import write_jsonl
from millrace.storage import StoreSpec, open_store, open_writer
from millrace.testing.rgw import RGW

FILE = "text.jsonl"
CAPACITY = 12 << 30  # of the server's disk
PERCENTS = (10, 50, 90)
SYSTEMS = ("millrace", "re-read and skip")
METRICS = ("s", "s_after_call")
PLACES = ("folder", "RGW")


@dataclass(frozen=True, slots=True)
class Place:
    """Source and shards of a work: two store specs as plain JSON values."""

    name: str
    source: dict[str, Any]
    store: dict[str, Any]


class Run:
    """A process of `benchmarks.resumed`, and what it says."""

    def __init__(self, system: str, place: Place, rows: int) -> None:
        self.began = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from benchmarks.resumed import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        job = {"system": system, "file": FILE, "rows": rows}
        self._write(json.dumps({**job, "source": place.source, "store": place.store}))

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield what it reports.

        It waits while an event is looked at, and goes on with the next.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            yield said
            if said["event"] == "ended":
                return
            self._write("")
        raise RuntimeError("the process ended before its work did")

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


class Bench:
    """One invocation."""

    def __init__(self, *, quick: bool) -> None:
        self.results = Results("resume")
        self.repeats = 1 if quick else 5
        self.size = 100_000_000 if quick else 1_000_000_000

    def run(self, place: Place, rows: int) -> None:
        """Kill one run three times, and measure how it goes on each time."""
        done = 0
        for percent in PERCENTS:
            done = self._shard_until(place, done, rows * percent // 100)
            work = f"{place.name}, {percent} %"
            for repeat in range(self.repeats):
                for system in rotate_systems(SYSTEMS, repeat):
                    seconds = first_sample(system, place, done)
                    for metric, value in zip(METRICS, seconds, strict=True):
                        self.results.add(work, system, metric, value)
        done = self._shard_until(place, done, None)
        if done != rows:
            raise RuntimeError(f"{place.name}: {done} samples came of {rows} rows")

    @staticmethod
    def _shard_until(place: Place, done: int, wanted: int | None) -> int:
        """Go on with the run, and kill it when so many rows are committed, or let it end."""
        with Run("millrace", place, done) as run:
            for event in run.events():
                if event["event"] == "shard.committed":
                    done += event["samples"]
                    if wanted is not None and done >= wanted:
                        return done
        return done


def first_sample(system: str, place: Place, rows: int) -> tuple[float, float]:
    """Seconds until a new process has a new sample, from its start and from its call."""
    wanted = {"millrace": "shard.half", "re-read and skip": "sample"}[system]
    with Run(system, place, rows) as run:
        for event in run.events():
            if event["event"] == wanted:
                return time.perf_counter() - run.began, event["after_call"]
    raise RuntimeError(f"{system} ended without {wanted}")


def folder_place(source: Path, store: Path) -> Place:
    """Return the work in a folder."""
    return Place("folder", {"url": source.as_uri()}, {"url": store.as_uri()})


def rgw_place(rgw: RGW, file: Path) -> Place:
    """Return the work on an S3 server: puts the source there."""
    rgw.create_bucket("source")
    rgw.create_bucket("shards")
    credentials = {
        "access_key_id": rgw.full.access_key_id,
        "secret_access_key": rgw.full.secret_access_key,
    }
    source, store = (
        {"url": f"s3://{bucket}", "endpoint": rgw.endpoint, "credentials": credentials}
        for bucket in ("source", "shards")
    )
    with (
        file.open("rb") as opened,
        open_writer(open_store(StoreSpec.model_validate(source)), FILE) as writer,
    ):
        while block := opened.read(1 << 20):
            writer.write(block)
    return Place("RGW", source, store)


def report(results: Results) -> None:
    """Print the figures, and how flat each line is."""
    values = {(row.work, row.system, row.metric): row for row in results.compute_rows()}
    lines: list[list[str]] = []
    for place in PLACES:
        for system in SYSTEMS:
            for metric in METRICS:
                rows = [values[f"{place}, {percent} %", system, metric] for percent in PERCENTS]
                figures = [f"{row.value:.3f}" for row in rows]
                growth = f"{rows[-1].value / rows[0].value:.2f}x"
                lines.append([place, system, metric, *figures, growth, str(rows[0].n)])
    print_table(["place", "system", "", *(f"{p} %" for p in PERCENTS), "90 % / 10 %", "n"], lines)


def main() -> int:
    """Measure, print the table, and write the rows if asked."""
    asked = parse_options("resume", __doc__)
    bench = Bench(quick=asked.quick)
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name:
        folder = Path(name)
        source = folder / "source" / FILE
        rows = write_jsonl(source, characters=1000, size=bench.size)
        bench.run(folder_place(source.parent, folder / "store"), rows)
        with RGW.start(folder / "rgw", capacity=CAPACITY) as rgw:
            bench.run(rgw_place(rgw, source), rows)
    report(bench.results)
    bench.results.save(asked.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
