"""Prefect server as a child process. This module does not import Prefect."""

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from millrace.testing.process import REPOSITORY, Child, find_free_ports, open_local

_STALL_TIMEOUT = 120.0  # seconds without CPU use after which a start fails
_POLL_INTERVAL = 0.1
_TICKS = os.sysconf("SC_CLK_TCK")


class PrefectServerProcess:
    """Prefect server on loopback with its own home, where the database is by default.

    Attributes:
        home: ``PREFECT_HOME`` of the server and its clients.
        log: File with the output of the server.
        url: URL of the API.
        environment: Environment variables of a process that uses this server.
    """

    def __init__(
        self,
        home: Path,
        *,
        port: int = 0,
        settings: Mapping[str, str] | None = None,
        log_level: str = "warning",
    ) -> None:
        """Start a server, and wait until it answers.

        Args:
            home: Folder of the server. It is created if it does not exist.
            port: Port of the server; 0 means any free port.
            settings: Additional environment variables of the server and its clients.
            log_level: Level of uvicorn's log.

        Raises:
            RuntimeError: The server ended, or used no CPU time for two minutes.
        """
        self.home = home
        self.log = home / "server.log"
        port = port or find_free_ports(1)[0]
        self.url = f"http://127.0.0.1:{port}/api"
        self.environment = {
            **{name: value for name, value in os.environ.items() if "PREFECT" not in name},
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": self.url,
            "PREFECT_UI_API_URL": self.url,
            "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(home / "ui"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            **(settings or {}),
        }
        home.mkdir(parents=True, exist_ok=True)
        # uvicorn as a child of `prefect server start` would survive a kill of that command.
        app = ["-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
        address = ["--host", "127.0.0.1", "--port", str(port), "--log-level", log_level]
        self._child = Child(
            [sys.executable, *app, *address],
            log=self.log,
            folder=REPOSITORY,
            environment=self.environment,
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self._child.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the server."""
        self._child.stop()

    def _wait_until_ready(self) -> None:
        before, deadline = 0.0, time.monotonic() + _STALL_TIMEOUT
        while not self._is_ready():
            if not self._child.is_running():
                raise RuntimeError(f"The Prefect server ended:\n{self._child.read_tail(40)}")
            if (cpu := _read_cpu_seconds(self._child.pid)) > before:
                before, deadline = cpu, time.monotonic() + _STALL_TIMEOUT
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"The Prefect server does not start:\n{self._child.read_tail(40)}"
                )
            time.sleep(_POLL_INTERVAL)

    def _is_ready(self) -> bool:
        try:
            with contextlib.closing(open_local(f"{self.url}/health", timeout=5)) as answer:
                return answer.status == 200
        except OSError:
            return False


def _read_cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process. On a busy machine, a start takes minutes."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS
