"""Machines are rented, used, and released, whatever happens in between."""

import threading
from collections import Counter
from datetime import timedelta

import pytest

from millrace import errors
from millrace.keys.rentals import RentalKeys
from millrace.progress import Event
from millrace.rentals import Instance, Rental, find_offers, reap
from millrace.rentals.guest.watchdog import DETACHED
from millrace.rentals.ledger import list_attempts
from millrace.rentals.progress_events import (
    MachineMissing,
    MachineReady,
    MachineReleased,
    MachineRented,
    PriceRaised,
    RentalCostUpdated,
)
from millrace.schemas.rental import ReleaseReason, ReleaseRecord
from millrace.storage import open_store, read
from tests.support.rentals.account import Account_, Reset


def endings(account: Account_, name: str = "fleet") -> list[ReleaseReason]:
    attempts = list_attempts(open_store(account.store), name)
    assert all(one.release_record for one in attempts)
    return [one.release_record.reason for one in attempts if one.release_record]


def find_expensive(account: Account_) -> ReleaseRecord:
    """The only release record that says that a machine was too expensive."""
    (found,) = [
        one.release_record
        for one in list_attempts(open_store(account.store), "fleet")
        if one.release_record and one.release_record.reason is ReleaseReason.TOO_EXPENSIVE
    ]
    return found


def test_machines_are_rented_used_and_released(world: Reset) -> None:
    account = world(program=600.0)
    settings = account.make_settings(machines=3)
    with Rental(settings, vast=account.vast, progress=account.note_event) as rental:
        rental.wait_until_ready()
        ready = rental.machines
        assert [one.slot for one in ready] == [0, 1, 2]
        assert len({one["machine"] for one in account.server.list_alive()}) == 3
        rental.wait_until_done()
        assert account.server.list_alive() == []
    assert endings(account) == [ReleaseReason.DONE] * 3
    billed = sum(one["cost"] for one in account.server.list_machines())
    assert 0 < billed <= rental.cost
    assert account.count_events(MachineReady) == account.count_events(MachineReleased) == 3


@pytest.mark.parametrize("fate", ["exited", "offline", "unknown", "oci", "stuck", "broken"])
def test_a_machine_that_does_not_come_up_is_released_and_another_taken(
    world: Reset, fate: str
) -> None:
    account = world(first=fate)
    with Rental(account.make_settings(machines=1), vast=account.vast) as rental:
        rental.wait_until_ready()
        (machine,) = rental.machines
        dead, other = account.server.list_machines()
        assert dead["fate"] == fate
        assert machine.instance
        assert machine.instance.id == other["id"]
        soon = 20 * 60 + 60 if fate == "stuck" else 180
        assert dead["destroyed"] - dead["created"] < soon
    assert account.server.list_alive() == []
    assert endings(account) == [ReleaseReason.DEAD, ReleaseReason.UNNEEDED]


@pytest.mark.parametrize(
    ("fate", "ending"),
    [
        ("outbid", ReleaseReason.OUTBID),
        ("silent", ReleaseReason.DEAD),
        ("vanished", ReleaseReason.DEAD),
        ("dearer", ReleaseReason.TOO_EXPENSIVE),
    ],
)
def test_work_goes_on_elsewhere_when_a_machine_is_lost(
    world: Reset, fate: str, ending: ReleaseReason
) -> None:
    account = world(program=3000.0)
    request = {"interruptible": fate == "outbid", "max_hourly": 1.5}
    settings = account.make_settings(request=request, poll_interval=timedelta(seconds=30))
    with Rental(settings, vast=account.vast) as rental:
        rental.wait_until_ready()
        (first,) = rental.machines
        assert first.instance
        account.server.befall(first.instance.id, fate)
        rental.wait_until_done()
    assert account.server.list_alive() == []
    assert endings(account) == [ending, ReleaseReason.DONE]
    one, other = account.server.list_machines()
    assert one["machine"] != other["machine"]


def test_a_program_that_fails_is_said_with_its_last_words(world: Reset) -> None:
    account = world(program=100.0, fates={"failing": 1.0})
    rental = Rental(account.make_settings(), vast=account.vast)
    said = "ended with exit code 1. Its last output:\nthe last words"
    with pytest.raises(errors.MachineError, match=said), rental:
        rental.wait_until_done()
    assert account.server.list_alive() == []
    assert endings(account) == [ReleaseReason.FAILED]


def test_a_program_that_fails_is_tried_elsewhere_if_that_is_wanted(world: Reset) -> None:
    account = world(program=100.0, first="failing")
    with Rental(account.make_settings(retry_failed=True), vast=account.vast) as rental:
        rental.wait_until_done()
    assert account.server.list_alive() == []
    assert endings(account) == [ReleaseReason.FAILED, ReleaseReason.DONE]


@pytest.mark.parametrize(("count", "tries"), [(1, 2), (4, 4)])
def test_a_program_that_cannot_be_installed_is_tried_twice_and_the_cause_is_said(
    world: Reset, count: int, tries: int
) -> None:
    account = world(fates={"broken": 1.0}, machines=30)
    rental = Rental(account.make_settings(machines=count), vast=account.vast)
    said = "cannot be installed.* 2 machines.*: pip: no such package"
    with pytest.raises(errors.MachineError, match=said), rental:
        rental.wait_until_ready()
    assert len(account.server.list_machines()) == tries  # those that were rented at once
    assert account.server.list_alive() == []
    assert Counter(endings(account)) == Counter(dead=2, unneeded=tries - 2)


def test_one_bad_host_does_not_end_a_rental_whose_program_can_be_installed(world: Reset) -> None:
    account = world(first="broken")
    with Rental(account.make_settings(machines=2), vast=account.vast) as rental:
        rental.wait_until_ready()
        for _ in range(2):
            account.server.befall(account.server.list_alive()[0]["id"], "exited")
            rental.wait_until_ready()
    assert account.server.list_alive() == []


def test_a_price_that_rose_between_search_and_create_is_said(world: Reset) -> None:
    account = world(first="raised")
    settings = account.make_settings()
    with Rental(settings, vast=account.vast, progress=account.note_event) as rental:
        rental.wait_until_ready()
        (machine,) = rental.machines
    (raised,) = [event for event in account.told if isinstance(event, PriceRaised)]
    offered = machine.attempt.intent.dollars_per_hour
    assert (raised.offered, raised.dollars_per_hour) == (offered, pytest.approx(offered * 1.5))
    assert endings(account) == [ReleaseReason.UNNEEDED]
    (one,) = account.server.list_machines()
    assert rental.cost >= one["cost"]


def test_a_price_that_rose_above_what_was_granted_is_not_paid(world: Reset) -> None:
    account = world(first="raised")
    (offer, *_) = find_offers(account.vast, account.make_settings().request)
    settings = account.make_settings(
        request={"max_hourly": offer.dollars_per_hour * 1.4, "duration": "36s"}
    )
    with Rental(settings, vast=account.vast) as rental:
        rental.wait_until_ready()
        first, _ = account.server.list_machines()
        assert first["destroyed"] - first["created"] < 60
    assert endings(account) == [ReleaseReason.TOO_EXPENSIVE, ReleaseReason.UNNEEDED]


def test_what_is_left_at_a_price_that_rose_does_not_cost_more_than_was_granted(
    world: Reset,
) -> None:
    account = world(first="raised")
    settings = account.make_settings(request={"max_total": 1.0})
    with Rental(settings, vast=account.vast, detached=True) as rental:
        rental.wait_until_ready()
        (machine,) = rental.machines
    account.server.advance(20 * 3600)
    reap(account.make_ledger_settings(), vast=account.vast)
    assert account.server.list_alive() == []
    raised, left = account.server.list_machines()
    lasts = float(left["body"]["env"]["MILLRACE_LIFETIME"]) / 3600
    assert raised["cost"] + lasts * machine.dollars_per_hour <= 1.001


def test_one_that_is_lost_and_cannot_be_replaced_ends_no_other(world: Reset) -> None:
    account = world(program=1000.0, machines=2)
    settings = account.make_settings(machines=2)
    with Rental(settings, vast=account.vast, progress=account.note_event) as rental:
        rental.wait_until_ready()
        first, _ = rental.machines
        assert first.instance
        account.server.befall(first.instance.id, "exited")
        rental.wait_until_done()
    assert account.server.list_alive() == []
    # The other has done its work, and then its host is free for what was missing.
    assert endings(account) == [ReleaseReason.DEAD, ReleaseReason.DONE, ReleaseReason.DONE]
    assert 5 < account.count_events(MachineMissing) < 20  # it was looked for all the time


