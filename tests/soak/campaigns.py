"""Run campaigns on rented machines whose leaders are killed: ``NUMBER SEED``.

The leader of the first campaign is killed once in each stage, those of the others at random
boundaries: before and after stages, at commits of shards, at rentals of machines, and at merges of
windows. The store and the provider's records show the faults.
"""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

from millrace.testing.repository import snapshot
from millrace.testing.vast import VastServer
from tests.prefect_server import PrefectServer
from tests.support.flows.campaign_child import STAGES
from tests.support.flows.campaign_kills import Site, kill_and_go_on

BOUNDARIES = [
    *(f"{when} {stage}" for stage in STAGES for when in ("before", "after")),
    "shard.committed 1", "shard.committed 2", "shard.committed 3", "rental.rented 1",
    "rental.rented 2", "window.merged 1", "window.merged 2",
]  # fmt: skip
FIRST_BOUNDARIES = [
    "shard.committed 2", "rental.rented 1", "before prewarm", "window.merged 1",
    "before run_cooldown", "before release_machines", "before save_checkpoint",
    "before clean_bucket",
]  # fmt: skip
"""Boundaries of the first campaign, which reaches all of them."""
KILLS_PER_CAMPAIGN = 8  # number of kills in each other campaign


@dataclass
class Counts:
    """Counts of all campaigns.

    Attributes:
        campaigns: Number of campaigns.
        machines: Number of machines that were rented.
        kills: Number of kills by boundary.
        wrong: Descriptions of the faults.
    """

    campaigns: int = 0
    machines: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def format_sentence(self) -> str:
        """Return the counts as a sentence."""
        return (
            f"campaigns {self.campaigns} (leaders killed {self.kills.total()} times at "
            f"{len(self.kills)} boundaries, machines {self.machines}): wrong {len(self.wrong)}"
        )


def run_campaigns(number: int, seed: int, report: Callable[[str], None]) -> Counts:
    """Run so many campaigns, one after another.

    Args:
        number: Number of campaigns.
        seed: Seed of the boundaries.
        report: Function that is called with a line of progress.
    """
    counts = Counts()
    with tempfile.TemporaryDirectory(prefix="millrace-campaigns-") as name:
        folder = Path(name)
        server = PrefectServer(folder / "prefect")
        settings: dict[Any, object] = {PREFECT_API_URL: server.url, PREFECT_HOME: server.home}
        try:
            with VastServer.start(folder / "vast") as vast, temporary_settings(settings):
                repository = snapshot(folder / "repository")
                for campaign in range(number):
                    drawn = Random(seed * 1000 + campaign).sample(BOUNDARIES, KILLS_PER_CAMPAIGN)
                    boundaries = drawn if campaign else FIRST_BOUNDARIES
                    site = Site(
                        server, vast, repository, folder / f"{campaign}", f"soak-{campaign}"
                    )
                    killed = kill_and_go_on(site, boundaries)
                    counts.campaigns += 1
                    counts.machines += killed.machines
                    counts.kills.update(killed.at)
                    counts.wrong += [f"campaign {campaign}: {what}" for what in killed.wrong]
                    if not killed.at:
                        counts.wrong.append(f"campaign {campaign}: no leader was killed")
                    if missed := set() if campaign else set(boundaries) - set(killed.at):
                        counts.wrong.append(f"campaign 0: was not killed at {sorted(missed)}")
                    report(counts.format_sentence())
                vast.reset()
        finally:
            server.stop()
    return counts


if __name__ == "__main__":
    began = time.monotonic()
    found = run_campaigns(int(sys.argv[1]), int(sys.argv[2]), print)
    print(*found.wrong, found.format_sentence(), f"{time.monotonic() - began:.0f} s", sep="\n")
    sys.exit(1 if found.wrong else 0)
