"""Delete the objects of a bucket: Millrace, its peers and a lower bound.

Run it with ``python -m benchmarks.cleanup [--quick] [--json FILE]``. Each system has its own bucket
with 20,000 gradients of eight workers, in a Ceph RGW on the loopback interface.

- ``list``: list all keys with size, ETag and time.
- ``delete``: delete all objects. Millrace reads its plan, and lists each batch again before it
  deletes it. The others delete keys that are in memory.
- ``all``: list and delete. Millrace makes a plan by a rule, writes the plan into the bucket,
  executes it, and writes a report.

The peers are s5cmd (``ls``, and ``rm`` of a pattern) and boto3 (a paginator, and ``delete_objects``
with 1,000 keys in eight threads). The lower bound (``floor``) is obstore with ``list`` and one
``delete`` of all keys. ``s`` is wall time without the start of a Python interpreter. The start of
s5cmd, which takes milliseconds, is included.

At the end, it measures the peak memory of a plan of 1,000,000 keys. A stand-in for a bucket lists
these keys, and receives the parts of the plan, because an RGW would need an hour to be filled.
"""

import os
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore

from benchmarks.common import (
    Results,
    find_s5cmd,
    measure_process,
    parse_options,
    print_table,
    rotate_systems,
)
from benchmarks.endless import endless, make_endless_spec
from millrace.cleanup import CleanupKind, CleanupSettings, Rule, execute, make_plan
from millrace.keys.gradients import GradientKeys
from millrace.storage import (
    Store,
    StoreSpec,
    list_objects,
    make_boto3_client,
    open_store,
    put,
)
from millrace.testing.credentials import make_credentials
from millrace.testing.rgw import RGW

SYSTEMS = ("millrace", "s5cmd", "boto3", "floor")
CAPACITY = 12 << 30  # size of the server's disk
WORKERS = 8
RULE = Rule(kinds=(CleanupKind.GRADIENTS,), older_than=timedelta(0))
MILLION = 1_000_000


