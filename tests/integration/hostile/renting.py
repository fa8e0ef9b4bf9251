"""Flows that rent, at a stand-in of Vast.ai that lies, beside others' machines.

A machine of the rental writes what it likes into its own folder, another account rents beside, and
a second machine bears the label of one of ours. The stand-in's books are the judge.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from millrace import errors
from millrace.keys.rentals import MACHINES, RentalKeys
from millrace.rentals import (
    LedgerSettings,
    OfferRequest,
    Program,
    Rental,
    RentalSettings,
    RentalTimeouts,
    VastAccount,
    VastClient,
    list_rentals,
    reap,
    release_rental,
)
from millrace.storage import StoreSpec
from millrace.testing.vast import StandInClock, VastServer
from tests.integration.hostile.commands import invoke, settings
from tests.integration.hostile.junk import Junk, Reach, make_junk
from tests.integration.hostile.site import Site

LEASE, REAPED = 180.0, 900.0  # seconds that an owner's lease, and two reapers, are apart
FOREIGN = ("", "somebody's", "millrace/ffffffffffff/fleet/000000/9999999999", "millrace/fleet")
FATES = ("lying", "silent", "failing", "broken", "vanished", "dearer", "raised", "outbid", "")
BLAMED = {
    "lying": "more than its network can transfer",
    "silent": "the machine sent no heartbeat",
    "broken": "could not install the program",
    "vanished": "the provider does not list the machine any more",
    "outbid": "the machine is exited: stopped",
}
"""Words of the report about a machine, by what became of it."""
REFUSED = (errors.BudgetError, errors.MachineError, errors.UnavailableError)
ROOM = 200
MAX_HOURLY = 2.0  # dollars of a machine
MAX_TOTAL = 20.0
_TRAFFIC = 0.05  # dollars of traffic, the most that a made up machine has


@dataclass
class World:
    """An account at a stand-in, the folder that rentals are written down in, and others.

    Attributes:
        site: The site.
        server: The stand-in.
        key: Key of the account.
        foreign: Machines of others with the same account.
        fate: Fate of the cheapest machine.
        planted: Machines that bear the label of one of ours.
        refused: Errors that ended a call which had to end well.
    """

    site: Site
    server: VastServer
    key: str
    foreign: list[int]
    fate: str = ""
    planted: list[int] = field(default_factory=list[int])
    refused: list[str] = field(default_factory=list[str])
    _planting: threading.Lock = field(default_factory=threading.Lock)

    @property
    def store(self) -> StoreSpec:
        return StoreSpec(url=self.folder.as_uri())

    @property
    def folder(self) -> Path:
        return self.site.folder / "store"

    @property
    def account(self) -> VastAccount:
        return VastAccount(api_key=SecretStr(self.key), server_url=self.server.url)

    @property
    def vast(self) -> VastClient:
        return VastClient(SecretStr(self.key), self.server.url, clock=StandInClock(self.server))

    @property
    def stand(self) -> LedgerSettings:
        return LedgerSettings(store=self.store, account=self.account)

    def make_settings(self) -> RentalSettings:
        return RentalSettings(
            name="fleet",
            store=self.store,
            account=self.account,
            request=OfferRequest(
                max_hourly=MAX_HOURLY, max_total=MAX_TOTAL, max_lifetime=timedelta(hours=3)
            ),
            program=Program(repo_url="https://example.org/x", command=("true",)),
            machines=2,
            timeouts=RentalTimeouts(
                startup_timeout=timedelta(minutes=5), poll_interval=timedelta(seconds=30)
            ),
        )

    def list_ours(self) -> list[dict[str, Any]]:
        """Return the machines of ours that are there now, and those that bear their labels."""
        return [one for one in self.server.list_alive() if one["id"] not in self.foreign]

    def list_left(self) -> list[int]:
        """Return the machines that Millrace has rented, and that are there now."""
        with self._planting:
            return [one["id"] for one in self.list_ours() if one["id"] not in self.planted]

    def attempt(self, call: Callable[[], Any], *, ends: bool = False) -> None:
        """Call, and note an error that it must not raise, and what its report must say.

        Args:
            call: Function to call.
            ends: Whether it returns only when the programs of all machines have ended.
        """
        said = ""
        try:
            call()
        except REFUSED as error:
            said = f"{type(error).__name__}: {error}"
            self.site.said.append(said)
        had = any(one["fate"] == self.fate for one in self.server.list_machines()) and self.fate
        if had == "failing" and any(BLAMED["silent"] in line for line in self.site.said):
            had = "silent"  # it has made its own reports unreadable before its program failed
        fails = ends and had == "failing"
        if bool(said) is not fails or (fails and not said.startswith("MachineError")):
            self.refused.append(said or "no error, though a program has failed")
        if ends and had in BLAMED:
            self.site.blamed.append(["rental.released fleet/", BLAMED[had]])
        if fails:
            self.site.blamed.append(["on machine fleet/", "ended with exit code 1"])

    def judge(self, result: Any, until: float, *, attended: bool = False) -> dict[str, Any]:
        """Return a flow's result, and what the books say.

        Args:
            result: Result of the flow.
            until: Time by which all machines must be destroyed, by the stand-in's clock.
            attended: Whether an owner was there all the time, which releases expensive machines.
        """
        books = self.server.list_machines()
        ours = [one for one in books if one["id"] not in self.foreign]
        late = [one["id"] for one in ours if (one["destroyed"] or until + 1) > until]
        gone = [one["id"] for one in books if one["id"] in self.foreign and one["destroyed"]]
        rented = [one for one in ours if one["id"] not in self.planted]
        dear = [
            one["id"] for one in rented
            if attended and one["cost"] > MAX_HOURLY * _hours(one) + _TRAFFIC
        ]  # fmt: skip
        return {
            "result": result, "refused": self.refused, "late": late, "foreign": gone, "dear": dear,
            "overspent": sum(one["cost"] for one in rented) > MAX_TOTAL,
        }  # fmt: skip

    def strike(self) -> None:
        """Have the first machine write what it likes, and others rent beside."""
        if self.site.reach is None:
            return
        mine = RentalKeys("fleet").make_machine_prefix(0)
        genuine = {
            path.relative_to(self.folder).as_posix(): path.read_bytes()
            for path in (self.folder / MACHINES).rglob("*")
            if path.is_file()
        }
        genuine = {key.replace("/000001/", "/000000/"): body for key, body in genuine.items()}
        genuine |= {
            f"{mine}{name}": b"{}" for name in ("beat.json", "ended.json", "log/000000.txt")
        }
        for one in make_junk(Reach((mine,)), genuine, 40, ROOM, self.site.dice):
            self._write(one)
        living = self.list_ours()
        if living:
            label = self.site.dice.choice(living)["label"]
            with self._planting:
                self.planted.append(self.server.plant(label))

    def _write(self, one: Junk) -> None:
        """Write a hostile object as a file, if a file can be called so."""
        path = self.folder / one.key
        if not path.resolve().is_relative_to(self.folder / MACHINES / "fleet" / "000000"):
            return
        with contextlib.suppress(OSError, ValueError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(one.body)
            if one.size is not None:
                os.truncate(path, one.size)
            when = time.time() + one.shift.total_seconds()
            os.utime(path, (when - 86400, when))
            self.site.junk.append(one)
            self.site.unread[str(path)] = (one.kind, path.stat().st_atime)


@contextmanager
def _world(site: Site, **more: Any) -> Iterator[World]:
    evil = site.reach is not None
    with VastServer.start(site.folder / "vast") as server:
        seed = site.dice.randrange(1 << 30) if evil else 0
        fate = site.dice.choice(FATES) if evil else ""
        wanted = {"program": 900.0} | more
        key = server.reset(seed=seed, machines=20, first=fate, **wanted)
        world = World(site, server, key, [server.plant(label) for label in FOREIGN], fate)
        world.folder.mkdir()
        yield world
        site.look_at_files()


def _hours(one: dict[str, Any]) -> float:
    return ((one["destroyed"] or one["created"]) - one["created"]) / 3600


def provision(site: Site) -> Any:
    """Rent two machines, until both programs have ended."""
    with _world(site) as world:

        def use() -> None:
            with Rental(world.make_settings(), vast=world.vast, progress=site.hear) as rental:
                rental.wait_until_ready()
                world.strike()
                rental.wait_until_done()

        world.attempt(use, ends=True)
        end, left = world.server.read_time(), world.list_left()
        _reap_all(world)
        return world.judge(left, end + LEASE + 2 * REAPED, attended=True)


def _left(world: World) -> None:
    def use() -> None:
        with Rental(world.make_settings(), vast=world.vast, detached=True) as rental:
            rental.wait_until_ready()

    world.attempt(use)
    world.strike()


def _reap_all(world: World) -> None:
    for _ in range(16):
        reap(world.stand, vast=world.vast, progress=world.site.hear)
        if not world.list_ours():
            return
        world.server.advance(REAPED)


def reap_instances(site: Site) -> Any:
    """Reap with the key of another account, and then with ours, until all time is over."""
    with _world(site) as world:
        _left(world)
        before = {one["id"] for one in world.list_ours()}
        other = VastClient(
            SecretStr(world.server.open_account()), world.server.url,
            clock=StandInClock(world.server),
        )  # fmt: skip
        seen = reap(world.stand, vast=other)
        kept = {one["id"] for one in world.list_ours()} == before
        end = world.server.read_time() + 3 * 3600
        world.server.advance(3 * 3600)
        _reap_all(world)
        return world.judge([kept, seen.closed_attempts, len(seen.released)], end + 2 * REAPED)


def release_machines(site: Site) -> Any:
    """Release what was left."""
    with _world(site) as world:
        _left(world)
        world.attempt(
            lambda: release_rental(world.stand, "fleet", vast=world.vast, progress=site.hear)
        )
        end, left = world.server.read_time(), world.list_left()
        _reap_all(world)
        return world.judge(left, end + 2 * REAPED)


def list_machines(site: Site) -> Any:
    """List what is rented, and release it."""
    with _world(site) as world:
        _left(world)
        found = list_rentals(world.stand, vast=world.vast)
        site.said += [f"{one.rental} {one.instance.label} {one.release_reason}" for one in found]
        rentals = sorted({one.rental for one in found})
        world.attempt(lambda: release_rental(world.stand, "fleet", vast=world.vast))
        end, left = world.server.read_time(), world.list_left()
        _reap_all(world)
        return world.judge([rentals, left], end + 2 * REAPED)


def command(name: str) -> Callable[[Site], Any]:
    """Return the act of a flow: a command that rents, at a stand-in whose time goes quickly.

    A command waits by this machine's clock, so a machine that says nothing is waited for as short
    as settings allow: five minutes and more, by default, would be taken for a run that hangs.
    """

    def act(site: Site) -> Any:
        with _world(site, rate=200.0, strict=False, program=300.0) as world:
            file = settings(
                site, "rent.yaml", name="fleet", store={"url": world.store.url},
                account={"api_key": world.key, "server_url": world.server.url},
                request={
                    "max_hourly": MAX_HOURLY, "max_total": MAX_TOTAL, "max_lifetime": "PT3H",
                },
                program={"repo_url": "https://example.org/x", "command": ["true"]},
                timeouts={
                    "poll_interval": "PT0.5S", "heartbeat_timeout": "PT30S",
                    "startup_timeout": "PT30S",
                },
            )  # fmt: skip
            words = {
                "rent": [file, "--yes"], "release": ["fleet", file, "--yes"],
                "reap": [file, "--yes"],
            }  # fmt: skip
            codes: list[int] = []
            if name not in {"rent", "offers"}:
                codes.append(invoke(site, ["machine", "rent", file, "--detach", "--yes"])[0])
                world.strike()
            with _striking(world) if name == "rent" else contextlib.nullcontext():
                code, odd = invoke(site, ["machine", name, *words.get(name, [file])])
            # A program that fails ends its rental with 1, unless junk is over what it has told.
            fine = {0, 1} if world.fate == "failing" else {0}
            wrong = [one for one in (*codes, code) if one not in fine]
            left = world.list_left() if name in {"rent", "release"} else []
            end = world.server.read_time()
            _reap_all(world)
            return world.judge([odd, wrong, left], end + 3 * 3600 + 2 * REAPED)

    return act


COMMANDS = ("offers", "rent", "list", "release", "reap")


@contextmanager
def _striking(world: World) -> Iterator[None]:
    """Strike as soon as a machine of the rental has sent a heartbeat.

    Raises:
        AssertionError: None has at the end of the context.
    """
    ended = threading.Event()

    def has_beat() -> bool:
        return any((world.folder / MACHINES / "fleet").glob("*/beat.json"))

    def strike() -> None:
        while not has_beat() and not ended.wait(0.02):
            pass
        assert has_beat(), "no machine was rented that could write anything"
        world.strike()

    with ThreadPoolExecutor(1) as pool:
        striking = pool.submit(strike)
        try:
            yield
        finally:
            ended.set()
        striking.result()
