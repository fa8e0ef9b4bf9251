"""The reaper releases machines without an owner, and nothing else."""

from datetime import UTC, datetime, timedelta

import pytest

from millrace import errors
from millrace.keys.rentals import MachineKeys, RentalKeys
from millrace.records import commit_once, fetch
from millrace.rentals import MachineStatus, Rental, list_rentals, reap, release_rental
from millrace.rentals.labels import Label
from millrace.rentals.ledger import ensure_installation, list_attempts
from millrace.rentals.progress_events import MachineReleased
from millrace.rentals.reports import read_heartbeat
from millrace.schemas.rental import DetachRecord, MoneyLimits, ReleaseReason
from millrace.storage import delete, open_store, put
from tests.support.rentals.account import Account_, Reset


def abandon(account: Account_, name: str = "fleet", count: int = 1) -> None:
    """Rent machines, and have their owner disappear."""
    rental = Rental(account.make_settings(name, machines=count), vast=account.vast)
    rental.__enter__()
    rental.wait_until_ready()
    rental._stack.close()  # its lease is released, its machines are not


def test_what_has_no_owner_is_released(world: Reset) -> None:
    account = world()
    abandon(account, count=2)
    seen = reap(account.make_ledger_settings(), dry_run=True, vast=account.vast)
    assert [one.release_reason for one in seen.released] == ["the machine has no living owner"] * 2
    assert len(account.server.list_alive()) == 2
    done = reap(account.make_ledger_settings(), vast=account.vast, progress=account.note_event)
    assert len(done.released) == account.count_events(MachineReleased) == 2
    assert account.server.list_alive() == []
    attempts = list_attempts(open_store(account.store), "fleet")
    assert [one.release_record.reason for one in attempts if one.release_record] == [
        ReleaseReason.REAPED
    ] * 2
    again = reap(account.make_ledger_settings(), vast=account.vast)
    assert (again.released, again.kept, again.closed_attempts) == ((), (), 0)


def test_what_has_an_owner_stays_until_its_time_is_over(world: Reset) -> None:
    account = world()
    request = {"max_lifetime": timedelta(hours=2)}
    with Rental(account.make_settings(request=request), vast=account.vast) as rental:
        rental.wait_until_ready()
        (kept,) = reap(account.make_ledger_settings(), vast=account.vast).kept
        assert "process" in kept.owner
        account.server.advance(2 * 3600)
        (gone,) = reap(account.make_ledger_settings(), vast=account.vast).released
        assert "the deadline was" in gone.release_reason
        assert account.server.list_alive() == []


def test_what_was_left_on_purpose_stays_until_its_time_is_over(world: Reset) -> None:
    account = world()
    request = {"max_lifetime": timedelta(hours=2)}
    with Rental(account.make_settings(request=request), vast=account.vast, detached=True) as rental:
        rental.wait_until_ready()
    assert len(reap(account.make_ledger_settings(), vast=account.vast).kept) == 1
    (listed,) = list_rentals(account.make_ledger_settings(), vast=account.vast)
    assert (listed.rental, listed.owner, listed.release_reason) == ("fleet", "", "")
    assert listed.cost > 0
    account.server.advance(2 * 3600)
    assert len(reap(account.make_ledger_settings(), vast=account.vast).released) == 1
    assert account.server.list_alive() == []


def detach(account: Account_, machines: int = 1, **request: float) -> list[int]:
    """Rent machines, and detach them; return their numbers."""
    settings = account.make_settings(machines=machines, request=request)
    with Rental(settings, vast=account.vast, detached=True) as rental:
        rental.wait_until_ready()
        return [one.instance.id for one in rental.machines if one.instance]


def test_a_detached_machine_whose_price_exceeds_the_limit_is_released(world: Reset) -> None:
    account = world()
    first, second = detach(account, machines=2)
    account.server.befall(first, "dearer")
    account.server.advance(120)
    done = reap(account.make_ledger_settings(), vast=account.vast)
    (gone,) = done.released
    assert gone.instance.id == first
    assert "an hour, and was offered for $" in gone.release_reason
    assert [one.instance.id for one in done.kept] == [second]
    assert [one["id"] for one in account.server.list_alive()] == [second]


