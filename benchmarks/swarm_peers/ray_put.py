"""Peer with Ray: one node reads an object and puts it into Ray's object store for all others."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import obstore
import ray
from obstore.store import S3Store
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from benchmarks.swarm_peers.naive import CONCURRENCY, RANGE
from benchmarks.swarm_peers.order import Order, Timer, Times, print_times, read_order, write_file


class RayPutNode:
    """Actor on one node."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._store = S3Store(**order.store)

    def wait(self) -> None:
        """Do nothing. The call returns when the actor has started."""

    def read(self, key: str) -> list[Any]:
        """Read an object from the store, write its file, and return a reference to the object."""
        size = obstore.head(self._store, key)["size"]
        whole = np.empty(size, dtype=np.uint8)  # Ray shares an array without a copy

        def read_range(start: int) -> None:
            end = min(start + RANGE, size)
            body = obstore.get_range(self._store, key, start=start, end=end)
            whole.data[start:end] = memoryview(body)

        with ThreadPoolExecutor(CONCURRENCY) as pool:
            list(pool.map(read_range, range(0, size, RANGE)))
        reference = ray.put(whole)
        write_file(self._order.make_path(key), whole.data)
        return [reference]

    def get(self, key: str, references: list[Any]) -> None:
        """Get an object from the node that has it, and write its file."""
        whole: Any = ray.get(references[0])
        write_file(self._order.make_path(key), whole.data)


def main() -> None:
    """Start an actor on every node, and read each object with the first actor."""
    timer = Timer()
    order = read_order()
    ray.init(address=order.ray, log_to_driver=False)
    strategies = [
        NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        for node in ray.nodes()
        if node["Alive"]
    ]
    actor: Any = ray.remote(RayPutNode)
    reader, *others = [
        actor.options(num_cpus=0, scheduling_strategy=strategy).remote(order)
        for strategy in strategies
    ]
    ray.get([node.wait.remote() for node in (reader, *others)])
    startup = timer.read()
    timer = Timer()
    pending: list[Any] = []
    for key in order.keys:
        reference = reader.read.remote(key)
        pending += [reference, *(node.get.remote(key, reference) for node in others)]
    ray.get(pending)
    print_times(Times(startup, timer.read()))


if __name__ == "__main__":
    main()