def test_waiting_is_ended_by_whoever_wants(world: Reset) -> None:
    account = world()
    stop = threading.Event()
    with Rental(account.make_settings(), vast=account.vast) as rental:
        rental.wait_until_ready()
        stop.set()
        rental.wait_until_done(stop)
        assert len(account.server.list_alive()) == 1
    assert account.server.list_alive() == []


def test_machines_that_are_missing_are_found_by_one_search(world: Reset) -> None:
    account = world(program=100.0)
    with Rental(account.make_settings(machines=4), vast=account.vast) as rental:
        rental.wait_until_done()
    calls = [one["call"] for one in account.server.list_requests()]
    assert (calls.count("create"), calls.count("search")) == (4, 1)


def test_an_offer_that_is_gone_is_left_for_the_next(world: Reset) -> None:
    account = world()
    account.server.fail_next(1, "gone", "create")
    with Rental(account.make_settings(), vast=account.vast) as rental:
        rental.wait_until_ready()
    assert endings(account) == [ReleaseReason.NEVER_RENTED, ReleaseReason.UNNEEDED]
    assert len(account.server.list_machines()) == 1


@pytest.mark.parametrize("lag", [0.0, 30.0])
def test_a_create_whose_answer_was_lost_is_looked_for_and_not_sent_again(
    world: Reset, lag: float
) -> None:
    account = world(lag=lag)
    account.server.fail_next(1, "lost", "create")
    with Rental(account.make_settings(), vast=account.vast) as rental:
        rental.wait_until_ready()
        (machine,) = rental.machines
        assert len(account.server.list_machines()) == 1
        creates = [one for one in account.server.list_requests() if one["call"] == "create"]
        assert len(creates) == 1
        assert machine.attempt.contract
        assert machine.attempt.contract.instance_id == account.server.list_alive()[0]["id"]
    assert account.server.list_alive() == []


def creates(account: Account_) -> int:
    return sum(one["call"] == "create" for one in account.server.list_requests())


def test_a_create_whose_answer_was_lost_is_waited_for_before_another_is_sent(world: Reset) -> None:
    account = world(late=90.0)
    account.server.fail_next(1, "lost, listed late", "create")
    with Rental(account.make_settings(), vast=account.vast) as rental:
        rental.wait_until_ready()
        (machine,) = rental.machines
        assert creates(account) == 1
        assert machine.attempt.instance_id == account.server.list_alive()[0]["id"]
    assert account.server.list_alive() == []
    assert endings(account) == [ReleaseReason.UNNEEDED]


def test_creates_that_are_never_answered_are_sent_ever_more_rarely_while_others_run(
    world: Reset,
) -> None:
    hours = 4
    account = world(program=3600.0 * hours, machines=40)

    def fail_creates(event: Event) -> None:
        account.note_event(event)
        if isinstance(event, MachineRented):
            account.server.fail_next(10_000, "cut", "create")

    request = {"max_lifetime": timedelta(hours=2 * hours)}
    minute = timedelta(minutes=1)  # far shorter than what lies between two creates
    settings = account.make_settings(machines=2, request=request, poll_interval=minute)
    with Rental(settings, vast=account.vast, progress=fail_creates) as rental:
        with pytest.raises(errors.UnavailableError, match="does not answer whether"):
            rental.wait_until_done()  # the one that runs has done its work: then it ends
        assert account.server.list_alive() == []
    assert endings(account).count(ReleaseReason.DONE) == 1
    assert 5 < creates(account) < 20  # one in 4 minutes at first, then in 20


def test_a_machine_that_is_listed_after_another_was_rented_is_released(world: Reset) -> None:
    account = world(late=400.0)
    account.server.fail_next(1, "lost, listed late", "create")
    with Rental(account.make_settings(), vast=account.vast) as rental:
        rental.wait_until_ready()
        account.server.advance(400.0)
        rental.wait_until_ready()
        late, other = account.server.list_machines()
        assert (late["destroyed"] is None, other["destroyed"] is None) == (False, True)
        assert rental.cost >= late["cost"] > 0
    assert account.server.list_alive() == []
    assert endings(account) == [ReleaseReason.UNNEEDED, ReleaseReason.UNNEEDED]