def main() -> int:
    """Run the benchmark, print the table, and write the rows as JSON if ``--json`` is set."""
    options = parse_options("cleanup", __doc__)
    objects, repeats = (2_000, 1) if options.quick else (20_000, 3)
    results = Results("cleanup")
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        with RGW.start(Path(folder) / "rgw", capacity=CAPACITY) as rgw:
            for repeat in range(repeats):
                for system in rotate_systems(SYSTEMS, repeat):
                    run_system(rgw, f"bench-{system}-{repeat}", system, objects, results)
        measure_memory(results, MILLION // 10 if options.quick else MILLION)
    report(results)
    results.save(options.file)
    return 0


def run_system(rgw: RGW, bucket: str, system: str, objects: int, results: Results) -> None:
    """Fill a bucket, and list and delete its objects with one system."""
    rgw.create_bucket(bucket)
    credentials = make_credentials(rgw.full)
    spec = StoreSpec(url=f"s3://{bucket}", endpoint=rgw.endpoint, credentials=credentials)
    fill_bucket(open_store(spec), objects)
    runs = {"millrace": run_millrace, "s5cmd": run_s5cmd, "boto3": run_boto3, "floor": run_floor}
    figures = measure_process(runs[system], spec.reveal_secrets()).figures
    remaining = sum(not stat.key.startswith("_clean/") for stat in list_objects(open_store(spec)))
    if remaining or figures.pop("objects") != objects:
        raise RuntimeError(f"{system} left {remaining} objects, or did not list all objects.")
    for work, seconds in figures.items():
        results.add(work, system, "s", seconds)


def fill_bucket(store: Store, objects: int) -> None:
    """Put so many gradients of all workers into a bucket."""
    keys = GradientKeys("run", "0.2.1")
    names = (keys.make_gradient_key(f"w{n % WORKERS}", n // WORKERS) for n in range(objects))
    with ThreadPoolExecutor(16) as pool:
        for _ in pool.map(lambda key: put(store, key, b"gradient"), names):
            pass


def run_millrace(settings: dict[str, Any]) -> dict[str, float]:
    """List and delete all objects with Millrace."""
    spec = StoreSpec.model_validate(settings)
    began = time.perf_counter()
    count = sum(1 for _ in list_objects(open_store(spec)))
    listed = time.perf_counter() - began
    cleanup = CleanupSettings(store=spec, rules=(RULE,))
    began = time.perf_counter()
    plan = make_plan(cleanup)
    planned = time.perf_counter() - began
    execute(cleanup, plan.name)
    total = time.perf_counter() - began
    return {"objects": count, "list": listed, "delete": total - planned, "all": total}


def run_s5cmd(settings: dict[str, Any]) -> dict[str, float]:
    """List and delete all objects with s5cmd."""
    program = find_s5cmd()
    credentials = settings["credentials"]
    environment = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": credentials["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": credentials["secret_access_key"],
        "AWS_REGION": "us-east-1",
    }

    def run(*arguments: str) -> tuple[float, bytes]:
        command = [str(program), "--endpoint-url", settings["endpoint"], *arguments]
        began = time.perf_counter()
        completed = subprocess.run(command, env=environment, check=True, capture_output=True)
        return time.perf_counter() - began, completed.stdout

    listed, lines = run("ls", "--show-fullpath", f"{settings['url']}/*")
    removed, _ = run("rm", f"{settings['url']}/*")
    # The time of rm includes its own listing, so that it is also the time of both.
    return {"objects": lines.count(b"\n"), "list": listed, "delete": removed, "all": removed}


def run_boto3(settings: dict[str, Any]) -> dict[str, float]:
    """List and delete all objects with boto3."""
    store = open_store(StoreSpec.model_validate(settings))
    client, bucket = make_boto3_client(store), store.location.bucket
    began = time.perf_counter()
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    keys = [stat.get("Key", "") for page in pages for stat in page.get("Contents", [])]
    listed = time.perf_counter() - began

    def delete_batch(first: int) -> None:
        batch = [{"Key": key} for key in keys[first : first + 1000]]
        client.delete_objects(Bucket=bucket, Delete={"Objects": batch, "Quiet": True})  # pyright: ignore[reportArgumentType]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(delete_batch, range(0, len(keys), 1000)))
    total = time.perf_counter() - began
    return {"objects": len(keys), "list": listed, "delete": total - listed, "all": total}


def run_floor(settings: dict[str, Any]) -> dict[str, float]:
    """List and delete all objects with obstore alone."""
    raw = open_store(StoreSpec.model_validate(settings)).raw
    began = time.perf_counter()
    keys = [meta["path"] for page in obstore.list(raw, chunk_size=1000) for meta in page]
    listed = time.perf_counter() - began
    obstore.delete(raw, keys)
    total = time.perf_counter() - began
    return {"objects": len(keys), "list": listed, "delete": total - listed, "all": total}


def measure_memory(results: Results, objects: int) -> None:
    """Measure the peak memory of a process that plans to delete so many objects."""
    with endless(objects) as endpoint:
        measurement = measure_process(plan_deletion, endpoint, objects)
    results.add("plan of a million", "millrace", "peak_rss_MB", measurement.peak_rss / 1e6)
    results.add("plan of a million", "millrace", "s", measurement.figures["s"])


def plan_deletion(endpoint: str, objects: int) -> dict[str, float]:
    """Plan to delete all objects of the stand-in, and check their number."""
    began = time.perf_counter()
    plan = make_plan(CleanupSettings(store=make_endless_spec(endpoint), rules=(RULE,)))
    if plan.objects != objects:
        raise RuntimeError(f"{plan.objects} of {objects} keys are in the plan.")
    return {"s": time.perf_counter() - began}


def report(results: Results) -> None:
    """Print the figures, and their ratios to the lower bound."""
    lines: list[list[str]] = []
    for row in results.compute_rows():
        ratio = ""
        if row.metric == "s" and row.work in {"list", "delete", "all"}:
            ratio = f"{results.compute_ratio(row.work, row.system, 'floor', 's'):.2f}x"
        lines.append([row.work, row.system, row.metric, f"{row.value:.4g}", ratio, str(row.n)])
    print_table(("work", "system", "metric", "median", "/floor", "n"), lines)


if __name__ == "__main__":
    raise SystemExit(main())
