"""Machines are rented in a safe order: intent, one create request, contract."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from millrace import errors
from millrace.keys.rentals import MAX_ATTEMPTS
from millrace.progress import Event
from millrace.records import Record
from millrace.rentals import list_attempts, machine_starter
from millrace.rentals.budget import Budget
from millrace.rentals.destroy import LISTING_LAG
from millrace.rentals.machine_starter import CreatePacer, MachineStarter, OfferSource
from millrace.rentals.machines import ReleaseDecision
from millrace.rentals.ownership import Ownership, StepTimer
from millrace.rentals.progress_events import MachineRented, OfferTaken
from millrace.rentals.releasing import MachineReleaser
from millrace.rentals.replacement import ReplacementPolicy
from millrace.rentals.state import RentalState
from millrace.schemas.rental import Contract, Intent, ReleaseReason
from millrace.storage import Store, put
from tests.support.rentals.parts import (
    FakeVast,
    ManualClock,
    make_attempt,
    make_context,
    make_machine,
    make_offer_row,
    make_settings,
)


class Bench:
    """Starter of a rental at an account with three offers.

    Attributes:
        vast: Account in memory.
        events: Reported events.
        state: Machines of the rental.
        ownership: Ownership of the rental, which is not acquired.
        releaser: Releaser of the rental's machines.
        starter: The starter.
    """

    def __init__(self, folder: Path, **more: Any) -> None:
        self.vast, self.events = FakeVast(), list[Event]()
        self.vast.offers = [make_offer_row(number, number / 10) for number in (1, 2, 3)]
        settings = make_settings(folder, **more)
        self.context = make_context(settings, self.vast, self.events)
        self.state = RentalState(settings.machines)
        self.policy = ReplacementPolicy(settings)
        self.ownership = Ownership(
            self.context.store,
            self.context.keys,
            settings.timeouts.heartbeat_timeout,
            StepTimer(timedelta(hours=1)),
        )
        self.releaser = MachineReleaser(self.context, self.state)
        self.starter = MachineStarter(
            self.context,
            state=self.state,
            budget=Budget(settings),
            policy=self.policy,
            ownership=self.ownership,
            releaser=self.releaser,
        )
        self.starter.prepare()

    def list_attempts(self) -> list[Any]:
        return list_attempts(self.context.store, "fleet")


def fail(*_: object) -> None:
    raise errors.UnavailableError("503")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, machines=2)


def test_a_rental_has_no_attempt_with_the_number_of_another_rentals_folder(bench: Bench) -> None:
    bench.state.costs[MAX_ATTEMPTS - 2] = 0.0
    bench.starter.rent_machine(0)
    (attempt,) = bench.list_attempts()
    folder = bench.context.keys.make_machine_prefix(attempt.number)
    assert folder == "_machines/fleet/099999/"
    with pytest.raises(errors.MachineError, match=r"fleet has had 100,000 attempts .*another name"):
        bench.starter.rent_machine(1)
    assert len(bench.vast.creates) == 1


def test_a_machine_is_rented_with_an_intent_and_a_contract(bench: Bench) -> None:
    bench.starter.rent_machine(1)
    (attempt,) = bench.list_attempts()
    assert (attempt.intent.slot, attempt.intent.machine_id) == (1, 1)
    assert attempt.contract is not None
    assert bench.state.active[1].attempt.contract == attempt.contract
    assert bench.vast.creates == [attempt.intent.label]
    assert [type(one) for one in bench.events] == [OfferTaken, MachineRented]


def test_the_number_of_an_attempt_whose_record_is_damaged_is_not_used_again(bench: Bench) -> None:
    put(bench.context.store, bench.context.keys.make_intent_key(0), b"junk")
    assert bench.list_attempts() == []
    bench.starter.rent_machine(0)
    assert [one.number for one in bench.list_attempts()] == [1]
    assert bench.state.active[0].attempt.number == 1


def test_two_machines_are_rented_from_one_search_on_different_hosts(bench: Bench) -> None:
    for slot in (0, 1):
        bench.starter.rent_machine(slot)
    assert [one.attempt.intent.machine_id for one in bench.state.machines] == [1, 2]
    assert bench.vast.searches == 1


def test_an_offer_that_is_gone_is_recorded_and_the_next_offer_taken(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = bench.vast.create_instance

    def fail_once(offer: int, **body: Any) -> Any:
        if offer == 1:
            raise errors.NotFoundError("gone")
        return create(offer, **body)

    monkeypatch.setattr(bench.vast, "create_instance", fail_once)
    bench.starter.rent_machine(0)
    gone, rented = bench.list_attempts()
    assert gone.release_record.reason is ReleaseReason.NEVER_RENTED
    assert (rented.intent.offer_id, rented.release_record) == (2, None)


@pytest.mark.parametrize("error", [errors.UnavailableError("503"), errors.NotFoundError("bucket")])
def test_an_error_of_the_store_is_no_answer_of_the_provider(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: errors.MillraceError
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(machine_starter, "upload_files", fail)
    with pytest.raises(type(error)):
        bench.starter.rent_machine(0)
    (attempt,) = bench.list_attempts()
    assert attempt.release_record.reason is ReleaseReason.NEVER_RENTED
    assert attempt.release_record.cost == 0
    assert (bench.vast.creates, bench.state.active) == ([], {})


def test_a_create_request_without_an_answer_is_not_repeated(bench: Bench) -> None:
    bench.vast.create_error = errors.UnavailableError("no answer")
    bench.starter.rent_machine(0)
    assert len(bench.vast.creates) == 1
    assert bench.state.active[0].is_unconfirmed


def fail_contracts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the ledger take no contract."""
    commit_once = machine_starter.commit_once

    def commit(store: Store, key: str, record: Record) -> object:
        return fail() if isinstance(record, Contract) else commit_once(store, key, record)

    monkeypatch.setattr(machine_starter, "commit_once", commit)


