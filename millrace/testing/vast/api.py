"""Handlers of the requests of the API and of tests."""

import asyncio
import contextlib
import json
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from millrace.testing.vast.books import MachineBooks
from millrace.testing.vast.clock import ClockFile
from millrace.testing.vast.faults import (
    CONTROL,
    INTERVALS,
    LISTS,
    REFUSALS,
    VastRefusedError,
    make_refusal,
)
from millrace.testing.vast.machines import StandInInstance, StandInMachine
from millrace.testing.vast.running import end_process
from millrace.testing.vast.world import World

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq, "neq": operator.ne, "gt": operator.gt, "gte": operator.ge,
    "lt": operator.lt, "lte": operator.le,
    "in": lambda have, wanted: have in wanted, "notin": lambda have, wanted: have not in wanted,
}  # fmt: skip


@dataclass
class VastApplication:
    """Handler of the requests of the API and of tests.

    Attributes:
        books: State behind the API.
        last: Time of the last admitted request, by API key and kind.
        log: Requests since the last reset.
        counted: Number of injections of each fault.
        failing: Faults for the next requests.
    """

    books: MachineBooks
    last: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    log: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    counted: Counter[str] = field(default_factory=Counter[str])
    failing: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def _reset(self, world: World) -> str:
        """Clear all state, start with a new world, and return the API key of the account."""
        key = self.books.reset(world)
        vars(self).update(vars(VastApplication(self.books)))
        return key

    async def handle_control(self, request: web.Request) -> web.Response:
        """Answer a request of a test, which the API does not have."""
        body = await request.json()
        match request.match_info["verb"]:
            case "reset" | "account" as verb:
                answer: Any = {
                    "key": self._reset(World(**body))
                    if verb == "reset"
                    else self.books.open_account()
                }
            case "advance":
                self.books.pass_time(body["seconds"])
                self.books.tick()
                answer = {}
            case "books":
                self.books.tick()
                answer = {
                    "instances": [
                        self.books.make_entry(one) for one in self.books.instances.values()
                    ]
                }
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
                self.books.instances[body["instance"]].body["label"] = body["label"]
                answer = {}
            case "befall":
                one = self.books.instances[body["instance"]]
                one.fate = body["fate"]
                self.books.tick()
                answer = {}
            case "plant":
                machine = StandInMachine(
                    next(self.books.numbers), "RTX 4090", 1, 24.0, 0.4, 0.1, 0, 0, "DE", 0.99, 30.0
                )
                answer = {"id": self.books.rent(machine, {"label": body["label"], "disk": 10}).id}
            case verb:
                raise web.HTTPNotFound(text=verb)
        return web.json_response(answer)

    def make_application(self) -> web.Application:
        """Return the application with all routes."""
        app = web.Application(middlewares=[self._answer])
        numbered = "{id:\\d+}"
        app.add_routes(
            [
                web.post(CONTROL + "{verb}", self.handle_control),
                web.post("/api/v0/bundles/", self.search),
                web.put(f"/api/v0/asks/{numbered}/", self.create),
                web.get("/api/v0/instances/", self.refuse_retired),
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
        self.books.tick()
        body = await request.json() if request.can_read_body else None
        call = handler.__name__
        entry = {"method": request.method, "path": request.path, "query": dict(request.query),
                 "body": body, "call": call, "fault": "", "at": self.books.now}  # fmt: skip
        self.log.append(entry)
        fault = self._draw_fault(call)
        entry["fault"] = fault
        if fault:
            self.counted[fault] += 1
        try:
            response = await self._answer_with_fault(fault, request, handler, call)
        except VastRefusedError as refused:
            response = make_response(refused)
        entry["status"] = response.status if response is not None else None
        if response is None:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        return response

    async def _answer_with_fault(
        self, fault: str, request: web.Request, handler: Any, call: str
    ) -> web.StreamResponse | None:
        """Answer a request, with a fault if one is named; None to close the connection."""
        self._check_pace(request, call)
        if fault in REFUSALS:
            raise VastRefusedError(*REFUSALS[fault])
        if fault == "cut":
            return None
        if fault == "lost" or (fault == "lost, listed late" and call == "create"):
            with contextlib.suppress(VastRefusedError):
                answer = json.loads((await handler(request)).text)
                if fault != "lost":
                    self.books.instances[answer["new_contract"]].lag = self.books.world.late
            return None
        if fault in LISTS and call == "list":
            return web.json_response(LISTS[fault])
        return await self._answer_changed(fault, request, handler, call)

    async def _answer_changed(
        self, fault: str, request: web.Request, handler: Any, call: str
    ) -> web.StreamResponse:
        """Answer a request, with a different result if there is a fault."""
        match fault:
            case "refused" if call in {"delete", "create"}:
                return web.json_response({"success": False, "error": "busy", "msg": "try again"})
            case "gone" if call == "create":
                raise make_refusal(410, "no_such_ask", "error 410/3907: no_such_ask")
            case "low bid" | "low bid, 400" if call == "create":
                answer = json.loads((await handler(request)).text)
                self.books.instances[answer["new_contract"]].stopped = True
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
                self.books.pass_time(40.0)
            case "trickle":
                return await trickle(request, await handler(request))
            case _:
                pass
        return await handler(request)

    def _draw_fault(self, call: str) -> str:
        for one in self.failing:
            if one["count"] and one["call"] in {"", call}:
                one["count"] -= 1
                return one["fault"]
        drawn = self.books.drawing.random()
        for fault, likely in self.books.world.faults.items():
            if drawn < likely:
                return fault
            drawn -= likely
        return ""

    def _check_pace(self, request: web.Request, call: str) -> None:
        name = {"delete": "destroy", "change": "label"}.get(call, call)
        interval = INTERVALS.get(name, 0.0)
        kind = (request.headers.get("Authorization", ""), name)
        before = self.last.get(kind, float("-inf"))
        if self.books.world.strict and self.books.now - before < interval - 0.01:
            self.counted["too frequent"] += 1
            raise VastRefusedError(429, f"API requests too frequent endpoint threshold={interval}")
        self.last[kind] = self.books.now

    def _identify_caller(self, request: web.Request) -> str:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        mine = next((one for one in self.books.instances.values() if one.key == token), None)
        if token != self.books.key and token not in self.books.others and mine is None:
            raise make_refusal(401, "auth_error", "Invalid user key")
        return "" if mine is None else str(mine.id)

    def _identify_account(self, request: web.Request) -> int:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return self.books.others.get(token, 1)

    async def search(self, request: web.Request) -> web.Response:
        """Answer a search with the matching offers."""
        self._identify_caller(request)
        query = await request.json()
        disk, limit = float(query.pop("allocated_storage")), int(query.pop("limit", 64))
        order, kind = query.pop("order"), query.pop("type")
        assert kind in {"on-demand", "bid", "reserved"}, kind
        found: list[dict[str, Any]] = []
        chosen = int(query.get("id", {}).get("eq", 0))  # offer of an earlier search
        for machine in self.books.machines.values():
            is_chosen = self.books.asks.get(chosen) == machine.id
            ask = chosen if is_chosen else next(self.books.numbers)
            offer = machine.make_offer(ask, disk)
            if all(is_match(offer, name, conditions) for name, conditions in query.items()):
                self.books.asks[ask] = machine.id
                found.append(offer)
        for name, direction in reversed(order):
            found.sort(key=lambda offer, name=name: offer[name], reverse=direction == "desc")
        return web.json_response({"offers": found[:limit]})

    async def create(self, request: web.Request) -> web.Response:
        """Rent the machine of an offer."""
        self._identify_caller(request)
        ask, body = int(request.match_info["id"]), await request.json()
        machine = self.books.machines.get(self.books.asks.get(ask, 0))
        if machine is None or machine.rented:
            if body.get("cancel_unavail"):
                raise make_refusal(410, "no_such_ask", f"error 410/3907: no_such_ask {ask}")
            raise make_refusal(
                404,
                "invalid_args",
                f"error 404/3603: no_such_ask Instance type by id {ask} is not available.",
            )
        if self.books.world.credit <= sum(one.cost for one in self.books.instances.values()):
            raise make_refusal(400, "insufficient_credit", "Your account lacks credit")
        if not body.get("image") or float(body.get("disk") or 0) < 8:
            raise make_refusal(400, "invalid_args", "image, disk")
        size = sum(len(name) + len(value) for name, value in body["env"].items())
        if size > 32768 or len(body.get("onstart") or "") > 4096 or len(body["label"] or "") > 256:
            raise make_refusal(400, "invalid_args", "too long")
        one = self.books.rent(machine, body)
        one.account = self._identify_account(request)
        price = body.get("price")
        if price is not None and price < machine.dph * 0.6:
            one.stopped = True
            said = {"success": False, "error": "bid_too_low", "msg": "the bid is too low"}
            return web.json_response({**said, "new_contract": one.id})
        return web.json_response({"success": True, "new_contract": one.id})

    async def refuse_retired(self, request: web.Request) -> web.Response:
        """Refuse a request for a retired path."""
        raise make_refusal(410, "deprecated_endpoint", "Use /api/v1/instances/")

    async def list(self, request: web.Request) -> web.Response:
        """Answer with a page of the account's machines."""
        if self._identify_caller(request):
            raise make_refusal(403, "forbidden", "not your own")
        limit = int(request.query.get("limit", "25"))
        after = int(request.query.get("after_token", "0"))
        there = sorted(
            (one for one in self.books.instances.values()
             if one.destroyed is None and self.books.now >= one.created + one.lag
             and one.account == self._identify_account(request)),
            key=lambda one: one.id,
        )  # fmt: skip
        page = [one for one in there if one.id > after][:limit]
        more = bool(page) and page[-1].id != there[-1].id
        return web.json_response(
            {
                "success": True,
                "instances": [one.make_row(self.books.now) for one in page],
                "next_token": str(page[-1].id) if more else None,
                "total_instances": len(there),
            }
        )

    def _get_own(self, request: web.Request) -> StandInInstance:
        who, number = self._identify_caller(request), request.match_info["id"]
        one = self.books.instances.get(int(number))
        if who and who != number:
            raise make_refusal(403, "forbidden", "not your own")
        theirs = one is not None and not who and one.account != self._identify_account(request)
        if one is None or one.destroyed is not None or theirs:
            raise make_refusal(404, "no_such_instance", f"Instance {number} not found.")
        return one

    async def show(self, request: web.Request) -> web.Response:
        """Answer with the row of one machine."""
        return web.json_response({"instances": self._get_own(request).make_row(self.books.now)})

    async def change(self, request: web.Request) -> web.Response:
        """Change the label of a machine."""
        one, body = self._get_own(request), await request.json()
        one.body["label"] = body.get("label", one.label)
        return web.json_response({"success": True})

    async def delete(self, request: web.Request) -> web.Response:
        """Destroy a machine."""
        one = self._get_own(request)
        self.books.destroy(one, "itself" if self._identify_caller(request) else "the account")
        return web.json_response({"success": True})

    async def user(self, request: web.Request) -> web.Response:
        """Answer with the account and its credit."""
        self._identify_caller(request)
        spent = sum(one.cost for one in self.books.instances.values())
        return web.json_response(
            {
                "id": self._identify_account(request),
                "credit": self.books.world.credit - spent,
                "balance": 0,
            }
        )


def make_response(refused: VastRefusedError) -> web.Response:
    """Return the response of an error."""
    if isinstance(refused.body, str):
        return web.Response(status=refused.status, text=refused.body)
    return web.json_response(refused.body, status=refused.status)


async def trickle(request: web.Request, answer: web.Response) -> web.StreamResponse:
    """Send 1000 spaces slowly before an answer, until the client disconnects."""
    assert isinstance(answer.body, bytes)
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):
        for _ in range(1000):
            await response.write(b" ")
            await asyncio.sleep(0.02)
        await response.write(answer.body)
    return response


def is_match(offer: dict[str, Any], name: str, conditions: dict[str, Any]) -> bool:
    """Decide whether an offer matches a filter. Values may be strings, as the SDK sends them."""
    have: Any = offer[name]  # an unknown field is an error of the caller
    if name == "geolocation":
        have = have.rpartition(", ")[2]
    for sign, wanted in conditions.items():
        if isinstance(have, (int, float)) and isinstance(wanted, str):
            wanted = wanted.lower() == "true" if isinstance(have, bool) else float(wanted)  # noqa: PLW2901
        if not COMPARISONS[sign](have, wanted):
            return False
    return True


async def serve(folder: Path) -> None:
    """Serve until the process ends. A line of JSON on stdout has the port."""
    books = MachineBooks(folder, ClockFile(folder))
    books.reset(World())
    server = VastApplication(books)
    runner = web.AppRunner(server.make_application())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(json.dumps({"port": runner.addresses[0][1]}), flush=True)
    try:
        while True:
            await asyncio.sleep(0.5)
            if books.world.rate:
                books.tick()
    finally:
        for one in books.instances.values():
            end_process(one)
