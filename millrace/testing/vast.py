"""Vast.ai's HTTP API, as much of it as renting takes: a process of its own, that keeps the books.

It outlives its clients, has a clock of its own, and is the judge of what was left and billed. What
it answers is what the API was seen to answer: paths, strings for values, fields that are null,
pages, statuses and bodies of errors, 429 below an interval. Faults are injected by a seed, and
counted. A rented machine is either made up, which then writes into the folder that it was given
what a real one would, or run for real: its onstart as a process of this machine, in a folder of
its own, with nothing of our environment.

It knows nothing of Millrace, but for the made up machines: what those write is what a rented
machine writes.
"""

import argparse
import asyncio
import base64
import contextlib
import itertools
import json
import os
import random
import re
import secrets
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from millrace.testing.process import Child, ask, free_ports, python_module

CONTROL = "/-/"
HOUR = 3600.0
EPOCH = 1_800_000_000.0  # where the clock begins
INTERVALS = {"create": 4.5, "destroy": 3.0, "list": 1.0, "search": 6.0, "show": 2.0, "label": 1.0}
REFUSALS: dict[str, tuple[int, Any]] = {
    "error500": (500, {"success": False, "error": "internal", "msg": "oops"}),
    "error502": (502, "<html>Bad Gateway</html>"),
    "text429": (429, "API requests too frequent endpoint threshold=4.5"),
    "json429": (429, {"detail": "Too many requests"}),
    "quota": (429, {"success": False, "error": "search_quota_exceeded", "msg": "daily"}),
}
LISTS: dict[str, Any] = {  # what a list of instances is answered with, with status 200
    "unsuccessful list": {
        "success": False, "error": "db", "msg": "timeout", "instances": [], "total_instances": 0,
    },
    "null list": {"success": True, "instances": None, "total_instances": 0},
    "no list": {"success": True, "total_instances": 0},
    "object list": {"success": True, "instances": {}, "total_instances": 0},
    "bare list": [],
}  # fmt: skip
FAULTS = {
    *REFUSALS, *LISTS, "lost", "lost, listed late", "cut", "slow", "refused", "part", "gone",
    "low bid", "low bid, 400",
}  # fmt: skip


class VastServer:
    """A running server. Made by `VastServer.start`; a context manager that stops it.

    Attributes:
        url: ``http://127.0.0.1:PORT``.
    """

    def __init__(self, child: Child, port: int, folder: Path) -> None:
        """Describe a server that runs already; `start` runs it."""
        self.url = f"http://127.0.0.1:{port}"
        self._child = child
        self._clock = _SharedClock(folder)

    @classmethod
    def start(cls, folder: Path) -> Self:
        """Start a server; it serves when this returns."""
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "vast.log"
        child = python_module("millrace.testing.vast", "--folder", str(folder), log=log)
        return cls(child, child.announced()["port"], folder)

    def reset(self, **world: Any) -> str:
        """Begin anew, and return the account's API key. See `World` for what may be said."""
        return self.ask("reset", world)["key"]

    def now(self) -> float:
        """The time by its clock, in seconds since 1970."""
        return self._clock.now()

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.ask("advance", {"seconds": seconds})

    def books(self) -> list[dict[str, Any]]:
        """Every machine that ever was: whose, when, what it cost."""
        return self.ask("books", {})["instances"]

    def alive(self) -> list[dict[str, Any]]:
        """The machines that there are now."""
        return [one for one in self.books() if one["destroyed"] is None]

    def requests(self) -> list[dict[str, Any]]:
        """Every request since `reset`, with its body and what was answered."""
        return self.ask("requests", {})["requests"]

    def fired(self) -> Counter[str]:
        """Return how often each fault was injected."""
        return Counter(self.ask("fired", {}))

    def fail_next(self, count: int, fault: str, call: str = "") -> None:
        """Have the next requests (of one kind) fail so."""
        self.ask("fail", {"count": count, "fault": fault, "call": call})

    def befall(self, instance: int, fate: str) -> None:
        """Have something happen to a machine: see `Instance.fate`."""
        self.ask("befall", {"instance": instance, "fate": fate})

    def second_account(self) -> str:
        """Open another account; its key."""
        return self.ask("account", {})["key"]

    def plant(self, label: str) -> int:
        """Have somebody else, with the same account, rent a machine; its number."""
        return self.ask("plant", {"label": label})["id"]

    def ask(self, verb: str, body: dict[str, Any]) -> Any:
        """Ask what no client of the API can."""
        return ask(f"{self.url}{CONTROL}{verb}", body)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.stop()
        self._clock.close()