def test_a_machine_whose_number_cannot_be_recorded_stays_unconfirmed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail_contracts(patch)
        bench.starter.rent_machine(0)
    (machine,) = bench.state.machines
    assert machine.is_unconfirmed
    bench.starter.confirm_machine(machine, 1)
    (attempt,) = bench.list_attempts()
    assert attempt.contract == machine.attempt.contract == Contract(instance_id=1)
    assert [type(one) for one in bench.events] == [OfferTaken, MachineRented]


def test_a_refused_machine_is_destroyed_though_its_number_cannot_be_recorded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_contracts(monkeypatch)
    bench.vast.refusal = "the bid is too low"
    with pytest.raises(errors.NotFoundError, match="no offer"):
        bench.starter.rent_machine(0)
    assert bench.vast.instances == {}
    bench.vast.clock.sleep(LISTING_LAG + 1)
    bench.releaser.start_releases([])
    reasons = [one.release_record.reason for one in bench.list_attempts()]
    assert reasons == [ReleaseReason.OUTBID] * 3


@pytest.mark.parametrize(
    "error",
    [errors.BudgetError("no credit"), errors.DeniedError("no"), errors.ConfigurationError("x")],
)
def test_a_refused_create_request_leaves_no_machine(
    bench: Bench, error: errors.MillraceError
) -> None:
    bench.vast.create_error, bench.vast.creates_despite_error = error, True
    with pytest.raises(type(error)):
        bench.starter.rent_machine(0)
    assert (bench.state.active, bench.vast.instances) == ({}, {})
    (attempt,) = bench.list_attempts()
    assert attempt.release_record.reason is ReleaseReason.NEVER_RENTED


def test_a_refused_create_request_does_not_wait_for_other_machines(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The release of another machine has started, and its host does not answer."""
    machine = make_machine(tmp_path, make_attempt(7, slot=1, instance_id=7))
    bench.vast.add(7, machine.attempt.intent.label)
    bench.state.start_release(ReleaseDecision(machine, ReleaseReason.DEAD, "silent"))
    monkeypatch.setattr(bench.vast, "destroy_instance", fail)
    bench.vast.create_error = errors.BudgetError("no credit")
    began = bench.vast.clock.elapsed
    with pytest.raises(errors.BudgetError, match="no credit"):
        bench.starter.rent_machine(0)
    assert bench.vast.clock.elapsed - began < 60
    assert list(bench.state.releasing) == [7]


def test_no_machine_is_rented_that_the_next_poll_would_release(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_total=1.0, poll_interval=timedelta(minutes=30), machines=2)
    bench.state.costs[0] = 0.95
    with pytest.raises(errors.BudgetError, match=r"\$0.95 of \$1.00 are spent, .* Raise max_total"):
        bench.starter.rent_machine(0)  # at 0.1 dollars an hour
    bench.state.costs[0] = 0.85
    bench.starter.rent_machine(0)  # at 0.2
    with pytest.raises(errors.MachineError, match="No machine is added to fleet"):
        bench.starter.rent_machine(1)
    assert len(bench.vast.creates) == len(bench.vast.instances) == 1


def test_a_machine_that_will_never_run_is_destroyed(bench: Bench) -> None:
    bench.vast.refusal = "the bid is too low"
    with pytest.raises(errors.NotFoundError, match="no offer"):
        bench.starter.rent_machine(0)
    assert bench.vast.instances == {}
    reasons = [one.release_record.reason for one in bench.list_attempts()]
    assert reasons == [ReleaseReason.OUTBID] * 3  # all offers


def test_an_intent_of_another_owner_ends_this_owner(bench: Bench) -> None:
    intent = make_attempt().intent
    record = {"kind": Intent.record_kind, "version": 1, "nonce": "x"}
    body = {**record, "record": intent.model_dump(mode="json")}
    put(bench.context.store, bench.context.keys.make_intent_key(0), json.dumps(body).encode())
    with pytest.raises(errors.HeldError, match="Another process has taken over fleet"):
        bench.starter.rent_machine(0)
    assert bench.ownership.is_superseded
    assert bench.vast.creates == []


def test_a_spent_budget_prevents_the_create_request(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_total=1.0)
    bench.state.costs[0] = 1.0
    with pytest.raises(errors.BudgetError, match="are spent"):
        bench.starter.rent_machine(0)
    assert bench.vast.creates == []


def test_creates_pause_after_three_without_an_answer() -> None:
    clock = ManualClock()
    pacer = CreatePacer(clock)
    pauses: list[float] = []
    for _ in range(9):
        pacer.note_unanswered()
        pauses.append(max(0.0, pacer.resume_at - clock.monotonic()))
    assert pauses == [0, 0, 60, 120, 240, 480, 960, 960, 960]
    with pytest.raises(errors.UnavailableError, match="does not answer whether"):
        pacer.refuse_during_pause()
    clock.sleep(960)
    pacer.refuse_during_pause()
    pacer.note_answer()
    pacer.note_unanswered()
    pacer.refuse_during_pause()


def test_offers_of_an_old_search_are_not_used(bench: Bench) -> None:
    source = OfferSource(bench.context)
    assert next(source.iterate(set())).id == 1
    assert next(source.iterate({2})).id == 3
    assert bench.vast.searches == 1
    bench.vast.clock.sleep(61)
    assert next(source.iterate(set())).id == 1
    assert bench.vast.searches == 2
