"""A real Prefect server of the tests' own, and workers for it, each a process."""

import asyncio
import contextlib
import json
import re
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

import psutil
import pytest

from millrace.testing.postgres import PostgresServer, find_programs
from millrace.testing.prefect_server import PrefectServerProcess
from millrace.testing.process import REPOSITORY

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State

T = TypeVar("T")

HANGS = 900.0  # seconds until a command that does not end is taken to hang, on a busy machine
PATIENCE = 300.0  # seconds without progress until what is waited for is taken to have failed
# Prefect answers 503 while another request writes to its SQLite, on a busy machine for minutes.
# Its clients wait 2, 4, 8, ... seconds; the default of 5 attempts ends after one minute.
CLIENT_RETRIES = 7


def wait_until(
    look: Callable[[], T | None], what: str, *, progress: Callable[[], object] = lambda: None
) -> T:
    """Wait until a function returns something else than None and False, and return the result.

    Args:
        look: Function that looks for a change in another process.
        what: Description of the change, for the error.
        progress: Function whose result differs while the other process makes progress. A change of
            the result extends the wait.
    """
    deadline, before = time.monotonic() + PATIENCE, progress()
    while True:
        began = time.monotonic()
        seen = look()
        if seen is not None and seen is not False:
            return seen
        ended = time.monotonic()
        if ended > deadline:
            now = progress()
            if now == before:
                raise AssertionError(f"{what}: not seen within {PATIENCE:g} s, and stuck at {now}")
            deadline, before = time.monotonic() + PATIENCE, now
        # What is waited for needs the processors, too.
        time.sleep(min(max(0.05, 10 * (ended - began)), 0.5))


@cache
def _make_tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()


