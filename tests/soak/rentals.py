"""Rent machines from an API that fails, while owners are killed, and count what is left.

The records of the stand-in for Vast.ai are the reference. Each owner and each reaper is a process
that is forked from this one. This process therefore opens no store, because stores start threads.
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
EXPECTED = 3  # exit code after an error that leaves no machine
UNAVAILABLE = 4  # exit code after an error that may leave machines, which the reaper releases
LEASE = 182.0  # time of the owner's lease, and 2 s by which the store's clock may be slow
LISTING_LAG = 180.0  # longest time from a rental to its listing, after which an owner gives up
REAP_INTERVAL = 900.0  # interval between two reapers in seconds
BOUNDARIES = [
    f"{when} {request}"
    for when in ("before", "after")
    for request in ("search", "create", "list", "destroy", "Intent", "Contract", "ReleaseRecord")
]
REQUESTS = {"search_offers": "search", "create_instance": "create", "_list_pages": "list",
            "destroy_instance": "destroy"}  # fmt: skip
MANY_TIMES = {"list": 40}  # largest number of a boundary by request; of the others, 4
FOREIGN = ("", "somebody's", "millrace/ffffffffffff/fleet/000000/9999999999", "millrace/fleet")


@dataclass(slots=True)
class Counts:
    """Counts of all runs.

    Attributes:
        runs: Number of runs.
        killed: Number of owners that were killed.
        boundaries: Number of kills by boundary.
        elsewhere: Number of killed owners that seemed to run on another machine.
        continued: Number of rentals that a second owner continued.
        fired: Number of injected faults of the API by kind.
        rented: Number of machines that were rented.
        fates: Number of own machines by their fates.
        left: Number of own machines that were left after the reapers.
        unavailable: Number of rentals whose last owner ended because the API does not answer.
        left_by_owners: Number of listed machines that an owner left at its end, if it was neither
            killed nor ended because the API does not answer.
        billed_late: Number of machines that were destroyed too late after the end of their last
            owner, as `_is_billed_late` decides.
        lost_foreign: Number of machines of other users that were destroyed.
        overspent: Number of rentals whose owner was not killed, and whose machines cost more than
            the limit. Machines that were listed too late do not count.
        undercounted: Number of rentals whose records have a lower cost than the provider's.
        unexpected: Unexpected ends of owners and reapers.
    """

    runs: int = 0
    killed: int = 0
    boundaries: Counter[str] = field(default_factory=Counter[str])
    elsewhere: int = 0
    continued: int = 0
    fired: Counter[str] = field(default_factory=Counter[str])
    rented: int = 0
    fates: Counter[str] = field(default_factory=Counter[str])
    left: int = 0
    unavailable: int = 0
    left_by_owners: int = 0
    billed_late: int = 0
    lost_foreign: int = 0
    overspent: int = 0
    undercounted: int = 0
    unexpected: list[str] = field(default_factory=list[str])

    @property
    def wrong(self) -> int:
        """Number of all faults."""
        return (
            self.left
            + self.left_by_owners
            + self.billed_late
            + self.lost_foreign
            + self.overspent
            + self.undercounted
            + len(self.unexpected)
        )

    def __str__(self) -> str:
        return (
            f"rentals {self.runs} (killed {self.killed}, of these elsewhere {self.elsewhere}, "
            f"continued {self.continued}, without an answer {self.unavailable}), "
            f"machines {self.rented}: left {self.left}, left by owners {self.left_by_owners}, "
            f"billed late {self.billed_late}, foreign {self.lost_foreign}, "
            f"overspent {self.overspent}, undercounted {self.undercounted}, "
            f"unexpected {len(self.unexpected)}"
        )


def run_rentals(
    server: VastServer, folder: Path, *, runs: int, seed: int, report: Callable[[str], None]
) -> Counts:
    """Run so many rentals with kills, and count the faults.

    Args:
        server: Stand-in for Vast.ai.
        folder: Folder of the stores.
        runs: Number of rentals.
        seed: Seed of all random choices.
        report: Function that is called with a line of progress.
    """
    counts = Counts()
    for number in range(runs):
        _run_rental(server, folder / "store", random.Random(f"{seed} {number}"), counts)
        if (number + 1) % 50 == 0:
            report(str(counts))
    return counts


def _run_rental(server: VastServer, store: Path, generator: random.Random, counts: Counts) -> None:
    """Run a rental with up to two kills of owners, then reapers, and count the faults."""
    store.mkdir()
    key = server.reset(
        seed=generator.randrange(1 << 30), machines=20, fates=FATES, faults=FAULTS,
        program=generator.uniform(100, 900), lag=generator.choice([0.0, 0.0, 20.0]),
        late=generator.choice([90.0, 400.0, 900.0]),
    )  # fmt: skip
    planted = [server.plant(label) for label in FOREIGN]
    text = json.dumps(
        {
            "key": key,
            "url": server.url,
            "store": store.as_uri(),
            "cost": str(store / "cost"),
            "count": generator.choice([1, 1, 2, 3]),
            "interruptible": generator.random() < 0.4,
            "max_total": generator.choice([0.2, 1.0, 20.0]),
        }
    )
    kills = [_draw_boundary(generator)] if generator.random() < 0.9 else []
    if kills and generator.random() < 0.3:
        kills.append(_draw_boundary(generator))
        counts.continued += 1
    killed = _run_owners(server, text, kills, store, counts)
    ended_at = server.read_time()
    if killed and generator.random() < 0.5:
        counts.elsewhere += _move_owner(store)
    _pass_time(server, store, generator.uniform(0, REAP_INTERVAL))
    reaper_runs: list[tuple[float, float]] = []
    for _ in range(8):
        started_at = server.read_time()
        code = _run_in_fork(lambda: _reap_machines(server, text), store)
        reaper_runs.append((started_at, server.read_time()))
        if code not in {0, EXPECTED, UNAVAILABLE}:
            counts.unexpected.append(
                f"a reaper ended with {code}:\n{(store / 'error').read_text()}"
            )
        if not _list_own_machines(server):
            break
        _pass_time(server, store, REAP_INTERVAL)
    _count_faults(server, counts, planted, ended_at, reaper_runs)
    if not killed:
        counts.overspent += _is_overspent(server, json.loads(text)["max_total"])
    counts.undercounted += _is_undercounted(server, store)
    counts.runs += 1
    counts.fired += server.count_fired()
    shutil.rmtree(store)


def _move_owner(store: Path) -> bool:
    """Name another machine in the newest term of the owner's lease, so that only time ends it.

    Returns:
        Whether the owner has such a term.
    """
    terms = sorted(store.glob("**/fleet/lease/owner/*.json"))
    if not terms:
        return False
    envelope = json.loads(terms[-1].read_bytes())
    envelope["record"]["holder"]["machine"] = "another machine"
    at = terms[-1].stat().st_mtime
    terms[-1].write_text(json.dumps(envelope))
    os.utime(terms[-1], (at, at))
    return True


def _pass_time(server: VastServer, store: Path, seconds: float) -> None:
    """Let time pass at the provider, and since the heartbeats of the owner's lease."""
    server.advance(seconds)
    for path in store.glob("**/lease/**/*"):
        if path.is_file():
            at = path.stat().st_mtime - seconds
            os.utime(path, (at, at))