def test_a_machine_that_is_listed_while_none_can_be_rented_gets_its_slot(world: Reset) -> None:
    account = world(late=400.0)
    account.server.fail_next(1, "lost, listed late", "create")

    def fail_searches(event: Event) -> None:
        account.note_event(event)
        if isinstance(event, MachineRented):
            account.server.fail_next(10_000, "error500", "search")

    settings = account.make_settings(machines=2)
    with Rental(settings, vast=account.vast, progress=fail_searches) as rental:
        rental.wait_until_ready()
        assert [one.slot for one in rental.machines] == [0, 1]
        assert account.count_events(MachineMissing) > 0
        assert len(account.server.list_alive()) == len(account.server.list_machines()) == 2
    assert account.server.list_alive() == []
    assert endings(account) == [ReleaseReason.UNNEEDED] * 2


def test_a_machine_that_is_listed_late_is_released_by_the_next_owner(world: Reset) -> None:
    account = world(late=900.0)
    account.server.fail_next(1, "lost, listed late", "create")
    with Rental(account.make_settings(), vast=account.vast) as rental:
        rental.wait_until_ready()
    account.server.advance(900)
    assert len(account.server.list_alive()) == 1
    with Rental(account.make_settings(), vast=account.vast) as rental:
        rental.wait_until_ready()
        assert len(account.server.list_alive()) == 1
        assert account.server.list_machines()[0]["destroyed"]
    assert account.server.list_alive() == []


def test_a_lost_create_is_not_called_released_while_no_list_can_be_read(world: Reset) -> None:
    account = world()
    account.server.fail_next(1, "lost", "create")
    account.server.fail_next(10_000, "unsuccessful list", "list")
    rental = Rental(account.make_settings(), vast=account.vast)
    with pytest.raises(errors.UnavailableError, match="is not confirmed"), rental:
        rental.wait_until_ready()
    (attempt,) = list_attempts(open_store(account.store), "fleet")
    assert attempt.release_record is None
    account.server.ask("calm", {})
    assert len(reap(account.make_ledger_settings(), vast=account.vast).released) == 1
    assert account.server.list_alive() == []


def test_a_create_that_was_cut_is_not_taken_for_done(world: Reset) -> None:
    account = world()
    account.server.fail_next(1, "cut", "create")
    with Rental(account.make_settings(), vast=account.vast) as rental:
        rental.wait_until_ready()
        assert len(account.server.list_alive()) == 1
    assert endings(account) == [ReleaseReason.NEVER_RENTED, ReleaseReason.UNNEEDED]


def test_what_a_bid_too_low_has_left_is_destroyed(world: Reset) -> None:
    account = world()
    account.server.fail_next(1, "low bid", "create")
    with Rental(
        account.make_settings(request={"interruptible": True}), vast=account.vast
    ) as rental:
        rental.wait_until_ready()
        assert len(account.server.list_alive()) == 1
    assert endings(account)[0] is ReleaseReason.OUTBID
    assert account.server.list_alive() == []


def test_a_list_that_cannot_be_read_is_not_an_empty_one(world: Reset) -> None:
    account = world(program=2000.0)
    with Rental(account.make_settings(), vast=account.vast) as rental:
        rental.wait_until_ready()
        account.server.fail_next(100, "part", "list")
        account.server.advance(300)
        rental.wait_until_ready()
        account.server.fail_next(0, "part", "list")
        rental.wait_until_done()
        assert len(account.server.list_machines()) == 1
    assert account.server.count_fired()["part"] > 0


def test_the_money_that_was_granted_is_a_hard_stop(world: Reset) -> None:
    account = world()
    minute = timedelta(minutes=1)
    settings = account.make_settings(machines=2, request={"max_total": 1.0}, poll_interval=minute)
    rental = Rental(settings, vast=account.vast)
    with pytest.raises(errors.BudgetError, match=r"of \$1\.00 are spent"), rental:
        rental.wait_until_done()
    assert account.server.list_alive() == []
    assert sum(one["cost"] for one in account.server.list_machines()) <= 1.0
    assert endings(account) == [ReleaseReason.OVER_BUDGET] * 2