def test_a_detached_machine_whose_traffic_costs_too_much_ends_no_other(world: Reset) -> None:
    account = world(first="lying late")
    detach(account, machines=2, max_total=8.0)
    account.server.advance(900)
    assert reap(account.make_ledger_settings(), vast=account.vast).released == ()
    account.server.advance(3600)
    done = reap(account.make_ledger_settings(), vast=account.vast)
    (gone,) = done.released
    assert gone.release_reason.endswith("more than its share")
    assert gone.cost < 6.0
    assert len(done.kept) == len(account.server.list_alive()) == 1


def test_detached_machines_are_released_before_they_cost_more_than_all_may(world: Reset) -> None:
    account = world()
    (number,) = detach(account, max_hourly=20.0, max_total=50.0)
    account.server.advance(600)
    assert reap(account.make_ledger_settings(), vast=account.vast).released == ()
    account.server.befall(number, "lying late")
    gone: list[MachineStatus] = []
    while not gone:
        account.server.advance(900)
        gone += reap(account.make_ledger_settings(), vast=account.vast).released
    assert gone[0].release_reason.endswith("of $50.00 are spent")
    assert account.server.list_alive() == []


def test_detached_machines_at_their_price_stay_until_their_deadlines(world: Reset) -> None:
    account = world(machines=30)
    detach(account, machines=3, max_total=3.0)
    attempts = list_attempts(open_store(account.store), "fleet")
    end = min(one.deadline for one in attempts).timestamp()
    assert {one.limits for one in attempts} == {
        MoneyLimits(max_hourly=2.0, max_total=3.0, machines=3)
    }
    while account.server.read_time() + 900 < end:
        account.server.advance(900)
        assert reap(account.make_ledger_settings(), vast=account.vast).released == ()
    assert len(account.server.list_alive()) == 3


def test_a_detached_machine_without_recorded_limits_stays(world: Reset) -> None:
    account = world()
    (number,) = detach(account)
    store, key = open_store(account.store), RentalKeys("fleet").make_detached_key(0)
    since = fetch(store, key, DetachRecord).since
    delete(store, [key])
    commit_once(store, key, DetachRecord(since=since))  # as earlier versions wrote it
    account.server.befall(number, "dearer")
    account.server.advance(120)
    (kept,) = reap(account.make_ledger_settings(), vast=account.vast).kept
    assert kept.instance.id == number


def test_nothing_that_is_not_ours_is_touched(world: Reset) -> None:
    account = world()
    store = open_store(account.store)
    mine = ensure_installation(store)
    others = [
        "", "somebody's", "millrace", f"millrace/{mine}", f"Millrace/{mine}/fleet/000000/1",
        "millrace/0123456789ab/fleet/000000/1", f"x/millrace/{mine}/fleet/000000/1",
        f"millrace/{mine}x/fleet/000000/1",
    ]  # fmt: skip
    planted = [account.server.plant(label) for label in others]
    strange = [
        account.server.plant(f"millrace/{mine}/{rest}")
        for rest in ("what is this", "a b/000001/2000000000", "../x/000001/2000000000")
    ]
    orphan = account.server.plant(f"millrace/{mine}/lost/000007/9999999999")
    done = reap(account.make_ledger_settings(), vast=account.vast)
    assert [one.instance.id for one in done.released] == [orphan]
    assert [one.instance.id for one in done.kept] == strange
    assert {one["id"] for one in account.server.list_alive()} == {*planted, *strange}
    assert not any(
        one.owner for one in list_rentals(account.make_ledger_settings(), vast=account.vast)
    )


