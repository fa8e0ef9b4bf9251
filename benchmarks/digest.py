"""Cost of digests: each algorithm alone, and their share of the paths of a byte.

Run it with ``python -m benchmarks.digest [--quick] [--json FILE]``. The stores are a folder, a Ceph
RGW on loopback by plain HTTP, and the stand-in of R2 in front of it, by TLS.

- ``one core``: GB for each CPU second of one thread. ``two threads``: GB for each second of the
  clock, each thread with a half of the bytes.
- ``shard``, ``save``, ``warm``: CPU seconds per GB of Millrace's processes, without the servers.
  A dataset is sharded, a checkpoint is saved, and one node gets a dataset from RGW.

The engine has no switch for its algorithm. Therefore ``hashing`` is computed from the speeds of
this run: it is the time of the algorithms that hash each byte of the path once. ``with SHA-256`` is
the measured path with one SHA-256 instead, which would be both digest and signature.
"""

import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3
from pydantic import ByteSize, SecretStr

from benchmarks.common import (
    CpuTimer,
    Results,
    measure_process,
    parse_options,
    print_table,
    read_cpu_seconds,
    rotate_systems,
)
from benchmarks.corpus import write_jsonl
from benchmarks.node_process import start_node
from millrace.digest import hash_blocks
from millrace.storage import StoreSpec
from millrace.storage.signed import encode_crc64
from millrace.testing.r2 import R2Proxy, Rules
from millrace.testing.rgw import RGW

MIB = 1 << 20
CAPACITY = 20 << 30  # of the server's disk
ACCOUNT = "0123456789abcdef0123456789abcdef"
KEY = "d" * 32  # that the driver and the node share
DATASET, JOB = "dataset", "job"
SHA256, BLAKE3, CRC = "SHA-256", "BLAKE3 in blocks", "CRC-64/NVME"
ALGORITHMS: dict[str, Callable[[memoryview], object]] = {
    SHA256: lambda data: hashlib.sha256(data).digest(),
    BLAKE3: hash_blocks,
    "BLAKE3 whole": lambda data: blake3(data).digest(),
    "MD5": lambda data: hashlib.md5(data, usedforsecurity=False).digest(),
    CRC: encode_crc64,
}
STORES: dict[str, tuple[str, ...]] = {
    "folder": (BLAKE3,),
    "RGW, HTTP": (BLAKE3, SHA256),
    "R2, TLS": (BLAKE3, CRC),
}
"""Algorithms that hash each byte of an upload, by the store."""


