"""Campaigns on rented machines whose leader is killed, again and again: ``NUMBER SEED``.

The first is killed once in each stage, the others at boundaries that are drawn: before and after
stages, at commits of shards, at machines that are rented or come up, at windows. Judged by the
store and by the provider's books.
"""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

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
EACH_STAGE = [
    "shard.committed 2", "rental.rented 1", "before prewarm", "window.merged 1",
    "before run_cooldown", "before release_machines", "before save_checkpoint",
    "before clean_bucket",
]  # fmt: skip
"""The boundaries of the first campaign, which reaches all of them."""
KILLS = 8  # of each other campaign


@dataclass
class Led:
    """Results of all campaigns."""

    campaigns: int = 0
    machines: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def format_sentence(self) -> str:
        return (
            f"campaigns {self.campaigns} (leaders killed {self.kills.total()} times at "
            f"{len(self.kills)} boundaries, machines {self.machines}): wrong {len(self.wrong)}"
        )


def run_campaigns(number: int, seed: int, tell: Callable[[str], None]) -> Led:
    """Run so many, one after the other."""
    led = Led()
    with tempfile.TemporaryDirectory(prefix="millrace-campaigns-") as name:
        folder = Path(name)
        server = PrefectServer(folder / "prefect")
        settings = {PREFECT_API_URL: server.url, PREFECT_HOME: server.home}
        try:
            with VastServer.start(folder / "vast") as vast, temporary_settings(settings):
                repository = snapshot(folder / "repository")
                for one in range(number):
                    drawn = Random(seed * 1000 + one).sample(BOUNDARIES, KILLS)
                    at = drawn if one else EACH_STAGE
                    site = Site(server, vast, repository, folder / f"{one}", f"soak-{one}")
                    killed = kill_and_go_on(site, at)
                    led.campaigns += 1
                    led.machines += killed.machines
                    led.kills.update(killed.at)
                    led.wrong += [f"campaign {one}: {what}" for what in killed.wrong]
                    if missed := set() if one else set(at) - set(killed.at):
                        led.wrong.append(f"campaign 0: was not killed at {sorted(missed)}")
                    tell(led.format_sentence())
                vast.reset()
        finally:
            server.stop()
    return led


if __name__ == "__main__":
    began = time.monotonic()
    found = run_campaigns(int(sys.argv[1]), int(sys.argv[2]), print)
    print(*found.wrong, found.format_sentence(), f"{time.monotonic() - began:.0f} s", sep="\n")
    sys.exit(1 if found.wrong else 0)
