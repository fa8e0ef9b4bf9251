"""Cost of Prefect: a dataset sharded by the engine, by its flow, and by a deployment's run.

Run it with ``python -m benchmarks.prefect [--quick] [--json FILE]``. The source is JSON lines in a
folder, the store a folder, a shard one row of 20 KB. A run makes 1 shard or 100 shards: no figure
may grow with the number of shards more than that of the engine.

- ``engine``: a Python process that imports `millrace.datasets` and calls `shard_dataset`.
- ``flow``: a Python process that imports `flows.shard_dataset` and calls the flow.
- ``deployment``: a flow run that is created by the API; a process worker starts it.

``first`` is the time from the start of the process, or the creation of the run, to the first byte
of a shard. ``last`` is the time from the last byte of the dataset to the call's return, or to the
run's state Completed. ``over`` is the sum of both, less the engine's. ``requests`` counts the HTTP
requests and websockets in the server's access log, except for the worker's polls. ``imports`` and
``rest`` are CPU seconds of the flow's own process, without the engine's workers: until the flow
begins, and from there on. ``task run`` is one of many empty task runs in a flow that is called.
Each server has an empty database.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefect.client.orchestration import SyncPrefectClient

from benchmarks.common import Results, parse_options, print_table, rotate_systems, walk_process_tree
from benchmarks.corpus import read_text
from millrace.keys.datasets import DatasetKeys
from millrace.testing.postgres import PostgresServer, find_programs
from millrace.testing.prefect_server import PrefectServerProcess
from millrace.testing.process import REPOSITORY, Child

SHARDS = (1, 100)
TASKS = 100
SYSTEMS = ("engine", "flow", "deployment")
METRICS = ("first_s", "last_s", "over_s", "requests", "imports_cpu_s", "rest_cpu_s")
CHARACTERS = 20_000  # of each row, and so of each shard
GOAL = 3.0  # seconds over the engine
POLL_INTERVAL = 0.5  # seconds between two polls of the worker; Prefect's default is 10
RUN_TIMEOUT = 600.0  # seconds
DEPLOYMENT = "shard-dataset/shard-dataset"
_REQUEST = re.compile(r'"(?:GET|POST|PUT|PATCH|DELETE|WebSocket) ([^ "]+)')
_POLLS = re.compile(r"/api/(health|work_pools|workers|work_queues|admin)\b")


@dataclass(frozen=True, slots=True)
class Timing:
    """Times and CPU seconds of one run.

    Attributes:
        began: Time at which the run was asked for, in seconds since 1970.
        ended: Time at which the run was complete.
        imports: CPU seconds of the run's process until the flow or the engine began.
        rest: CPU seconds of the run's process from there on.
        requests: Requests to the API.
    """

    began: float
    ended: float
    imports: float
    rest: float
    requests: int


class ProcessWatch:
    """Samples the CPU seconds of the process of a flow run, below a worker.

    Attributes:
        samples: Times, in seconds since 1970, and CPU seconds until then.
    """

    def __init__(self, worker: int) -> None:
        self.samples: list[tuple[float, float]] = []
        self._worker = worker
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "ProcessWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def find_cpu(self, at: float) -> float:
        """Return the CPU seconds at a time: those of the last sample before it."""
        return max((cpu for when, cpu in self.samples if when <= at), default=0.0)

    def _watch(self) -> None:
        ticks, run = os.sysconf("SC_CLK_TCK"), None
        while not self._stop.wait(0.02):
            try:
                run = run or self._find_run()
                if run is not None:
                    fields = Path(f"/proc/{run}/stat").read_text().rpartition(")")[2].split()
                    cpu = (int(fields[11]) + int(fields[12])) / ticks
                    self.samples.append((time.time(), cpu))
            except OSError:
                continue  # the process has ended

    def _find_run(self) -> int | None:
        for pid in walk_process_tree(self._worker):
            if b"\0prefect.engine\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        return None


@dataclass(slots=True)
class PrefectBench:
    """One Prefect server with a worker, and the runs that it is asked for."""

    server: PrefectServerProcess
    worker: Child
    database: str
    folder: Path
    results: Results
    _count: int = field(default=0)

    def run(self, system: str, shards: int) -> None:
        """Shard a dataset by one of the systems, and add its figures."""
        self._count += 1
        name, store = f"run-{self._count}", self.folder / f"store-{self._count}"
        source = self.folder / f"source-{shards}"
        parameters = make_parameters(system, name, source, store)
        if system == "deployment":
            timing = self._run_deployment(parameters)
        else:
            timing = self._call(system, parameters)
        first, last = find_times(store, name, shards)
        figures = {
            "first_s": first - timing.began,
            "last_s": timing.ended - last,
            "requests": timing.requests,
            "imports_cpu_s": timing.imports,
            "rest_cpu_s": timing.rest,
        }
        for metric, value in figures.items():
            self.results.add(make_work_name(shards, self.database), system, metric, value)

    def run_tasks(self) -> None:
        """Measure the cost of one of many empty task runs."""
        log_size = self.server.log.stat().st_size
        told = self._run_script("task_calls", str(TASKS))
        told["requests"] = self._count_requests(log_size) / TASKS
        for metric, value in told.items():
            self.results.add(f"task run, {self.database}", "prefect", metric, value)

    def _run_script(self, script: str, *arguments: str) -> dict[str, float]:
        """Run a script of this package with the server's API, and return what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{script}", *arguments],
            cwd=REPOSITORY,
            env=self.server.environment,
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{script} {arguments[0]} failed:\n{done.stderr}")
        return json.loads(done.stdout)

    def _call(self, system: str, parameters: dict[str, Any]) -> Timing:
        log_size, began = self.server.log.stat().st_size, time.time()
        told = self._run_script("sharding_call", system, json.dumps(parameters))
        requests = self._count_requests(log_size)
        return Timing(
            began, told["ended"], told["imports"], told["cpu"] - told["imports"], requests
        )

    def _run_deployment(self, parameters: dict[str, Any]) -> Timing:
        with SyncPrefectClient(self.server.url) as client:
            deployment = client.read_deployment_by_name(DEPLOYMENT).id
            with ProcessWatch(self.worker.pid) as watch:
                log_size, began = self.server.log.stat().st_size, time.time()
                run = client.create_flow_run_from_deployment(deployment, parameters=parameters)
                # The server's log shows the end: questions about the run would be counted.
                deadline = time.monotonic() + RUN_TIMEOUT
                while not (watch.samples and time.time() - watch.samples[-1][0] > 1.0):
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"The run did not end:\n{self.worker.read_tail(40)}")
                    time.sleep(0.1)
            requests = self._count_requests(log_size)
            run = client.read_flow_run(run.id)
        if run.state is None or not run.state.is_completed() or run.start_time is None:
            raise RuntimeError(f"The run failed: {run.state}\n{self.worker.read_tail(40)}")
        imports = watch.find_cpu(run.start_time.timestamp())
        ended = run.state.timestamp.timestamp()
        return Timing(began, ended, imports, watch.samples[-1][1] - imports, requests)

    def _count_requests(self, begin: int) -> int:
        """Count the requests in the server's log from an offset on."""
        with self.server.log.open("rb") as log:
            log.seek(begin)
            paths = _REQUEST.findall(log.read().decode(errors="replace"))
        return sum(not _POLLS.match(path) for path in paths)


