"""Process that `benchmarks.resume` starts and kills. It has few imports.

It reads its job from a line of JSON. For each event, it prints a line of JSON, and then waits for
another line.
"""

import io
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SHARD_BYTES = 8 << 20


def shard_with_millrace(job: dict[str, Any]) -> None:
    """Shard a dataset with Millrace, or continue after the last committed shard."""
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

    settings = PipelineSettings(
        dataset="text",
        source=SourceLocation(**job["source"], columns={"txt": "text"}),
        store=StoreSpec(**job["store"]),
        sharding=ShardingSettings(
            shard_bytes=ByteSize(SHARD_BYTES), partition_bytes=ByteSize(1 << 40)
        ),
        execution=ExecutionSettings(workers=1),
    )
    called = time.perf_counter()

    def report_progress(event: Event) -> None:
        samples = event.samples if isinstance(event, ShardCommitted) else 0
        _report_event(event.kind, after_call=time.perf_counter() - called, samples=samples)

    shard_dataset(settings, progress=report_progress)


def skip_rows(job: dict[str, Any]) -> None:
    """Read a file of JSON lines from its beginning to a row, and encode a sample of that row."""
    spec = job["source"]
    if spec["url"].startswith("file://"):
        called = time.perf_counter()
        with (Path(spec["url"].removeprefix("file://")) / job["file"]).open("rb") as lines:
            _encode_row(lines, job["rows"])
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
        with io.BufferedReader(body, 1 << 20) as lines:  # boto3's iter_lines is far slower
            _encode_row(lines, job["rows"])
    _report_event("sample", after_call=time.perf_counter() - called)


def _encode_row(lines: Iterable[bytes | str], number: int) -> bytes:
    """Return the text of a row as bytes, after all rows before it were read."""
    for index, line in enumerate(lines):
        if index < number:
            continue
        return json.loads(line)["text"].encode()
    raise ValueError(f"there is no row {number}")


def _report_event(name: str, **figures: Any) -> None:
    """Print an event, and wait for a line."""
    sys.stdout.write(json.dumps({"event": name, **figures}) + "\n")
    sys.stdout.flush()
    sys.stdin.readline()


def main() -> None:
    """Read the job from the standard input, and run it."""
    job = json.loads(sys.stdin.readline())
    {"millrace": shard_with_millrace, "re-read and skip": skip_rows}[job["system"]](job)
    _report_event("ended")