def test_two_installations_with_one_account_leave_each_others_alone(
    world: Reset, tmp_path_factory: pytest.TempPathFactory
) -> None:
    account = world()
    abandon(account)
    other = Account_(account.server, account.key, tmp_path_factory.mktemp("other"))
    abandon(other, "fleet")
    assert len(account.server.list_alive()) == 2
    reap(other.make_ledger_settings(), vast=other.vast)
    (left,) = account.server.list_alive()
    assert left["label"].startswith(f"millrace/{ensure_installation(open_store(account.store))}/")


@pytest.mark.parametrize("fault", ["part", "error500", "lost", "text429"])
def test_a_list_that_cannot_be_read_is_unknown_and_the_reaper_says_so(
    world: Reset, fault: str
) -> None:
    account = world()
    abandon(account)
    account.server.fail_next(1000, fault, "list")
    with pytest.raises(errors.UnavailableError, match=r"list|known"):
        reap(account.make_ledger_settings(), vast=account.vast)
    assert len(account.server.list_alive()) == 1
    (attempt,) = list_attempts(open_store(account.store), "fleet")
    assert attempt.release_record is None


def test_what_came_though_nobody_thought_so_is_released(world: Reset) -> None:
    account = world(late=900.0)  # longer than its rental lasts
    account.server.fail_next(1, "lost, listed late", "create")
    with Rental(account.make_settings(), vast=account.vast) as rental:
        rental.wait_until_ready()
    account.server.advance(900)
    (ghost,) = account.server.list_alive()
    (gone,) = reap(account.make_ledger_settings(), vast=account.vast).released
    assert gone.instance.id == ghost["id"]
    assert "was released before (never rented), but still exists" in gone.release_reason
    assert account.server.list_alive() == []


def test_an_attempt_of_which_nothing_is_left_is_closed(world: Reset) -> None:
    account = world()
    abandon(account)
    account.server.befall(account.server.list_alive()[0]["id"], "vanished")
    account.server.advance(3600)
    assert account.server.list_alive() == []
    account.server.advance(30 * 24 * 3600)  # its watchdog has destroyed it at its deadline
    assert reap(account.make_ledger_settings(), vast=account.vast).closed_attempts == 1
    (attempt,) = list_attempts(open_store(account.store), "fleet")
    assert attempt.release_record
    lifetime = (attempt.intent.deadline - attempt.intent.started_at) / timedelta(hours=1)
    rent_cost = lifetime * attempt.intent.dollars_per_hour
    machine = MachineKeys(RentalKeys("fleet").make_machine_prefix(attempt.number))
    heartbeat = read_heartbeat(open_store(account.store), machine)
    assert heartbeat is not None
    traffic_cost = (
        heartbeat.received * attempt.intent.download_dollars_per_gb
        + heartbeat.sent * attempt.intent.upload_dollars_per_gb
    ) / 1e9
    assert traffic_cost > 0
    assert attempt.release_record.cost == pytest.approx(rent_cost + traffic_cost)


def test_a_rental_is_released_by_name(world: Reset) -> None:
    account = world()
    with Rental(account.make_settings(machines=2), vast=account.vast, detached=True) as rental:
        rental.wait_until_ready()
        with pytest.raises(errors.HeldError, match="is held by"):
            release_rental(account.make_ledger_settings(), "fleet", vast=account.vast)
    with pytest.raises(errors.NotFoundError, match="has no rental 'other'"):
        release_rental(account.make_ledger_settings(), "other", vast=account.vast)
    assert (
        release_rental(
            account.make_ledger_settings(), "fleet", vast=account.vast, include_detached=False
        )
        == 0
    )
    assert len(account.server.list_alive()) == 2  # its owner has left both to work
    assert release_rental(account.make_ledger_settings(), "fleet", vast=account.vast) == 2
    assert account.server.list_alive() == []
    assert release_rental(account.make_ledger_settings(), "fleet", vast=account.vast) == 0


def other_account(account: Account_) -> Account_:
    """Another account, with the same store."""
    return Account_(account.server, account.server.open_account(), account.folder)