def make_work_name(shards: int, database: str) -> str:
    """Return the name of a work in the table."""
    return f"{shards} shard{'s'[: shards > 1]}, {database}"


def write_rows(folder: Path, rows: int) -> None:
    """Write JSON lines into a new folder."""
    folder.mkdir(parents=True)
    texts = (read_text()[n * CHARACTERS : (n + 1) * CHARACTERS] for n in range(rows))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))


def make_parameters(system: str, dataset: str, source: Path, store: Path) -> dict[str, Any]:
    """Return the engine's settings or the flow's parameters of a run: one row is one shard."""
    place = {"url" if system == "engine" else "bucket": source.as_uri()}
    return {
        "dataset": dataset,
        "source": {**place, "columns": {"txt": "text"}},
        "sharding": {"shard_samples": 1},
        "execution": {"workers": 1, "uploads": 2},
        **({"store": {"url": store.as_uri()}} if system == "engine" else {}),
        **({"destination": store.as_uri()} if system != "engine" else {}),
    }


def find_times(store: Path, dataset: str, shards: int) -> tuple[float, float]:
    """Return when the first shard and the last object of a complete dataset were written."""
    keys = DatasetKeys(dataset)
    written = [path.stat().st_mtime for path in (store / keys.shards).rglob("*.tar")]
    if len(written) != shards or not (store / keys.manifest).exists():
        raise RuntimeError(f"{dataset}: {len(written)} shards instead of {shards}")
    objects = (store / name for name in (keys.manifest, keys.index, keys.block_digests))
    last = max(path.stat().st_mtime for path in objects if path.exists())
    return min(written), max(last, *written)