def test_a_machine_that_lies_about_its_traffic_ends_neither_the_rental_nor_the_budget(
    world: Reset,
) -> None:
    account = world(program=600.0, first="lying")
    settings = account.make_settings(machines=2, request={"max_total": 5.0})
    with Rental(settings, vast=account.vast) as rental:
        rental.wait_until_done()
    assert sorted(endings(account)) == [
        ReleaseReason.DONE,
        ReleaseReason.DONE,
        ReleaseReason.TOO_EXPENSIVE,
    ]
    liar = find_expensive(account)
    assert "more than its network can transfer" in liar.message
    assert liar.cost < 1.0  # what its line can move, at most
    assert rental.cost < 5.0


@pytest.mark.soak
def test_a_late_lie_about_traffic_costs_the_share_of_its_machine(world: Reset) -> None:
    account = world(program=7200.0, first="lying late")
    settings = account.make_settings(machines=4, request={"max_total": 12.0})
    with Rental(settings, vast=account.vast) as rental:
        rental.wait_until_done()
    reasons = endings(account)
    assert reasons.count(ReleaseReason.DONE) == 4
    liar = find_expensive(account)
    assert liar.message == "the traffic of the machine has cost $3.30, more than its share"
    assert 3.3 < liar.cost < 4.0


def test_machines_are_released_side_by_side(world: Reset) -> None:
    account = world()
    with Rental(account.make_settings(machines=8), vast=account.vast) as rental:
        rental.wait_until_ready()
        account.server.fail_next(40, "error500", "delete")
        before = account.server.read_time()
    assert account.server.list_alive() == []
    assert account.server.count_fired()["error500"] > 8
    assert (
        account.server.read_time() - before < 300
    )  # each destroy tried for two minutes: 15 minutes


def test_the_time_that_was_granted_is_one_too(world: Reset) -> None:
    account = world()
    minute, hour = timedelta(minutes=1), timedelta(hours=1)
    settings = account.make_settings(request={"max_lifetime": hour}, poll_interval=minute)
    rental = Rental(settings, vast=account.vast)
    with (
        pytest.raises(errors.BudgetError, match="the deadline of machine fleet/0 has passed"),
        rental,
    ):
        rental.wait_until_done()
    (one,) = account.server.list_machines()
    assert one["destroyed"] - one["created"] < 3700


def test_an_account_without_credit_is_said_at_once(world: Reset) -> None:
    account = world(credit=0.0)
    rental = Rental(account.make_settings(), vast=account.vast)
    with pytest.raises(errors.BudgetError, match="add credit"), rental:
        rental.wait_until_ready()
    assert sum(one["call"] == "create" for one in account.server.list_requests()) == 1


def test_whoever_goes_on_with_a_rental_has_its_machines(world: Reset) -> None:
    account = world(program=900.0)
    settings = account.make_settings(machines=2)
    with Rental(settings, vast=account.vast, detached=True) as rental:
        rental.wait_until_ready()
        before = {one.attempt.contract for one in rental.machines}
    assert len(account.server.list_alive()) == 2
    with Rental(settings, vast=account.vast) as rental:
        rental.wait_until_ready()
        assert {one.attempt.contract for one in rental.machines} == before
        rental.wait_until_done()
    assert len(account.server.list_machines()) == 2
    assert account.server.list_alive() == []
    with Rental(settings, vast=account.vast) as rental:
        rental.wait_until_done()  # all programs have ended: nothing is rented again
    assert len(account.server.list_machines()) == 2