def _draw_boundary(generator: random.Random) -> tuple[str, int]:
    """Return a random boundary, and the number of its occurrence at which the owner is killed."""
    name = generator.choice(BOUNDARIES)
    return name, generator.randrange(1, 1 + MANY_TIMES.get(name.partition(" ")[2], 4))


def _run_owners(
    server: VastServer, text: str, kills: list[tuple[str, int]], store: Path, counts: Counts
) -> bool:
    """Run owners one after another. Returns whether the last one was killed."""
    for boundary in kills or [("", 0)]:
        code = _run_in_fork(lambda boundary=boundary: _rent(server, text, *boundary), store)
        if code == -signal.SIGKILL:
            counts.killed += 1
            counts.boundaries[boundary[0]] += 1
            continue
        if code == UNAVAILABLE:
            counts.unavailable += 1
        elif code in {0, EXPECTED}:
            counts.left_by_owners += sum(map(_is_soon_listed, _list_own_machines(server)))
        else:
            counts.unexpected.append(
                f"an owner ended with {code}:\n{(store / 'error').read_text()}"
            )
        return False
    return bool(kills)


def _list_own_machines(server: VastServer) -> list[dict[str, Any]]:
    return [machine for machine in server.list_alive() if machine["label"] not in FOREIGN]


def _is_soon_listed(machine: dict[str, Any]) -> bool:
    """Decide whether a machine is listed before an owner gives up the search for it."""
    return machine["listed"] - machine["created"] <= LISTING_LAG


