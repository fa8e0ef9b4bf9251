"""A campaign on rented machines, killed in each stage and started again."""

import json
from pathlib import Path

from tests.flows.campaign_kills import Site, kill_and_go_on
from tests.prefect_server import PrefectServer, Worker, until
from tests.servers.vast import VastServer

AT = [
    "shard.committed 2",
    "rental.rented 1",
    "before prewarm",
    "window.merged 1",
    "before cool_down",
    "before release",
    "before save_checkpoint",
    "before clean_bucket",
]


def test_a_campaign_killed_in_each_stage_ends_right(
    prefect_api: PrefectServer, vast: VastServer, repository: Path, tmp_path: Path
) -> None:
    site = Site(prefect_api, vast, repository, tmp_path, "killed")
    killed = kill_and_go_on(site, AT)
    vast.reset()
    assert killed.at == AT
    assert killed.wrong == [], killed.log[-3000:]


def test_a_campaign_that_is_cancelled_gives_its_machines_back(
    deployed: PrefectServer, prefect_api: PrefectServer, worker: Worker, vast: VastServer,
    repository: Path, tmp_path: Path,
) -> None:  # fmt: skip
    site = Site(prefect_api, vast, repository, tmp_path, "cancelled")
    plan = json.loads(site.plan.read_text())
    plan["training"]["windows"] = 1000  # it has not ended before it is cancelled
    run = deployed.start("campaign/campaign", watch=False, plan=plan).run
    chain = site.store / "cancelled/run/gathers/1/chain"
    until((chain / "000000001.json").exists, "the first window")
    assert len(vast.alive()) == 2
    cancelled = deployed.prefect("flow-run", "cancel", str(run))
    assert cancelled.returncode == 0, cancelled.stdout + cancelled.stderr
    deployed.wait(run, "Cancelled")
    until(lambda: vast.alive() == [], "the machines given back")
    assert [one["by"] for one in vast.books()] == ["the account"] * 2
    assert not [table for table, text in deployed.tables() if site.key in text]
    vast.reset()
