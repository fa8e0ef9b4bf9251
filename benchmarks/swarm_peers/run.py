"""Run a peer on a rig, check what it brought, and say what it took.

``python -m benchmarks.swarm_peers.run`` shows them all beside the floor, each on a rig of its own.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import print_table
from benchmarks.rig import DISK, GOODPUT, Rig, RigError
from benchmarks.rig.ray_nodes import RayNodes
from benchmarks.rig.store import Store
from benchmarks.swarm_peers.memory import PeakMemory, any_process, of_ray
from benchmarks.swarm_peers.order import Order, Times, heard
from benchmarks.swarm_peers.xenna_python import NoXennaError, xenna_python

MIB = 1 << 20
TIMEOUT = 600.0  # seconds
DESTINATION = DISK / "warm"


@dataclass(frozen=True, slots=True)
class Figures:
    """Cost of putting the objects on every node.

    Attributes:
        seconds: From the first request to the last whole file.
        startup_seconds: Until the first request, in a cluster that was up.
        peak_rss: Bytes: the largest resident set of one process that carries the bytes.
        store_bytes: Bodies that the store sent.
        store_gets: In answer to so many requests.
    """

    seconds: float
    startup_seconds: float
    peak_rss: int
    store_bytes: int
    store_gets: int

    @classmethod
    def of(cls, times: Times, memory: PeakMemory, store: Store) -> "Figures":
        """Gather them."""
        counts = store.read_counts()
        gets = sum(one.gets for one in counts.objects.values())
        return cls(times.transfer, times.startup, memory.peak, counts.bytes, gets)


def run_peer(
    rig: Rig, store: Store, name: str, keys: Sequence[str], destination: Path = DESTINATION
) -> Figures:
    """Let a peer put objects on every node of a rig.

    Args:
        rig: Whose nodes.
        store: In the rig; its counts begin anew.
        name: One of `PEERS`.
        keys: Of the objects.
        destination: The folder, the same path on every node.

    Raises:
        RigError: It failed, or what it brought is not what the store has.
        NoXennaError: It cannot run here; the sentence says why.
    """
    store.reset()
    figures = PEERS[name](rig, store, keys, destination)
    check_files(rig, store, keys, destination)
    return figures


def check_files(rig: Rig, store: Store, keys: Sequence[str], destination: Path) -> None:
    """Compare every node's files with the store's objects.

    Raises:
        RigError: One differs.
    """
    for key in keys:
        due = store.head(key).etag.strip('"')
        for host in rig.nodes:
            if host.call(_md5, destination / key) != due:
                raise RigError(f"{key} on {host.name} is not what the store has.")


def _md5(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "md5").hexdigest()
    except OSError as error:
        return str(error)


def _naive(rig: Rig, store: Store, keys: Sequence[str], destination: Path) -> Figures:
    order = Order(store.make_config(), list(keys), str(destination), "", {})
    command = [sys.executable, "-m", "benchmarks.swarm_peers.naive"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with ExitStack() as stack, PeakMemory(rig, any_process) as memory:
        began = time.perf_counter()
        nodes = [host.popen(command, **pipes) for host in rig.nodes]
        for node in nodes:
            stack.enter_context(node)
            stack.callback(node.kill)
        for node in nodes:
            _tell(node, order.said())
        for node in nodes:
            _heard(node)
        startup = time.perf_counter() - began
        for node in nodes:
            _tell(node, "go\n")
        slowest = max(heard(_heard(node)).transfer for node in nodes)
    return Figures.of(Times(startup, slowest), memory, store)


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()


def _heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RigError("A node ended before it was done.")
    return line


def _ray(rig: Rig, store: Store, keys: Sequence[str], destination: Path) -> Figures:
    room = 80 * MIB + sum(store.head(key).size for key in keys) * 5 // 4
    with RayNodes.start(rig, object_store=room) as ray:
        order = Order(store.make_config(), list(keys), str(destination), ray.address, {})
        return _driven(rig, store, ray, Path(sys.executable), "ray_put", order)


def _millrace(rig: Rig, store: Store, keys: Sequence[str], destination: Path) -> Figures:
    asked = list(keys) if len(keys) == 1 else []  # many by their prefix, as a person would
    with RayNodes.start(rig) as ray:
        order = Order(store.make_config(), asked, str(destination), ray.address, {})
        return _driven(rig, store, ray, Path(sys.executable), "ours", order)


def _xenna(
    rig: Rig, store: Store, keys: Sequence[str], destination: Path, *, options: dict[str, Any]
) -> Figures:
    python = xenna_python()
    with RayNodes.start(rig, python=python) as ray:
        order = Order(store.make_config(), list(keys), str(destination), ray.address, options)
        return _driven(rig, store, ray, python, "xenna", order)


def _driven(
    rig: Rig, store: Store, ray: RayNodes, python: Path, script: str, order: Order
) -> Figures:
    """Run a script that drives actors, on the head's node."""
    command = [python, "-m", f"benchmarks.swarm_peers.{script}"]
    with PeakMemory(rig, of_ray) as memory:
        said = rig.nodes[0].run(command, stdin=order.said(), env=ray.environment, timeout=TIMEOUT)
    return Figures.of(heard(said.splitlines()[-1]), memory, store)


PEERS: dict[str, Callable[[Rig, Store, Sequence[str], Path], Figures]] = {
    "millrace": _millrace,
    "naive": _naive,
    "ray": _ray,
    "xenna": partial(_xenna, options={"chunk_size_bytes": 4 * MIB}),
    # Quicker with large objects: by default a node has four transfers at once on two cores.
    "xenna-tuned": partial(_xenna, options={"chunk_size_bytes": 4 * MIB, "node_parallelism": 32}),
    "xenna-default": partial(_xenna, options={}),
}


def main() -> None:
    """Show what each takes."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.swarm_peers.run", description="The swarm's peers on a rig."
    )
    parser.add_argument("peers", nargs="*", default=list(PEERS), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=200, help="of every link, the store's too")
    parser.add_argument("--mib", type=int, default=128, help="the size of the object")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    asked = parser.parse_args()
    size = asked.mib * MIB
    floor = size / (asked.mbit * 1e6 / 8 * GOODPUT)
    lines, rows = [["floor", f"{floor:.1f}", "1.00", "", "", "1.00", ""]], {}
    for name in asked.peers:
        shape = {"nodes": asked.nodes, "rate_mbit": asked.mbit, "store_mbit": asked.mbit}
        # Twice for those that write twice, and once for Ray's object store.
        with (
            Rig.start(**shape, disk_bytes=3 * size + 512 * MIB) as rig,
            Store.start(DISK / "objects", rig.store) as store,
        ):
            store.generate("object", size)
            try:
                found = run_peer(rig, store, name, ["object"])
            except NoXennaError as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
                continue
        rows[name] = asdict(found)
        lines.append(
            [
                name,
                f"{found.seconds:.1f}",
                f"{found.seconds / floor:.2f}",
                f"{found.startup_seconds:.1f}",
                f"{found.peak_rss / 1e6:.0f}",
                f"{found.store_bytes / size:.2f}",
                str(found.store_gets),
            ]
        )
    header = ["", "seconds", "x floor", "startup s", "peak RSS MB", "x store bytes", "GETs"]
    print_table(header, lines)
    if asked.json is not None:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