def test_an_owner_that_cannot_begin_leaves_detached_machines_detached(
    world: Reset, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = world()
    settings = account.make_settings()
    with Rental(settings, vast=account.vast, detached=True) as rental:
        rental.wait_until_ready()
    store = open_store(account.store)
    owner = rental._context.keys.owner
    other = account.server.open_account()
    with pytest.raises(errors.ConfigurationError, match="another account"):
        Rental(settings, vast=Account_(account.server, other, account.folder).vast).__enter__()
    assert read(store, owner, max_size=100) == DETACHED

    def fail(*_: object) -> None:
        raise errors.UnavailableError("503")

    monkeypatch.setattr("millrace.rentals.rental.delete_detach_records", fail)
    with pytest.raises(errors.UnavailableError):
        Rental(settings, vast=account.vast).__enter__()
    assert read(store, owner, max_size=100) == DETACHED
    assert [one.is_detached for one in list_attempts(store, "fleet")] == [True]


def test_two_cannot_have_the_same_rental(world: Reset) -> None:
    account = world()
    with Rental(account.make_settings(), vast=account.vast) as rental:
        rental.wait_until_ready()
        with pytest.raises(errors.HeldError, match="fleet is held by"):
            Rental(account.make_settings(), vast=account.vast).__enter__()
        assert len(account.server.list_alive()) == 1


@pytest.mark.parametrize("fault", ["error500", "error502", "text429", "json429", "lost", "refused"])
def test_a_release_is_tried_until_a_listing_shows_that_it_is_done(world: Reset, fault: str) -> None:
    account = world()
    with Rental(account.make_settings(machines=2), vast=account.vast) as rental:
        rental.wait_until_ready()
        account.server.fail_next(3, fault, "delete")
    assert account.server.list_alive() == []
    assert account.server.count_fired()[fault] == 3


def test_what_cannot_be_released_is_said_and_left_to_the_reaper(world: Reset) -> None:
    account = world()
    rental = Rental(account.make_settings(), vast=account.vast)
    rental.__enter__()
    rental.wait_until_ready()
    account.server.fail_next(10_000, "error500", "delete")
    said = r"release of millrace/\w+/fleet/000000/\d+ is not confirmed .*reap"
    with pytest.raises(errors.UnavailableError, match=said):
        rental.__exit__(None, None, None)
    (attempt,) = list_attempts(open_store(account.store), "fleet")
    assert attempt.release_record is None


def test_nothing_is_asked_more_often_than_the_api_allows(world: Reset) -> None:
    account = world(program=300.0)
    with Rental(account.make_settings(machines=3), vast=account.vast) as rental:
        rental.wait_until_done()
    assert not account.server.count_fired()["too frequent"], account.server.list_requests()


def test_the_heartbeat_stops_while_a_poll_hangs_and_not_while_no_one_polls(world: Reset) -> None:
    account, elapsed = world(program=600.0), 0.0
    vast, store, keys = account.vast, open_store(account.store), RentalKeys("fleet")
    list_instances, is_hanging, resume = vast.list_instances, threading.Event(), threading.Event()

    def hang(**options: bool) -> list[Instance]:
        is_hanging.set()
        assert resume.wait(60)
        return list_instances(**options)

    with Rental(account.make_settings(), vast=vast) as rental:
        rental._timer._clock = lambda: elapsed

        def is_renewed() -> bool:
            before = read(store, keys.owner)
            rental._ownership._heartbeat._renew_heartbeat()
            return read(store, keys.owner) != before

        rental.wait_until_ready()
        elapsed += 36_000  # the caller works with the machines
        assert is_renewed()
        vast.list_instances = hang
        poll = threading.Thread(target=rental.wait_until_done)
        poll.start()
        assert is_hanging.wait(60)
        assert is_renewed()
        elapsed += 3600 + 60 + 10  # with a minute for a machine, and the interval of polls
        assert is_renewed()
        elapsed += 1
        assert not is_renewed()
        resume.set()
        poll.join(60)
        assert is_renewed()
    assert account.server.list_alive() == []


def test_the_machines_are_checked_between_two_slots_for_which_the_api_does_not_answer(
    world: Reset,
) -> None:
    account, stop, told = world(), threading.Event(), list[type[Event]]()

    def note(event: Event) -> None:
        told.append(type(event))
        if told.count(MachineMissing) == 3:
            stop.set()

    settings = account.make_settings(machines=3)
    with Rental(settings, vast=account.vast, progress=note) as rental:
        rental.wait_until_ready()
        for machine in account.server.list_alive()[:2]:
            account.server.befall(machine["id"], "exited")
        account.server.fail_next(1000, "error500", "search")
        rental.wait_until_done(stop)
        account.server.ask("calm", {})
    failed = told[told.index(MachineMissing) :]
    assert failed[:4] == [MachineMissing, RentalCostUpdated, MachineMissing, RentalCostUpdated]
