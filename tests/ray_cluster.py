"""A Ray cluster of several nodes on this machine, each with a folder that stands for its disk."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from millrace.testing.process import find_free_ports

DISK = "MILLRACE_TEST_DISK"
"""The variable that names a node's own folder."""

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_num_prestart_python_workers": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",  # with Ray's 15, they wait for the processes of other tests
}


@dataclass
class RayCluster:
    """A running cluster.

    Attributes:
        address: For ``ray.init``.
        environment: Environment variables of a process that can join the cluster.
        disks: Each node's folder.
    """

    address: str
    environment: dict[str, str]
    disks: list[Path]
    folder: Path

    def join(self) -> Path:
        """Start a further node; its folder. The first is the head, which has no CPU."""
        disk = Path(tempfile.mkdtemp(prefix="disk-", dir=self.folder))
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"]
        command += ["--object-store-memory", str(80 << 20), "--include-log-monitor=false"]
        if self.disks:
            command += ["--address", self.address, "--num-cpus=1"]
        else:
            port = self.address.rpartition(":")[2]
            command += ["--head", f"--port={port}", "--num-cpus=0", "--include-dashboard=false"]
            command += ["--temp-dir", str(self.folder / "ray")]
        subprocess.run(
            command,
            env=os.environ | self.environment | {DISK: str(disk)},
            check=True,
            capture_output=True,
        )
        self.disks.append(disk)
        return disk

    def kill(self, disk: Path) -> None:
        """Kill all processes of a node."""
        self._kill(f"{DISK}={disk}".encode())

    def kill_actor(self, name: str) -> None:
        """Kill the process of one actor of a class."""
        token = f"RAY_AUTH_TOKEN={self.environment['RAY_AUTH_TOKEN']}".encode()
        mine = [pid for pid in _others() if token in _environment(pid)]
        title = f"ray::{name}".encode()
        found = [pid for pid in mine if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title)]
        os.kill(found[0], signal.SIGKILL)

    def run_driver(self, code: str, asked: object) -> Any:
        """Run a driver in a process of its own: Ray lets one connect to one cluster only.

        Args:
            code: Program, which prints its result as the last line, in JSON.
            asked: Its input, as JSON.
        """
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(asked),
            env=os.environ | self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def stop(self) -> None:
        """Kill all processes of the cluster, and of nothing else."""
        self._kill(f"RAY_AUTH_TOKEN={self.environment['RAY_AUTH_TOKEN']}".encode())

    def _kill(self, mark: bytes) -> None:
        while found := [pid for pid in _others() if mark in _environment(pid)]:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _others() -> list[int]:
    own = os.getpid()
    return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and int(p.name) != own]


def _environment(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError):
        if "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """Three nodes; the head has no CPU, as is usual on Kubernetes."""
    with tempfile.TemporaryDirectory(prefix="mr-", ignore_cleanup_errors=True) as name:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        (port,) = find_free_ports(1)
        cluster = RayCluster(f"127.0.0.1:{port}", {**_SETTINGS, **token}, [], Path(name))
        try:
            for _ in range(3):
                cluster.join()
            yield cluster
        finally:
            cluster.stop()