class _SharedClock:
    """Clock in a file, which one process sets and others read: rentals read the time very often.

    Args:
        folder: Folder of the server.
    """

    _FORMAT = struct.Struct("dd")  # time at the zero of the monotonic clock, and the rate

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "clock", os.O_RDWR | os.O_CREAT)

    def set(self, now: float, rate: float) -> None:
        """Set the time, in seconds since 1970, and how fast it passes."""
        os.pwrite(self._file, self._FORMAT.pack(now - time.monotonic() * rate, rate), 0)

    def now(self) -> float:
        """Return the time in seconds since 1970."""
        zero, rate = self._FORMAT.unpack(os.pread(self._file, self._FORMAT.size, 0))
        return zero + time.monotonic() * rate

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class StandInClock:
    """The server's clock, for a client that rents by it: waiting lets its time pass."""

    def __init__(self, server: VastServer) -> None:
        self._server = server

    def now(self) -> datetime:
        return datetime.fromtimestamp(self._server.now(), UTC)

    def monotonic(self) -> float:
        return self._server.now()

    def sleep(self, seconds: float) -> None:
        self._server.advance(seconds)


# -- the server's side


@dataclass
class Machine:
    """A host, and what it asks for."""

    id: int
    gpu: str
    gpus: int
    memory: float
    dph: float
    storage: float  # dollars a GB a month
    down_cost: float
    up_cost: float
    place: str
    reliability: float
    loading: float
    rented: bool = False
    fate: str = ""

    def offer(self, ask: int, disk: float) -> dict[str, Any]:
        """As a search shows it."""
        return {
            "id": ask,
            "ask_contract_id": ask,
            "machine_id": self.id,
            "gpu_name": self.gpu,
            "num_gpus": self.gpus,
            "gpu_ram": self.memory * 1000,
            "dph_base": self.dph,
            "dph_total": self.total(disk),
            "min_bid": round(self.dph * 0.6, 4),
            "storage_cost": self.storage,
            "inet_down": 800.0,
            "inet_up": 400.0,
            "inet_down_cost": self.down_cost,
            "inet_up_cost": self.up_cost,
            "disk_space": 500.0,
            "duration": 30 * 24 * HOUR,
            "direct_port_count": 20,
            "reliability": self.reliability,
            "reliability2": self.reliability,
            "geolocation": self.place,
            "verified": True,
            "verification": "verified",
            "rentable": not self.rented,
            "rented": self.rented,
            "external": False,
            "hosting_type": 0,
            "score": self.reliability * 100,
        }

    def total(self, disk: float) -> float:
        return self.dph + self.storage * disk / 730


