"""Text sharded into an S3 store: Millrace, webdataset's ShardWriter, and the floor of bare PUTs.

Run it with ``python -m benchmarks.shards [--quick] [--json FILE]``. The source is JSON lines in a
local folder, the store a Ceph RGW on loopback, a shard 64 MiB.

- ``millrace``: `shard_dataset` from call to return: the plan, two worker processes started and
  ended, the ledger, the manifest.
- ``webdataset``: one process reads the lines with ``json``, a ``ShardWriter`` writes shards to a
  folder, its ``post`` hook sends each with boto3's ``upload_file`` and removes it.
- ``floor``: the very shards that Millrace made, ready in memory, sent by obstore's ``put`` from
  as many processes and threads as Millrace uploads with. Nothing that uploads them is faster.

Every body's SHA-256 is signed and checked by the server, on all three sides. The first run of
each is read back, and what it holds must be the same samples.

Last, a source of 1,000,000 files is planned: seconds, and the peak memory of the process. A
stand-in of a bucket lists them.
"""

import hashlib
import io
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event as Gate
from pathlib import Path
from typing import Any

import obstore
from obstore.store import S3Store
from pydantic import ByteSize

from benchmarks.common import (
    CpuTimer,
    Results,
    measure_process,
    parse_options,
    print_table,
    rotate_systems,
)
from benchmarks.corpus import write_jsonl
from benchmarks.endless import endless, make_endless_spec
from millrace import shard_dataset
from millrace.datasets import (
    ExecutionSettings,
    PipelineSettings,
    ShardingSettings,
    SourceLocation,
    plan_dataset,
)
from millrace.datasets.sources import SourceKind
from millrace.storage import StoreSpec
from millrace.testing.credentials import make_credentials
from millrace.testing.key import connect
from millrace.testing.rgw import RGW, Key

MIB = 1 << 20
SHARD = 64 * MIB
CAPACITY = 20 << 30  # of the server's disk: a sparse file, but in time it is written all over
WORKERS = 2
UPLOADS = 1
PLANNED = 1_000_000  # files
SYSTEMS = ("millrace", "webdataset", "floor")
METRICS = ("MB/s", "cpu_s_per_GB", "peak_rss_MB")
STATED = SHARD * (UPLOADS + 1) * WORKERS


@dataclass(frozen=True, slots=True)
class Work:
    """Dataset that is sharded.

    Attributes:
        name: Of the work.
        characters: Of text in a sample.
        size: Bytes of the source.
        quick: Bytes of the source with ``--quick``.
    """

    name: str
    characters: int
    size: int
    quick: int


WORKS = (
    Work("1 KB", 1_000, 512 * MIB, 64 * MIB),
    Work("20 KB", 20_000, 2048 * MIB, 256 * MIB),
    Work("100 KB", 100_000, 2048 * MIB, 256 * MIB),
)


@dataclass(frozen=True, slots=True)
class Target:
    """Destination of a run's shards."""

    endpoint: str
    key: Key
    bucket: str
    prefix: str

    def client(self) -> Any:
        """Return a boto3 client of the destination."""
        return connect(self.endpoint, self.key)

    def listed(self) -> list[str]:
        """List the destination."""
        pages = self.client().get_paginator("list_objects_v2")
        found = pages.paginate(Bucket=self.bucket, Prefix=f"{self.prefix}/")
        return [item["Key"] for page in found for item in page.get("Contents", [])]

    def shards(self) -> list[str]:
        """List the shards of the destination."""
        return [key for key in self.listed() if key.endswith(".tar")]


def run_millrace(source: Path, target: Target, partition: int) -> dict[str, float]:
    """Shard a folder of JSON lines with Millrace."""
    config = _pipeline(source, target, partition)
    cpu, began = CpuTimer(), time.perf_counter()
    report = shard_dataset(config)
    wall, spent = time.perf_counter() - began, cpu.read()
    return _figures(report.manifest.size, wall, spent)


def run_webdataset(source: Path, target: Target) -> dict[str, float]:
    """Shard a folder of JSON lines the usual way: write a shard, upload it, remove it."""
    from webdataset.writer import ShardWriter

    client, size = target.client(), 0

    def send(name: str) -> None:
        nonlocal size
        file = Path(name)
        client.upload_file(name, target.bucket, f"{target.prefix}/{file.name}")
        size += file.stat().st_size
        file.unlink()

    with tempfile.TemporaryDirectory() as staging, redirect_stdout(io.StringIO()):
        pattern = f"{staging}/train-%06d.tar"
        cpu, began = CpuTimer(), time.perf_counter()
        with ShardWriter(pattern, maxsize=SHARD, post=send, mtime=0) as writer:
            for file in sorted(source.iterdir()):
                with file.open() as lines:
                    for number, line in enumerate(lines):
                        row = json.loads(line)
                        writer.write({"__key__": f"{number:09d}", "txt": row["text"]})
        wall, spent = time.perf_counter() - began, cpu.read()
    return _figures(size, wall, spent)


