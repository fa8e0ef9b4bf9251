"""A training loop in a process of its own, which reports each batch with the state after it.

``python -m tests.support.shard_training`` reads a line of JSON on its standard input. With a cache,
it also reports each step of each file in it. At one of the steps, it waits for another line.
"""

import json
import sys
import threading
from pathlib import Path
from typing import Any

from millrace.datasets.loader import ShardLoader, dataset_files
from millrace.datasets.loader.disk_cache import DiskCache, Download, LentFile
from millrace.storage import StoreSpec

_reports = threading.Lock()


def report(message: dict[str, Any]) -> None:
    with _reports:
        print(json.dumps(message), flush=True)


class ReportingCache(DiskCache):
    """Cache that reports the steps of each file, and waits at one of them."""

    stop: list[str] | None = None

    def lend(self, digest: str, size: int, download: Download) -> LentFile | None:
        def download_and_report(file: int, damaged: Path | None) -> None:
            download(file, damaged)
            self.reach("downloaded", digest)

        self.reach("wanted", digest)
        lent = super().lend(digest, size, download_and_report)
        self.reach("lent", digest)
        return lent

    def reach(self, step: str, digest: str) -> None:
        report({"step": step, "digest": digest})
        if self.stop == [step, digest]:
            sys.stdin.readline()


def main() -> None:
    call = json.loads(sys.stdin.readline())
    cache = None
    if folder := call.get("cache"):
        dataset_files.DiskCache = ReportingCache  # each process opens the cache anew
        ReportingCache.stop = call["stop"]
        cache = ReportingCache(Path(folder), call["max_bytes"])
    loader = ShardLoader(
        StoreSpec.model_validate(call["store"]),
        "corpus",
        rank=call["rank"],
        world_size=call["world_size"],
        streams=call["streams"],
        shuffle_window=20,
        batch_size=13,
        cache=cache,
    )
    if call["state"]:
        loader.load_state_dict(call["state"])
    for batch in loader:
        pairs = [(sample["__key__"], sample["txt"]) for sample in batch]
        report({"received": pairs, "state": loader.state_dict()})


if __name__ == "__main__":
    main()
