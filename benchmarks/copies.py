"""Copy the objects of a bucket into another bucket: Millrace, its peers and a lower bound.

Run it with ``python -m benchmarks.copies [--quick] [--json FILE]``. Each system has a bucket of its
own, in a Ceph RGW on the loopback interface.

- ``by the store``: 10,000 objects of 10 KB within an account. The peers are s5cmd (``cp``) and
  boto3 (``copy_object`` in 16 threads).
- ``again``: the same once more, when all objects are there. The peer is ``s5cmd sync``.
- ``through``: the same objects, into a bucket of another account, so that the bytes go through the
  process. The peer is boto3 (``get_object`` and ``put_object`` in 16 threads).
- ``large``: four objects of 256 MiB, in the same way. The peer is ``upload_fileobj`` of boto3.

The lower bound (``floor``) of ``through`` and ``large`` reads and writes with obstore alone, and
proves nothing. ``s`` is wall time without the start of Python, and
``cpu_s`` is the CPU time of the client.
"""

import io
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore

from benchmarks.common import (
    CpuTimer,
    Results,
    find_s5cmd,
    measure_process,
    parse_options,
    print_table,
    rotate_systems,
)
from millrace.cleanup import CopyOutcome, copy_objects
from millrace.storage import (
    StoreSpec,
    delete,
    list_objects,
    make_boto3_client,
    open_store,
    put,
)
from millrace.testing.credentials import make_credentials
from millrace.testing.key import Key
from millrace.testing.rgw import RGW

CAPACITY = 30 << 30  # size of the server's disk
SMALL = 10_000  # bytes
PART_SIZE = 16 << 20
WORKS = {
    "by the store": ("millrace", "s5cmd", "boto3"),
    "through": ("millrace", "boto3", "floor"),
    "large": ("millrace", "boto3", "floor"),
}
Settings = dict[str, Any]


def main() -> int:
    """Run the benchmark, print the table, and write the rows as JSON if ``--json`` is set."""
    options = parse_options("copies", __doc__)
    count, size, repeats = (1_000, 64 << 20, 1) if options.quick else (10_000, 256 << 20, 3)
    results = Results("copies")
    with (
        tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder,
        RGW.start(Path(folder) / "rgw", capacity=CAPACITY) as rgw,
    ):

        def make(bucket: str, owner: Key) -> StoreSpec:
            credentials = make_credentials(owner)
            return StoreSpec(url=f"s3://{bucket}", endpoint=rgw.endpoint, credentials=credentials)

        for bucket, objects, bytes_each in (("small", count, SMALL), ("large", 4, size)):
            rgw.create_bucket(bucket)
            fill(make(bucket, rgw.full), objects, bytes_each)
        for repeat in range(repeats):
            for work, systems in WORKS.items():
                source = make("large" if work == "large" else "small", rgw.full)
                owner = rgw.full if work == "by the store" else rgw.other
                for system in rotate_systems(systems, repeat):
                    target = f"{work.replace(' ', '-')}-{system}-{repeat}"
                    rgw.make_client(owner).create_bucket(Bucket=target)
                    specs = source.reveal_secrets(), make(target, owner).reveal_secrets()
                    for key, value in measure_process(run, system, work, *specs).figures.items():
                        done, _, metric = key.rpartition(" | ")
                        results.add(done, system, metric, value)
                    check(source, make(target, owner))
    report(results)
    results.save(options.file)
    return 0


def fill(spec: StoreSpec, objects: int, size: int) -> None:
    """Put random objects into a bucket, those above 16 MiB in parts."""
    store, body = open_store(spec), os.urandom(size)

    def write(number: int) -> None:
        key, data = f"{number % 100:03}/{number:06}.bin", number.to_bytes(8, "big") + body[8:]
        if size > PART_SIZE:
            obstore.put(store.raw, key, data, use_multipart=True, chunk_size=PART_SIZE)
        else:
            put(store, key, data)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(objects)))


def check(source: StoreSpec, target: StoreSpec) -> None:
    """Check that all objects were copied, then delete the copies."""
    wanted = {stat.key: stat.size for stat in list_objects(open_store(source))}
    store = open_store(target)
    found = {stat.key: stat.size for stat in list_objects(store)}
    if wanted != found:
        raise RuntimeError(f"{len(found)} of {len(wanted)} objects were copied.")
    delete(store, found)