def run_floor(ready: Path, target: Target) -> dict[str, float]:
    """Send shards that are ready in memory, and do nothing else."""
    spawn = multiprocessing.get_context("spawn")
    files = sorted(ready.rglob("*.tar"))
    gate, senders = spawn.Event(), []
    for number in range(WORKERS):
        ours, theirs = spawn.Pipe()
        share = files[number::WORKERS]
        process = spawn.Process(target=_send_ready, args=(share, target, gate, theirs))
        process.start()
        senders.append((ours, process))
    for pipe, _ in senders:
        pipe.recv()  # its shards are in memory
    began = time.perf_counter()
    gate.set()
    spent = [pipe.recv() for pipe, _ in senders]
    wall = time.perf_counter() - began
    for _, process in senders:
        process.join()
    return _figures(sum(file.stat().st_size for file in files), wall, sum(spent))


def _send_ready(files: list[Path], target: Target, gate: Gate, pipe: Connection) -> None:
    shards = {f"{target.prefix}/{file.name}": file.read_bytes() for file in files}
    store = S3Store(
        target.bucket,
        config={
            "endpoint": target.endpoint,
            "region": "us-east-1",
            "access_key_id": target.key.access_key_id,
            "secret_access_key": target.key.secret_access_key,
            "virtual_hosted_style_request": False,
            "checksum_algorithm": "SHA256",
        },
        client_options={"allow_http": True},
    )

    def send(key: str) -> None:
        obstore.put(store, key, shards[key], use_multipart=False)

    with ThreadPoolExecutor(UPLOADS) as pool:
        pipe.send("ready")
        gate.wait()
        cpu = CpuTimer()
        list(pool.map(send, shards))
        pipe.send(cpu.read())


def run_planning(endpoint: str) -> dict[str, float]:
    """Plan a dataset of all the files of a bucket."""
    store = make_endless_spec(endpoint)
    config = PipelineSettings(
        dataset="d", source=SourceLocation(kind=SourceKind.FILES, **dict(store)), store=store
    )
    cpu, began = CpuTimer(), time.perf_counter()
    files = plan_dataset(config).source.files
    wall = time.perf_counter() - began
    return {"files": files, "seconds": wall, "cpu_s": cpu.read()}


def _figures(size: int, wall: float, cpu: float) -> dict[str, float]:
    return {"MB/s": size / 1e6 / wall, "cpu_s_per_GB": cpu / (size / 1e9)}


def _pipeline(
    source: Path, target: Target, partition: int, *, folder: Path | None = None
) -> PipelineSettings:
    if folder is None:
        credentials = make_credentials(target.key)
        url = f"s3://{target.bucket}"
        store = StoreSpec(url=url, endpoint=target.endpoint, credentials=credentials)
    else:
        store = StoreSpec(url=folder.as_uri())
    return PipelineSettings(
        dataset=target.prefix,
        source=SourceLocation(url=source.as_uri(), columns={"txt": "text"}),
        store=store,
        sharding=ShardingSettings(shard_bytes=ByteSize(SHARD), partition_bytes=ByteSize(partition)),
        execution=ExecutionSettings(workers=WORKERS, uploads=UPLOADS),
    )


def _read_through(folder: Path) -> None:
    """Bring a folder's files into the page cache: it is not the disk that is measured."""
    for file in folder.iterdir():
        with file.open("rb", buffering=0) as opened:
            while opened.read(MIB):
                pass


def contents(target: Target) -> tuple[int, str]:
    """Return how many samples a run has made, and a digest of their payloads in any order."""
    client = target.client()
    total = count = 0
    for key in target.shards():
        body = client.get_object(Bucket=target.bucket, Key=key)["Body"].read()
        for payload in _payloads(body):
            total += int.from_bytes(hashlib.sha256(payload).digest())
            count += 1
    return count, f"{total % 2**256:064x}"


