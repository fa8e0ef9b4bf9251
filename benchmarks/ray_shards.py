"""Shard text on 1, 2 and 3 nodes of a Ray cluster: Millrace, Ray Data and a lower bound.

Run it with ``python -m benchmarks.ray_shards [--quick] [--json FILE]``. Each node is a host of a
rig (network namespaces, see `benchmarks.rig`) with one CPU and a link of a set rate. The store is
another host. So the links are the limit, and not the processors of this machine.

- ``millrace``: `shard_dataset` with ``execution.ray`` from call to return.
- ``ray data``: ``read_json(...).map(...).write_webdataset(...)``, also from call to return.
- ``floor``: the larger of the source and the shards over the links of the nodes, computed.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Results, parse_options, print_table, rotate_systems
from benchmarks.corpus import write_jsonl
from benchmarks.rig import DISK, GOODPUT, Rig, RigError, RigHost
from benchmarks.rig.ray_nodes import RigRayNodes
from benchmarks.rig.store import RigStore
from benchmarks.swarm_peers.memory import PeakMemory, is_ray_worker

MIB = 1 << 20
FILE_SIZE = 8 * MIB  # a partition, and a shard
MBIT, STORE_MBIT = 40.0, 400.0
SYSTEMS = ("millrace", "ray data")
NODES = (1, 2, 3)
METRICS = ("MB/s", "cpu_s_per_GB", "peak_rss_MB")
TIMEOUT = 600.0  # seconds
GOAL = 1.7  # rate of two nodes over that of one


@dataclass(frozen=True, slots=True)
class Corpus:
    """Source of the runs.

    Attributes:
        files: Bodies of the JSON lines files.
    """

    files: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(map(len, self.files))

    @classmethod
    def make(cls, folder: Path, files: int) -> "Corpus":
        """Write rows of 20 KB, and divide them into files."""
        path = folder / "rows.jsonl"
        write_jsonl(path, characters=20_000, size=files * FILE_SIZE)
        bodies: list[bytes] = [b""]
        with path.open("rb") as lines:
            for line in lines:
                if len(bodies[-1]) + len(line) > FILE_SIZE and len(bodies) < files:
                    bodies.append(b"")
                bodies[-1] += line
        return cls(tuple(bodies))

    def upload(self, store: RigStore) -> None:
        """Put the files into a store."""
        for number, body in enumerate(self.files):
            store.put(f"source/{number:05d}.jsonl", body)


def make_settings(store: RigStore, ray: RigRayNodes, shard_bytes: int) -> dict[str, Any]:
    """Return the settings of a run."""
    return {
        "dataset": "text",
        "source": {**store.make_settings("source"), "columns": {"txt": "text"}},
        "store": store.make_settings("made"),
        "sharding": {"shard_bytes": shard_bytes, "partition_bytes": FILE_SIZE},
        "execution": {"ray": ray.address, "uploads": 2},
    }


@contextmanager
def start_cluster(corpus: Corpus, nodes: int) -> Generator[tuple[Rig, RigStore, RigRayNodes]]:
    """Start a Ray cluster on a new rig, whose store has the corpus."""
    with (
        Rig.start(
            nodes=nodes,
            rate_mbit=MBIT,
            store_mbit=STORE_MBIT,
            disk_bytes=4 * corpus.size + 512 * MIB,
        ) as rig,
        RigStore.start(DISK / "objects", rig.store) as store,
        RigRayNodes.start(rig, object_store=256 * MIB) as ray,
    ):
        corpus.upload(store)
        yield rig, store, ray


def start_driver(
    host: RigHost, system: str, store: RigStore, ray: RigRayNodes, shard_bytes: int = FILE_SIZE
) -> "subprocess.Popen[str]":
    """Start `benchmarks.ray_sharding` on a host."""
    command = [sys.executable, "-m", "benchmarks.ray_sharding"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    driver = host.popen(command, env=ray.environment, **pipes)
    assert driver.stdin is not None
    order = {"system": system, "settings": make_settings(store, ray, shard_bytes)}
    driver.stdin.write(json.dumps(order) + "\n")
    driver.stdin.flush()
    return driver


def run_once(corpus: Corpus, system: str, nodes: int) -> dict[str, float]:
    """Run a system on a new rig, and return its figures."""
    with start_cluster(corpus, nodes) as (rig, store, ray):
        used = rig.read_cpu_seconds()
        with (
            PeakMemory(rig, is_ray_worker) as memory,
            start_driver(rig.nodes[0], system, store, ray) as driver,
        ):
            assert driver.stdout is not None
            *_, last = driver.stdout
        if driver.returncode:
            raise RigError(f"{system} on {nodes} nodes ended with exit code {driver.returncode}.")
        figures = json.loads(last)
        cpu = figures["cpu"] + rig.read_cpu_seconds() - used
    rate = corpus.size / 1e6 / figures["seconds"]
    return dict(zip(METRICS, (rate, cpu / corpus.size * 1e9, memory.peak / 1e6), strict=True))


def main() -> None:
    """Run the systems on each number of nodes, alternately, and print a table."""
    options = parse_options("ray_shards", __doc__)
    results = Results("ray_shards")
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus.make(Path(folder), 6 if options.quick else 24)
    for repeat in range(1 if options.quick else 3):
        for nodes in NODES:
            work = f"{nodes} node{'s' * (nodes > 1)}"
            for system in rotate_systems(SYSTEMS, repeat):
                for metric, value in run_once(corpus, system, nodes).items():
                    results.add(work, system, metric, value)
            results.add(work, "floor", "MB/s", nodes * MBIT / 8 * GOODPUT)
    lines: list[list[str]] = []
    for row in results.compute_rows():
        ratio = results.compute_ratio(row.work, row.system, "floor", "MB/s")
        shown = f"{ratio:.2f}" if row.metric == "MB/s" else ""
        lines.append([row.work, row.system, row.metric, f"{row.value:.2f}", shown, str(row.n)])
    print_table(["work", "system", "metric", "median", "x floor", "n"], lines)
    for nodes in NODES[1:]:
        pairs = zip(
            results.values[f"{nodes} nodes", "millrace", "MB/s"],
            results.values["1 node", "millrace", "MB/s"],
            strict=True,
        )
        gains = sorted(many / one for many, one in pairs)
        print(f"{nodes} nodes: {gains[len(gains) // 2]:.2f} times the rate of one", flush=True)
    results.save(options.file)


if __name__ == "__main__":
    main()