@contextmanager
def start_bench(
    database: str, folder: Path, results: Results, programs: Path | None
) -> Iterator[PrefectBench]:
    """Start a Prefect server on a database, deploy the flows, and start a worker."""
    with ExitStack() as stack:
        settings = {"PREFECT_SERVER_LOGGING_LEVEL": "INFO"}  # a line for each request
        if programs is not None:
            postgres = stack.enter_context(PostgresServer(programs, folder / "postgres"))
            settings["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = postgres.url
        home = folder / f"prefect-{database}"
        server = stack.enter_context(
            PrefectServerProcess(home, settings=settings, log_level="info")
        )
        environment = {
            **server.environment,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
            "PREFECT_WORKER_QUERY_SECONDS": str(POLL_INTERVAL),
        }
        programs_folder = Path(sys.executable).parent
        deploy = subprocess.run(
            [programs_folder / "millrace", "deploy"],
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if deploy.returncode:
            raise RuntimeError(f"millrace deploy failed:\n{deploy.stdout}{deploy.stderr}")
        with SyncPrefectClient(server.url) as client:
            for deployment in client.read_deployments():  # no run by schedule beside a measured one
                client.pause_deployment(deployment.id)
        worker = Child(
            [str(programs_folder / "prefect"), "worker", "start", "--pool", "millrace"],
            log=folder / f"worker-{database}.log",
            folder=folder,
            environment=environment,
        )
        stack.callback(worker.stop)
        yield PrefectBench(server, worker, database, folder / database, results)


def add_overhead(results: Results) -> None:
    """Add the seconds of each system over those of the engine in the same repeat."""
    for work, system, metric in list(results.values):
        if metric != "first_s" or system == "engine":
            continue
        sums = [
            [
                a + b
                for a, b in zip(
                    results.values[work, one, "first_s"],
                    results.values[work, one, "last_s"],
                    strict=True,
                )
            ]
            for one in (system, "engine")
        ]
        for ours, engines in zip(*sums, strict=True):
            results.add(work, system, "over_s", ours - engines)


def report(results: Results) -> None:
    """Print the table."""
    values = {(row.work, row.system, row.metric): row for row in results.compute_rows()}
    lines = []
    tasks = [row for row in results.compute_rows() if row.system == "prefect"]
    for work in dict.fromkeys(row.work for row in results.compute_rows() if row not in tasks):
        for system in SYSTEMS:
            cells = [values.get((work, system, metric)) for metric in METRICS]
            shown = [
                f"{c.value:.{0 if c.metric == 'requests' else 2}f}" if c else "" for c in cells
            ]
            lines.append([work, system, *shown, str(cells[0].n if cells[0] else 0)])
    print_table(["work", "system", *METRICS, "n"], lines)
    for row in tasks:
        print(f"{row.work}: {row.value:.3f} {row.metric}")
    worst = max(row.value for row in results.compute_rows() if row.metric == "over_s")
    print(f"\nAt most {worst:.1f} s over the engine; the goal is {GOAL:g} s.")


def main() -> int:
    """Measure, print the table, and write the rows if asked."""
    asked = parse_options("prefect", __doc__)
    results, programs = Results("prefect"), find_programs()
    if programs is None:
        print("PostgreSQL is not installed (Debian: postgresql), so only SQLite is measured.")
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # the user of PostgreSQL enters it
        for database in ("SQLite", "PostgreSQL") if programs else ("SQLite",):
            for shards in SHARDS:
                write_rows(folder / database / f"source-{shards}", shards)
            used = programs if database == "PostgreSQL" else None
            with start_bench(database, folder, results, used) as bench:
                for repeat in range(1 if asked.quick else 3):
                    for shards in SHARDS:
                        for system in rotate_systems(SYSTEMS, repeat):
                            bench.run(system, shards)
                    bench.run_tasks()
    add_overhead(results)
    report(results)
    results.save(asked.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
