"""A machine stays while it starts in time, sends heartbeats, and costs what was offered."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from millrace import errors
from millrace.keys.rentals import RentalKeys
from millrace.progress import Event
from millrace.records import fetch
from millrace.rentals import Instance, Machine
from millrace.rentals.budget import Budget
from millrace.rentals.inspection import MachineInspector
from millrace.rentals.machines import ReleaseDecision
from millrace.rentals.messages import MachineHeartbeat, ProgramExit, SetupReport
from millrace.rentals.progress_events import MachineReady, OutputPrinted, PriceRaised
from millrace.rentals.replacement import ReplacementPolicy
from millrace.schemas.rental import PriceRaiseRecord, ReleaseReason
from millrace.storage import put
from tests.support.rentals.parts import (
    FakeVast,
    make_attempt,
    make_context,
    make_machine,
    make_settings,
)


class Bench:
    """Inspector of one machine, which the provider lists as number 1.

    Attributes:
        vast: Account in memory.
        store: Store of the ledger.
        events: Reported events.
        machine: The machine.
    """

    def __init__(self, folder: Path, **more: Any) -> None:
        self.vast, self.events = FakeVast(), list[Event]()
        settings = make_settings(folder, **more)
        context = make_context(settings, self.vast, self.events)
        self.store = context.store
        self.inspector = MachineInspector(context, Budget(settings), ReplacementPolicy(settings))
        self.machine: Machine = make_machine(folder)
        self.vast.add(1)

    def write(self, key: str, message: BaseModel) -> None:
        put(self.machine.reports.store, key, message.model_dump_json().encode())

    def beat(self, number: int, **more: int) -> None:
        self.write(self.machine.reports.keys.heartbeat, MachineHeartbeat(number=number, **more))

    def inspect(self, instances: list[Instance] | None = None) -> ReleaseDecision | None:
        return self.inspector.inspect(
            self.machine, self.vast.list_instances() if instances is None else instances
        )


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def check(decision: ReleaseDecision | None, reason: ReleaseReason, message: str) -> None:
    assert decision is not None
    assert decision.reason is reason
    assert message in decision.message


def test_a_machine_is_ready_when_it_runs_and_has_sent_a_heartbeat(bench: Bench) -> None:
    assert bench.inspect() is None
    assert not bench.machine.is_ready
    bench.beat(1)
    assert bench.inspect() is None
    assert bench.machine.is_ready
    assert bench.events == [MachineReady(machine="fleet/0", instance=1)]


def test_a_machine_that_does_not_start_in_time_is_released(bench: Bench) -> None:
    bench.vast.clock.sleep(20 * 60)
    assert bench.inspect() is None
    bench.vast.clock.sleep(1)
    bench.write(bench.machine.reports.keys.setup, SetupReport(state="installing"))
    check(bench.inspect(), ReleaseReason.DEAD, "did not start within 0:20:00; its last state was")


def test_a_failed_installation_is_released_with_its_error(bench: Bench) -> None:
    report = SetupReport(state="failed", detail="pip: no such package")
    bench.write(bench.machine.reports.keys.setup, report)
    decision = bench.inspect()
    check(decision, ReleaseReason.DEAD, "could not install the program: pip: no such package")
    assert decision is not None
    assert decision.setup_error == "pip: no such package"


def test_a_machine_without_heartbeats_is_released(bench: Bench) -> None:
    bench.beat(1)
    bench.inspect()
    bench.vast.clock.sleep(300)
    assert bench.inspect() is None
    bench.vast.clock.sleep(1)
    check(bench.inspect(), ReleaseReason.DEAD, "no heartbeat for 0:05:00")


def test_a_store_that_does_not_answer_is_not_silence(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise errors.UnavailableError("down")

    bench.beat(1)
    bench.inspect()
    monkeypatch.setattr("millrace.rentals.reports.list_objects", fail)
    bench.vast.clock.sleep(1000)
    assert bench.inspect() is None


def test_a_machine_that_is_not_listed_is_lost_but_an_unread_listing_tells_nothing(
    bench: Bench,
) -> None:
    bench.vast.clock.sleep(181)
    assert bench.inspector.inspect(bench.machine, None) is None
    check(bench.inspect([]), ReleaseReason.DEAD, "does not list the machine any more")


def test_a_new_machine_may_be_listed_late(bench: Bench) -> None:
    bench.vast.clock.sleep(180)
    assert bench.inspect([]) is None


def test_a_create_request_without_an_answer_is_given_up_after_the_listing_lag(
    bench: Bench, tmp_path: Path
) -> None:
    bench.machine = make_machine(tmp_path, make_attempt())
    assert bench.inspect([]) is None
    bench.vast.clock.sleep(181)
    assert bench.inspector.inspect(bench.machine, None) is None  # unknown, not empty
    check(bench.inspect([]), ReleaseReason.NEVER_RENTED, "got no answer")


@pytest.mark.parametrize(
    ("code", "reason", "message"),
    [(0, ReleaseReason.DONE, "exit code 0"), (3, ReleaseReason.FAILED, "exit code 3. Its last")],
)
def test_a_machine_whose_program_ended_is_released(
    bench: Bench, code: int, reason: ReleaseReason, message: str
) -> None:
    bench.write(bench.machine.reports.keys.program_exit, ProgramExit(code=code))
    check(bench.inspect(), reason, message)


def test_the_last_output_of_a_failed_program_is_in_the_message(bench: Bench) -> None:
    keys = bench.machine.reports.keys
    put(bench.machine.reports.store, keys.make_log_key(0), b"one\ntwo\n")
    bench.write(keys.program_exit, ProgramExit(code=1))
    check(bench.inspect(), ReleaseReason.FAILED, "Its last output:\none\ntwo")
    printed = [one.text for one in bench.events if isinstance(one, OutputPrinted)]
    assert printed == ["one", "two"]


def test_a_raised_price_is_reported_once_and_refused_above_the_limit(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_hourly=1.0)
    bench.vast.add(1, dph_total=0.8)
    assert bench.inspect() is None
    assert bench.inspect() is None
    assert bench.events == [PriceRaised(machine="fleet/0", offered=0.5, dollars_per_hour=0.8)]
    bench.vast.add(1, dph_total=1.1)
    check(bench.inspect(), ReleaseReason.TOO_EXPENSIVE, "costs $1.100 an hour")


def test_a_price_is_recorded_before_any_decision(tmp_path: Path) -> None:
    """Also if the machine is released for another reason, which is checked before its price."""
    bench = Bench(tmp_path, max_hourly=1.0)
    bench.vast.add(1, dph_total=0.8)
    bench.write(bench.machine.reports.keys.program_exit, ProgramExit(code=0))
    check(bench.inspect(), ReleaseReason.DONE, "exit code 0")
    assert bench.machine.dollars_per_hour == 0.8
    bench.inspect([])  # the price stays known when the machine is not listed
    assert bench.machine.dollars_per_hour == 0.8
    record = fetch(bench.store, RentalKeys("fleet").make_raised_key(0, 0), PriceRaiseRecord)
    assert record.dollars_per_hour == 0.8


def test_a_machine_that_is_too_expensive_is_released_though_the_store_takes_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise errors.UnavailableError("down")

    bench = Bench(tmp_path, max_hourly=1.0)
    monkeypatch.setattr("millrace.rentals.ledger.commit_once", fail)
    bench.vast.add(1, dph_total=1.1)
    check(bench.inspect(), ReleaseReason.TOO_EXPENSIVE, "costs $1.100 an hour")
    assert bench.machine.dollars_per_hour == 1.1


def test_implausible_traffic_is_refused(bench: Bench) -> None:
    bench.beat(1, sent=1 << 50)
    check(bench.inspect(), ReleaseReason.TOO_EXPENSIVE, "more than its network can transfer")


def test_a_machine_that_was_outbid_or_failed_is_released(bench: Bench) -> None:
    stopped = {"cur_state": "stopped", "intended_status": "stopped", "next_state": "stopped"}
    bench.vast.add(1, is_bid=True, **stopped)
    check(bench.inspect(), ReleaseReason.OUTBID, "another client pays more")
    bench.vast.add(1, actual_status="exited", status_msg="gone")
    check(bench.inspect(), ReleaseReason.DEAD, "the machine is exited: gone")


def test_a_ready_machine_may_be_unknown_to_the_provider_for_a_while(bench: Bench) -> None:
    bench.beat(1)
    bench.inspect()
    bench.vast.add(1, actual_status="unknown")
    assert bench.inspect() is None