def _is_undercounted(server: VastServer, store: Path) -> bool:
    """Decide whether machines have cost more than their release records or their owner say.

    After the kill of an owner, records may be missing until a later reaper.
    """
    billed = Counter[str]()
    for machine in server.list_machines():
        if machine["label"] not in FOREIGN and _is_soon_listed(machine):
            billed[machine["label"].split("/")[3]] += machine["cost"]  # number of the attempt
    recorded = {
        path.name.partition("-")[0]: json.loads(path.read_bytes())["record"]["cost"]
        for path in store.glob("**/fleet/attempts/*-released.json")
    }
    told = store / "cost"  # by an owner that was not killed
    if told.exists() and (
        billed.keys() - recorded.keys() or float(told.read_text()) < sum(billed.values()) - 1e-6
    ):
        return True
    return any(
        recorded[number] < cost - 1e-6 for number, cost in billed.items() if number in recorded
    )


def _count_faults(
    server: VastServer,
    counts: Counts,
    planted: list[int],
    ended_at: float,
    reaper_runs: list[tuple[float, float]],
) -> None:
    machines = server.list_machines()
    own_machines = [machine for machine in machines if machine["label"] not in FOREIGN]
    counts.rented += len(own_machines)
    counts.fates += Counter(machine["fate"] for machine in own_machines)
    counts.left += len(_list_own_machines(server))
    counts.lost_foreign += sum(
        machine["destroyed"] is not None for machine in machines if machine["id"] in planted
    )
    for machine in own_machines:
        counts.billed_late += _is_billed_late(machine, ended_at, reaper_runs)


def _is_overspent(server: VastServer, max_total: float) -> bool:
    """Decide whether machines cost more than the limit. An owner only knows listed machines."""
    own_machines = [one for one in server.list_machines() if one["label"] not in FOREIGN]
    return sum(one["cost"] for one in own_machines if _is_soon_listed(one)) > max_total


def _is_billed_late(
    machine: dict[str, Any], ended_at: float, reaper_runs: list[tuple[float, float]]
) -> bool:
    """Decide whether a machine was destroyed too late after the end of its last owner.

    A reaper can destroy a machine that is listed, and whose owner's lease has ended. A reaper that
    began before cannot, and the next one begins an interval after the end of that one. While a
    reaper runs, it repeats requests that fail, and the time of the stand-in passes. So the time
    outside of reapers is limited to the lease and one interval.

    Args:
        machine: Entry of the stand-in's records.
        ended_at: Time at which the last owner was killed or ended.
        reaper_runs: Begin and end of each reaper, by the stand-in's clock.
    """
    if machine["destroyed"] is None:
        return True
    begin, end = max(ended_at, machine["listed"]), machine["destroyed"]
    reaping = sum(
        max(0.0, min(end, reaper_end) - max(begin, reaper_begin))
        for reaper_begin, reaper_end in reaper_runs
    )
    return end - begin - reaping > LEASE + REAP_INTERVAL


