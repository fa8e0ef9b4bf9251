"""Rentals whose owners are killed anywhere, at an API that fails: what is left, by its own books.

Each owner, and each reaper, is a process of its own. It is forked from this one, which therefore
opens no store: that would start threads.
"""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from millrace import errors
from millrace.rentals import (
    LedgerSettings,
    OfferRequest,
    Program,
    Rental,
    RentalSettings,
    RentalTimeouts,
    VastAccount,
    VastClient,
    destroy,
    machine_starter,
    reap,
)
from millrace.rentals.destroy import LISTING_LAG
from millrace.storage import StoreSpec
from millrace.testing.vast import StandInClock, VastServer

FATES = {
    "exited": 0.06, "oci": 0.06, "unknown": 0.04, "stuck": 0.02, "broken": 0.05, "outbid": 0.08,
    "silent": 0.04, "vanished": 0.05, "dearer": 0.05, "failing": 0.03,
}  # fmt: skip
FAULTS = {
    "error500": 0.01, "error502": 0.01, "text429": 0.01, "json429": 0.01, "lost": 0.015,
    "cut": 0.01, "slow": 0.005, "refused": 0.01, "part": 0.01, "gone": 0.05, "low bid": 0.03,
    "low bid, 400": 0.03, "lost, listed late": 0.02,
    "unsuccessful list": 0.01, "null list": 0.005, "no list": 0.005, "object list": 0.005,
    "bare list": 0.005,
}  # fmt: skip
LEASE = 180.0
REAPED = 900.0  # seconds between two reapers
BOUNDARIES = [
    f"{when} {what}"
    for when in ("before", "after")
    for what in ("search", "create", "list", "destroy", "Intent", "Contract", "ReleaseRecord")
]
REQUESTS = {"search_offers": "search", "create_instance": "create", "_list_pages": "list",
            "destroy_instance": "destroy"}  # fmt: skip
OFTEN = {"list": 40}  # of the others about so many: 4
FOREIGN = ("", "somebody's", "millrace/ffffffffffff/fleet/000000/9999999999", "millrace/fleet")


@dataclass(slots=True)
class Came:
    """Results of all runs.

    Attributes:
        runs: How many.
        killed: Owners that were.
        boundaries: At which they were.
        again: Rentals that a second owner went on with.
        fired: Faults of the API.
        rented: Machines.
        alive: Machines of ours that were left, after the reaper.
        late: Machines that were billed longer than the owner's lease and a reaper allow, after
            the listing showed them.
        foreign: Machines of others that are gone.
        overspent: Rentals that nobody killed, and whose machines that a listing has shown in time
            cost more than was granted.
        strange: Owners and reapers that ended as they never should.
    """

    runs: int = 0
    killed: int = 0
    boundaries: Counter[str] = field(default_factory=Counter[str])
    again: int = 0
    fired: Counter[str] = field(default_factory=Counter[str])
    rented: int = 0
    alive: int = 0
    late: int = 0
    foreign: int = 0
    overspent: int = 0
    strange: list[str] = field(default_factory=list[str])

    @property
    def wrong(self) -> int:
        return self.alive + self.late + self.foreign + self.overspent + len(self.strange)

    def __str__(self) -> str:
        return (
            f"rentals {self.runs} (killed {self.killed}, gone on with {self.again}), machines "
            f"{self.rented}: left {self.alive}, billed late {self.late}, others' {self.foreign}, "
            f"overspent {self.overspent}, strange {len(self.strange)}"
        )


def run_rentals(
    server: VastServer, folder: Path, *, runs: int, seed: int, tell: Callable[[str], None]
) -> Came:
    """Rent, be killed, and count what is left.

    Args:
        server: The stand-in: its books are the judge.
        folder: Where stores are made.
        runs: How many.
        seed: Of all that is drawn.
        tell: Told how far it is.
    """
    came = Came()
    for number in range(runs):
        _run(server, folder / "store", random.Random(f"{seed} {number}"), came)
        if (number + 1) % 50 == 0:
            tell(str(came))
    return came


def _run(server: VastServer, store: Path, dice: random.Random, came: Came) -> None:
    store.mkdir()
    key = server.reset(
        seed=dice.randrange(1 << 30), machines=20, fates=FATES, faults=FAULTS,
        program=dice.uniform(100, 900), lag=dice.choice([0.0, 0.0, 20.0]),
        late=dice.choice([90.0, 400.0, 900.0]),
    )  # fmt: skip
    planted = [server.plant(label) for label in FOREIGN]
    told = json.dumps(
        {
            "key": key,
            "url": server.url,
            "store": store.as_uri(),
            "count": dice.choice([1, 1, 2, 3]),
            "interruptible": dice.random() < 0.4,
            "max_total": dice.choice([0.2, 1.0, 20.0]),
        }
    )
    kills = [_boundary(dice)] if dice.random() < 0.9 else []
    if kills and dice.random() < 0.3:
        kills.append(_boundary(dice))
        came.again += 1
    killed = _owners(server, told, kills, store, came)
    died = server.read_time()
    server.advance(dice.uniform(0, REAPED))
    for _ in range(8):
        code = _forked(lambda: _reap(server, told), store)
        if code not in {0, 3}:
            came.strange.append(f"a reaper ended with {code}:\n{(store / 'said').read_text()}")
        if not _ours(server):
            break
        server.advance(REAPED)
    _judge(server, came, planted, json.loads(told), died if killed else None)
    came.runs += 1
    came.fired += server.count_fired()
    shutil.rmtree(store)


