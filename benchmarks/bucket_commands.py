"""Commands of a bucket of foreign objects, as people run them: Millrace, s5cmd and boto3.

Run it with ``python -m benchmarks.bucket_commands [--quick] [--json FILE]``. Each system has its
own bucket with 100,000 objects of 100 bytes that Millrace did not write, in a Ceph RGW on the
loopback interface that keeps its objects in memory.

- ``list``: list all objects with size and time, into a file.
- ``usage``: count the objects and their bytes. Millrace counts by kind, folder and age.
- ``dry run``: list what a suffix selects. Millrace writes the plan into the bucket.
- ``clean``: delete what a suffix selects: each time another third of the objects. Millrace writes a
  plan, and lists each batch again before it deletes it.
- ``wipe``: delete all objects.

``s`` is wall time with the start of the program, and ``cpu_s`` is its CPU time. The commands of
boto3 are a script with a paginator, and with ``delete_objects`` of 1,000 keys in eight threads.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.common import (
    CpuTimer,
    Results,
    find_s5cmd,
    parse_options,
    print_table,
    rotate_systems,
)
from millrace.storage import Store, StoreSpec, list_objects, open_store, put
from millrace.testing.credentials import make_credentials
from millrace.testing.rgw import RGW

SYSTEMS = ("millrace", "s5cmd", "boto3")
SUFFIXES = (".log", ".pt", ".tmp")
BODY = bytes(100)

_SCRIPT = """
import sys
from concurrent.futures import ThreadPoolExecutor

import boto3

work, bucket, suffix = sys.argv[1:]
client = boto3.client("s3")
pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
found = (one for page in pages for one in page.get("Contents", []) if one["Key"].endswith(suffix))
if work == "usage":
    sizes = [one["Size"] for one in found]
    print(len(sizes), sum(sizes))
elif work in {"list", "dry run"}:
    for one in found:
        print(one["LastModified"], one["Size"], one["Key"])
else:
    keys = [{"Key": one["Key"]} for one in found]

    def delete_batch(first):
        batch = {"Objects": keys[first : first + 1000], "Quiet": True}
        return client.delete_objects(Bucket=bucket, Delete=batch).get("Errors", [])

    with ThreadPoolExecutor(8) as pool:
        sys.exit(any(pool.map(delete_batch, range(0, len(keys), 1000))))
"""


def main() -> int:
    """Run the benchmark, print the table, and write the rows as JSON if ``--json`` is set."""
    options = parse_options("bucket_commands", __doc__)
    objects = 3_000 if options.quick else 100_000
    results = Results("bucket_commands")
    with (
        tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder,
        RGW.start(Path(folder) / "rgw", in_memory=True) as rgw,
    ):
        credentials = make_credentials(rgw.full)
        environment = {
            **os.environ,
            "AWS_ENDPOINT_URL": rgw.endpoint,
            "S3_ENDPOINT_URL": rgw.endpoint,
            "AWS_ACCESS_KEY_ID": rgw.full.access_key_id,
            "AWS_SECRET_ACCESS_KEY": rgw.full.secret_access_key,
            "AWS_REGION": "us-east-1",
        }
        stores: dict[str, Store] = {}
        for system in SYSTEMS:
            url = f"s3://{rgw.create_bucket(f'bench-{system}')}"
            spec = StoreSpec(url=url, endpoint=rgw.endpoint, credentials=credentials)
            stores[system] = open_store(spec)
            fill_bucket(stores[system], objects)
        for repeat, suffix in enumerate(SUFFIXES):
            for work in ("list", "usage", "dry run", "clean"):
                for system in rotate_systems(SYSTEMS, repeat):
                    measure(results, work, system, suffix, environment)
            further = range(repeat + 1, len(SUFFIXES))
            check(stores, sum(len(range(n, objects, len(SUFFIXES))) for n in further))
        for store in stores.values():
            fill_bucket(store, objects // 3)
        for system in SYSTEMS:
            measure(results, "wipe", system, "", environment)
        check(stores, 0)
    report(results)
    results.save(options.file)
    return 0


def fill_bucket(store: Store, objects: int) -> None:
    """Put so many objects into folders, an equal number with each suffix."""
    suffixes, folders = len(SUFFIXES), 50
    names = (f"runs/{n % folders:03}/{n:06}{SUFFIXES[n % suffixes]}" for n in range(objects))
    with ThreadPoolExecutor(16) as pool:
        for _ in pool.map(lambda key: put(store, key, BODY), names):
            pass


def check(stores: Mapping[str, Store], objects: int) -> None:
    """Check that each system has left so many objects of those that were put."""
    for system, store in stores.items():
        found = sum(stat.key.startswith("runs/") for stat in list_objects(store))
        if found != objects:
            raise RuntimeError(f"{system} left {found} objects, instead of {objects}.")


def measure(
    results: Results, work: str, system: str, suffix: str, environment: Mapping[str, str]
) -> None:
    """Run a command of one system, and measure it."""
    bucket = f"bench-{system}"
    selected = suffix if work in {"dry run", "clean"} else ""
    command = make_command(work, system, bucket, selected)
    cpu, began = CpuTimer(), time.perf_counter()
    with tempfile.TemporaryFile() as output:
        subprocess.run(command, env=environment, check=True, stdout=output)
    results.add(work, system, "s", time.perf_counter() - began)
    results.add(work, system, "cpu_s", cpu.read())


def make_command(work: str, system: str, bucket: str, suffix: str) -> list[str]:
    """Return the command of one system for one work."""
    url = f"s3://{bucket}"
    if system == "boto3":
        return [sys.executable, "-c", _SCRIPT, work, bucket, suffix]
    if system == "s5cmd":
        words = {
            "list": ["ls"], "usage": ["du"], "dry run": ["--dry-run", "rm"], "clean": ["rm"],
            "wipe": ["rm"],
        }[work]  # fmt: skip
        return [str(find_s5cmd()), *words, f"{url}/*{suffix}"]
    old = ["--older-than", "0s", "--suffix", suffix]
    words = {
        "list": ["list", url],
        "usage": ["usage", url],
        "dry run": ["clean", url, *old, "--dry-run"],
        "clean": ["clean", url, *old, "--yes"],
        "wipe": ["wipe", url, "--confirm", bucket],
    }[work]
    return [sys.executable, "-m", "millrace", "bucket", *words]


def report(results: Results) -> None:
    """Print the figures, and the ratios of Millrace to the others."""
    lines: list[list[str]] = []
    for row in results.compute_rows():
        ratio = results.compute_ratio(row.work, "millrace", row.system, row.metric)
        figures = [f"{row.value:.4g}", f"{ratio:.2f}x", str(row.n)]
        lines.append([row.work, row.system, row.metric, *figures])
    print_table(("work", "system", "metric", "median", "millrace/", "n"), lines)


if __name__ == "__main__":
    raise SystemExit(main())
