"""A run that shards on rented machines is killed or cancelled."""

import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from blocks import VastCredentials
from flows.reap_machines import reap_machines
from millrace.testing.vast import VastServer
from tests.oracle import Folder
from tests.prefect_server import PrefectServer, SharedWorker, Worker, wait_until
from tests.support.flows.fixtures import (
    RUN,
    SHARD,
    SHARDING,
    has_one_partition_left,
    hold_partition,
    make_jsonl,
    make_texts,
    read_texts,
)


def prepare(vast: VastServer, payer: Any, repository: Path, store: Path) -> dict[str, Any]:
    """Prepare an account with real machines and a source; return the parameters of a run."""
    key = vast.reset(real=True, rate=1.0, strict=False, image=sysconfig.get_path("purelib"))
    VastCredentials(api_key=SecretStr(key), server_url=vast.url).save("payer", overwrite=True)
    (store / "raw").mkdir(parents=True)
    (store / "raw/rows.jsonl").write_bytes(make_jsonl(make_texts()))
    return {
        "dataset": "words",
        "source": {"url": (store / "raw").as_uri(), "columns": {"txt": "text"}},
        "destination": store.as_uri(),
        "sharding": SHARDING,
        "execution": RUN,
        "machines": {
            "request": {"max_hourly": 2.0, "max_total": 10.0},
            "repo_url": repository.as_uri(),
            "vast": payer,
            "timeouts": {"poll_interval": "PT1S"},
        },
    }


@pytest.mark.soak
def test_a_run_that_is_killed_leaves_its_machines_to_the_reaper_and_another_goes_on(
    deployed: PrefectServer, prefect_api: PrefectServer, shared_worker: SharedWorker,
    vast: VastServer, payer: Any, repository: Path, tmp_path: Path,
) -> None:  # fmt: skip
    shared_worker.stop()
    store = tmp_path / "store"
    parameters = prepare(vast, payer, repository, store)
    held = hold_partition(store.as_uri(), "words", "train-00001")
    (tmp_path / "first").mkdir()
    first = Worker(deployed, tmp_path / "first")
    try:
        deployed.start(SHARD, watch=False, **parameters)
        wait_until(lambda: has_one_partition_left(store), "all partitions but the held one")
    finally:
        first.kill()  # with the run, and with the monitor of its rental
    assert len(vast.list_alive()) == 1
    reaped = prefect_api.call(
        reap_machines, bucket=parameters["destination"], vast=payer, dry_run=False
    )
    assert "1 machine released, 0 stay." in prefect_api.read_artifacts(reaped.run)["reaper"]
    assert vast.list_alive() == []
    made = {one: one.stat().st_mtime_ns for one in store.glob("words/shards/**/*.tar")}
    assert made
    held.release()

    (tmp_path / "second").mkdir()
    second = Worker(deployed, tmp_path / "second")
    try:
        done = deployed.start(SHARD, **parameters)
    finally:
        second.stop()
    assert done.code == 0, done.output
    assert read_texts(Folder(store)) == Counter(make_texts())
    assert made.items() <= {one: one.stat().st_mtime_ns for one in made}.items()
    machines = vast.list_machines()
    assert [one["by"] for one in machines] == ["the account"] * 2
    report = prefect_api.read_artifacts(done.run)["shards-words"]
    assert "The rented machines have cost $" in report


@pytest.mark.soak
def test_a_run_that_is_cancelled_leaves_no_machine(
    deployed: PrefectServer, own_worker: Worker, vast: VastServer, payer: Any, repository: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    store = tmp_path / "store"
    parameters = prepare(vast, payer, repository, store)
    hold_partition(store.as_uri(), "words", "train-00001")
    run = deployed.start(SHARD, watch=False, **parameters).run
    wait_until(lambda: len(vast.list_alive()) == 1, "a machine")
    cancelled = deployed.run_prefect("flow-run", "cancel", str(run))
    assert cancelled.returncode == 0, cancelled.stdout + cancelled.stderr
    deployed.wait(run, "Cancelled")
    wait_until(lambda: vast.list_alive() == [], "the machine released")
    assert [one["by"] for one in vast.list_machines()] == ["the account"]
    assert not list(store.glob("words/manifest.json"))
