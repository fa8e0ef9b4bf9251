"""Runs that are cancelled, or whose worker dies: another goes on where they were."""

from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.oracle import Folder
from tests.prefect_server import PrefectServer, SharedWorker, Worker, wait_until
from tests.support.flows.fixtures import (
    RUN,
    SHARD,
    SHARDING,
    has_one_partition_left,
    hold_partition,
    make_texts,
    read_texts,
)


def _leases_held_by(pids: set[int], folder: Path) -> list[Path]:
    return [
        epoch
        for epoch in folder.glob("words/lease/*/*.json")
        if any(f'"pid":{pid},' in epoch.read_text() for pid in pids)
        and not epoch.with_suffix(".end").exists()
    ]


def test_a_cancelled_run_stops_and_the_next_one_finishes_it(
    deployed: PrefectServer, own_worker: Worker, tmp_path: Path, folder_source: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    held = hold_partition(out.as_uri(), "words", "train-00001")
    parameters = {
        "dataset": "words", "source": folder_source, "destination": out.as_uri(),
        "sharding": SHARDING, "execution": RUN,
    }  # fmt: skip
    first = deployed.start(SHARD, watch=False, **parameters)
    wait_until(lambda: has_one_partition_left(out), "all partitions but the one that is held")
    processes = own_worker.list_descendants()
    assert processes

    said = deployed.run_prefect("flow-run", "cancel", str(first.run))
    assert said.returncode == 0, said.stdout + said.stderr

    deployed.wait(first.run, "Cancelled")
    assert psutil.wait_procs(processes, timeout=60)[1] == []
    assert _leases_held_by({process.pid for process in processes}, out) == []
    done = {
        name: (out / name).stat().st_mtime_ns for name in Folder(out).list_names() if ".tar" in name
    }
    assert done

    held.release()
    second = deployed.start(SHARD, **parameters)

    assert second.code == 0, second.output
    assert read_texts(Folder(out)) == Counter(make_texts())
    # What the first one had made was not made again.
    assert (
        done.items()
        <= {name: (out / name).stat().st_mtime_ns for name in Folder(out).list_names()}.items()
    )


@pytest.mark.soak
def test_a_run_left_running_by_a_dead_worker_does_not_block_the_next(
    deployed: PrefectServer, shared_worker: SharedWorker, tmp_path: Path,
    folder_source: dict[str, Any],
) -> None:  # fmt: skip
    shared_worker.stop()
    out = tmp_path / "out"
    held = hold_partition(out.as_uri(), "words", "train-00001")
    parameters = {
        "dataset": "words", "source": folder_source, "destination": out.as_uri(),
        # Longer than the test may take: only a holder that is seen dead can be followed.
        "sharding": SHARDING, "execution": RUN | {"lease_timeout": "PT1H"},
    }  # fmt: skip
    (tmp_path / "first").mkdir()
    first = Worker(deployed, tmp_path / "first")
    try:
        zombie = deployed.start(SHARD, watch=False, **parameters)
        wait_until(lambda: has_one_partition_left(out), "all partitions but the one that is held")
    finally:
        first.kill()
    held.release()
    (tmp_path / "second").mkdir()
    second = Worker(deployed, tmp_path / "second")
    try:
        done = deployed.start(SHARD, **parameters)
    finally:
        second.stop()

    assert done.code == 0, done.output
    assert read_texts(Folder(out)) == Counter(make_texts())
    state = deployed.read_flow_run(zombie.run).state
    assert state is not None
    # Whoever is quick sees it Running for ever; the automation of `millrace setup` ends it.
    assert state.name in {"Running", "Crashed"}
