"""Measure how the work on a dataset grows with the number of its partitions.

Run it with ``python -m benchmarks.partitions [--only STEP ...] [--quick] [--json FILE]``. A file of
JSON lines is divided into partitions of one row, and the dataset is in a folder. So nearly all of
the cost is that of the partitions. Each step runs in a process of its own, in this order:

- ``plan``: the plan is computed from the listing of the source.
- ``status-open``, ``garbage-open``: no partition of the dataset has begun.
- ``shard``: all partitions are sharded in this process, and the dataset is finalized.
- ``finalize``: the manifest is deleted, and a run finalizes the dataset again.
- ``status``, ``verify``, ``garbage``: the dataset is complete.
- ``delete-garbage``: as many shards as partitions that no record names are deleted, and the leases.

``exponent`` is the growth of the CPU time between the two largest sizes: 1 if ten times the
partitions cost ten times as much. The cost of one partition is subtracted first.
"""

import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from benchmarks.common import (
    CpuTimer,
    Results,
    compute_exponent,
    measure_process,
    parse_options,
    print_table,
)
from millrace.datasets import (
    PipelineSettings,
    delete_garbage,
    plan_dataset,
    plan_garbage,
    read_status,
    shard_dataset,
    verify_dataset,
)
from millrace.datasets.plan import commit_plan
from millrace.keys.datasets import DatasetKeys
from millrace.progress import ignore_event
from millrace.storage import delete, open_store, put

ROW = 1024  # bytes of a row, and of a partition
NAME = "rows"
SIZES, QUICK_SIZES = (1_000, 10_000, 100_000), (30, 100, 300)
METRICS = ("CPU s", "seconds", "peak RSS MB")


def make_settings(folder: Path) -> PipelineSettings:
    """Return the settings of a dataset whose partitions have one row each."""
    return PipelineSettings.model_validate(
        {
            "dataset": NAME,
            "source": {"url": (folder / "source").as_uri(), "columns": {"txt": "text"}},
            "store": {"url": (folder / "store").as_uri()},
            "sharding": {"partition_bytes": ROW, "shard_bytes": 1 << 16},
            "execution": {"workers": 0, "uploads": 1},
        }
    )


def write_source(folder: Path, count: int) -> None:
    """Write a file of so many rows, and an empty store."""
    (folder / "source").mkdir()
    (folder / "store").mkdir()
    text = b"x" * (ROW - len(b'{"text": "%09d "}\n' % 0))
    with (folder / "source" / "rows.jsonl").open("wb") as file:
        for number in range(count):
            file.write(b'{"text": "%09d %b"}\n' % (number, text))


def commit(folder: Path) -> None:
    """Commit the plan, so that the dataset has begun."""
    settings = make_settings(folder)
    plan = plan_dataset(settings)
    commit_plan(open_store(settings.store), DatasetKeys(NAME), plan, {}, ignore_event)


def run_plan(folder: Path, count: int) -> None:
    """Plan the dataset."""
    assert len(plan_dataset(make_settings(folder)).partitions) == count


def run_status_open(folder: Path, count: int) -> None:
    """Read the status of a dataset of which no partition has begun."""
    status = read_status(open_store(make_settings(folder).store), NAME)
    assert (len(status.partitions), status.ended_partitions) == (count, 0)


def run_status(folder: Path, count: int) -> None:
    """Read the status of the complete dataset."""
    status = read_status(open_store(make_settings(folder).store), NAME)
    assert status.ended_partitions == count


def run_garbage(folder: Path, count: int) -> None:
    """Plan the deletion of the garbage, of which none is old enough."""
    assert not plan_garbage(open_store(make_settings(folder).store), NAME).objects, count


def run_shard(folder: Path, count: int) -> None:
    """Shard all partitions, and finalize the dataset."""
    assert shard_dataset(make_settings(folder)).samples == count


def run_finalize(folder: Path, count: int) -> None:
    """Finalize a dataset whose manifest is deleted."""
    settings = make_settings(folder)
    delete(open_store(settings.store), [DatasetKeys(NAME).manifest])
    assert shard_dataset(settings).new_shards == 0, count


def run_verify(folder: Path, count: int) -> None:
    """Verify the sizes of all shards."""
    store = open_store(make_settings(folder).store)
    found = verify_dataset(store, NAME, digests=False)
    assert (found.is_intact, found.shards) == (True, count)


def run_delete_garbage(folder: Path, count: int) -> None:
    """Delete shards that no record names, and the leases of the complete dataset."""
    store, keys = open_store(make_settings(folder).store), DatasetKeys(NAME)
    prefix = keys.make_shards_prefix("webdataset", "train")
    for number in range(count):
        put(store, f"{prefix}train-{number:05d}-999999.tar", b"")
    plan = plan_garbage(store, NAME, min_age=timedelta(seconds=-60))
    found = delete_garbage(store, plan).deletion
    assert found.deleted_objects == len(plan.objects) >= count


STEPS: dict[str, Callable[[Path, int], None]] = {
    "plan": run_plan,
    "status-open": run_status_open,
    "garbage-open": run_garbage,
    "shard": run_shard,
    "finalize": run_finalize,
    "status": run_status,
    "verify": run_verify,
    "garbage": run_garbage,
    "delete-garbage": run_delete_garbage,
}
OPEN_STEPS = {"plan", "status-open", "garbage-open"}


def measure_step(name: str, folder: Path, count: int) -> dict[str, float]:
    """Run a step in this process."""
    cpu, began = CpuTimer(), time.perf_counter()
    STEPS[name](folder, count)
    return {"CPU s": cpu.read(), "seconds": time.perf_counter() - began}


def main() -> None:
    """Run the steps at each size, and print a table with the exponents."""
    options = parse_options("partitions", __doc__, parts=list(STEPS))
    results, sizes = Results("partitions"), QUICK_SIZES if options.quick else SIZES
    for count in (1, *sizes):
        with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name:
            folder = Path(name)
            write_source(folder, count)
            commit(folder)
            for step in STEPS:
                is_setup = step == "shard" and not OPEN_STEPS.issuperset(options.only)
                if step not in options.only and not is_setup:
                    continue
                measured = measure_process(measure_step, step, folder, count)
                values = (*measured.figures.values(), measured.peak_rss / 1e6)
                for metric, value in zip(METRICS, values, strict=True):
                    results.add(f"{step}, {count:,}", "millrace", metric, value)
    lines: list[list[str]] = []
    for step in STEPS:
        if step not in options.only:
            continue
        rows = {
            count: [results.values[f"{step}, {count:,}", "millrace", one][0] for one in METRICS]
            for count in (1, *sizes)
        }
        exponent = compute_exponent({count: rows[count][0] for count in sizes}, rows[1][0])
        if exponent is not None:
            results.add(step, "millrace", "exponent", exponent)
        cells = ["/".join(f"{value:.3g}" for value in rows[count]) for count in (1, *sizes)]
        lines.append([step, *cells, f"{exponent:.2f}" if exponent is not None else "-"])
    print(f"Cells: {' / '.join(METRICS)}.")
    print_table(["step", *(f"{count:,}" for count in (1, *sizes)), "exponent"], lines)
    results.save(options.file)


if __name__ == "__main__":
    main()
