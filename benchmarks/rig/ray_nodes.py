"""A Ray cluster over the nodes of a rig: the head on the first, a Ray node on each further one.

The dashboard, the metrics, the log monitor and the autoscaler are off, as far as Ray lets them be;
its folders are on the hosts' own disks. Requests must carry a token made for this cluster.
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

from benchmarks.common import tree
from benchmarks.rig.hosts import DISK, Host, Rig

PORT = 6379
FOLDER = DISK / "ray"  # short: the path of a UNIX socket has at most 107 bytes
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


class RayNodes:
    """A running cluster. Made by `RayNodes.start`; a context manager that stops it.

    Attributes:
        hosts: Where it runs, the head's first.
        address: For ``ray.init``, in one of them.
        environment: What a process in one of them needs in order to be let in.
    """

    def __init__(self, hosts: Sequence[Host], environment: dict[str, str]) -> None:
        """Describe a cluster that runs already; `start` runs it."""
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
        """Start a cluster; all nodes are alive when this returns.

        Args:
            rig: Whose nodes.
            python: An interpreter that has Ray; None: this one.
            head_cpus: Of the head's node; 0: tasks that ask for one go elsewhere.
            cpus: Of each further node.
            object_store: Bytes of each node's object store. Ray has no smaller one than 75 MiB.

        Raises:
            RigError: A node did not start.
        """
        environment = {**QUIET, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        nodes = cls(rig.nodes, environment)
        ray = [python or Path(sys.executable), "-m", "ray.scripts.scripts", "start"]
        ray += ["--temp-dir", FOLDER, "--disable-usage-stats", "--include-log-monitor=false"]
        ray += ["--object-store-memory", str(object_store)]

        def start(host: Host, cpus: int, *more: str) -> None:
            where = [f"--node-ip-address={host.address}", f"--num-cpus={cpus}"]
            host.run([*ray, *where, *more], env=environment, timeout=START_TIMEOUT)

        head, *others = rig.nodes
        with contextlib.ExitStack() as stack:
            stack.callback(nodes.stop)
            alone = ["--include-dashboard=false", "--no-monitor"]
            start(head, head_cpus, "--head", f"--port={PORT}", *alone)
            with ThreadPoolExecutor(len(others) or 1) as pool:
                join = f"--address={nodes.address}"
                list(pool.map(lambda host: start(host, cpus, join), others))
            stack.pop_all()
        return nodes

    def __enter__(self) -> Self:
        """Nothing: it runs already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it."""
        self.stop()

    def stop(self) -> None:
        """Kill its processes, and those of others that were started with its environment."""
        token = f"RAY_AUTH_TOKEN={self.environment['RAY_AUTH_TOKEN']}".encode()
        for host in self.hosts:
            killed: set[int] = set()
            while True:
                # All are found before the first is killed: one that is ending has no environment.
                # Some of Ray's write their titles over it, so their parents are to tell of them.
                told = [pid for pid in host.pids() if token in _environment(pid)]
                found = {pid for parent in told for pid in tree(parent)}
                for pid in found:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                killed |= found
                if killed.isdisjoint(host.pids()):
                    break
                time.sleep(0.005)


def _environment(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []
