"""The process that `benchmarks.resume` starts, kills and starts again. It imports little.

It reads one line of JSON, what to do, and prints a line of JSON for each event; it goes on when
it reads another line.
"""

import io
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SHARD = 8 << 20


def shard_on(job: dict[str, Any]) -> None:
    """Shard a dataset with Millrace, or go on with it where the ledger ends."""
    from pydantic import ByteSize

    from millrace.datasets import (
        ExecutionSettings,
        PipelineSettings,
        ShardingSettings,
        SourceLocation,
        shard_dataset,
    )
    from millrace.datasets.progress_events import ShardCommitted
    from millrace.progress import Event
    from millrace.storage import StoreSpec

    config = PipelineSettings(
        dataset="text",
        source=SourceLocation(**job["source"], columns={"txt": "text"}),
        store=StoreSpec(**job["store"]),
        sharding=ShardingSettings(shard_bytes=ByteSize(SHARD), partition_bytes=ByteSize(1 << 40)),
        execution=ExecutionSettings(workers=1),
    )
    called = time.perf_counter()

    def progress(event: Event) -> None:
        samples = event.samples if isinstance(event, ShardCommitted) else 0
        _say(event.kind, after_call=time.perf_counter() - called, samples=samples)

    shard_dataset(config, progress=progress)


def skip_to(job: dict[str, Any]) -> None:
    """Read a file of JSON lines again up to a row, and make a sample of that row."""
    spec = job["source"]
    if spec["url"].startswith("file://"):
        called = time.perf_counter()
        with (Path(spec["url"].removeprefix("file://")) / job["file"]).open("rb") as lines:
            _first_from(lines, job["rows"])
    else:
        import boto3

        client = boto3.client(
            "s3",
            endpoint_url=spec["endpoint"],
            region_name="us-east-1",
            aws_access_key_id=spec["credentials"]["access_key_id"],
            aws_secret_access_key=spec["credentials"]["secret_access_key"],
        )
        called = time.perf_counter()
        bucket = spec["url"].removeprefix("s3://")
        body: Any = client.get_object(Bucket=bucket, Key=job["file"])["Body"]
        with io.BufferedReader(body, 1 << 20) as lines:  # its own iter_lines is far slower
            _first_from(lines, job["rows"])
    _say("sample", after_call=time.perf_counter() - called)


def _first_from(lines: Iterable[bytes | str], start: int) -> bytes:
    for index, line in enumerate(lines):
        if index < start:
            continue
        return json.loads(line)["text"].encode()
    raise ValueError(f"there is no row {start}")


def _say(name: str, **figures: Any) -> None:
    sys.stdout.write(json.dumps({"event": name, **figures}) + "\n")
    sys.stdout.flush()
    sys.stdin.readline()


def main() -> None:
    """Do what the first line says."""
    job = json.loads(sys.stdin.readline())
    {"millrace": shard_on, "re-read and skip": skip_to}[job["system"]](job)
    _say("ended")
