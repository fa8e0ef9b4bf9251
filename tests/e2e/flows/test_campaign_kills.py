"""A campaign on rented machines, killed and started again."""

import json
from pathlib import Path

import pytest
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName

from millrace.testing.vast import VastServer
from tests.prefect_server import PrefectServer, Worker, wait_until
from tests.support.flows.campaign_kills import Site, kill_and_go_on
from tests.support.flows.campaigns import WORKERS

AT = ["window.merged 1"]
"""A boundary in the middle; `tests.soak.campaigns` has all others."""


def prewarm_reports(server: PrefectServer, dataset: str) -> list[str]:
    """Return the reports of the prewarms of a dataset, and of the weights of its run."""
    wanted = FlowRunFilter(name=FlowRunFilterName(any_=[f"prewarm-{dataset}-and-1-more"]))
    with server.make_client() as client:
        runs = client.read_flow_runs(flow_run_filter=wanted)
    return [server.read_artifacts(run.id)["prewarm"] for run in runs]


def test_a_campaign_killed_in_the_middle_ends_right(
    prefect_api: PrefectServer, vast: VastServer, repository: Path, tmp_path: Path
) -> None:
    site = Site(prefect_api, vast, repository, tmp_path, "killed", grace=600)
    killed = kill_and_go_on(site, AT)
    vast.reset()
    assert killed.at == AT
    assert killed.wrong == [], killed.log[-3000:]
    assert killed.machines == WORKERS
    (report,) = prewarm_reports(prefect_api, "killed-text")
    assert "**2 of 2 nodes** have all of " in report
    assert "unverified at the source" not in report  # manifest and metadata have the digests


@pytest.mark.soak
def test_a_campaign_that_is_killed_or_cancelled_gives_its_machines_back(
    deployed: PrefectServer, prefect_api: PrefectServer, own_worker: Worker, vast: VastServer,
    repository: Path, tmp_path: Path,
) -> None:  # fmt: skip
    """The machines only stand in the records: who trains on them is the other test's."""
    site = Site(prefect_api, vast, repository, tmp_path, "stopped", real=False)
    plan = json.loads(site.plan.read_text())
    chain = site.store / "stopped/run/gathers/1/chain"

    run = deployed.start("campaign/campaign", watch=False, plan=plan).run
    wait_until(lambda: len(vast.list_alive()) == 2, "two machines")
    wait_until(lambda: list(chain.glob("*.json")), "the run to begin")
    for process in own_worker.list_descendants():
        process.kill()
    deployed.wait(run, "Crashed")
    wait_until(lambda: vast.list_alive() == [], "the machines released")
    wait_until(
        lambda: "2 machines of stopped released" in deployed.read_logs(run), "what the hook says"
    )

    again = deployed.start("campaign/campaign", watch=False, plan=plan).run
    wait_until(lambda: len(vast.list_alive()) == 2, "two more machines")
    cancelled = deployed.run_prefect("flow-run", "cancel", str(again))
    assert cancelled.returncode == 0, cancelled.stdout + cancelled.stderr
    deployed.wait(again, "Cancelled")
    wait_until(lambda: vast.list_alive() == [], "the machines released")
    assert [one["by"] for one in vast.list_machines()] == ["the account"] * 4
    assert not [table for table, text in deployed.read_tables() if site.key in text]
    vast.reset()
