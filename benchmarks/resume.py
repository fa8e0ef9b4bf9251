"""Measure the time until a killed run continues: Millrace, and a reader that skips rows.

Run it with ``python -m benchmarks.resume [--quick] [--json FILE]``. One file of JSON lines is one
partition, so that a run continues with a seek in the file. SIGKILL ends a run and its worker after
10, 50 and 90 % of the rows are committed. Then it is started again.

- ``millrace``: the time until the event ``shard.halfway``, after which 4 MiB of new samples
  are encoded.
- ``re-read and skip``: the time until the first new row is encoded by a reader without a cursor,
  which reads all lines before that row again.

``s`` is the time from the start of the process. ``s_after_call`` excludes the start of the
interpreter and the imports. Source and shards are in a folder, and then in a Ceph RGW on the
loopback interface.
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
CAPACITY = 12 << 30  # size of the server's disk
PERCENTS = (10, 50, 90)
SYSTEMS = ("millrace", "re-read and skip")
METRICS = ("s", "s_after_call")
PLACES = ("folder", "RGW")


@dataclass(frozen=True, slots=True)
class Place:
    """Location of the source and the shards.

    Attributes:
        name: Name of the place.
        source: Settings of the source's store as JSON values.
        store: Settings of the shards' store as JSON values.
    """

    name: str
    source: dict[str, Any]
    store: dict[str, Any]


class Run:
    """Process of `benchmarks.resume_process`. A ``with`` statement kills it at its end.

    Attributes:
        began: Time of the start of the process, from `time.perf_counter`.
    """

    def __init__(self, system: str, place: Place, rows: int) -> None:
        self.began = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from benchmarks.resume_process import main; main()"],
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

    def read_events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of the process, which waits until the next event is requested.

        Raises:
            RuntimeError: The process ended before its work.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            yield event
            if event["event"] == "ended":
                return
            self._write("")
        raise RuntimeError("the process ended before its work did")

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


class ResumeBench:
    """One invocation of the benchmark.

    Attributes:
        results: Results of the runs.
        repeats: Number of measurements of each system.
        size: Size of the source in bytes.
    """

    def __init__(self, *, quick: bool) -> None:
        self.results = Results("resume")
        self.repeats = 1 if quick else 5
        self.size = 100_000_000 if quick else 1_000_000_000

    def run(self, place: Place, rows: int) -> None:
        """Kill a run three times, and measure the time until it continues each time."""
        done = 0
        for percent in PERCENTS:
            done = self._shard_until(place, done, rows * percent // 100)
            work = f"{place.name}, {percent} %"
            for repeat in range(self.repeats):
                for system in rotate_systems(SYSTEMS, repeat):
                    seconds = measure_first_sample(system, place, done)
                    for metric, value in zip(METRICS, seconds, strict=True):
                        self.results.add(work, system, metric, value)
        done = self._shard_until(place, done, None)
        if done != rows:
            raise RuntimeError(f"{place.name}: {done} samples came of {rows} rows")

    @staticmethod
    def _shard_until(place: Place, done: int, wanted: int | None) -> int:
        """Continue a run until its end, or kill it after so many committed rows.

        Args:
            place: Location of the source and the shards.
            done: Number of rows that are already committed.
            wanted: Number of committed rows after which the run is killed, or None.

        Returns:
            Number of committed rows.
        """
        with Run("millrace", place, done) as run:
            for event in run.read_events():
                if event["event"] == "shard.committed":
                    done += event["samples"]
                    if wanted is not None and done >= wanted:
                        return done
        return done


def measure_first_sample(system: str, place: Place, rows: int) -> tuple[float, float]:
    """Return the seconds until the first new sample, from the start of the process and the call."""
    wanted = {"millrace": "shard.halfway", "re-read and skip": "sample"}[system]
    with Run(system, place, rows) as run:
        for event in run.read_events():
            if event["event"] == wanted:
                return time.perf_counter() - run.began, event["after_call"]
    raise RuntimeError(f"{system} ended without {wanted}")


def make_folder_place(source: Path, store: Path) -> Place:
    """Return the place of two folders."""
    return Place("folder", {"url": source.as_uri()}, {"url": store.as_uri()})


def make_rgw_place(rgw: RGW, file: Path) -> Place:
    """Create two buckets, upload the source, and return their place."""
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
    """Print the figures, and the ratio of the last position to the first."""
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
    """Run the benchmark, print the table, and write the rows as JSON if ``--json`` is set."""
    options = parse_options("resume", __doc__)
    bench = ResumeBench(quick=options.quick)
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name:
        folder = Path(name)
        source = folder / "source" / FILE
        rows = write_jsonl(source, characters=1000, size=bench.size)
        bench.run(make_folder_place(source.parent, folder / "store"), rows)
        with RGW.start(folder / "rgw", capacity=CAPACITY) as rgw:
            bench.run(make_rgw_place(rgw, source), rows)
    report(bench.results)
    bench.results.save(options.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