def test_machines_of_another_account_are_neither_closed_nor_called_gone(world: Reset) -> None:
    account = world()
    with Rental(account.make_settings(machines=2), vast=account.vast, detached=True) as rental:
        rental.wait_until_ready()
    account.server.advance(3600)
    other = other_account(account)

    found = reap(other.make_ledger_settings(), vast=other.vast)
    assert (found.released, found.closed_attempts, found.foreign_attempts) == ((), 0, 2)
    with pytest.raises(errors.ConfigurationError, match=r"2 machines of fleet .* another account"):
        release_rental(other.make_ledger_settings(), "fleet", vast=other.vast)
    with (
        pytest.raises(errors.ConfigurationError, match=r"2 machines of fleet .* another account"),
        Rental(other.make_settings(machines=2), vast=other.vast),
    ):
        pass
    assert len(account.server.list_alive()) == 2
    assert {one.release_record for one in list_attempts(open_store(account.store), "fleet")} == {
        None
    }

    assert len(list_rentals(account.make_ledger_settings(), vast=account.vast)) == 2
    assert release_rental(account.make_ledger_settings(), "fleet", vast=account.vast) == 2
    assert account.server.list_alive() == []


def test_a_machine_that_bears_the_label_of_another_costs_that_one_nothing(world: Reset) -> None:
    account = world()
    with Rental(account.make_settings(), vast=account.vast, progress=account.note_event) as rental:
        rental.wait_until_ready()
        (machine,) = rental.machines
        stray = account.server.plant(machine.attempt.intent.label)
        rental.wait_until_ready()
        done = reap(account.make_ledger_settings(), vast=account.vast)
        assert [one.instance.id for one in done.released] == [stray]
        assert "has the label of machine" in done.released[0].release_reason
        assert [one.instance.id for one in done.kept] == [machine.attempt.instance_id]
        assert [one["id"] for one in account.server.list_alive()] == [machine.attempt.instance_id]
        (attempt,) = list_attempts(open_store(account.store), "fleet")
        assert attempt.release_record is None
        again = account.server.plant(machine.attempt.intent.label)
    assert [one["id"] for one in account.server.list_alive()] == [again]  # the rental's own is gone
    assert [
        one.instance.id for one in reap(account.make_ledger_settings(), vast=account.vast).released
    ] == [again]
    assert account.server.list_alive() == []


def test_a_label_that_was_changed_gives_a_machine_no_more_time(world: Reset) -> None:
    account = world()
    request = {"max_lifetime": timedelta(hours=2)}
    with Rental(account.make_settings(request=request), vast=account.vast, detached=True) as rental:
        rental.wait_until_ready()
        (machine,) = rental.machines
    assert machine.attempt.instance_id
    label = machine.attempt.intent.label.rpartition("/")[0] + "/9999999999"
    account.server.ask("label", {"instance": machine.attempt.instance_id, "label": label})
    account.server.advance(2 * 3600)
    (gone,) = reap(account.make_ledger_settings(), vast=account.vast).released
    assert "the deadline was" in gone.release_reason
    assert account.server.list_alive() == []


def test_names_that_no_rental_can_have_hide_no_machine(world: Reset) -> None:
    account = world()
    abandon(account)
    store = open_store(account.store)
    for name in ("a/lease/b", "x/attempts/y", "bad name", "..x"):
        put(store, f"_rentals/{name}/attempts/000000-intent.json", b"{}")
    assert len(reap(account.make_ledger_settings(), vast=account.vast).released) == 1
    assert account.server.list_alive() == []


def test_a_label_says_what_it_is_and_another_says_nothing() -> None:
    with pytest.raises(errors.ConfigurationError, match="too long for a label"):
        str(Label("a" * 12, "x" * 240, 1, datetime.now(UTC)))
    text = "millrace/0123456789ab/a/b/000003/1800000000"
    label = Label.parse(text, "0123456789ab")
    assert label
    assert (label.rental, label.attempt, str(label)) == ("a/b", 3, text)
    for other in ("", "millrace/0123456789ab/", "millrace/0123456789ab/a/b/3", text + "x"):
        assert Label.parse(other, "0123456789ab") is None
    assert Label.parse(text, "0123456789ac") is None
