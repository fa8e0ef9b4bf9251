"""Measure how the cost of each kind of work grows with its size.

Run it with ``python -m benchmarks.growth [--quick] [--json FILE] [--only KIND ...]``. Each kind of
work runs at three sizes, up to 100 times the smallest one, each in a process of its own:

- ``samples``: rows of a dataset that is sharded into a folder.
- ``files``: files of a source that is planned; a stand-in lists them.
- ``keys``: objects of a plan of cleaning; the same stand-in.
- ``workers``: gradients of 65,536 values that are merged into one.
- ``tensors``: tensors of 1,024 values of a checkpoint that is saved and loaded in a folder.
- ``nodes``: nodes of a swarm that receive 100 pieces each. The tracker gives the orders, and the
  transfers are simulated.

``CPU s`` has the user and system time of the process and its children. ``exponent`` is the growth
between the two largest sizes: 1 if ten times the work costs ten times as much. The cost of a run of
size 1 is subtracted, because a constant cost would hide the growth.
"""

import heapq
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ByteSize

from benchmarks.cleanup import RULE
from benchmarks.common import (
    CpuTimer,
    Results,
    compute_exponent,
    measure_process,
    parse_options,
    print_table,
)
from benchmarks.corpus import write_jsonl
from benchmarks.endless import endless, make_endless_spec
from benchmarks.gradients import make_gradient
from benchmarks.shards import run_planning
from millrace.checkpoints import Saver, load
from millrace.cleanup import CleanupSettings, make_plan
from millrace.datasets import (
    ExecutionSettings,
    PipelineSettings,
    ShardingSettings,
    SourceLocation,
)
from millrace.gradients import MergeRule, MergeSettings, merge
from millrace.gradients.codec.merged_chunks import make_dense
from millrace.storage import StoreSpec, open_store
from millrace.swarm.tracker import PieceOrder, Tracker

MIB = 1 << 20
GOAL = 1.1  # exponent
PIECES = 100  # of each node
TICK = 0.25  # seconds between two ticks of the tracker
CHARACTERS, ROW = 1000, 1100  # of a sample's text, and about the bytes of its row


def measure_samples(count: int) -> dict[str, float]:
    """Shard so many rows."""
    from millrace import shard_dataset

    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name:
        folder = Path(name)
        write_jsonl(folder / "source" / "rows.jsonl", characters=CHARACTERS, size=count * ROW)
        settings = PipelineSettings(
            dataset="d",
            source=SourceLocation(url=(folder / "source").as_uri(), columns={"txt": "text"}),
            store=StoreSpec(url=(folder / "store").as_uri()),
            sharding=ShardingSettings(shard_bytes=ByteSize(4 * MIB)),
            execution=ExecutionSettings(workers=1),
        )
        cpu = CpuTimer()
        shard_dataset(settings)
        return {"CPU s": cpu.read()}


def plan_files(endpoint: str) -> dict[str, float]:
    """Plan a dataset from all files of a bucket."""
    return {"CPU s": run_planning(endpoint)["cpu_s"]}


def plan_keys(endpoint: str) -> dict[str, float]:
    """Plan to delete all objects of a bucket."""
    settings = CleanupSettings(store=make_endless_spec(endpoint), rules=(RULE,))
    cpu = CpuTimer()
    make_plan(settings)
    return {"CPU s": cpu.read()}


def measure_workers(count: int) -> dict[str, float]:
    """Merge so many gradients."""
    dice, shape = torch.Generator().manual_seed(0), (256, 256)
    gradient = make_gradient({"t": torch.randn(shape, generator=dice)}, "w")
    gradients = {f"w{n:04d}": gradient for n in range(count)}
    settings = MergeSettings(rule=MergeRule.SENDERS)
    list(merge({"w0000": gradient}, settings))  # the kernels are compiled
    cpu = CpuTimer()
    for _, runs in merge(gradients, settings):
        make_dense(runs, shape)
    return {"CPU s": cpu.read()}