@dataclass(frozen=True, slots=True)
class Route:
    """Path of a byte.

    Attributes:
        work: Name of the work.
        store: Name of the store.
        hashes: Algorithms that hash each byte.
    """

    work: str
    store: str
    hashes: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the path in the results."""
        return f"{self.work}, {self.store}"


PATHS = (
    *(Route("shard", store, hashes) for store, hashes in STORES.items()),
    *(Route("save", store, hashes) for store, hashes in STORES.items()),
    Route("warm", "RGW, HTTP", (BLAKE3,)),
)
BY_NAME = {path.name: path for path in PATHS}


def run_speeds(results: Results, *, size: int, repeats: int) -> None:
    """Hash the same bytes by each algorithm, in turn."""
    data = memoryview(os.urandom(size))
    halves = [data[: size // 2], data[size // 2 :]]
    for repeat in range(repeats):
        for name in rotate_systems(list(ALGORITHMS), repeat):
            hash_bytes = ALGORITHMS[name]
            began = time.thread_time()
            hash_bytes(data)
            results.add("one core", name, "GB/s", size / 1e9 / (time.thread_time() - began))
            with ThreadPoolExecutor(len(halves)) as pool:
                list(pool.map(hash_bytes, [data[:MIB]] * len(halves)))  # the threads have started
                clock = time.perf_counter()
                list(pool.map(hash_bytes, halves))
                clock = time.perf_counter() - clock
            results.add("two threads", name, "GB/s", size / 1e9 / clock)


def run_shard(spec: dict[str, Any], source: Path, size: int) -> dict[str, float]:
    """Shard a folder of JSON lines."""
    from millrace import shard_dataset
    from millrace.datasets import (
        ExecutionSettings,
        PipelineSettings,
        ShardingSettings,
        SourceLocation,
    )

    config = PipelineSettings(
        dataset=DATASET,
        source=SourceLocation(url=source.as_uri(), columns={"txt": "text"}),
        store=StoreSpec.model_validate(spec),
        sharding=ShardingSettings(
            shard_bytes=ByteSize(64 * MIB), partition_bytes=ByteSize(size // 2)
        ),
        execution=ExecutionSettings(workers=2, uploads=1),
    )
    cpu = CpuTimer()
    made = shard_dataset(config).manifest.size
    return {"cpu_s_per_GB": cpu.read() / (made / 1e9)}


def run_save(spec: dict[str, Any], _: Path, size: int) -> dict[str, float]:
    """Save a state that is there already."""
    from benchmarks.checkpoints import make_state
    from millrace.checkpoints import Saver
    from millrace.storage import open_store

    state = make_state(size, 0)
    with Saver(open_store(StoreSpec.model_validate(spec)), JOB) as saver:
        cpu = CpuTimer()
        saver.save(state, step=0).result()
        spent = cpu.read()
    return {"cpu_s_per_GB": spent / (size / 1e9)}


def run_warm(spec: dict[str, Any], root: Path, _: int) -> dict[str, float]:
    """Bring the shards of a dataset to one node, which is a process of its own."""
    from millrace.swarm import Host, Hosts, PrewarmSettings, Request, prewarm

    with start_node(root, KEY, "--port", "0", encrypted=False) as node:
        settings = PrewarmSettings(
            requests=(Request(dataset=DATASET),),
            stores={"s": StoreSpec.model_validate(spec)},
            root=root,
            nodes=Hosts(hosts=(Host(url=node.url, name="node"),), key=SecretStr(KEY)),
        )
        before, cpu = read_cpu_seconds(node.pid), CpuTimer()
        report = prewarm(settings)
        spent = cpu.read() + read_cpu_seconds(node.pid) - before
    if report.store_bytes != report.size:
        raise RuntimeError(f"{report.store_bytes:,} bytes were read, of {report.size:,}.")
    return {"cpu_s_per_GB": spent / (report.size / 1e9)}


RUNS: dict[str, Callable[[dict[str, Any], Path, int], dict[str, float]]] = {
    "shard": run_shard,
    "save": run_save,
    "warm": run_warm,
}


class DigestBench:
    """One invocation: its servers, its folders, its results."""

    def __init__(self, results: Results, folder: Path, rgw: RGW, r2: R2Proxy) -> None:
        self.results = results
        self._folder, self._rgw, self._r2 = folder, rgw, r2
        self._number = 0

    def run(self, *, size: int, repeats: int) -> None:
        """Run each path, in turn."""
        source = self._folder / "source"
        write_jsonl(source / "text.jsonl", characters=20_000, size=size)
        warm = self._make_spec("RGW, HTTP")
        measure_process(run_shard, warm, source, size)
        for repeat in range(repeats):
            for path in map(BY_NAME.__getitem__, rotate_systems(list(BY_NAME), repeat)):
                spec = warm if path.work == "warm" else self._make_spec(path.store)
                where = self._folder / f"node-{repeat}" if path.work == "warm" else source
                figures = measure_process(RUNS[path.work], spec, where, size).figures
                for metric, value in figures.items():
                    self.results.add(path.name, "millrace", metric, value)

    def _make_spec(self, store: str) -> dict[str, Any]:
        """Return the settings of a store that has no objects yet."""
        self._number += 1
        if store == "folder":
            return {"url": (self._folder / f"store-{self._number}").as_uri()}
        bucket = self._rgw.create_bucket(f"bench-{self._number}")
        key = self._rgw.full
        credentials = {
            "access_key_id": key.access_key_id,
            "secret_access_key": key.secret_access_key,
        }
        if store == "RGW, HTTP":
            url, endpoint, ca_file = f"s3://{bucket}", self._rgw.endpoint, None
        else:
            url, endpoint = f"r2://{ACCOUNT}/{bucket}", self._r2.endpoint
            ca_file = str(self._r2.ca_file)
        return {"url": url, "endpoint": endpoint, "ca_file": ca_file, "credentials": credentials}


def compute_paths(results: Results) -> None:
    """Add the hashing of each path, and its cost with SHA-256 instead."""
    values = {(row.work, row.system, row.metric): row.value for row in results.compute_rows()}
    seconds = {name: 1 / values["one core", name, "GB/s"] for name in ALGORITHMS}
    for path in PATHS:
        total = values[path.name, "millrace", "cpu_s_per_GB"]
        hashing = sum(seconds[name] for name in path.hashes)
        results.add(path.name, "millrace", "hashing_s_per_GB", hashing)
        replaced = total - hashing + seconds[SHA256]
        results.add(path.name, "with SHA-256", "cpu_s_per_GB", replaced)


def report(results: Results) -> None:
    """Print the speeds and the paths."""
    rows = {(row.work, row.system, row.metric): row for row in results.compute_rows()}
    lines: list[Sequence[str]] = []
    for name in ALGORITHMS:
        one, two = (rows[work, name, "GB/s"] for work in ("one core", "two threads"))
        ratio = results.compute_ratio("one core", name, SHA256, "GB/s")
        cells = [f"{one.value:.2f}", f"{1 / one.value:.2f}", f"{two.value:.2f}", f"{ratio:.2f}x"]
        lines.append([name, *cells, str(one.n)])
    print_table(
        ["algorithm", "GB/s, one core", "s/GB", "GB/s, two threads", "/SHA-256", "n"], lines
    )
    print()
    lines = []
    for path in PATHS:
        total = rows[path.name, "millrace", "cpu_s_per_GB"]
        hashing = rows[path.name, "millrace", "hashing_s_per_GB"].value
        before = rows[path.name, "with SHA-256", "cpu_s_per_GB"].value
        cells = [f"{value:.2f}" for value in (total.value, hashing, before)]
        ratio = f"{total.value / before:.2f}x"
        lines.append([path.name, " + ".join(path.hashes), *cells, ratio, str(total.n)])
    print_table(["path", "hashes", "CPU s/GB", "hashing", "with SHA-256", "ratio", "n"], lines)


def main() -> int:
    """Measure, print the tables, and write the rows if asked."""
    asked = parse_options("digest", __doc__)
    results = Results("digest")
    run_speeds(results, size=(16 if asked.quick else 128) * MIB, repeats=2 if asked.quick else 7)
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name:
        folder = Path(name)
        with RGW.start(folder / "rgw", capacity=CAPACITY) as rgw:
            keys = {rgw.full.access_key_id: rgw.full.secret_access_key}
            rules = Rules(write_interval=0)
            with R2Proxy.start(rgw.endpoint, keys, folder / "r2", rules=rules) as r2:
                size, repeats = (64 * MIB, 1) if asked.quick else (512 * MIB, 3)
                DigestBench(results, folder, rgw, r2).run(size=size, repeats=repeats)
    compute_paths(results)
    report(results)
    results.save(asked.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