@dataclass
class Instance:
    """A machine that was rented.

    Attributes:
        fate: What becomes of it: ``exited``, ``offline``, ``unknown``, ``oci``, ``stuck``,
            ``outbid``, ``silent`` (it runs, and says nothing), ``failing`` (its program does),
            ``broken`` (nothing can be installed), ``raised`` (it costs half as much again as was
            offered), ``dearer``, ``vanished``, ``lying`` (about what it has moved); empty: nothing.
        lag: Seconds after its creation in which the listing does not show it.
    """

    id: int
    key: str
    machine: Machine
    body: dict[str, Any]
    created: float
    hourly: float
    storage_hourly: float
    fate: str = ""
    lag: float = 0.0
    account: int = 1
    stopped: bool = False
    running: float | None = None
    destroyed: float | None = None
    by: str = ""
    cost: float = 0.0
    billed: float = 0.0
    beats: int = 0
    ended: bool = False
    process: "subprocess.Popen[bytes] | None" = None
    home: Path | None = None
    port: int = 0

    @property
    def ports(self) -> list[int]:
        """Ports that the machine was rented with (``-p 8080:8080``)."""
        found = (re.fullmatch(r"-p (\d+):\1", name) for name in self.body.get("env", {}))
        return [int(match[1]) for match in found if match]

    @property
    def label(self) -> str:
        return self.body.get("label") or ""

    @property
    def order(self) -> dict[str, Any] | None:
        """Command for the machine, if there was one."""
        text = self.body.get("env", {}).get("MILLRACE_CONFIG")
        return json.loads(base64.b64decode(text)) if text else None

    def bill(self, now: float) -> None:
        """Charge what has come to be due since the last time."""
        end = now if self.destroyed is None else min(now, self.destroyed)
        hours = max(0.0, end - self.billed) / HOUR
        running = self.running is not None and not self.stopped
        self.cost += hours * (self.hourly if running else self.storage_hourly)
        self.billed = end

    def row(self, now: float) -> dict[str, Any]:
        """As the listing shows it; fields that it has not yet are null."""
        status, message = self.status(now)
        state = "stopped" if self.stopped else "running"
        up = status == "running"
        return {
            "id": self.id,
            "label": self.label or None,
            "machine_id": self.machine.id,
            "actual_status": status,
            "cur_state": state,
            "intended_status": state,
            "next_state": state,
            "status_msg": message,
            "dph_total": self.hourly,
            "is_bid": self.body.get("price") is not None,
            "min_bid": round(self.machine.dph * 0.6, 4),
            "image_uuid": self.body.get("image"),
            "extra_env": [[name, value] for name, value in self.body.get("env", {}).items()],
            "start_date": self.running,
            "end_date": None,
            "public_ipaddr": "127.0.0.1" if up else None,
            "ports": self._mapped() if up else None,
            "ssh_host": "127.0.0.1",
            "ssh_port": 40022,
        }

    def _mapped(self) -> dict[str, Any]:
        """From 70000 on a port is drawn, and the same inside and outside."""
        outside = {22: 40022} | {port: 40000 + port % 1000 for port in self.ports if port < 70000}
        if max(self.ports, default=0) >= 70000:
            outside[self.port] = self.port
        return {
            f"{inside}/tcp": [{"HostIp": "0.0.0.0", "HostPort": str(port)}]
            for inside, port in outside.items()
        }

    def status(self, now: float) -> tuple[str | None, str | None]:
        if self.stopped:
            return "exited", "stopped"
        if self.fate in {"exited", "offline", "unknown"}:
            return self.fate, f"Error: the container is {self.fate}"
        if self.fate == "oci":
            return "created", "Error response from daemon: OCI runtime create failed: runc"
        if self.running is not None:
            return "running", "success, running python:3.11"
        age = now - self.created
        return (None, None) if age < 5 else ("loading", "Pulling from library/python ")


@dataclass
class World:
    """World that a test begins with.

    Attributes:
        seed: Of all that is drawn.
        machines: How many hosts there are.
        fates: What becomes of machines, and how likely each is.
        first: What becomes of the machine that costs least.
        faults: How likely each fault of a request is: see ``FAULTS``.
        program: Seconds that a made up program runs.
        rate: How fast the clock goes by itself: 0 only when it is told to.
        real: Whether machines are run for real.
        image: Where the packages are that a real machine's image has, for its Python to find.
        index: Whether a machine with such an image may fetch further packages from pip's index.
        credit: Dollars of the account; none left, and nothing can be rented.
        lag: Seconds after which a machine comes to be seen in the listing.
        late: The same for a machine whose create is ``lost, listed late``.
        strict: Whether requests below the interval are refused.
    """

    seed: int = 0
    machines: int = 12
    fates: dict[str, float] = field(default_factory=dict)
    first: str = ""
    faults: dict[str, float] = field(default_factory=dict)
    program: float = 1e9
    rate: float = 0.0
    real: bool = False
    image: str = ""
    index: bool = False
    credit: float = 100.0
    lag: float = 0.0
    late: float = 90.0
    strict: bool = True


