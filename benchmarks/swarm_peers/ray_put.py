"""One node reads an object and puts it into Ray's object store; all others get it and write it."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import obstore
import ray
from obstore.store import S3Store
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from benchmarks.swarm_peers.naive import AT_ONCE, RANGE
from benchmarks.swarm_peers.order import Clock, Order, Times, answer, read_order, write


class Node:
    """A process on one node."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._store = S3Store(**order.store)

    def ready(self) -> None:
        """Do nothing: who answers runs."""

    def read(self, key: str) -> list[Any]:
        """Read an object from the store and write it; a reference to it."""
        size = obstore.head(self._store, key)["size"]
        whole = np.empty(size, dtype=np.uint8)  # others get it without a copy

        def part(start: int) -> None:
            end = min(start + RANGE, size)
            body = obstore.get_range(self._store, key, start=start, end=end)
            whole.data[start:end] = memoryview(body)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(part, range(0, size, RANGE)))
        reference = ray.put(whole)
        write(self._order.path(key), whole.data)
        return [reference]

    def get(self, key: str, references: list[Any]) -> None:
        """Get an object from the node that has it, and write it."""
        whole: Any = ray.get(references[0])
        write(self._order.path(key), whole.data)


def main() -> None:
    """Start an actor on every node, and let the first read for all."""
    clock = Clock()
    order = read_order()
    ray.init(address=order.ray, log_to_driver=False)
    places = [
        NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        for node in ray.nodes()
        if node["Alive"]
    ]
    actor: Any = ray.remote(Node)
    reader, *others = [
        actor.options(num_cpus=0, scheduling_strategy=place).remote(order) for place in places
    ]
    ray.get([node.ready.remote() for node in (reader, *others)])
    startup = clock.now()
    clock = Clock()
    waited: list[Any] = []
    for key in order.keys:
        reference = reader.read.remote(key)
        waited += [reference, *(node.get.remote(key, reference) for node in others)]
    ray.get(waited)
    answer(Times(startup, clock.now()))


if __name__ == "__main__":
    main()
