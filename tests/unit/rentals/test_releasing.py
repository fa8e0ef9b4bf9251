"""Released machines are destroyed, recorded with their costs, and reported."""

from pathlib import Path
from typing import cast

import pytest

from millrace import errors
from millrace.progress import Event
from millrace.records import commit_once
from millrace.rentals import Instance, Machine, VastClient, list_attempts, releasing
from millrace.rentals.budget import Budget
from millrace.rentals.destroy import DESTROY_TIMEOUT, destroy_machines
from millrace.rentals.ledger import Attempt
from millrace.rentals.machines import ReleaseDecision
from millrace.rentals.messages import MachineHeartbeat
from millrace.rentals.progress_events import MachineReleased
from millrace.rentals.releasing import MachineReleaser
from millrace.rentals.state import RentalState
from millrace.schemas.rental import ReleaseReason
from millrace.storage import put
from tests.support.rentals.parts import (
    FakeVast,
    make_attempt,
    make_context,
    make_machine,
    make_settings,
)


class Bench:
    """Releaser of a rental with two machines.

    Attributes:
        vast: Account in memory, which has the machines and another one.
        events: Reported events.
        state: Machines of the rental.
        releaser: The releaser.
    """

    def __init__(self, folder: Path) -> None:
        self.vast, self.events = FakeVast(), list[Event]()
        self.settings = make_settings(folder, machines=2)
        self.context = make_context(self.settings, self.vast, self.events)
        self.state = RentalState(2)
        for slot in (0, 1):
            self.add(make_machine(folder, make_attempt(slot, slot=slot, instance_id=slot + 1)))
        self.vast.add(9, "another")
        self.releaser = MachineReleaser(self.context, self.state)

    def add(self, machine: Machine) -> None:
        intent = machine.attempt.intent
        self.state.active[machine.slot] = machine
        commit_once(
            self.context.store, self.context.keys.make_intent_key(machine.attempt.number), intent
        )
        self.vast.add(machine.slot + 1, intent.label)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_the_release_of_many_machines_may_take_longer_than_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A listing shows each machine for ten seconds after its destroy request."""
    vast, destroyed_at, gone = FakeVast(), dict[int, float](), list[str]()
    machines = {f"label-{number}": number for number in range(256)}
    for label, number in machines.items():
        vast.add(number, label)

    def destroy(number: int) -> None:
        vast.clock.sleep(4.0)
        destroyed_at.setdefault(number, vast.clock.elapsed)

    def list_instances() -> list[Instance]:
        elapsed = vast.clock.elapsed
        return [
            one
            for one in vast.instances.values()
            if elapsed - destroyed_at.get(one.id, elapsed) < 10.0
        ]

    monkeypatch.setattr(vast, "destroy_instance", destroy)
    monkeypatch.setattr(vast, "list_instances", list_instances)
    destroy_machines(cast("VastClient", vast), machines, gone.append)
    assert sorted(gone) == sorted(machines)
    assert destroyed_at[255] - destroyed_at[0] > DESTROY_TIMEOUT.total_seconds()


def test_a_released_machine_is_destroyed_recorded_and_reported(bench: Bench) -> None:
    bench.vast.clock.sleep(3600)
    first, second = bench.state.machines
    bench.releaser.release([ReleaseDecision(first, ReleaseReason.DONE, "ended")])
    assert set(bench.vast.instances) == {2, 9}
    assert bench.state.machines == (second,)
    released, kept = list_attempts(bench.context.store, "fleet")
    assert released.release_record is not None
    assert (released.release_record.reason, released.release_record.message) == ("done", "ended")
    assert released.release_record.cost == pytest.approx(0.5, rel=0.01)
    assert kept.release_record is None
    (event,) = bench.events
    assert isinstance(event, MachineReleased)
    assert (event.machine, event.reason) == ("fleet/0", ReleaseReason.DONE)


@pytest.mark.parametrize("is_listed", [True, False])
def test_the_cost_of_a_released_machine_has_the_price_at_its_release(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *, is_listed: bool
) -> None:
    """A host has raised its price since the last listing. Without a listing, it is unknown."""
    bench.vast.clock.sleep(3600)
    machine = bench.state.active[0]
    bench.vast.add(1, machine.attempt.intent.label, dph_total=1.5)
    list_instances = bench.vast.list_instances

    def list_unless_brief(*, is_brief: bool = False) -> list[Instance]:
        if is_brief and not is_listed:
            raise errors.UnavailableError("no answer")
        return list_instances()

    monkeypatch.setattr(bench.vast, "list_instances", list_unless_brief)
    bench.releaser.release([ReleaseDecision(machine, ReleaseReason.OVER_BUDGET, "spent")])
    assert set(bench.vast.instances) == {2, 9}
    assert bench.state.costs[0] == pytest.approx(1.5 if is_listed else 0.5, rel=0.01)


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_machine_costs_nothing_if_it_was_never_rented(bench: Bench, *, is_listed: bool) -> None:
    """A listing at the release may still show it."""
    bench.vast.clock.sleep(3600)
    machine = bench.state.active[0]
    if not is_listed:
        del bench.vast.instances[1]
    bench.releaser.release([ReleaseDecision(machine, ReleaseReason.NEVER_RENTED, "gone")])
    assert set(bench.vast.instances) == {2, 9}
    assert bench.state.costs[0] == pytest.approx(0.5 if is_listed else 0.0, rel=0.01)


def test_the_cost_of_a_released_machine_has_its_last_traffic(bench: Bench) -> None:
    bench.vast.clock.sleep(3600)
    machine = bench.state.active[0]
    beat = MachineHeartbeat(number=1, received=10**10)
    key = machine.reports.keys.heartbeat
    put(bench.context.store, key, beat.model_dump_json().encode())
    bench.releaser.release([ReleaseDecision(machine, ReleaseReason.UNNEEDED, "over")])
    assert bench.state.costs[0] == pytest.approx(0.5 + 10 * 0.1, rel=0.01)


def test_a_release_does_not_wait_for_the_store(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raised prices that cannot be recorded soon are in the records of the releases."""
    bench.vast.clock.sleep(3600)
    tried: list[str] = []

    def fail(_: object, __: str, attempt: Attempt, ___: float) -> Attempt:
        tried.append(attempt.intent.label)
        return attempt

    monkeypatch.setattr(releasing, "record_price", fail)
    machines = bench.state.machines
    for machine in machines:
        bench.vast.add(machine.slot + 1, machine.attempt.intent.label, dph_total=1.5)
    bench.releaser.release([ReleaseDecision(one, ReleaseReason.UNNEEDED, "") for one in machines])
    assert tried == [machines[0].attempt.intent.label]
    costs = [one.release_record.cost for one in list_attempts(bench.context.store, "fleet")]
    assert costs == [pytest.approx(1.5, rel=0.01)] * 2