class _RefusedError(Exception):
    def __init__(self, status: int, body: Any) -> None:
        super().__init__(status, body)
        self.status, self.body = status, body


@dataclass
class _Server:
    folder: Path
    clock: _SharedClock
    world: World = field(default_factory=World)
    key: str = ""
    others: dict[str, int] = field(default_factory=dict)  # accounts, by their keys
    drawing: random.Random = field(default_factory=random.Random)
    machines: dict[int, Machine] = field(default_factory=dict)
    asks: dict[int, int] = field(default_factory=dict)
    instances: dict[int, Instance] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)
    counted: Counter[str] = field(default_factory=Counter)
    failing: list[dict[str, Any]] = field(default_factory=list)
    numbers: Any = field(default_factory=lambda: itertools.count(1000))

    # -- time, and what it brings

    @property
    def now(self) -> float:
        return self.clock.now()

    def pass_time(self, seconds: float) -> None:
        """Set the clock forward."""
        self.clock.set(self.now + seconds, self.world.rate)

    def tick(self) -> None:
        """Let happen what has come due."""
        now = self.now
        for one in self.instances.values():
            if one.destroyed is not None:
                continue
            up = one.created + one.machine.loading
            fails = one.fate in {"exited", "offline", "unknown", "oci", "stuck"}
            if one.running is None and not one.stopped and not fails and now >= up:
                one.bill(up)
                one.running = up
                self._come_up(one)
            if one.running is not None and not one.stopped:
                self._live(one, now)
            one.bill(now)

    def _come_up(self, one: Instance) -> None:
        if self.world.real:
            one.home = self.folder / f"{self.key[-8:]}-{one.id}"
            (one.port,) = free_ports(1)
            one.process = _run(one, one.home, self.world)
        elif one.order:
            state = {"state": "failed", "detail": "pip: no such package"}
            _write(one, "setup.json", state if one.fate == "broken" else {"state": "starting"})

    def _live(self, one: Instance, now: float) -> None:
        """Drawn description of a machine, and faults of all machines."""
        assert one.running is not None
        if one.fate == "outbid" and now >= one.running + 60:
            one.bill(now)
            one.stopped = True
            self._end(one)
            return
        if one.fate == "vanished" and now >= one.running + 60:
            self.destroy(one, "the host")
            return
        if one.fate == "dearer" and now >= one.running + 60:
            one.bill(now)
            one.hourly, one.fate = one.hourly * 10, ""
        if self.world.real or not one.order or one.ended or one.fate == "broken":
            return
        if one.fate == "silent" and now >= one.running + 60:
            return
        if not one.beats:  # what it says that it has moved, a GB and a tenth of one
            one.cost += one.machine.down_cost + one.machine.up_cost / 10
        one.beats += 1
        lies = one.fate == "lying"
        moved = {"received": 10**15, "sent": 10**15} if lies else {"received": 10**9, "sent": 10**8}
        _write(one, "beat.json", {"number": one.beats, **moved})
        if now >= one.running + self.world.program:
            one.ended = True
            _write(one, "log/000000.txt", "the last words\n")
            _write(one, "ended.json", {"code": 1 if one.fate == "failing" else 0, "seconds": 1.0})

    def destroy(self, one: Instance, by: str) -> None:
        one.bill(self.now)
        one.destroyed, one.by = self.now, by
        one.machine.rented = False
        self._end(one)

    def _end(self, one: Instance) -> None:
        if one.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()
            one.process = None
        if one.home is not None:
            shutil.rmtree(one.home, ignore_errors=True)

    # -- what a test asks

    async def control(self, request: web.Request) -> web.Response:
        body = await request.json()
        match request.match_info["verb"]:
            case "reset" | "account" as verb:
                answer: Any = {"key": self.reset(World(**body)) if verb == "reset" else self.open()}
            case "advance":
                self.pass_time(body["seconds"])
                self.tick()
                answer = {}
            case "books":
                self.tick()
                answer = {"instances": [self._entry(one) for one in self.instances.values()]}
            case "requests":
                answer = {"requests": self.log}
            case "fired":
                answer = self.counted
            case "fail":
                self.failing = [one for one in self.failing if one["count"]] + [body]
                answer = {}
            case "calm":
                self.failing, answer = [], {}
            case "label":
                self.instances[body["instance"]].body["label"] = body["label"]
                answer = {}
            case "befall":
                one = self.instances[body["instance"]]
                one.fate = body["fate"]
                self.tick()
                answer = {}
            case "plant":
                machine = Machine(next(self.numbers), "RTX 4090", 1, 24.0, 0.4, 0.1, 0, 0, "DE",
                                  0.99, 30.0)  # fmt: skip
                answer = {"id": self._rented(machine, {"label": body["label"], "disk": 10}).id}
            case verb:
                raise web.HTTPNotFound(text=verb)
        return web.json_response(answer)

    def _entry(self, one: Instance) -> dict[str, Any]:
        return {
            "id": one.id,
            "label": one.label,
            "machine": one.machine.id,
            "created": one.created,
            "listed": one.created + one.lag,
            "running": one.running,
            "destroyed": one.destroyed,
            "by": one.by,
            "cost": one.cost,
            "fate": one.fate,
            "stopped": one.stopped,
            "process": one.process.pid if one.process else None,
            "key": one.key,
            "home": str(one.home) if one.home else None,
            "body": one.body,
        }

    def open(self) -> str:
        """Open another account; its key."""
        key = f"account-{secrets.token_hex(16)}"
        self.others[key] = len(self.others) + 2
        return key

    def reset(self, world: World) -> str:
        for one in self.instances.values():
            self._end(one)
        unknown = set(world.faults) - FAULTS
        assert not unknown, unknown
        vars(self).update(vars(_Server(self.folder, self.clock, world)))
        self.drawing = random.Random(world.seed)
        self.key = f"account-{secrets.token_hex(16)}"
        self.clock.set(EPOCH, world.rate)
        for _ in range(world.machines):
            draw = self.drawing
            place = draw.choice(["Texas, US", "Bavaria, DE", "Ontario, CA", "Tokyo, JP"])
            loading = draw.uniform(20, 120) * (not world.real)
            machine = Machine(
                next(self.numbers), draw.choice(["RTX 4090", "RTX 4090", "H100 SXM"]), 1, 24.0,
                round(draw.uniform(0.2, 0.9), 4), round(draw.uniform(0.05, 0.3), 3),
                round(draw.uniform(0, 0.02), 4), round(draw.uniform(0, 0.03), 4), place,
                round(draw.uniform(0.955, 0.999), 4), loading,
            )  # fmt: skip
            fates = list(world.fates)
            drawn = draw.choices([*fates, ""], [*world.fates.values(),
                                                1 - sum(world.fates.values())])  # fmt: skip
            machine.fate = drawn[0]
            self.machines[machine.id] = machine
        if world.first:
            least = min(self.machines.values(), key=lambda machine: machine.total(40.0))
            least.fate = world.first
        return self.key

    # -- what a client asks

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._answer])
        numbered = "{id:\\d+}"
        app.add_routes(
            [
                web.post(CONTROL + "{verb}", self.control),
                web.post("/api/v0/bundles/", self.search),
                web.put(f"/api/v0/asks/{numbered}/", self.create),
                web.get("/api/v0/instances/", self.retired),
                web.get("/api/v1/instances/", self.list),
                web.get(f"/api/v0/instances/{numbered}/", self.show),
                web.put(f"/api/v0/instances/{numbered}/", self.change),
                web.delete(f"/api/v0/instances/{numbered}/", self.delete),
                web.get("/api/v0/users/current", self.user),
                web.get("/api/v0/users/current/", self.user),
            ]
        )
        return app

    @web.middleware
    async def _answer(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path.startswith(CONTROL):
            return await handler(request)
        self.tick()
        body = await request.json() if request.can_read_body else None
        call = handler.__name__
        entry = {"method": request.method, "path": request.path, "query": dict(request.query),
                 "body": body, "call": call, "fault": "", "at": self.now}  # fmt: skip
        self.log.append(entry)
        fault = self._fault(call)
        entry["fault"] = fault
        if fault:
            self.counted[fault] += 1
        try:
            response = await self._faulty(fault, request, handler, call)
        except _RefusedError as refused:
            response = _response(refused)
        entry["status"] = response.status if response is not None else None
        if response is None:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        return response

    async def _faulty(
        self, fault: str, request: web.Request, handler: Any, call: str
    ) -> web.Response | None:
        """Answer, with a fault or without; None: the connection is closed."""
        self._pace(call)
        if fault in REFUSALS:
            raise _RefusedError(*REFUSALS[fault])
        if fault == "cut":
            return None
        if fault == "lost" or (fault == "lost, listed late" and call == "create"):
            with contextlib.suppress(_RefusedError):
                answer = json.loads((await handler(request)).text)
                if fault != "lost":
                    self.instances[answer["new_contract"]].lag = self.world.late
            return None
        if fault in LISTS and call == "list":
            return web.json_response(LISTS[fault])
        return await self._changed(fault, request, handler, call)

    async def _changed(
        self, fault: str, request: web.Request, handler: Any, call: str
    ) -> web.Response:
        """Answer otherwise than without the fault."""
        match fault:
            case "refused" if call in {"delete", "create"}:
                return web.json_response({"success": False, "error": "busy", "msg": "try again"})
            case "gone" if call == "create":
                raise _refused(410, "no_such_ask", "error 410/3907: no_such_ask")
            case "low bid" | "low bid, 400" if call == "create":
                answer = json.loads((await handler(request)).text)
                self.instances[answer["new_contract"]].stopped = True
                said = {"success": False, "error": "bid_too_low", "msg": "the bid is too low"}
                status = 400 if fault.endswith("400") else 200
                return web.json_response({**answer, **said}, status=status)
            case "part" if call == "list":
                page = json.loads((await handler(request)).text)
                page["instances"] = page["instances"][:-1]
                page["next_token"] = None
                page["total_instances"] = max(1, page["total_instances"])
                return web.json_response(page)
            case "slow":
                self.pass_time(40.0)
        return await handler(request)

    def _fault(self, call: str) -> str:
        for one in self.failing:
            if one["count"] and one["call"] in {"", call}:
                one["count"] -= 1
                return one["fault"]
        drawn = self.drawing.random()
        for fault, likely in self.world.faults.items():
            if drawn < likely:
                return fault
            drawn -= likely
        return ""

    def _pace(self, call: str) -> None:
        name = {"delete": "destroy", "change": "label"}.get(call, call)
        interval = INTERVALS.get(name, 0.0)
        before = self.last.get(name, float("-inf"))
        if self.world.strict and self.now - before < interval - 0.01:
            self.counted["too frequent"] += 1
            raise _RefusedError(429, f"API requests too frequent endpoint threshold={interval}")
        self.last[name] = self.now

    def _who(self, request: web.Request) -> str:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        mine = next((one for one in self.instances.values() if one.key == token), None)
        if token != self.key and token not in self.others and mine is None:
            raise _refused(401, "auth_error", "Invalid user key")
        return "" if mine is None else str(mine.id)

    def _account(self, request: web.Request) -> int:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return self.others.get(token, 1)

    async def search(self, request: web.Request) -> web.Response:
        self._who(request)
        query = await request.json()
        disk, limit = float(query.pop("allocated_storage")), int(query.pop("limit", 64))
        order, kind = query.pop("order"), query.pop("type")
        assert kind in {"on-demand", "bid", "reserved"}, kind
        found: list[dict[str, Any]] = []
        for machine in self.machines.values():
            ask = next(self.numbers)
            offer = machine.offer(ask, disk)
            if all(_fits(offer, name, conditions) for name, conditions in query.items()):
                self.asks[ask] = machine.id
                found.append(offer)
        for name, direction in reversed(order):
            found.sort(key=lambda offer, name=name: offer[name], reverse=direction == "desc")
        return web.json_response({"offers": found[:limit]})

    async def create(self, request: web.Request) -> web.Response:
        self._who(request)
        ask, body = int(request.match_info["id"]), await request.json()
        machine = self.machines.get(self.asks.get(ask, 0))
        if machine is None or machine.rented:
            if body.get("cancel_unavail"):
                raise _refused(410, "no_such_ask", f"error 410/3907: no_such_ask {ask}")
            raise _refused(
                404,
                "invalid_args",
                f"error 404/3603: no_such_ask Instance type by id {ask} is not available.",
            )
        if self.world.credit <= sum(one.cost for one in self.instances.values()):
            raise _refused(400, "insufficient_credit", "Your account lacks credit")
        if not body.get("image") or float(body.get("disk") or 0) < 8:
            raise _refused(400, "invalid_args", "image, disk")
        size = sum(len(name) + len(value) for name, value in body["env"].items())
        if size > 32768 or len(body.get("onstart") or "") > 4096 or len(body["label"] or "") > 256:
            raise _refused(400, "invalid_args", "too long")
        one = self._rented(machine, body)
        one.account = self._account(request)
        price = body.get("price")
        if price is not None and price < machine.dph * 0.6:
            one.stopped = True
            said = {"success": False, "error": "bid_too_low", "msg": "the bid is too low"}
            return web.json_response({**said, "new_contract": one.id})
        return web.json_response({"success": True, "new_contract": one.id})

    def _rented(self, machine: Machine, body: dict[str, Any]) -> Instance:
        machine.rented = True
        disk = float(body["disk"])
        price = body.get("price")
        hourly = machine.total(disk) if price is None else price + machine.storage * disk / 730
        if machine.fate == "raised":
            hourly *= 1.5
        one = Instance(
            next(self.numbers), f"instance-{secrets.token_hex(16)}", machine, body, self.now,
            hourly, machine.storage * disk / 730, fate=machine.fate, lag=self.world.lag,
            billed=self.now,
        )  # fmt: skip
        self.instances[one.id] = one
        return one

    async def retired(self, request: web.Request) -> web.Response:
        raise _refused(410, "deprecated_endpoint", "Use /api/v1/instances/")

    async def list(self, request: web.Request) -> web.Response:
        if self._who(request):
            raise _refused(403, "forbidden", "not your own")
        limit = int(request.query.get("limit", 25))
        after = int(request.query.get("after_token", 0))
        there = sorted(
            (one for one in self.instances.values()
             if one.destroyed is None and self.now >= one.created + one.lag
             and one.account == self._account(request)),
            key=lambda one: one.id,
        )  # fmt: skip
        page = [one for one in there if one.id > after][:limit]
        more = bool(page) and page[-1].id != there[-1].id
        return web.json_response(
            {
                "success": True,
                "instances": [one.row(self.now) for one in page],
                "next_token": str(page[-1].id) if more else None,
                "total_instances": len(there),
            }
        )

    def _mine(self, request: web.Request) -> Instance:
        who, number = self._who(request), request.match_info["id"]
        one = self.instances.get(int(number))
        if who and who != number:
            raise _refused(403, "forbidden", "not your own")
        theirs = one is not None and not who and one.account != self._account(request)
        if one is None or one.destroyed is not None or theirs:
            raise _refused(404, "no_such_instance", f"Instance {number} not found.")
        return one

    async def show(self, request: web.Request) -> web.Response:
        return web.json_response({"instances": self._mine(request).row(self.now)})

    async def change(self, request: web.Request) -> web.Response:
        one, body = self._mine(request), await request.json()
        one.body["label"] = body.get("label", one.label)
        return web.json_response({"success": True})

    async def delete(self, request: web.Request) -> web.Response:
        one = self._mine(request)
        self.destroy(one, "itself" if self._who(request) else "the account")
        return web.json_response({"success": True})

    async def user(self, request: web.Request) -> web.Response:
        self._who(request)
        spent = sum(one.cost for one in self.instances.values())
        return web.json_response(
            {"id": self._account(request), "credit": self.world.credit - spent, "balance": 0}
        )


def _refused(status: int, code: str, said: str) -> _RefusedError:
    return _RefusedError(status, {"success": False, "error": code, "msg": said})


def _response(refused: _RefusedError) -> web.Response:
    if isinstance(refused.body, str):
        return web.Response(status=refused.status, text=refused.body)
    return web.json_response(refused.body, status=refused.status)


def _fits(offer: dict[str, Any], name: str, conditions: dict[str, Any]) -> bool:
    """Decide whether an offer matches a filter. Values may be strings, as the SDK sends them."""
    have = offer[name]  # a filter by a field that there is not is a mistake
    for sign, wanted in conditions.items():
        if name == "geolocation":
            place = have.rpartition(", ")[2]
            if (place in wanted) is not (sign == "in"):
                return False
            continue
        if isinstance(have, (int, float)) and isinstance(wanted, str):
            wanted = wanted.lower() == "true" if isinstance(have, bool) else float(wanted)  # noqa: PLW2901
        held = {
            "eq": lambda a, b: a == b,
            "neq": lambda a, b: a != b,
            "gt": lambda a, b: a > b,
            "gte": lambda a, b: a >= b,
            "lt": lambda a, b: a < b,
            "lte": lambda a, b: a <= b,
            "in": lambda a, b: a in b,
            "notin": lambda a, b: a not in b,
        }[sign](have, wanted)
        if not held:
            return False
    return True


def _write(one: Instance, name: str, body: Any) -> None:
    """Write what a machine says into the folder that it was given."""
    order = one.order
    assert order is not None
    path = Path(order["store"]["url"].removeprefix("file://")) / order["prefix"] / name
    path.parent.mkdir(parents=True, exist_ok=True)
    text = body if isinstance(body, str) else json.dumps(body)
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.replace(path)


def _run(one: Instance, home: Path, world: World) -> "subprocess.Popen[bytes]":
    """Run a machine's onstart: in a folder and a process namespace of its own, with a clean
    environment. All that it starts ends with it.
    """
    home.mkdir(parents=True, exist_ok=True)
    variables = {
        name: value for name, value in one.body["env"].items() if re.fullmatch(r"\w+", name)
    }
    environment = {
        "PATH": f"{sys.base_prefix}/bin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "CONTAINER_ID": str(one.id),
        "CONTAINER_API_KEY": one.key,
        "GPU_COUNT": "0",
        **variables,
        **{f"VAST_TCP_PORT_{port}": str(one.port) for port in one.ports},
        **_image(world),
    }
    script = f"{one.body['onstart']}\nwait\nexec sleep infinity"
    with (home / "onstart.log").open("ab") as log:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", *_apart(), "bash", "-c", script],
            cwd=home, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip


def _image(world: World) -> dict[str, str]:
    """Return the environment of an image with packages, setuptools among them.

    pip finds the packages there. Without an index it asks none.
    """
    if not world.image:
        return {}
    packages = {"PYTHONPATH": world.image}
    if world.index:
        return packages
    return packages | {
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it the other way round: no isolation
        "PIP_CONFIG_FILE": os.devnull,
    }


@cache
def _apart() -> tuple[str, ...]:
    """Return the prefix of a command that runs in its own process namespace, if possible."""
    apart = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    for ways in (apart, ("unshare", "--user", "--map-root-user", *apart[1:])):
        if subprocess.run([*ways, "true"], capture_output=True, check=False).returncode == 0:
            return ways
    return ()


async def _serve(folder: Path) -> None:
    server = _Server(folder, _SharedClock(folder))
    server.reset(World())
    runner = web.AppRunner(server.application())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(json.dumps({"port": runner.addresses[0][1]}), flush=True)
    try:
        while True:
            await asyncio.sleep(0.5)
            if server.world.rate:
                server.tick()
    finally:
        for one in server.instances.values():
            server._end(one)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    asyncio.run(_serve(parser.parse_args().folder))