class PrefectServer(PrefectServerProcess):
    """A server on PostgreSQL, and what tests ask of it.

    On SQLite, which waits for one writer at a time, a busy machine answers 503 for minutes.
    """

    def __init__(self, home: Path) -> None:
        """Start it, and wait until it answers."""
        programs = find_programs()
        assert programs is not None, "PostgreSQL is missing: run `make servers`."
        self._folder = Path(tempfile.mkdtemp(prefix="postgres-"))  # short: a socket's path is
        self._folder.chmod(0o755)  # the user of PostgreSQL enters it
        self._database = PostgresServer(programs, self._folder / "data", is_durable=False)
        settings = {
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": self._database.url,
            "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "2",
            "PREFECT_CLIENT_MAX_RETRIES": str(CLIENT_RETRIES),
        }
        super().__init__(home, settings=settings)

    def stop(self) -> None:
        """Stop the server and its database."""
        super().stop()
        self._database.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def make_client(self) -> "SyncPrefectClient":
        """A client of it."""
        from prefect.client.orchestration import SyncPrefectClient

        # Prefect would read the system's certificates for each client, for longer than a request.
        return SyncPrefectClient(self.url, httpx_settings={"verify": _make_tls_context()})

    def run_prefect(
        self, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run Prefect's command line in the repository."""
        return self.run("prefect", "--no-prompt", *arguments, environment=environment)

    def run(
        self, *command: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command that is to use this server."""
        program, *arguments = command
        return subprocess.run(
            [str(Path(sys.executable).parent / program), *arguments],
            cwd=REPOSITORY,
            env={**self.environment, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=HANGS,
            check=False,
        )

    def start_by_command(self, deployment: str, **parameters: Any) -> "Started":
        """``prefect deployment run --watch``, as a person types it."""
        said = self.run_prefect(
            "deployment", "run", deployment, "--params", json.dumps(parameters),
            "--watch", "--watch-timeout", str(int(HANGS)),
        )  # fmt: skip
        found = re.search(r"UUID: ([0-9a-f-]{36})", said.stdout)
        assert found, said.stdout + said.stderr
        return Started(UUID(found[1]), said.returncode, said.stdout + said.stderr)

    def start(self, deployment: str, *, watch: bool = True, **parameters: Any) -> "Started":
        """The same by the API, some seconds sooner each; its output is how it ended."""
        with self.make_client() as client:
            of = client.read_deployment_by_name(deployment).id
            run = client.create_flow_run_from_deployment(of, parameters=parameters).id
        if not watch:
            return Started(run, 0, "")
        state = wait_until(
            lambda: self._ended(run), f"the end of {deployment}, {run}", progress=self._doing(run)
        )
        return Started(run, int(not state.is_completed()), f"{state.name}: {state.message}")

    def run_here(self, deployment: str, **parameters: Any) -> "Started":
        """Run a deployment as the process of a worker does, but in this one (`prefect_api`)."""
        from prefect.context import AsyncClientContext
        from prefect.flow_engine import run_flow
        from prefect.flows import load_flow_from_flow_run
        from prefect.logging.handlers import APILogHandler
        from prefect.states import Pending

        async def load() -> "Flow[..., Any]":
            async with AsyncClientContext.get_or_create():  # closes the client
                return await load_flow_from_flow_run(run, use_placeholder_flow=False)

        with self.make_client() as client:
            of = client.read_deployment_by_name(deployment).id
            # A worker takes runs that are scheduled.
            run = client.create_flow_run_from_deployment(of, parameters=parameters, state=Pending())
        with contextlib.chdir(REPOSITORY):  # loading the flow changes the folder
            state: State[Any] = run_flow(asyncio.run(load()), run, return_type="state")  # pyright: ignore[reportAssignmentType]
        APILogHandler().flush()
        return Started(run.id, int(not state.is_completed()), f"{state.name}: {state.message}")

    def call(self, flow: "Flow[..., Any]", /, **parameters: Any) -> "Started":
        """Call a flow in this process, which is a client of the server (`prefect_api`)."""
        from prefect.logging.handlers import APILogHandler

        state: State[Any] = flow(**parameters, return_state=True)
        APILogHandler().flush()
        run = state.state_details.flow_run_id
        assert run is not None
        return Started(run, int(not state.is_completed()), f"{state.name}: {state.message}")

    def begin(self, flow: "Flow[..., Any]", /, **parameters: Any) -> "Begun":
        """Call a flow in a thread of this process, which is a client of the server."""
        with self.make_client() as client:
            made = client.create_flow_run(flow, parameters=parameters)
        return self._begin(flow, made, parameters)

    def retry(self, flow: "Flow[..., Any]", run: UUID, /, **parameters: Any) -> "Begun":
        """Run an ended flow run once more, as "Retry" of the UI does."""
        from prefect.states import AwaitingRetry

        with self.make_client() as client:
            client.set_flow_run_state(run, AwaitingRetry())
        return self._begin(flow, self.read_flow_run(run), parameters)

    def _begin(
        self, flow: "Flow[..., Any]", made: "FlowRun", parameters: dict[str, Any]
    ) -> "Begun":
        from prefect.flow_engine import run_flow

        def call() -> "State[Any]":
            return run_flow(flow, made, parameters, return_type="state")  # pyright: ignore[reportReturnType]

        with_settings = copy_context()
        pool = ThreadPoolExecutor(1)
        calling = pool.submit(with_settings.run, call)
        pool.shutdown(wait=False)
        return Begun(made.id, calling)

    def read_flow_run(self, run: UUID) -> "FlowRun":
        """A flow run as the server has it now."""
        with self.make_client() as client:
            return client.read_flow_run(run)

    def _ended(self, run: UUID) -> "State | None":
        state = self.read_flow_run(run).state
        return state if state is not None and state.is_final() else None

    def wait(self, run: UUID, *states: str) -> "FlowRun":
        """Wait until a flow run is in one of these states, by their names."""

        def look() -> "FlowRun | None":
            now = self.read_flow_run(run)
            return now if now.state is not None and now.state.name in states else None

        what = f"flow run {run} in {' or '.join(states)}"
        return wait_until(look, what, progress=self._doing(run))

    def _doing(self, run: UUID) -> Callable[[], tuple[str, str]]:
        """Tell how far a flow run is: its state, and the last that it has logged."""

        def read() -> tuple[str, str]:
            state = self.read_flow_run(run).state
            return state.name if state and state.name else "", self.read_logs(run)[-500:]

        return read

    def read_artifacts(self, run: UUID) -> dict[str, Any]:
        """The artifacts of a flow run: key to data."""
        from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

        with self.make_client() as client:
            found = client.read_artifacts(
                artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run]))
            )
        return {artifact.key or "": artifact.data for artifact in found}

    def read_logs(self, run: UUID) -> str:
        """Return the log of a flow run and its tasks, from the API."""
        from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId

        lines: list[str] = []
        with self.make_client() as client:
            while True:
                page = client.read_logs(
                    LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run])), offset=len(lines)
                )
                if not page:
                    return "\n".join(lines)
                lines += [entry.message for entry in page]

    def read_tables(self) -> Iterator[tuple[str, str]]:
        """Every value in the server's database, with the name of its table."""
        return self._database.read_values()


@dataclass(frozen=True)
class Begun:
    """A flow that a thread of this process runs."""

    run: UUID
    _calling: "Future[State[Any]]"

    def wait_for_result(self) -> "Started":
        """Wait until it has ended; what it came to."""
        from prefect.logging.handlers import APILogHandler

        state = self._calling.result()
        APILogHandler().flush()
        return Started(self.run, int(not state.is_completed()), f"{state.name}: {state.message}")


@dataclass(frozen=True)
class Started:
    """Exit code of a deployment's run (0 if completed), and its output."""

    run: UUID
    code: int
    output: str


class Worker:
    """A process worker, in a process group of its own."""

    def __init__(
        self,
        server: PrefectServer,
        folder: Path,
        pool: str = "millrace",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start one; the runs that it starts inherit its environment."""
        self.log = folder / "worker.log"
        executable = str(Path(sys.executable).parent / "prefect")
        with self.log.open("ab") as sink:
            self._process = subprocess.Popen(
                [executable, "worker", "start", "--pool", pool, "--limit", "4"],
                stdout=sink,
                stderr=subprocess.STDOUT,
                cwd=folder,  # not the repository: nothing may depend on where a worker stands
                env={
                    **server.environment,
                    "PREFECT_WORKER_QUERY_SECONDS": "0.5",
                    **(environment or {}),
                },
                start_new_session=True,
                preexec_fn=_hear_interrupts,  # noqa: PLW1509 - it only sets a signal
            )

    def list_descendants(self) -> list[psutil.Process]:
        """The flow runs' processes, and theirs."""
        return psutil.Process(self._process.pid).children(recursive=True)

    def terminate(self) -> None:
        """Send SIGTERM to it alone, as a service manager or `docker stop` does."""
        self._process.terminate()

    def stop(self) -> None:
        """Stop it in order."""
        if self._process.poll() is None:
            self.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(15)
        self.kill()

    def kill(self) -> None:
        """SIGKILL it and all that it has started, as a power cut would."""
        if self._process.poll() is None:
            processes = self.list_descendants()
            self._process.kill()
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, timeout=PATIENCE)
        self._process.wait()


def _hear_interrupts() -> None:
    # A shell in the background has them ignored, and Prefect stops a worker by one.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    """A Prefect server with nothing of ours on it yet."""
    server = PrefectServer(tmp_path_factory.mktemp("prefect") / "home")
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def prefect_api(prefect_server: PrefectServer) -> Iterator[PrefectServer]:
    """The server, and this process as its client."""
    from prefect.logging.handlers import APILogHandler
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_CLIENT_MAX_RETRIES,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
        PREFECT_HOME,
        temporary_settings,
    )

    with temporary_settings(
        {
            PREFECT_API_URL: prefect_server.url,
            PREFECT_HOME: prefect_server.home,
            PREFECT_CLIENT_MAX_RETRIES: CLIENT_RETRIES,
            PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
        }
    ):
        yield prefect_server
        APILogHandler().flush()


@pytest.fixture(scope="session")
def deployed(prefect_server: PrefectServer) -> PrefectServer:
    """The server after ``millrace setup`` and ``millrace deploy``, without a block."""
    made = prefect_server.run("millrace", "setup", "--without-buckets", "--uploads", "8")
    assert made.returncode == 0, made.stdout + made.stderr
    done = prefect_server.run("millrace", "deploy")
    assert done.returncode == 0, done.stdout + done.stderr
    return prefect_server


class SharedWorker:
    """At most one worker at a time, which stays for the next test that needs the same."""

    def __init__(self, server: PrefectServer, folders: pytest.TempPathFactory) -> None:
        self._server, self._folders = server, folders
        self._environment: dict[str, str] = {}
        self._worker: Worker | None = None

    def get(self, environment: Mapping[str, str]) -> Worker:
        """Return the worker with this environment."""
        if self._worker is None or self._environment != environment:
            self.stop()
            self._environment = dict(environment)
            folder = self._folders.mktemp("worker")
            self._worker = Worker(self._server, folder, environment=environment)
        return self._worker

    def stop(self) -> None:
        """Stop it: another one may start."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None


@pytest.fixture(scope="session")
def shared_worker(
    deployed: PrefectServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedWorker]:
    """The worker of all tests that do not stop theirs."""
    shared = SharedWorker(deployed, tmp_path_factory)
    yield shared
    shared.stop()


@pytest.fixture
def worker(shared_worker: SharedWorker) -> Worker:
    """A worker, which also ran what earlier tests started."""
    return shared_worker.get({})


@pytest.fixture
def own_worker(
    deployed: PrefectServer, shared_worker: SharedWorker, tmp_path: Path
) -> Iterator[Worker]:
    """The only worker, of one test: it may be stopped, and all its processes are that test's."""
    shared_worker.stop()
    one = Worker(deployed, tmp_path)
    try:
        yield one
    finally:
        one.stop()