def measure_tensors(count: int) -> dict[str, float]:
    """Save so many tensors, and load them."""
    state = {"model": {f"t{n:06d}": torch.full((1024,), float(n)) for n in range(count)}}
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        store = open_store(Path(folder).as_uri())
        cpu = CpuTimer()
        with Saver(store, "job") as saver:
            saver.save(state, step=0).result()
        load(store, "job", step=0)
        return {"CPU s": cpu.read()}


def measure_nodes(count: int) -> dict[str, float]:
    """Bring all pieces to so many nodes. Each transfer takes 0.5 to 1.5 simulated seconds."""
    dice, now, due = random.Random(0), 0.0, TICK
    tracker = Tracker([MIB] * PIECES, known_digests={n: f"d{n}" for n in range(PIECES)})
    pending: list[tuple[float, int, PieceOrder]] = []
    given, arrived = 0, set[tuple[str, int]]()

    def give(orders: list[PieceOrder]) -> None:
        nonlocal given
        for order in orders:
            given += 1
            heapq.heappush(pending, (now + dice.uniform(0.5, 1.5), given, order))

    cpu = CpuTimer()
    for n in range(count):
        give(tracker.add_node(f"n{n}", (), now))
    give(tracker.begin(now))
    while len(arrived) < count * PIECES:
        while not pending or due <= pending[0][0]:
            now = due
            give(tracker.tick(now))
            due += TICK
        now, _, order = heapq.heappop(pending)
        name, piece, source = order.node, order.piece, order.source
        if (name, piece) in arrived:
            give(tracker.note_redundant_transfer(name, piece, source, now))
            continue
        arrived.add((name, piece))
        give(tracker.complete_transfer(name, piece, source, f"d{piece}", now))
    return {"CPU s": cpu.read(), "simulated s": now}


@dataclass(frozen=True, slots=True)
class Kind:
    """Kind of work.

    Attributes:
        measure: Function that does the work.
        smallest: Smallest size.
        is_listed: Whether the work is that many objects of a bucket, which a stand-in lists.
    """

    measure: Callable[..., dict[str, float]]
    smallest: int
    is_listed: bool = False

    def run(self, count: int) -> dict[str, float]:
        """Do the work in a process of its own, and return its figures."""
        if not self.is_listed:
            return measure_process(self.measure, count).figures
        with endless(count) as endpoint:
            return measure_process(self.measure, endpoint).figures


KINDS = {
    "samples": Kind(measure_samples, 1_000),
    "files": Kind(plan_files, 1_000, is_listed=True),
    "keys": Kind(plan_keys, 1_000, is_listed=True),
    "workers": Kind(measure_workers, 10),
    "tensors": Kind(measure_tensors, 100),
    "nodes": Kind(measure_nodes, 8),
}


def main() -> int:
    """Measure, print the table, and write the rows if asked."""
    asked = parse_options("growth", __doc__, parts=list(KINDS))
    results, lines = Results("growth"), list[list[str]]()
    factors, repeats = ((1, 3, 10), 1) if asked.quick else ((1, 10, 100), 3)
    for name in asked.only:
        kind, costs = KINDS[name], dict[int, float]()
        for size in (1, *(factor * kind.smallest for factor in factors)):
            work = f"{size:,} {name}"
            for _ in range(repeats):
                for metric, value in kind.run(size).items():
                    results.add(work, "millrace", metric, value)
            costs[size] = statistics.median(results.values[work, "millrace", "CPU s"])
        exponent = compute_exponent(costs, costs[1])
        if exponent is not None:
            results.add(name, "millrace", "exponent", exponent)
        cells = [f"{size:,}: {cost:.3g}" for size, cost in costs.items()]
        lines.append([name, *cells, f"{exponent:.2f}" if exponent is not None else "-", f"{GOAL}"])
    print_table(["kind", *["size: CPU s"] * (len(factors) + 1), "exponent", "goal"], lines)
    results.save(asked.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
