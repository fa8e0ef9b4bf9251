"""Run a peer on a rig, check the copied files, and measure the run.

``python -m benchmarks.swarm_peers.run`` compares all peers with the lower bound. Each peer has a
new rig.
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
from benchmarks.rig.ray_nodes import RigRayNodes
from benchmarks.rig.store import RigStore
from benchmarks.swarm_peers.memory import PeakMemory, is_any_process, is_ray_worker
from benchmarks.swarm_peers.order import Order, Times, parse_times
from benchmarks.swarm_peers.xenna_python import NoXennaError, ensure_xenna_python

MIB = 1 << 20
TIMEOUT = 600.0  # seconds
DESTINATION = DISK / "warm"


@dataclass(frozen=True, slots=True)
class Figures:
    """Cost of copying the objects to every node.

    Attributes:
        seconds: Time from the first request to the last complete file, in seconds.
        startup_seconds: Time until the first request, in a cluster that was already running.
        peak_rss: Largest resident set of a single process that transfers data, in bytes.
        store_bytes: Number of bytes of bodies that the store sent.
        store_gets: Number of GetObject requests.
    """

    seconds: float
    startup_seconds: float
    peak_rss: int
    store_bytes: int
    store_gets: int

    @classmethod
    def gather(cls, times: Times, memory: PeakMemory, store: RigStore) -> "Figures":
        """Combine the times of a peer with its memory and the counts of the store."""
        counts = store.read_counts()
        gets = sum(each.gets for each in counts.objects.values())
        return cls(times.transfer, times.startup, memory.peak, counts.bytes, gets)


def run_peer(
    rig: Rig, store: RigStore, name: str, keys: Sequence[str], destination: Path = DESTINATION
) -> Figures:
    """Copy objects to every node of a rig with a peer.

    Args:
        rig: Rig with the nodes.
        store: Store in the rig. Its counts are reset.
        name: Name of the peer in `PEERS`.
        keys: Keys of the objects.
        destination: Path of the destination folder, the same on every node.

    Raises:
        RigError: The peer failed, or a file differs from its object.
        NoXennaError: This machine cannot run cosmos-xenna.
    """
    store.reset()
    figures = PEERS[name](rig, store, keys, destination)
    check_files(rig, store, keys, destination)
    return figures


def check_files(rig: Rig, store: RigStore, keys: Sequence[str], destination: Path) -> None:
    """Compare the files of every node with the objects of the store.

    Raises:
        RigError: A file differs from its object, or is missing.
    """
    for key in keys:
        expected = store.head(key).etag.strip('"')
        for host in rig.nodes:
            if host.call(_compute_md5, destination / key) != expected:
                raise RigError(f"{key} on {host.name} is not what the store has.")


def _compute_md5(path: Path) -> str:
    """Return the MD5 of a file, or the error of its read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "md5").hexdigest()
    except OSError as error:
        return str(error)


