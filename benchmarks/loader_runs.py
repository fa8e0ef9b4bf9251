"""Runs of the systems of `benchmarks.loader`. Each reads all samples of a cold epoch."""

import time
from collections.abc import Iterator
from typing import Any

from benchmarks.common import CpuTimer
from benchmarks.loader_peers import PEERS, StoredShards, fetch_bodies, import_peer
from millrace.datasets.loader import ShardLoader

BATCH = 32  # samples of the first batch


def run_millrace(shards: StoredShards) -> dict[str, float]:
    """Load all samples of an epoch."""
    field = "tokens" if shards.format == "tokens" else "txt"

    def load() -> Iterator[Any]:
        for sample in ShardLoader(shards.spec, shards.dataset, format=shards.format):
            yield sample[field]

    return _measure(load())


def run_peer(shards: StoredShards, work: str, peer: str) -> dict[str, float]:
    """Read all samples with another reader."""
    import_peer(peer, shards.packages)
    return _measure(PEERS[work][peer](shards))


def run_floor(shards: StoredShards, samples: int, stored: int) -> dict[str, float]:
    """Fetch the shards, and count their samples if all bytes have come."""
    cpu, began, first, size = CpuTimer(), time.perf_counter(), 0.0, 0
    for body in fetch_bodies(shards):
        size += len(body)
        first = first or time.perf_counter() - began
    return {
        "samples": samples if size == stored else 0,
        "seconds": time.perf_counter() - began,
        "first": first,
        "cpu": cpu.read(),
    }


def _measure(samples: Iterator[Any]) -> dict[str, float]:
    cpu, began, first, count, size = CpuTimer(), time.perf_counter(), 0.0, 0, 0
    for sample in samples:
        count += 1
        size += len(sample)
        if count == BATCH:
            first = time.perf_counter() - began
    seconds = time.perf_counter() - began
    return {"samples": count, "seconds": seconds, "first": first, "cpu": cpu.read()}