def run(system: str, work: str, source: Settings, target: Settings) -> dict[str, float]:
    """Copy all objects with one system, and measure it."""
    copiers: dict[str, Callable[[str, Settings, Settings], dict[str, Callable[[], None]]]] = {
        "millrace": make_millrace, "s5cmd": make_s5cmd, "boto3": make_boto3, "floor": make_floor
    }  # fmt: skip
    figures: dict[str, float] = {}
    for done, copy in copiers[system](work, source, target).items():
        cpu, began = CpuTimer(), time.perf_counter()
        copy()
        figures[f"{done} | s"] = time.perf_counter() - began
        figures[f"{done} | cpu_s"] = cpu.read()
    return figures


def make_millrace(work: str, source: Settings, target: Settings) -> dict[str, Callable[[], None]]:
    """Return the works of Millrace."""

    def copy(outcome: CopyOutcome) -> None:
        here, there = (open_store(StoreSpec.model_validate(one)) for one in (source, target))
        done = copy_objects(here, there)
        if done.failed or not done.objects[outcome]:
            raise RuntimeError(f"{done}")

    works = {work: lambda: copy(CopyOutcome.COPIED)}
    return works | ({"again": lambda: copy(CopyOutcome.EQUAL)} if work == "by the store" else {})


def make_s5cmd(work: str, source: Settings, target: Settings) -> dict[str, Callable[[], None]]:
    """Return the works of s5cmd."""
    program = find_s5cmd()
    credentials = source["credentials"]
    environment = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": credentials["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": credentials["secret_access_key"],
        "AWS_REGION": "us-east-1",
    }

    def copy(verb: str) -> None:
        command = [str(program), "--endpoint-url", source["endpoint"], verb]
        command += [f"{source['url']}/*", f"{target['url']}/"]
        subprocess.run(command, env=environment, check=True, capture_output=True)

    return {work: lambda: copy("cp"), "again": lambda: copy("sync")}


def make_boto3(work: str, source: Settings, target: Settings) -> dict[str, Callable[[], None]]:
    """Return the works of boto3."""
    here, there = (open_store(StoreSpec.model_validate(one)) for one in (source, target))
    reader, writer = make_boto3_client(here), make_boto3_client(there)
    names = here.location.bucket, there.location.bucket

    def copy_one(key: str) -> None:
        if work == "by the store":
            named = {"Bucket": names[0], "Key": key}
            writer.copy_object(Bucket=names[1], Key=key, CopySource=named)  # pyright: ignore[reportArgumentType]
            return
        body = reader.get_object(Bucket=names[0], Key=key)["Body"].read()
        if work == "large":
            writer.upload_fileobj(io.BytesIO(body), names[1], key)
        else:
            writer.put_object(Bucket=names[1], Key=key, Body=body)

    def copy() -> None:
        pages = reader.get_paginator("list_objects_v2").paginate(Bucket=names[0])
        keys = [one.get("Key", "") for page in pages for one in page.get("Contents", [])]
        with ThreadPoolExecutor(4 if work == "large" else 16) as pool:
            list(pool.map(copy_one, keys))

    return {work: copy}


def make_floor(work: str, source: Settings, target: Settings) -> dict[str, Callable[[], None]]:
    """Return the works of obstore alone."""
    here, there = (open_store(StoreSpec.model_validate(one)).raw for one in (source, target))

    def copy_one(key: str) -> None:
        body = obstore.get(here, key).bytes()
        large = work == "large"
        obstore.put(there, key, body, use_multipart=large, chunk_size=PART_SIZE)

    def copy() -> None:
        keys = [meta["path"] for page in obstore.list(here, chunk_size=1000) for meta in page]
        with ThreadPoolExecutor(4 if work == "large" else 16) as pool:
            list(pool.map(copy_one, keys))

    return {work: copy}


def report(results: Results) -> None:
    """Print the figures, and their ratios to Millrace."""
    lines: list[list[str]] = []
    for row in results.compute_rows():
        ratio = results.compute_ratio(row.work, row.system, "millrace", row.metric)
        lines.append(
            [row.work, row.system, row.metric, f"{row.value:.4g}", f"{ratio:.2f}x", str(row.n)]
        )
    print_table(("work", "system", "metric", "median", "/millrace", "n"), lines)


if __name__ == "__main__":
    raise SystemExit(main())