def _run_in_fork(work: Callable[[], None], store: Path) -> int:
    """Do work in a forked process.

    Returns:
        Exit code of the process: `UNAVAILABLE` or `EXPECTED` after such an error, 1 after any
            other.
    """
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    code = 1
    try:
        work()
        code = 0
    except errors.UnavailableError:
        code = UNAVAILABLE
    except (errors.BudgetError, errors.MachineError, errors.NotFoundError):
        code = EXPECTED
    except BaseException:  # noqa: BLE001 - the parent process reports it
        (store / "error").write_text(traceback.format_exc())
    os._exit(code)


def _make_client(server: VastServer, arguments: dict[str, Any]) -> VastClient:
    return VastClient(SecretStr(arguments["key"]), arguments["url"], clock=StandInClock(server))


def _rent(server: VastServer, text: str, boundary: str, number: int) -> None:
    """Rent machines until all programs have ended, or until the kill at a boundary."""
    arguments = json.loads(text)
    _install_kill(boundary, number)
    settings = RentalSettings(
        name="fleet",
        store=StoreSpec(url=arguments["store"]),
        account=VastAccount(api_key=SecretStr(arguments["key"]), server_url=arguments["url"]),
        request=OfferRequest(
            max_hourly=2.0,
            max_total=arguments["max_total"],
            interruptible=arguments["interruptible"],
        ),
        program=Program(repo_url="https://example.org/x", command=("true",)),
        machines=arguments["count"],
        timeouts=RentalTimeouts(
            startup_timeout=timedelta(minutes=5), poll_interval=timedelta(seconds=30)
        ),
    )
    with Rental(settings, vast=_make_client(server, arguments)) as rental:
        rental.wait_until_done()
    Path(arguments["cost"]).write_text(str(rental.cost))


def _reap_machines(server: VastServer, text: str) -> None:
    """Destroy the machines whose owner is dead."""
    arguments = json.loads(text)
    account = VastAccount(api_key=SecretStr(arguments["key"]), server_url=arguments["url"])
    settings = LedgerSettings(store=StoreSpec(url=arguments["store"]), account=account)
    reap(settings, vast=_make_client(server, arguments))


def _install_kill(boundary: str, number: int) -> None:
    """Patch requests and commits so that one of them kills this process before or after itself."""
    reached = Counter[str]()

    def reach_boundary(name: str) -> None:
        reached[name] += 1
        if name == boundary and reached[name] == number:
            os.kill(os.getpid(), signal.SIGKILL)

    send_once, commit_once = VastClient._send_once, machine_starter.commit_once

    def send_at_boundaries(vast: VastClient, work: Any) -> Any:
        method = work.__qualname__.split(".")[1]
        request = REQUESTS.get(method, method)
        reach_boundary(f"before {request}")
        try:
            return send_once(vast, work)
        finally:
            reach_boundary(f"after {request}")

    def commit_at_boundaries(store: Any, key: str, record: Any) -> Any:
        reach_boundary(f"before {type(record).__name__}")
        result = commit_once(store, key, record)
        reach_boundary(f"after {type(record).__name__}")
        return result

    VastClient._send_once = send_at_boundaries  # type: ignore[method-assign]
    machine_starter.commit_once = destroy.commit_once = commit_at_boundaries  # type: ignore[assignment]


def main(runs: int, seed: int) -> int:
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as folder,
        VastServer.start(Path(folder) / "vast") as server,
    ):
        counts = run_rentals(
            server, Path(folder), runs=runs, seed=seed, report=lambda line: print(line, flush=True)
        )
    happened = counts.boundaries.keys() | counts.fates.keys() | counts.fired.keys()
    wanted = {*BOUNDARIES, *FATES, *FAULTS} - {"dearer"}  # the stand-in forgets this fate
    never = wanted - happened if runs >= 300 else set()
    is_covered = not never and counts.killed and (counts.elsewhere or runs < 300)
    print(*counts.unexpected[:3], f"boundaries {dict(counts.boundaries)}",
          f"faults {dict(counts.fired)}", f"fates {dict(counts.fates)}",
          f"never happened {never}", counts, sep="\n")  # fmt: skip
    return 0 if is_covered and not counts.wrong else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
