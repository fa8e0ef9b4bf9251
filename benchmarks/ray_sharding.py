"""Script that shards a dataset on the Ray cluster of a rig: see `benchmarks.ray_shards`.

It reads the order from the first line of its standard input, and prints lines of JSON: the kind of
each event, and at the end its figures.
"""

import json
import logging
import sys
import time
from typing import Any

from millrace.datasets import PipelineSettings, shard_dataset, verify_dataset
from millrace.progress import Event
from millrace.storage import StoreSpec, open_store


def main() -> None:
    """Shard a dataset with the system that the order names."""
    order = json.loads(sys.stdin.readline())
    run = {"millrace": run_millrace, "ray data": run_ray_data}[order["system"]]
    figures = run(PipelineSettings.model_validate(order["settings"]))
    print(json.dumps({"cpu": time.process_time(), **figures}), flush=True)


def run_millrace(settings: PipelineSettings) -> dict[str, Any]:
    """Shard with Millrace, and return the seconds, and the digests of the shards by key."""
    began = time.perf_counter()
    report = shard_dataset(settings, progress=_print_event)
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "samples": report.samples,
        "shards": {shard.key: shard.digest for shard in report.manifest.shards},
        "intact": verify_dataset(open_store(settings.store), settings.dataset).is_intact,
    }


def run_ray_data(settings: PipelineSettings) -> dict[str, Any]:
    """Shard with Ray Data, and return the seconds."""
    import ray
    import s3fs

    ray.init(address=settings.execution.ray, log_to_driver=False, logging_level=logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    source, target = settings.source.store, settings.store
    credentials = source.credentials
    assert credentials is not None
    filesystem = s3fs.S3FileSystem(
        key=credentials.access_key_id,
        secret=credentials.secret_access_key.get_secret_value(),
        client_kwargs={"endpoint_url": source.endpoint, "region_name": source.region},
        config_kwargs={"s3": {"addressing_style": "path"}},
    )
    began = time.perf_counter()
    rows = ray.data.read_json(_strip_scheme(source), filesystem=filesystem)
    samples = rows.map(lambda row: {"__key__": f"{row['id']:09d}", "txt": row["text"]})
    out = f"{_strip_scheme(target)}/{settings.dataset}"
    samples.write_webdataset(out, filesystem=filesystem, try_create_dir=False)
    return {"seconds": time.perf_counter() - began}


def _strip_scheme(store: StoreSpec) -> str:
    return store.url.partition("://")[2]


def _print_event(event: Event) -> None:
    print(json.dumps({"kind": event.kind}), flush=True)


if __name__ == "__main__":
    main()
