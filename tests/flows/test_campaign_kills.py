"""A campaign on rented machines, killed in each stage and started again."""

from pathlib import Path

from tests.flows.campaign_kills import Site, kill_and_go_on
from tests.prefect_server import PrefectServer
from tests.servers.vast import VastServer

AT = [
    "shard.committed 2",
    "before provision",
    "rental.rented 1",
    "after provision",
    "before prewarm",
    "window.merged 1",
    "before cool_down",
    "after cool_down",
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
