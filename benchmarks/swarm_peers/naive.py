"""Naive peer: each node reads all objects from the store in ranges."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import obstore
from obstore.store import S3Store

from benchmarks.swarm_peers.order import Order, Timer, Times, create_file, print_times, read_order

RANGE = 8 << 20  # bytes
CONCURRENCY = 4


def fetch(order: Order, store: S3Store) -> None:
    """Read all objects from the store, and write them into files."""
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        for key in order.keys:
            size = obstore.head(store, key)["size"]
            file = create_file(order.make_path(key), size)

            def read_range(
                start: int, *, key: str = key, size: int = size, file: int = file
            ) -> None:
                body = obstore.get_range(store, key, start=start, end=min(start + RANGE, size))
                os.pwrite(file, body, start)

            try:
                list(pool.map(read_range, range(0, size, RANGE)))
            finally:
                os.close(file)


def main() -> None:
    """Print a line when ready, wait for a line, and read the objects."""
    timer = Timer()
    order = read_order()
    store = S3Store(**order.store)
    startup = timer.read()
    print("ready", flush=True)
    sys.stdin.readline()
    timer = Timer()
    fetch(order, store)
    print_times(Times(startup, timer.read()))


if __name__ == "__main__":
    main()
