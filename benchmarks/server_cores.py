"""An S3 store on cores of its own, so that it takes none of the clients' time."""

import os
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from millrace.testing.rgw import RGW


def split_cores(cores: Set[int]) -> tuple[Set[int], Set[int]]:
    """Return the cores of the clients and of the store: all for both if there are at most two."""
    if len(cores) <= 2:
        return cores, cores
    ordered = sorted(cores)
    half = len(ordered) // 2
    return set(ordered[:half]), set(ordered[half:])


@contextmanager
def start_store(folder: Path, **options: Any) -> Iterator[RGW]:
    """Start an RGW on cores of its own, and keep this process and its children on the others.

    Args:
        folder: Folder of the server.
        options: Further arguments of `RGW.start`.
    """
    cores = os.sched_getaffinity(0)
    ours, servers = split_cores(cores)
    os.sched_setaffinity(0, servers)  # a process inherits the cores of the thread that starts it
    try:
        with RGW.start(folder, **options) as rgw:
            os.sched_setaffinity(0, ours)
            yield rgw
    finally:
        os.sched_setaffinity(0, cores)
