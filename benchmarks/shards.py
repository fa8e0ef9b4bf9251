"""Shard text into an S3 store: Millrace, webdataset's ShardWriter and a lower bound.

Run it with ``python -m benchmarks.shards [--quick] [--json FILE]``. The source is JSON lines in a
local folder. The store is a Ceph RGW on the loopback interface. A shard has 64 MiB.

- ``millrace``: `shard_dataset` from call to return, with the plan, the start and the end of two
  worker processes, the ledger and the manifest.
- ``webdataset``: one process reads the lines with ``json``. A ``ShardWriter`` writes shards to a
  folder. Its ``post`` hook uploads each shard with boto3's ``upload_file``, and deletes it.
- ``floor``: obstore's ``put`` uploads the shards of Millrace from memory, with as many processes
  and threads as Millrace. This is a lower bound of the time.

All three systems sign the SHA-256 of every body, and the server checks it. The first run of each
system is read back, and its samples are compared.

At the end, it measures the time and the peak memory of a plan of 1,000,000 files. A stand-in for a
bucket lists these files.
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
from multiprocessing.synchronize import Event as StartEvent
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
from benchmarks.server_cores import start_store
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
CAPACITY = 20 << 30  # size of the server's disk: a sparse file that fills during the runs
WORKERS = 2
UPLOADS = 1
PLANNED = 1_000_000  # files
SYSTEMS = ("millrace", "webdataset", "floor")
METRICS = ("MB/s", "cpu_s_per_GB", "peak_rss_MB")
BUFFER_BOUND = SHARD * (UPLOADS + 1) * WORKERS


@dataclass(frozen=True, slots=True)
class ShardsWork:
    """Dataset to shard.

    Attributes:
        name: Name of the work.
        characters: Number of characters of a sample.
        size: Size of the source in bytes.
        quick: Size of the source in bytes with ``--quick``.
    """

    name: str
    characters: int
    size: int
    quick: int


WORKS = (
    ShardsWork("1 KB", 1_000, 512 * MIB, 64 * MIB),
    ShardsWork("20 KB", 20_000, 2048 * MIB, 256 * MIB),
    ShardsWork("100 KB", 100_000, 2048 * MIB, 256 * MIB),
)


@dataclass(frozen=True, slots=True)
class ShardsTarget:
    """Destination of a run's shards.

    Attributes:
        endpoint: Endpoint URL of the store.
        key: Access key of the store.
        bucket: Name of the bucket.
        prefix: Prefix of the keys.
    """

    endpoint: str
    key: Key
    bucket: str
    prefix: str

    def make_client(self) -> Any:
        """Return a boto3 client of the store."""
        return connect(self.endpoint, self.key)

    def list_keys(self) -> list[str]:
        """Return all keys of the destination."""
        paginator = self.make_client().get_paginator("list_objects_v2")
        pages = paginator.paginate(Bucket=self.bucket, Prefix=f"{self.prefix}/")
        return [item["Key"] for page in pages for item in page.get("Contents", [])]

    def list_shards(self) -> list[str]:
        """Return the keys of the shards of the destination."""
        return [key for key in self.list_keys() if key.endswith(".tar")]


def run_millrace(source: Path, target: ShardsTarget, partition: int) -> dict[str, float]:
    """Shard a folder of JSON lines with Millrace."""
    settings = _make_settings(source, target, partition)
    cpu, began = CpuTimer(), time.perf_counter()
    report = shard_dataset(settings)
    wall, spent = time.perf_counter() - began, cpu.read()
    return _make_figures(report.manifest.size, wall, spent)


def run_webdataset(source: Path, target: ShardsTarget) -> dict[str, float]:
    """Shard a folder of JSON lines with webdataset, and upload and delete each shard."""
    from webdataset.writer import ShardWriter

    client, size = target.make_client(), 0

    def upload(name: str) -> None:
        nonlocal size
        file = Path(name)
        client.upload_file(name, target.bucket, f"{target.prefix}/{file.name}")
        size += file.stat().st_size
        file.unlink()

    with tempfile.TemporaryDirectory() as staging, redirect_stdout(io.StringIO()):
        pattern = f"{staging}/train-%06d.tar"
        cpu, began = CpuTimer(), time.perf_counter()
        with ShardWriter(pattern, maxsize=SHARD, post=upload, mtime=0) as writer:
            for file in sorted(source.iterdir()):
                with file.open() as lines:
                    for number, line in enumerate(lines):
                        row = json.loads(line)
                        writer.write({"__key__": f"{number:09d}", "txt": row["text"]})
        wall, spent = time.perf_counter() - began, cpu.read()
    return _make_figures(size, wall, spent)


def run_floor(prepared: Path, target: ShardsTarget) -> dict[str, float]:
    """Upload shards from memory with a few processes."""
    spawn = multiprocessing.get_context("spawn")
    files = sorted(prepared.rglob("*.tar"))
    start, senders = spawn.Event(), []
    for number in range(WORKERS):
        receiver, sender = spawn.Pipe()
        share = files[number::WORKERS]
        process = spawn.Process(target=_upload_prepared, args=(share, target, start, sender))
        process.start()
        senders.append((receiver, process))
    for pipe, _ in senders:
        pipe.recv()  # the process has read its shards into memory
    began = time.perf_counter()
    start.set()
    spent = [pipe.recv() for pipe, _ in senders]
    wall = time.perf_counter() - began
    for _, process in senders:
        process.join()
    return _make_figures(sum(file.stat().st_size for file in files), wall, sum(spent))


def _upload_prepared(
    files: list[Path], target: ShardsTarget, start: StartEvent, pipe: Connection
) -> None:
    """Read shards into memory, wait for the start, upload them, and send the CPU seconds."""
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

    def upload(key: str) -> None:
        obstore.put(store, key, shards[key], use_multipart=False)

    with ThreadPoolExecutor(UPLOADS) as pool:
        pipe.send("ready")
        start.wait()
        cpu = CpuTimer()
        list(pool.map(upload, shards))
        pipe.send(cpu.read())


def run_planning(endpoint: str) -> dict[str, float]:
    """Plan a dataset of all files of a bucket."""
    store = make_endless_spec(endpoint)
    settings = PipelineSettings(
        dataset="d", source=SourceLocation(kind=SourceKind.FILES, **dict(store)), store=store
    )
    cpu, began = CpuTimer(), time.perf_counter()
    files = plan_dataset(settings).source.files
    wall = time.perf_counter() - began
    return {"files": files, "seconds": wall, "cpu_s": cpu.read()}


def _make_figures(size: int, wall: float, cpu: float) -> dict[str, float]:
    """Return the figures of a run by metric."""
    return {"MB/s": size / 1e6 / wall, "cpu_s_per_GB": cpu / (size / 1e9)}


def _make_settings(
    source: Path, target: ShardsTarget, partition: int, *, folder: Path | None = None
) -> PipelineSettings:
    """Return the settings of a run, which writes into the target or into a folder."""
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


def _fill_page_cache(folder: Path) -> None:
    """Read all files of a folder into the page cache, so that the disk is not measured."""
    for file in folder.iterdir():
        with file.open("rb", buffering=0) as opened:
            while opened.read(MIB):
                pass


def digest_samples(target: ShardsTarget) -> tuple[int, str]:
    """Return the number of samples of a run, and a digest of their payloads in any order."""
    client = target.make_client()
    total = count = 0
    for key in target.list_shards():
        body = client.get_object(Bucket=target.bucket, Key=key)["Body"].read()
        for payload in _iterate_payloads(body):
            total += int.from_bytes(hashlib.sha256(payload).digest())
            count += 1
    return count, f"{total % 2**256:064x}"


def _iterate_payloads(tar: bytes) -> Iterator[memoryview]:
    """Yield the contents of the files of a ustar archive (POSIX.1-1988)."""
    at, view = 0, memoryview(tar)
    while tar[at] != 0:
        assert tar[at + 156 : at + 157] == b"0", "not a plain file"
        size = int(tar[at + 124 : at + 135], 8)
        yield view[at + 512 : at + 512 + size]
        at += 512 + -(-size // 512) * 512


class ShardsBench:
    """One invocation of the benchmark, with its server, folders and results.

    Attributes:
        results: Results of the runs.
    """

    def __init__(self, rgw: RGW, folder: Path, *, quick: bool) -> None:
        self.results = Results("shards")
        self._rgw, self._folder, self._quick = rgw, folder, quick
        self._bucket = rgw.create_bucket("bench")

    def run(self, work: ShardsWork) -> None:
        """Run the systems over one work, alternately."""
        source, prepared = self._folder / "source", self._folder / "ready"
        size = work.quick if self._quick else work.size
        rows = write_jsonl(source / "text.jsonl", characters=work.characters, size=size)
        partition = size // WORKERS
        # The lower bound uploads these shards.
        shard_dataset(
            _make_settings(source, self._make_target("ready"), partition, folder=prepared)
        )
        digests: dict[str, tuple[int, str]] = {}
        for repeat in range(1 if self._quick else 3):
            for system in rotate_systems(SYSTEMS, repeat):
                target = self._make_target(system)
                _fill_page_cache(source)
                match system:
                    case "millrace":
                        measurement = measure_process(run_millrace, source, target, partition)
                    case "webdataset":
                        measurement = measure_process(run_webdataset, source, target)
                    case _:
                        measurement = measure_process(run_floor, prepared, target)
                for metric, value in measurement.figures.items():
                    self.results.add(work.name, system, metric, value)
                if system != "floor":  # the lower bound has every shard in memory
                    self.results.add(work.name, system, "peak_rss_MB", measurement.peak_rss / 1e6)
                if repeat == 0:
                    digests[system] = digest_samples(target)
            self._delete(*SYSTEMS)
        if len(set(digests.values())) != 1 or digests["millrace"][0] != rows:
            raise RuntimeError(f"{work.name}: the systems did not make the same samples: {digests}")
        _remove(source, prepared)

    def run_idle(self) -> None:
        """Measure the memory of Millrace with one row per worker, so without buffers of shards."""
        source = self._folder / "source"
        for number in range(WORKERS):
            write_jsonl(source / f"{number}.jsonl", characters=1000, size=1)
        for _ in range(1 if self._quick else 3):
            measurement = measure_process(run_millrace, source, self._make_target("idle"), MIB)
            self.results.add("idle", "millrace", "peak_rss_MB", measurement.peak_rss / 1e6)
            self._delete("idle")
        _remove(source)

    def run_planning(self) -> None:
        """Plan a million files, or a tenth of them with ``--quick``."""
        files = PLANNED // 10 if self._quick else PLANNED
        with endless(files) as endpoint:
            measurement = measure_process(run_planning, endpoint)
        if measurement.figures.pop("files") != files:
            raise RuntimeError("the plan does not have every file")
        for metric, value in measurement.figures.items():
            self.results.add(f"plan {files:,} files", "millrace", metric, value)
        self.results.add(
            f"plan {files:,} files", "millrace", "peak_rss_MB", measurement.peak_rss / 1e6
        )

    def _make_target(self, prefix: str) -> ShardsTarget:
        return ShardsTarget(self._rgw.endpoint, self._rgw.full, self._bucket, prefix)

    def _delete(self, *prefixes: str) -> None:
        for prefix in prefixes:
            target = self._make_target(prefix)
            keys = [{"Key": key} for key in target.list_keys()]
            target.make_client().delete_objects(Bucket=self._bucket, Delete={"Objects": keys})


def _remove(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder)


def report(results: Results) -> None:
    """Print the figures and their ratios."""
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
            formatted = [
                f"{row.value:.{digits}f}" if row else ""
                for row, digits in zip(cells, (1, 2, 0), strict=True)
            ]
            lines.append(
                [work.name, system, *formatted, *ratios, str(cells[0].n if cells[0] else 0)]
            )
    print_table(["work", "system", *METRICS, "/webdataset", "/floor", "n"], lines)
    peak = max(values[work.name, "millrace", "peak_rss_MB"].value for work in WORKS)
    idle = values["idle", "millrace", "peak_rss_MB"].value
    print(
        f"\nMemory of millrace: at most {peak:.0f} MB. Its {WORKERS + 1} processes take "
        f"{idle:.0f} MB with one row per worker. The remaining {peak - idle:.0f} MB have the "
        f"documented bound shard_bytes * (uploads + 1) * workers = {BUFFER_BOUND / 1e6:.0f} MB."
    )
    for (work, _, metric), row in values.items():
        if work.startswith("plan "):
            print(f"{work}: {metric} {row.value:.1f}")


def main() -> int:
    """Run the benchmark, print the table, and write the rows as JSON if ``--json`` is set."""
    options = parse_options("shards", __doc__)
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name:
        folder = Path(name)
        with start_store(folder / "rgw", capacity=CAPACITY) as rgw:
            bench = ShardsBench(rgw, folder, quick=options.quick)
            bench.run_idle()
            bench.run_planning()
            for work in WORKS:
                bench.run(work)
    bench.results.add("stated bound", "millrace", "shard_buffers_MB", BUFFER_BOUND / 1e6)
    report(bench.results)
    bench.results.save(options.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
