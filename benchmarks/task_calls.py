"""Script for the cost of a task run of Prefect: see `benchmarks.prefect`.

Usage: ``python -m benchmarks.task_calls COUNT``.
"""

import json
import sys
import time

from prefect import flow, task


@task
def do_nothing() -> None:
    """Return at once."""


@flow
def run_tasks(count: int) -> tuple[float, float]:
    """Run so many tasks one after the other, and return their seconds and CPU seconds."""
    do_nothing()  # what only the first run imports and opens
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        do_nothing()
    return time.perf_counter() - began, time.process_time() - cpu


def main() -> None:
    """Run the tasks, and print seconds and CPU seconds of each as JSON."""
    count = int(sys.argv[1])
    seconds, cpu = run_tasks(count)
    json.dump({"s": seconds / count, "cpu_s": cpu / count}, sys.stdout)


if __name__ == "__main__":
    main()