def test_a_listing_that_may_lack_the_machine_is_not_trusted_at_once(
    bench: Bench, tmp_path: Path
) -> None:
    machine = make_machine(tmp_path, make_attempt(2, slot=2))  # its create got no answer
    started = bench.vast.clock.monotonic()
    bench.releaser.release([ReleaseDecision(machine, ReleaseReason.UNNEEDED, "over")])
    assert bench.vast.clock.monotonic() - started >= 180
    started = bench.vast.clock.monotonic()
    machine = make_machine(tmp_path, make_attempt(3, slot=2))
    machine.rented_at = started
    bench.releaser.release_refused(ReleaseDecision(machine, ReleaseReason.NEVER_RENTED, "refused"))
    assert bench.vast.clock.monotonic() == started
    assert not bench.state.releasing


def test_a_spent_budget_releases_all_machines(bench: Bench) -> None:
    budget = Budget(bench.settings)
    bench.releaser.enforce_budget(budget)
    assert len(bench.state.machines) == 2
    bench.vast.clock.sleep(10 * 3600)
    with pytest.raises(errors.BudgetError, match=r"of \$10\.00 are spent: all machines of fleet"):
        bench.releaser.enforce_budget(budget)
    assert (bench.state.machines, set(bench.vast.instances)) == ((), {9})
    reasons = {(type(one), getattr(one, "reason", None)) for one in bench.events}
    assert reasons == {(MachineReleased, ReleaseReason.OVER_BUDGET)}
