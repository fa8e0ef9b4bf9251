"""A campaign on rented machines whose leader is killed, and started again, until it has ended."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from pydantic import SecretStr

from blocks import VastCredentials
from examples.tiny_lm.begin import begin
from millrace.rentals.owner_monitor import GRACE_PERIOD
from millrace.storage import open_store
from millrace.testing.process import REPOSITORY
from millrace.testing.vast import VastServer
from tests.prefect_server import PrefectServer
from tests.support.flows.campaigns import (
    WORKERS,
    find_committed_shards,
    find_faults,
    find_shards,
    make_plan_settings,
    make_text,
)


@dataclass
class Killed:
    """Result of a campaign whose leader was killed.

    Attributes:
        at: Boundaries at which the leader was killed.
        wrong: Sentences about wrong results.
        machines: Number of machines that were rented.
        log: Output of the leaders.
    """

    at: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    machines: int = 0
    log: str = ""


class Site:
    """A store, a text, and an account at the stand-in.

    Its machines are run for real, or only stand in the provider's records.

    Args:
        server: Prefect server of the leaders.
        vast: Stand-in of the provider.
        repository: Repository that the machines clone.
        folder: Folder of the store and the text.
        name: Name of the campaign.
        real: Whether the machines are run.
        grace: Seconds in which a next leader may take over the machines of a killed one.
    """

    def __init__(
        self,
        server: PrefectServer,
        vast: VastServer,
        repository: Path,
        folder: Path,
        name: str,
        *,
        real: bool = True,
        grace: float = GRACE_PERIOD,
    ) -> None:
        self.server, self.vast, self.name, self.grace = server, vast, name, grace
        self.monitors: list[psutil.Process] = []
        self.store = folder / "store"
        self.text = make_text(folder / "text")
        packages = sysconfig.get_path("purelib")
        rate = 1.0 if real else 100.0
        self.key = key = vast.reset(real=real, rate=rate, strict=False, image=packages)
        VastCredentials(api_key=SecretStr(key), server_url=vast.url).save(name, overwrite=True)
        begin(open_store(self.store.as_uri()), f"{name}/first")
        machines = {
            "kind": "rented",
            "request": {"max_hourly": 2.0, "max_total": 5.0, "disk": "10GB"},
            "vast": name,
            "repo_url": repository.as_uri(),
            "timeouts": {"poll_interval": "PT1S", "heartbeat_timeout": "PT2M"},
            "prewarm": real,
        }
        self.log = folder / "leader.log"
        self.plan = folder / "plan.json"
        plan = make_plan_settings(name, self.store.as_uri(), folder / "text", machines)
        self.plan.write_text(json.dumps(plan))

    def lead(self) -> "Leader":
        """Start a leader."""
        return Leader(self)

    def judge(self, killed: Killed, shards: dict[str, tuple[int, int]]) -> Killed:
        """Return the faults at the end, by the store and the provider's records."""
        for monitor in self.monitors:
            with contextlib.suppress(psutil.NoSuchProcess):
                monitor.kill()
        killed.wrong += find_faults(self.store, self.name, self.text)
        if find_shards(self.store, f"{self.name}-text") != shards:
            killed.wrong.append("a shard was made twice")
        books = self.vast.list_machines()
        killed.machines = len(books)
        # Without a next leader in time, the monitor of a killed one releases its machines.
        most = WORKERS * (1 + len(killed.at))
        if not WORKERS <= killed.machines <= most:
            killed.wrong.append(f"{killed.machines} machines were rented, at most {most} may be")
        at_once = max((count_alive(books, one["created"]) for one in books), default=0)
        if at_once > WORKERS + sum(where.startswith("rental.rented") for where in killed.at):
            killed.wrong.append(f"{at_once} machines were rented at once, for {WORKERS} workers")
        if alive := [one["id"] for one in books if one["destroyed"] is None]:
            killed.wrong.append(f"machines {alive} are left")
        killed.log = self.log.read_text(errors="replace")
        return killed


def count_alive(books: list[dict[str, Any]], time: float) -> int:
    """Count the machines that are rented at a time, by the provider's records."""
    return sum(
        one["created"] <= time and (one["destroyed"] is None or time < one["destroyed"])
        for one in books
    )


class Leader:
    """A process that leads the campaign, and is at a boundary, or has ended."""

    def __init__(self, site: Site) -> None:
        self._log, child = site.log, "tests.support.flows.campaign_child"
        self._sink = self._log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", child, str(site.plan), str(site.grace)],
            cwd=REPOSITORY,
            env=site.server.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._sink,
            start_new_session=True,
        )

    def read_boundaries(self) -> Iterator[str]:
        """Return the next boundary that the campaign reaches; the last one is ``done``.

        Raises:
            RuntimeError: It ended otherwise.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.startswith(b"{"):
                continue  # what a library prints
            said = json.loads(line)
            if "done" in said:
                self.end()
                yield "done"
                return
            yield said["at"]
            self._let_on()
        self.end()
        log = self._log.read_text(errors="replace")
        raise RuntimeError(f"the leader ended with {self._process.returncode}:\n{log[-3000:]}")

    def kill(self) -> list[psutil.Process]:
        """SIGKILL it, and return the processes that it has started, which go on."""
        started = psutil.Process(self._process.pid).children()
        os.kill(self._process.pid, signal.SIGKILL)
        self.end()
        return started

    def end(self) -> None:
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._sink):
            if pipe is not None:
                pipe.close()

    def _let_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()


def kill_and_go_on(site: Site, at: list[str]) -> Killed:
    """Have the leader killed at each of these boundaries, and the next one go on.

    Args:
        site: Site of the campaign.
        at: The boundaries, each once, if it comes: see `tests.support.flows.campaign_child`.
    """
    killed, left = Killed(), list(at)
    shards: dict[str, tuple[int, int]] = {}
    committed: dict[str, tuple[int, int]] = {}
    while True:
        leader = site.lead()
        for where in leader.read_boundaries():
            if not shards and where == "before await_machines":
                shards = find_shards(site.store, f"{site.name}-text")
            if where == "done":
                return site.judge(killed, shards | committed)
            if where in left:
                left.remove(where)
                killed.at.append(where)
                site.monitors += leader.kill()
                # A shard that is committed now must stay as it is.
                for name, shard in find_committed_shards(site.store, f"{site.name}-text").items():
                    committed.setdefault(name, shard)
                break