def _boundary(dice: random.Random) -> tuple[str, int]:
    """A boundary, and at which of its kind."""
    name = dice.choice(BOUNDARIES)
    return name, dice.randrange(1, 1 + OFTEN.get(name.partition(" ")[2], 4))


def _owners(
    server: VastServer, told: str, kills: list[tuple[str, int]], store: Path, came: Came
) -> bool:
    """Have owners rent, one after the other; whether the last one was killed."""
    for at in kills or [("", 0)]:
        code = _forked(lambda at=at: _own(server, told, *at), store)
        if code == -signal.SIGKILL:
            came.killed += 1
            came.boundaries[at[0]] += 1
        elif code not in {0, 3}:
            came.strange.append(f"an owner ended with {code}:\n{(store / 'said').read_text()}")
        else:
            return False
    return bool(kills)


def _ours(server: VastServer) -> list[dict[str, Any]]:
    return [one for one in server.list_alive() if one["label"] not in FOREIGN]


def _judge(
    server: VastServer, came: Came, planted: list[int], told: dict[str, Any], died: float | None
) -> None:
    books = server.list_machines()
    ours = [one for one in books if one["label"] not in FOREIGN]
    came.rented += len(ours)
    came.alive += len(_ours(server))
    came.foreign += sum(one["destroyed"] is not None for one in books if one["id"] in planted)
    if died is None:  # what no listing shows, no owner can count
        seen = [one["cost"] for one in ours if one["listed"] - one["created"] <= LISTING_LAG]
        came.overspent += sum(seen) > told["max_total"]
    else:
        for one in ours:
            end = max(died, one["listed"]) + LEASE + REAPED
            came.late += (one["destroyed"] or end + 1) > end


def _forked(work: Callable[[], None], store: Path) -> int:
    """Do work in a process of its own; its exit code: 3 if it was refused, 1 for a bug."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    code = 1
    try:
        work()
        code = 0
    except (errors.BudgetError, errors.MachineError, errors.NotFoundError, errors.UnavailableError):
        code = 3
    except BaseException:  # noqa: BLE001 - it is told to the parent
        (store / "said").write_text(traceback.format_exc())
    os._exit(code)


def _vast(server: VastServer, told: dict[str, Any]) -> VastClient:
    return VastClient(SecretStr(told["key"]), told["url"], clock=StandInClock(server))


def _own(server: VastServer, text: str, boundary: str, at: int) -> None:
    """Rent until all programs have ended, or be killed at a boundary."""
    told = json.loads(text)
    _kill_at(boundary, at)
    settings = RentalSettings(
        name="fleet",
        store=StoreSpec(url=told["store"]),
        account=VastAccount(api_key=SecretStr(told["key"]), server_url=told["url"]),
        request=OfferRequest(
            max_hourly=2.0, max_total=told["max_total"], interruptible=told["interruptible"]
        ),
        program=Program(repo_url="https://example.org/x", command=("true",)),
        machines=told["count"],
        timeouts=RentalTimeouts(
            startup_timeout=timedelta(minutes=5), poll_interval=timedelta(seconds=30)
        ),
    )
    with Rental(settings, vast=_vast(server, told)) as rental:
        rental.wait_until_done()


def _reap(server: VastServer, text: str) -> None:
    told = json.loads(text)
    account = VastAccount(api_key=SecretStr(told["key"]), server_url=told["url"])
    settings = LedgerSettings(store=StoreSpec(url=told["store"]), account=account)
    reap(settings, vast=_vast(server, told))


def _kill_at(which: str, at: int) -> None:
    """Have this process killed right before, or after, one of its requests or commits."""
    passed = Counter[str]()

    def boundary(name: str) -> None:
        passed[name] += 1
        if name == which and passed[name] == at:
            os.kill(os.getpid(), signal.SIGKILL)

    asked, commit = VastClient._send_once, machine_starter.commit_once

    def ask(vast: VastClient, work: Any) -> Any:
        method = work.__qualname__.split(".")[1]
        what = REQUESTS.get(method, method)
        boundary(f"before {what}")
        try:
            return asked(vast, work)
        finally:
            boundary(f"after {what}")

    def committed(store: Any, key: str, record: Any) -> Any:
        boundary(f"before {type(record).__name__}")
        done = commit(store, key, record)
        boundary(f"after {type(record).__name__}")
        return done

    VastClient._send_once = ask  # type: ignore[method-assign]
    machine_starter.commit_once = destroy.commit_once = committed  # type: ignore[assignment]


def main(runs: int, seed: int) -> int:
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as folder,
        VastServer.start(Path(folder) / "vast") as server,
    ):
        came = run_rentals(
            server, Path(folder), runs=runs, seed=seed, tell=lambda line: print(line, flush=True)
        )
    never = set(BOUNDARIES) - came.boundaries.keys() if runs >= 300 else set()
    print(*came.strange[:3], f"boundaries {dict(came.boundaries)}", f"faults {dict(came.fired)}",
          f"never killed at {never}", came, sep="\n")  # fmt: skip
    return 1 if came.wrong or never or not came.killed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