def _payloads(tar: bytes) -> Iterator[memoryview]:
    """Yield the bodies of a plain ustar file's members (POSIX.1-1988), by its headers alone."""
    at, view = 0, memoryview(tar)
    while tar[at] != 0:
        assert tar[at + 156 : at + 157] == b"0", "not a plain file"
        size = int(tar[at + 124 : at + 135], 8)
        yield view[at + 512 : at + 512 + size]
        at += 512 + -(-size // 512) * 512


class Bench:
    """One invocation: its server, its folders, its results."""

    def __init__(self, rgw: RGW, folder: Path, *, quick: bool) -> None:
        self.results = Results("shards")
        self._rgw, self._folder, self._quick = rgw, folder, quick
        self._bucket = rgw.create_bucket("bench")

    def run(self, work: Work) -> None:
        """Run each system over one work, interleaved."""
        source, ready = self._folder / "source", self._folder / "ready"
        size = work.quick if self._quick else work.size
        rows = write_jsonl(source / "text.jsonl", characters=work.characters, size=size)
        partition = size // WORKERS
        # The shards that the floor sends.
        shard_dataset(_pipeline(source, self._target("ready"), partition, folder=ready))
        seen: dict[str, tuple[int, str]] = {}
        for repeat in range(1 if self._quick else 3):
            for system in rotate_systems(SYSTEMS, repeat):
                target = self._target(system)
                _read_through(source)
                match system:
                    case "millrace":
                        cost = measure_process(run_millrace, source, target, partition)
                    case "webdataset":
                        cost = measure_process(run_webdataset, source, target)
                    case _:
                        cost = measure_process(run_floor, ready, target)
                for metric, value in cost.figures.items():
                    self.results.add(work.name, system, metric, value)
                if system != "floor":  # which holds every shard in memory, by what it is
                    self.results.add(work.name, system, "peak_rss_MB", cost.peak_rss / 1e6)
                if repeat == 0:
                    seen[system] = contents(target)
            self._delete(*SYSTEMS)
        if len(set(seen.values())) != 1 or seen["millrace"][0] != rows:
            raise RuntimeError(f"{work.name}: the systems did not make the same samples: {seen}")
        _remove(source, ready)

    def run_idle(self) -> None:
        """Run Millrace over a row a worker: what its processes take besides shards."""
        source = self._folder / "source"
        for number in range(WORKERS):
            write_jsonl(source / f"{number}.jsonl", characters=1000, size=1)
        for _ in range(1 if self._quick else 3):
            cost = measure_process(run_millrace, source, self._target("idle"), MIB)
            self.results.add("idle", "millrace", "peak_rss_MB", cost.peak_rss / 1e6)
            self._delete("idle")
        _remove(source)

    def run_planning(self) -> None:
        """Plan a million files, a tenth of them with ``--quick``."""
        files = PLANNED // 10 if self._quick else PLANNED
        with endless(files) as endpoint:
            cost = measure_process(run_planning, endpoint)
        if cost.figures.pop("files") != files:
            raise RuntimeError("the plan does not have every file")
        for metric, value in cost.figures.items():
            self.results.add(f"plan {files:,} files", "millrace", metric, value)
        self.results.add(f"plan {files:,} files", "millrace", "peak_rss_MB", cost.peak_rss / 1e6)

    def _target(self, prefix: str) -> Target:
        return Target(self._rgw.endpoint, self._rgw.full, self._bucket, prefix)

    def _delete(self, *prefixes: str) -> None:
        for prefix in prefixes:
            target = self._target(prefix)
            keys = [{"Key": key} for key in target.listed()]
            target.client().delete_objects(Bucket=self._bucket, Delete={"Objects": keys})


def _remove(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder)


def report(results: Results) -> None:
    """Print the figures of a run, and the ratios."""
    values = {(row.work, row.system, row.metric): row for row in results.compute_rows()}
    lines: list[list[str]] = []
    for work in WORKS:
        for system in SYSTEMS:
            cells = [values.get((work.name, system, metric)) for metric in METRICS]
            ratios = ["", ""]
            if system == "millrace":
                others = ("webdataset", "floor")
                ratios = [
                    f"{results.compute_ratio(work.name, system, o, 'MB/s'):.2f}x" for o in others
                ]
            shown = [
                f"{row.value:.{digits}f}" if row else ""
                for row, digits in zip(cells, (1, 2, 0), strict=True)
            ]
            lines.append([work.name, system, *shown, *ratios, str(cells[0].n if cells[0] else 0)])
    print_table(["work", "system", *METRICS, "/webdataset", "/floor", "n"], lines)
    peak = max(values[work.name, "millrace", "peak_rss_MB"].value for work in WORKS)
    idle = values["idle", "millrace", "peak_rss_MB"].value
    print(
        f"\nMemory of millrace: {peak:.0f} MB at most, of which {idle:.0f} MB are its "
        f"{WORKERS + 1} processes with one row to do; the rest, {peak - idle:.0f} MB, is stated to "
        f"be at most shard_bytes * (uploads + 1) * workers = {STATED / 1e6:.0f} MB."
    )
    for (work, _, metric), row in values.items():
        if work.startswith("plan "):
            print(f"{work}: {metric} {row.value:.1f}")


def main() -> int:
    """Measure, print the table, and write the rows if asked."""
    asked = parse_options("shards", __doc__)
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name:
        folder = Path(name)
        with RGW.start(folder / "rgw", capacity=CAPACITY) as rgw:
            bench = Bench(rgw, folder, quick=asked.quick)
            bench.run_idle()
            bench.run_planning()
            for work in WORKS:
                bench.run(work)
    bench.results.add("stated bound", "millrace", "shard_buffers_MB", STATED / 1e6)
    report(bench.results)
    bench.results.save(asked.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
