"""A Ray cluster on the nodes of a rig, with its head on the first node.

The dashboard, the metrics, the log monitor and the autoscaler are off, as far as Ray has settings
for that. Ray's folders are on the disks of the hosts. Each cluster has its own token, which
requests need.
"""

import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from benchmarks.common import walk_process_tree
from benchmarks.rig.hosts import DISK, Rig, RigHost

PORT = 6379
FOLDER = DISK / "ray"  # the path of a UNIX socket has at most 107 bytes
START_TIMEOUT = 120.0  # seconds
MIB = 1 << 20
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_num_prestart_python_workers": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_DEDUP_LOGS": "0",
}


class RigRayNodes:
    """Running cluster, started by `RigRayNodes.start`. As a context manager, it stops at the exit.

    Attributes:
        hosts: Hosts of the cluster, with the head's host first.
        address: Address for ``ray.init`` in a process of one of the hosts.
        environment: Environment variables for such a process, with the cluster's token.
    """

    def __init__(self, hosts: Sequence[RigHost], environment: dict[str, str]) -> None:
        """Describe a cluster that `start` has started."""
        self.hosts = tuple(hosts)
        self.address = f"{hosts[0].address}:{PORT}"
        self.environment = environment

    @classmethod
    def start(
        cls,
        rig: Rig,
        *,
        python: Path | None = None,
        head_cpus: int = 1,
        cpus: int = 1,
        object_store: int = 80 * MIB,
    ) -> Self:
        """Start a cluster, and wait until all nodes have joined it.

        Args:
            rig: Rig of the nodes.
            python: Python interpreter with Ray. None stands for this interpreter.
            head_cpus: Number of CPUs of the head's node. With 0, tasks that need a CPU run on the
                other nodes.
            cpus: Number of CPUs of each other node.
            object_store: Size of each node's object store in bytes. Ray requires 75 MiB.

        Raises:
            RigError: A node did not start.
        """
        environment = {**QUIET, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        nodes = cls(rig.nodes, environment)
        ray = [python or Path(sys.executable), "-m", "ray.scripts.scripts", "start"]
        ray += ["--temp-dir", FOLDER, "--disable-usage-stats", "--include-log-monitor=false"]
        ray += ["--object-store-memory", str(object_store)]

        def start(host: RigHost, cpus: int, *more: str) -> None:
            node = [f"--node-ip-address={host.address}", f"--num-cpus={cpus}"]
            host.run([*ray, *node, *more], env=environment, timeout=START_TIMEOUT)

        head, *others = rig.nodes
        with contextlib.ExitStack() as stack:
            stack.callback(nodes.stop)
            minimal = ["--include-dashboard=false", "--no-monitor"]
            start(head, head_cpus, "--head", f"--port={PORT}", *minimal)
            with ThreadPoolExecutor(len(others) or 1) as pool:
                join = f"--address={nodes.address}"
                list(pool.map(lambda host: start(host, cpus, join), others))
            stack.pop_all()
        return nodes

    def __enter__(self) -> Self:
        """Return the cluster, which is already running."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the cluster."""
        self.stop()

    def stop(self) -> None:
        """Kill the processes of the cluster, and all others with its environment."""
        token = f"RAY_AUTH_TOKEN={self.environment['RAY_AUTH_TOKEN']}".encode()
        for host in self.hosts:
            killed: set[int] = set()
            while True:
                # All processes are found before the first kill, since the environment of an ending
                # process is empty. Some processes of Ray overwrite their environment with a title,
                # so they are found as descendants of others.
                parents = [pid for pid in host.list_pids() if token in _read_environment(pid)]
                found = {pid for parent in parents for pid in walk_process_tree(parent)}
                for pid in found:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                killed |= found
                if killed.isdisjoint(host.list_pids()):
                    break
                time.sleep(0.005)


def _read_environment(pid: int) -> list[bytes]:
    """Return the environment of a process, or nothing if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []
