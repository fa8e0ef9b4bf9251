"""Every node reads the whole of every object from the store itself, by ranges, into its file."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import obstore
from obstore.store import S3Store

from benchmarks.swarm_peers.order import Clock, Order, Times, answer, create, read_order

RANGE = 8 << 20  # bytes
AT_ONCE = 4


def fetch(order: Order, store: S3Store) -> None:
    """Bring all objects to this node."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for key in order.keys:
            size = obstore.head(store, key)["size"]
            file = create(order.path(key), size)

            def part(start: int, *, key: str = key, size: int = size, file: int = file) -> None:
                body = obstore.get_range(store, key, start=start, end=min(start + RANGE, size))
                os.pwrite(file, body, start)

            try:
                list(pool.map(part, range(0, size, RANGE)))
            finally:
                os.close(file)


def main() -> None:
    """Say that it is ready, wait for a line, fetch."""
    clock = Clock()
    order = read_order()
    store = S3Store(**order.store)
    startup = clock.now()
    print("ready", flush=True)
    sys.stdin.readline()
    clock = Clock()
    fetch(order, store)
    answer(Times(startup, clock.now()))


if __name__ == "__main__":
    main()
