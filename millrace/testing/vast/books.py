"""State of the server: clock, accounts, hosts and rented machines."""

import itertools
import random
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.testing.process import find_free_ports
from millrace.testing.vast.clock import ClockFile
from millrace.testing.vast.faults import FAULTS
from millrace.testing.vast.machines import HOUR, StandInInstance, StandInMachine
from millrace.testing.vast.running import end_process, run_onstart, write_report
from millrace.testing.vast.world import World

EPOCH = 1_800_000_000.0  # time of the clock after a reset


@dataclass
class MachineBooks:
    """State of the server behind the API.

    Attributes:
        folder: Folder of the real machines.
        clock: Clock of the server.
        world: World of the test.
        key: API key of the first account.
        others: Numbers of the other accounts, by their API keys.
        drawing: Random numbers from the world's seed.
        machines: Hosts by number.
        asks: Numbers of the hosts, by the numbers of their offers.
        instances: All machines that were ever rented, by number.
        numbers: Unused numbers.
    """

    folder: Path
    clock: ClockFile
    world: World = field(default_factory=World)
    key: str = ""
    others: dict[str, int] = field(default_factory=dict[str, int])
    drawing: random.Random = field(default_factory=random.Random)
    machines: dict[int, StandInMachine] = field(default_factory=dict[int, StandInMachine])
    asks: dict[int, int] = field(default_factory=dict[int, int])
    instances: dict[int, StandInInstance] = field(default_factory=dict[int, StandInInstance])
    numbers: Any = field(default_factory=lambda: itertools.count(1000))

    @property
    def now(self) -> float:
        """Time by the clock, in seconds since 1970."""
        return self.clock.read()

    def pass_time(self, seconds: float) -> None:
        """Advance the clock."""
        self.clock.set(self.now + seconds, self.world.rate)

    def tick(self) -> None:
        """Apply all changes that are due by now."""
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
                self._advance_machine(one, now)
            one.bill(now)

    def _come_up(self, one: StandInInstance) -> None:
        if self.world.real:
            one.home = self.folder / f"{self.key[-8:]}-{one.id}"
            (one.port,) = find_free_ports(1)
            one.process = run_onstart(one, one.home, self.world)
        elif one.order:
            state = {"state": "failed", "detail": "pip: no such package"}
            write_report(
                one, "setup.json", state if one.fate == "broken" else {"state": "starting"}
            )

    def _advance_machine(self, one: StandInInstance, now: float) -> None:
        """Apply the fate of a running machine, or write its report."""
        assert one.running is not None
        if one.fate == "outbid" and now >= one.running + 60:
            one.bill(now)
            one.stopped = True
            end_process(one)
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
        if not one.beats:  # cost of the traffic in its report
            one.cost += one.machine.down_cost + one.machine.up_cost / 10
        one.beats += 1
        received, sent = 10**9, 10**8
        if one.fate == "lying":
            received = sent = 10**15
        elif one.fate == "lying late":
            elapsed = now - one.running
            received, sent = (int(elapsed * 4 * 800e6 / 8) if elapsed > HOUR else 0), 0
        moved = {"received": received, "sent": sent}
        write_report(one, "beat.json", {"number": one.beats, **moved})
        if now >= one.running + self.world.program:
            one.ended = True
            write_report(one, "log/000000.txt", "the last words\n")
            write_report(
                one, "ended.json", {"code": 1 if one.fate == "failing" else 0, "seconds": 1.0}
            )

    def destroy(self, one: StandInInstance, by: str) -> None:
        """Bill and destroy a machine."""
        one.bill(self.now)
        one.destroyed, one.by = self.now, by
        one.machine.rented = False
        end_process(one)

    def make_entry(self, one: StandInInstance) -> dict[str, Any]:
        """Return the state of a machine for a test."""
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

    def open_account(self) -> str:
        """Open another account, and return its key."""
        key = f"account-{secrets.token_hex(16)}"
        self.others[key] = len(self.others) + 2
        return key

    def reset(self, world: World) -> str:
        """Clear all state, create the hosts of a world, and return the account's API key."""
        for one in self.instances.values():
            end_process(one)
        unknown = set(world.faults) - FAULTS
        assert not unknown, unknown
        vars(self).update(vars(MachineBooks(self.folder, self.clock, world)))
        self.drawing = random.Random(world.seed)
        self.key = f"account-{secrets.token_hex(16)}"
        self.clock.set(EPOCH, world.rate)
        for _ in range(world.machines):
            draw = self.drawing
            place = draw.choice(["Texas, US", "Bavaria, DE", "Ontario, CA", "Tokyo, JP"])
            loading = draw.uniform(20, 120) * (not world.real)
            machine = StandInMachine(
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
            least = min(self.machines.values(), key=lambda machine: machine.compute_price(40.0))
            least.fate = world.first
        return self.key

    def rent(self, machine: StandInMachine, body: dict[str, Any]) -> StandInInstance:
        """Rent a machine on a host."""
        machine.rented = True
        disk = float(body["disk"])
        price = body.get("price")
        hourly = (
            machine.compute_price(disk) if price is None else price + machine.storage * disk / 730
        )
        if machine.fate == "raised":
            hourly *= 1.5
        one = StandInInstance(
            next(self.numbers), f"instance-{secrets.token_hex(16)}", machine, body, self.now,
            hourly, machine.storage * disk / 730, fate=machine.fate, lag=self.world.lag,
            billed=self.now,
        )  # fmt: skip
        self.instances[one.id] = one
        return one