def _run_naive(rig: Rig, store: RigStore, keys: Sequence[str], destination: Path) -> Figures:
    """Run the naive peer: a process on every node."""
    order = Order(store.make_config(), list(keys), str(destination), "", {})
    command = [sys.executable, "-m", "benchmarks.swarm_peers.naive"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with ExitStack() as stack, PeakMemory(rig, is_any_process) as memory:
        began = time.perf_counter()
        nodes = [host.popen(command, **pipes) for host in rig.nodes]
        for node in nodes:
            stack.enter_context(node)
            stack.callback(node.kill)
        for node in nodes:
            _send_line(node, order.format_line())
        for node in nodes:
            _read_line(node)
        startup = time.perf_counter() - began
        for node in nodes:
            _send_line(node, "go\n")
        slowest = max(parse_times(_read_line(node)).transfer for node in nodes)
    return Figures.gather(Times(startup, slowest), memory, store)


def _send_line(process: subprocess.Popen[str], line: str) -> None:
    """Write a line to the standard input of a process."""
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()


def _read_line(process: subprocess.Popen[str]) -> str:
    """Read a line from the standard output of a process."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RigError("The process of a node ended too early.")
    return line


def _run_ray(rig: Rig, store: RigStore, keys: Sequence[str], destination: Path) -> Figures:
    """Run the peer with Ray's object store."""
    object_store = 80 * MIB + sum(store.head(key).size for key in keys) * 5 // 4
    with RigRayNodes.start(rig, object_store=object_store) as ray:
        order = Order(store.make_config(), list(keys), str(destination), ray.address, {})
        return _run_driver(rig, store, ray, Path(sys.executable), "ray_put", order)


def _run_millrace(rig: Rig, store: RigStore, keys: Sequence[str], destination: Path) -> Figures:
    """Run Millrace with agents that Ray starts."""
    requested = list(keys) if len(keys) == 1 else []  # several keys are requested by prefix
    with RigRayNodes.start(rig) as ray:
        order = Order(store.make_config(), requested, str(destination), ray.address, {})
        return _run_driver(rig, store, ray, Path(sys.executable), "millrace_nodes", order)


def _run_xenna(
    rig: Rig, store: RigStore, keys: Sequence[str], destination: Path, *, options: dict[str, Any]
) -> Figures:
    """Run cosmos-xenna."""
    python = ensure_xenna_python()
    with RigRayNodes.start(rig, python=python) as ray:
        order = Order(store.make_config(), list(keys), str(destination), ray.address, options)
        return _run_driver(rig, store, ray, python, "xenna", order)


def _run_driver(
    rig: Rig, store: RigStore, ray: RigRayNodes, python: Path, script: str, order: Order
) -> Figures:
    """Run the script of a peer on the node of Ray's head."""
    command = [python, "-m", f"benchmarks.swarm_peers.{script}"]
    with PeakMemory(rig, is_ray_worker) as memory:
        output = rig.nodes[0].run(
            command, stdin=order.format_line(), env=ray.environment, timeout=TIMEOUT
        )
    return Figures.gather(parse_times(output.splitlines()[-1]), memory, store)


PEERS: dict[str, Callable[[Rig, RigStore, Sequence[str], Path], Figures]] = {
    "millrace": _run_millrace,
    "naive": _run_naive,
    "ray": _run_ray,
    "xenna": partial(_run_xenna, options={"chunk_size_bytes": 4 * MIB}),
    # Faster with large objects: the default is four concurrent transfers per node on two cores.
    "xenna-tuned": partial(
        _run_xenna, options={"chunk_size_bytes": 4 * MIB, "node_parallelism": 32}
    ),
    "xenna-default": partial(_run_xenna, options={}),
}


def main() -> None:
    """Run the peers, and print a table of their costs."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.swarm_peers.run",
        description="Compare the peers of the swarm on a rig.",
    )
    parser.add_argument(
        "peers", nargs="*", default=list(PEERS), help=f"peers to run: {', '.join(PEERS)}"
    )
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument(
        "--mbit", type=float, default=200, help="rate of every link, also the store's"
    )
    parser.add_argument("--mib", type=int, default=128, help="size of the object")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the figures as JSON")
    options = parser.parse_args()
    size = options.mib * MIB
    floor = size / (options.mbit * 1e6 / 8 * GOODPUT)
    lines, rows = [["floor", f"{floor:.1f}", "1.00", "", "", "1.00", ""]], {}
    for name in options.peers:
        rates = {"nodes": options.nodes, "rate_mbit": options.mbit, "store_mbit": options.mbit}
        # Some peers write the object twice, and Ray's object store has a third copy.
        with (
            Rig.start(**rates, disk_bytes=3 * size + 512 * MIB) as rig,
            RigStore.start(DISK / "objects", rig.store) as store,
        ):
            store.generate("object", size)
            try:
                figures = run_peer(rig, store, name, ["object"])
            except NoXennaError as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
                continue
        rows[name] = asdict(figures)
        lines.append(
            [
                name,
                f"{figures.seconds:.1f}",
                f"{figures.seconds / floor:.2f}",
                f"{figures.startup_seconds:.1f}",
                f"{figures.peak_rss / 1e6:.0f}",
                f"{figures.store_bytes / size:.2f}",
                str(figures.store_gets),
            ]
        )
    header = ["", "seconds", "x floor", "startup s", "peak RSS MB", "x store bytes", "GETs"]
    print_table(header, lines)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
