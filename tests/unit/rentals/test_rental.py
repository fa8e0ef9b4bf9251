"""A rental from its first machine to its end, with an account in memory."""

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from millrace import errors
from millrace.keys.rentals import MachineKeys, RentalKeys
from millrace.lease import Holder, Lease, LeaseTerm
from millrace.progress import Event
from millrace.records import Record, commit_once
from millrace.rentals import (
    Rental,
    VastClient,
    machine_starter,
    reap,
    reaper,
    release_rental,
)
from millrace.rentals.destroy import LISTING_LAG
from millrace.rentals.ledger import list_attempts
from millrace.rentals.messages import MachineHeartbeat
from millrace.rentals.progress_events import MachineRented
from millrace.schemas.rental import Contract, ReleaseReason
from millrace.storage import Store, exists, open_store, put, read
from tests.support.rentals.parts import HOUR, START, FakeVast, make_offer_row, make_settings

KEYS = RentalKeys("fleet")


class Bench:
    """A folder, and an account whose machines are ready at once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.vast = folder, FakeVast(offers=[make_offer_row(1), make_offer_row(2)])
        self.silent: set[int] = set()  # numbers of machines that do not start

    @property
    def store(self) -> Store:
        return open_store(self.folder.as_uri())

    def rent(
        self,
        *,
        detached: bool = False,
        repeat: bool = False,
        quorum: int | None = None,
        **more: Any,
    ) -> Rental:
        return Rental(
            make_settings(self.folder, **more),
            detached=detached,
            repeat=repeat,
            quorum=quorum,
            vast=cast("VastClient", self.vast),
            progress=self._write_heartbeats,
        )

    def write_heartbeat(self, number: int, received: int = 0) -> None:
        """Write the heartbeat of a machine."""
        key = MachineKeys(KEYS.make_machine_prefix(number)).heartbeat
        beat = MachineHeartbeat(number=1, received=received)
        put(self.store, key, beat.model_dump_json().encode())

    def _write_heartbeats(self, event: Event) -> None:
        if isinstance(event, MachineRented):
            for attempt in list_attempts(self.store, "fleet"):
                if attempt.number not in self.silent:
                    self.write_heartbeat(attempt.number)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def take_over(store: Store) -> None:
    """Begin the next term of the lease, as another owner does."""
    holder = Holder(id="other", host="elsewhere", machine="", pid=1, started="1")
    commit_once(store, KEYS.lease.make_term_key(1), LeaseTerm(holder=holder, ttl=HOUR))


@pytest.mark.parametrize("is_detached", [False, True])
@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_an_owner_leaves_the_machines_to_the_next_one(
    bench: Bench, error: type[BaseException] | None, is_detached: bool
) -> None:
    """Also if it has not polled since the takeover."""
    rental = bench.rent(detached=is_detached)
    rental.__enter__()
    rental.wait_until_ready()
    take_over(bench.store)
    assert not cast("Callable[..., object]", rental.__exit__)(error, None, None)
    assert len(bench.vast.instances) == 1
    (attempt,) = list_attempts(bench.store, "fleet")
    assert not attempt.is_detached
    assert attempt.release_record is None


@pytest.mark.parametrize("kind", [errors.UnavailableError, errors.DeniedError])
def test_an_owner_whose_lease_cannot_be_read_releases_its_machines(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, kind: type[errors.MillraceError]
) -> None:
    def fail(_: Lease) -> bool:
        raise kind("no answer")

    with bench.rent() as rental:
        rental.wait_until_ready()
        monkeypatch.setattr(Lease, "is_superseded", fail)
    assert not bench.vast.instances


def abandon(bench: Bench, **more: Any) -> None:
    """Rent the machines of a rental, and have their owner disappear."""
    rental = bench.rent(**more)
    rental.__enter__()
    rental.wait_until_ready()
    rental._stack.close()  # its lease is released, its machines are not


def test_a_next_owner_keeps_a_machine_that_the_provider_hears_nothing_of_for_a_while(
    bench: Bench,
) -> None:
    abandon(bench)
    bench.vast.add(1, bench.vast.creates[0], actual_status="unknown")
    with bench.rent(retry_failed=True) as rental:
        rental.wait_until_ready()
        assert set(bench.vast.instances) == {1}
        bench.vast.clock.sleep(301)  # its heartbeats have ended, too
        rental.wait_until_ready()
        assert set(bench.vast.instances) == {2}


def test_a_next_owner_with_a_longer_timeout_keeps_the_machines_of_the_one_before(
    bench: Bench,
) -> None:
    """Their watchdogs know the timeout that they were rented with."""
    abandon(bench, heartbeat_timeout=timedelta(seconds=30))
    with bench.rent(heartbeat_timeout=HOUR) as rental:
        assert rental._ownership._heartbeat._interval == 5.0
    with bench.rent(heartbeat_timeout=HOUR) as rental:  # all machines are released
        assert rental._ownership._heartbeat._interval == 600.0


@pytest.mark.parametrize("way", ["reap", "lose", "release", "release lost"])
def test_the_traffic_of_a_machine_counts_also_if_others_release_it(bench: Bench, way: str) -> None:
    bench.vast.offers = [make_offer_row(1) | {"inet_down_cost": 0.02}]
    settings = make_settings(bench.folder).ledger
    abandon(bench)
    bench.vast.clock.sleep(HOUR.total_seconds())
    bench.write_heartbeat(0, received=100 * 10**9)
    number = next(iter(bench.vast.instances))
    if "lo" in way:
        bench.vast.instances.clear()
    else:
        bench.vast.add(number, bench.vast.creates[0], dph_total=None)  # a price of null
    vast = cast("VastClient", bench.vast)
    if way.startswith("re") and way != "reap":
        release_rental(settings, "fleet", vast=vast)
    else:
        reap(settings, vast=vast)
    (attempt,) = list_attempts(bench.store, "fleet")
    assert attempt.release_record is not None
    assert attempt.release_record.cost == pytest.approx(0.5 + 2.0, abs=0.1)
    with bench.rent() as rental:
        assert rental.cost == pytest.approx(2.5, abs=0.1)


def test_one_of_several_machines_cannot_spend_the_money_of_all_by_its_reports(
    bench: Bench,
) -> None:
    bench.vast.offers = [
        make_offer_row(one) | {"inet_down_cost": 0.1, "inet_down": 10_000.0} for one in (1, 2)
    ]
    abandon(bench, machines=2, max_total=20.0)
    bench.vast.clock.sleep(HOUR.total_seconds())
    bench.write_heartbeat(0, received=1 << 50)
    reap(make_settings(bench.folder).ledger, vast=cast("VastClient", bench.vast))
    with bench.rent(machines=2, max_total=20.0) as rental:
        # Both machines: an hour at the highest price at most, and a tenth above the share.
        assert 11.0 < rental.cost < 2 * 2.1 + 11.0


def fail_progress(event: Event) -> None:
    raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("way", ["owner", "reap", "release"])
def test_all_machines_are_released_though_no_progress_can_be_shown(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The first request to destroy the second machine fails."""
    destroy, failures = bench.vast.destroy_instance, [2]

    def destroy_later(number: int) -> None:
        if number in failures:
            failures.remove(number)
            raise errors.UnavailableError("429")
        destroy(number)

    monkeypatch.setattr(bench.vast, "destroy_instance", destroy_later)
    settings, vast = make_settings(bench.folder, machines=2), cast("VastClient", bench.vast)
    if way == "owner":
        monkeypatch.setattr(bench, "_write_heartbeats", fail_progress)
        with bench.rent(machines=2) as rental:
            rental._fill_slots(threading.Event())
            assert len(bench.vast.instances) == 2
    else:
        abandon(bench, machines=2)
        if way == "reap":
            reap(settings.ledger, vast=vast, progress=fail_progress)
        else:
            release_rental(settings.ledger, "fleet", vast=vast, progress=fail_progress)
    assert not bench.vast.instances
    assert all(one.release_record for one in list_attempts(bench.store, "fleet"))
    assert not failures


def test_no_owner_takes_machines_over_while_the_reaper_releases_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandon(bench, machines=2)
    destroy, refusals = bench.vast.destroy_instance, list[str]()

    def start_owner(number: int) -> None:
        destroy(number)
        with pytest.raises(errors.HeldError, match="fleet is held by") as refusal:
            bench.rent(machines=2).__enter__()
        refusals.append(str(refusal.value))

    monkeypatch.setattr(bench.vast, "destroy_instance", start_owner)
    result = reap(make_settings(bench.folder).ledger, vast=cast("VastClient", bench.vast))
    assert (len(result.released), len(refusals)) == (2, 2)
    with bench.rent(machines=2) as rental:  # the reaper has left the rental
        assert rental.machines == ()


@pytest.mark.parametrize("detached", [False, True])
def test_the_reaper_leaves_machines_to_an_owner_that_comes_at_the_last_moment(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *, detached: bool
) -> None:
    """Also if this owner has detached them by then."""
    abandon(bench)
    next_owner, acquire = bench.rent(detached=detached), reaper.acquire_ownership

    def acquire_late(*args: Any) -> object:
        next_owner.__enter__()
        if detached:
            next_owner.__exit__(None, None, None)
        return acquire(*args)

    monkeypatch.setattr(reaper, "acquire_ownership", acquire_late)
    result = reap(make_settings(bench.folder).ledger, vast=cast("VastClient", bench.vast))
    assert (len(result.released), len(result.kept)) == (0, 1)
    assert result.kept[0].owner == ("" if detached else "another process")
    assert len(bench.vast.instances) == 1
    next_owner._stack.close()


def test_a_machine_that_cannot_be_destroyed_ends_no_rental_and_counts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its host does not answer. Its slot gets another machine."""
    bench.vast.offers = [make_offer_row(one) for one in range(1, 9)]
    destroy, stuck = bench.vast.destroy_instance, {1}

    def destroy_others(number: int) -> None:
        if number in stuck:
            raise errors.UnavailableError("this host does not answer")
        destroy(number)

    monkeypatch.setattr(bench.vast, "destroy_instance", destroy_others)
    with bench.rent(machines=2) as rental:
        rental.wait_until_ready()
        bench.vast.add(1, bench.vast.creates[0], actual_status="exited")
        started = bench.vast.clock.elapsed
        rental.wait_until_ready()
        assert bench.vast.clock.elapsed - started < 60
        assert set(bench.vast.instances) == {1, 2, 3}
        assert [one.attempt.instance_id for one in rental.machines] == [3, 2]
        assert not caplog.records
        bench.vast.clock.sleep(HOUR.total_seconds())
        assert rental.cost == pytest.approx(3 * 0.5, rel=0.02)
        raise_price(bench, 1.5)  # also of a machine whose release has started
        bench.write_heartbeat(1, received=1)
        bench.write_heartbeat(2, received=1)
        rental.wait_until_ready()
        assert "this host does not answer" in caplog.text
        stuck.clear()
        rental.wait_until_ready()
        assert set(bench.vast.instances) == {2, 3}
        assert read_costs(bench) == [pytest.approx(1.5, rel=0.02)]
    assert not bench.vast.instances


def test_a_machine_that_cannot_be_destroyed_at_the_takeover_keeps_no_owner_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandon(bench, machines=2)
    with monkeypatch.context() as patch:
        patch.setattr(bench.vast, "destroy_instance", fail)
        rental = bench.rent(machines=1).__enter__()
        rental.wait_until_ready()
        assert set(bench.vast.instances) == {1, 2}
        with pytest.raises(errors.UnavailableError, match="is not confirmed"):
            rental.__exit__(None, None, None)
    assert read_costs(bench) == []


def test_a_long_interval_of_polls_does_not_delay_a_release(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, clock = threading.Event(), bench.vast.clock
    sleep = clock.sleep

    def sleep_and_stop(seconds: float) -> None:
        stop.set()  # as another thread does meanwhile
        sleep(seconds)

    with bench.rent(poll_interval=HOUR) as rental:
        rental.wait_until_ready()
        began = clock.monotonic()
        monkeypatch.setattr(clock, "sleep", sleep_and_stop)
        rental.wait_until_done(stop)
        assert clock.monotonic() - began < 60


def test_no_machine_is_rented_while_no_listing_shows_whether_released_ones_exist(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.vast.offers = [make_offer_row(one) for one in range(1, 9)]
    with bench.rent(machines=2, retry_failed=True) as rental:
        rental.wait_until_ready()
        put(bench.store, MachineKeys(KEYS.make_machine_prefix(0)).program_exit, b'{"code": 1}')
        with monkeypatch.context() as patch:
            patch.setattr(bench.vast, "list_instances", fail)
            rental._poll_machines()
            rental._fill_slots(threading.Event())
            assert len(bench.vast.creates) == 2
        rental._poll_machines()
        rental._fill_slots(threading.Event())
        assert len(bench.vast.creates) == 3


def test_a_machine_that_cannot_be_had_releases_no_quorum(bench: Bench) -> None:
    """The next owner finds one of three machines lost, and no offer fits."""
    bench.vast.offers = [make_offer_row(one) for one in range(1, 4)]
    abandon(bench, machines=3)
    bench.vast.instances.pop(1)
    bench.vast.offers = []
    with bench.rent(machines=3, quorum=2) as rental:
        rental.wait_until_ready()
        assert len(rental.machines) == 2
        bench.vast.instances.pop(2)  # the quorum was there
        rental._poll_machines()
        rental._fill_slots(threading.Event())
        assert len(rental.machines) == 1


@pytest.mark.parametrize("way", ["search", "create"])
def test_a_refused_request_for_another_machine_releases_no_proven_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    bench.vast.offers = [make_offer_row(one) for one in range(1, 4)]
    with bench.rent(machines=2) as rental:
        rental.wait_until_ready()
        bench.vast.instances.pop(1)
        bench.vast.clock.sleep(LISTING_LAG + 1)
        for number in (0, 1):
            bench.write_heartbeat(number, received=1)
        if way == "create":
            bench.vast.create_error = errors.ConfigurationError("this request is refused")
        else:
            monkeypatch.setattr(bench.vast, "search_offers", deny)
            rental._starter._offers._found = []
        rental._poll_machines()
        rental._fill_slots(threading.Event())
        assert set(bench.vast.instances) == {2}
        assert [one.attempt.instance_id for one in rental.machines] == [2]


def deny(*_: object, **__: object) -> None:
    raise errors.DeniedError("the key is not known")


def test_a_quorum_waits_for_other_machines_until_the_timeout(bench: Bench) -> None:
    bench.vast.offers = [make_offer_row(one) for one in range(1, 4)]
    bench.silent.add(2)
    with bench.rent(machines=3, quorum=2, startup_timeout="2h") as rental:
        rental.wait_until_ready(timeout=HOUR / 20)
        assert [one.is_ready for one in rental.machines] == [True, True, False]
        assert bench.vast.clock.elapsed >= HOUR.total_seconds() / 20


class KilledError(BaseException):
    """End of an owner that no part of it handles."""


def kill_before(patch: pytest.MonkeyPatch, function: str) -> None:
    """Have the next call of a function end its process."""

    def kill(*_: object, **__: object) -> None:
        raise KilledError

    patch.setattr(function, kill)


def fail(*_: object, **__: object) -> None:
    raise errors.UnavailableError("503")


def raise_price(bench: Bench, dollars_per_hour: float) -> None:
    """Raise the price of the first machine."""
    bench.vast.add(1, bench.vast.creates[0], dph_total=dollars_per_hour)


def read_released_cost(bench: Bench) -> float:
    """Return the recorded cost of the only machine."""
    (attempt,) = list_attempts(bench.store, "fleet")
    assert attempt.release_record is not None
    return attempt.release_record.cost


@pytest.mark.parametrize("price", [0.54, 1.5, 5.0])  # hardly raised, raised, above `max_hourly`
def test_a_price_that_a_killed_owner_saw_counts_when_the_reaper_finds_no_machine(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, price: float
) -> None:
    """The owner is killed after it has destroyed the machine, before it records the release."""
    rental = bench.rent()
    rental.__enter__()
    rental.wait_until_ready()
    bench.vast.clock.sleep(HOUR.total_seconds())
    raise_price(bench, price)
    put(bench.store, MachineKeys(KEYS.make_machine_prefix(0)).program_exit, b'{"code": 0}')
    with monkeypatch.context() as patch:
        kill_before(patch, "millrace.rentals.releasing.record_release")
        with pytest.raises(KilledError):
            rental.wait_until_done()
    rental._stack.close()
    assert not bench.vast.instances
    reap(make_settings(bench.folder).ledger, vast=cast("VastClient", bench.vast))
    assert read_released_cost(bench) == pytest.approx(price, rel=0.01)
    with bench.rent() as rental:
        assert rental.cost == pytest.approx(price, rel=0.01)


@pytest.mark.parametrize("is_listed", [True, False])
def test_an_owner_that_continues_counts_the_prices_that_the_one_before_saw(
    bench: Bench, is_listed: bool
) -> None:
    """Also if the price has fallen since, or the machine is lost."""
    rental = bench.rent(max_total=6.0)
    rental.__enter__()
    rental.wait_until_ready()
    raise_price(bench, 1.8)
    rental.wait_until_ready()
    rental._stack.close()
    bench.vast.clock.sleep(3.3 * HOUR.total_seconds())
    raise_price(bench, 0.5)
    if not is_listed:
        bench.vast.instances.clear()
    rental = bench.rent(max_total=6.0)
    with pytest.raises(errors.BudgetError, match=r"\$5\.94 of \$6\.00 are spent"), rental:
        rental.wait_until_ready()
    assert not bench.vast.instances
    assert read_released_cost(bench) == pytest.approx(5.94, rel=0.01)


@pytest.mark.parametrize("way", ["reap", "release"])
def test_a_price_that_a_killed_reaper_saw_counts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The machine is destroyed, and the release is not recorded. The next reaper records it."""
    abandon(bench)
    bench.vast.clock.sleep(HOUR.total_seconds())
    raise_price(bench, 1.5)
    settings, vast = make_settings(bench.folder).ledger, cast("VastClient", bench.vast)
    module = "reaper" if way == "reap" else "outside_release"
    with monkeypatch.context() as patch:
        kill_before(patch, f"millrace.rentals.{module}.record_release")
        with pytest.raises(KilledError):
            reap(settings, vast=vast) if way == "reap" else release_rental(
                settings, "fleet", vast=vast
            )
    assert not bench.vast.instances
    reap(settings, vast=vast)
    assert read_released_cost(bench) == pytest.approx(1.5, rel=0.01)


def test_the_reaper_records_the_cost_until_the_machine_is_gone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The provider refuses to destroy the machine for ten minutes."""
    abandon(bench)
    bench.vast.clock.sleep(HOUR.total_seconds())
    destroy, end = bench.vast.destroy_instance, bench.vast.clock.elapsed + 600

    def destroy_late(number: int) -> None:
        if bench.vast.clock.elapsed < end:
            raise errors.UnavailableError("500")
        destroy(number)

    monkeypatch.setattr(bench.vast, "destroy_instance", destroy_late)
    reap(make_settings(bench.folder).ledger, vast=cast("VastClient", bench.vast))
    assert not bench.vast.instances
    assert read_released_cost(bench) == pytest.approx(0.5 * 70 / 60, rel=0.01)


def test_the_reaper_keeps_the_price_of_a_detached_machine_that_is_lost_later(bench: Bench) -> None:
    with bench.rent(detached=True, max_total=40.0) as rental:
        rental.wait_until_ready()
    raise_price(bench, 1.5)
    settings, vast = make_settings(bench.folder).ledger, cast("VastClient", bench.vast)
    reap(settings, dry_run=True, vast=vast)
    assert not exists(bench.store, KEYS.make_raised_key(0, 0))
    assert len(reap(settings, vast=vast).kept) == 1
    bench.vast.clock.sleep(HOUR.total_seconds())
    bench.vast.instances.clear()
    assert reap(settings, vast=vast).closed_attempts == 1
    assert read_released_cost(bench) == pytest.approx(1.5, rel=0.01)


def test_a_detached_machine_that_has_failed_is_released(bench: Bench) -> None:
    with bench.rent(detached=True, machines=2) as rental:
        rental.wait_until_ready()
    settings, vast = make_settings(bench.folder).ledger, cast("VastClient", bench.vast)
    bench.vast.add(1, bench.vast.creates[0], actual_status="exited")
    assert reap(settings, vast=vast).released == ()  # it has sent a heartbeat just now
    written_at = time.time() - 2 * HOUR.total_seconds()
    for number in (0, 1):
        key = MachineKeys(KEYS.make_machine_prefix(number)).heartbeat
        os.utime(bench.folder / key, (written_at, written_at))
    (gone,) = reap(settings, vast=vast).released
    assert "the machine is exited, and has sent no heartbeat for " in gone.release_reason
    assert set(bench.vast.instances) == {2}  # no other sign than the silence


def lose(bench: Bench, hours: float) -> None:
    """Rent a machine for an hour, and have it and its owner disappear for some hours."""
    rental = bench.rent()
    rental.__enter__()
    rental.wait_until_ready()
    bench.vast.clock.sleep(HOUR.total_seconds())
    rental._stack.close()
    bench.vast.instances.clear()
    bench.vast.clock.sleep(hours * HOUR.total_seconds())
    written_at = time.time() - hours * HOUR.total_seconds()
    for key in (KEYS.owner, MachineKeys(KEYS.make_machine_prefix(0)).heartbeat):
        os.utime(bench.folder / key, (written_at, written_at))


@pytest.mark.parametrize("way", ["owner", "blind owner", "reap", "release"])
def test_a_machine_that_is_lost_without_an_owner_costs_nothing_afterwards(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Also after its deadline, and if the first listing of the next owner cannot be read."""
    lose(bench, hours=60)
    settings, vast = make_settings(bench.folder).ledger, cast("VastClient", bench.vast)
    expected = pytest.approx(0.5 * 65 / 60, rel=0.01)
    if way == "reap":
        reap(settings, vast=vast)
    elif way == "release":
        release_rental(settings, "fleet", vast=vast)
    else:
        rental = bench.rent()
        with monkeypatch.context() as patch:
            if way == "blind owner":
                patch.setattr(bench.vast, "list_instances", fail)
            rental.__enter__()
        assert rental.cost == expected
        rental.wait_until_ready()
        assert len(bench.vast.instances) == 1  # another machine
        rental.__exit__(None, None, None)
        attempts = list_attempts(bench.store, "fleet")
        assert sum(one.compute_cost(START) for one in attempts) == pytest.approx(rental.cost)
    first, *_ = list_attempts(bench.store, "fleet")
    assert first.release_record is not None
    assert first.release_record.cost == expected


def test_a_program_that_ended_without_an_owner_is_done_also_after_the_deadline(
    bench: Bench,
) -> None:
    lose(bench, hours=60)
    put(bench.store, MachineKeys(KEYS.make_machine_prefix(0)).program_exit, b'{"code": 0}')
    with bench.rent() as rental:
        rental.wait_until_done()
    (attempt,) = list_attempts(bench.store, "fleet")
    assert attempt.release_record is not None
    assert attempt.release_record.reason is ReleaseReason.DONE


def fail_first_contracts(patch: pytest.MonkeyPatch, count: int) -> None:
    """Have the ledger fail to take contracts some times."""
    commit_once = machine_starter.commit_once

    def commit(store: Store, key: str, record: Record) -> object:
        nonlocal count
        if isinstance(record, Contract) and count:
            count -= 1
            raise errors.UnavailableError("503")
        return commit_once(store, key, record)

    patch.setattr(machine_starter, "commit_once", commit)


def test_a_contract_that_could_not_be_recorded_is_recorded_at_a_later_poll(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine keeps its slot meanwhile, however long the ledger does not answer."""
    fail_first_contracts(monkeypatch, 3)
    with bench.rent() as rental:
        rental._fill_slots(threading.Event())
        for _ in range(2):
            bench.vast.clock.sleep(2 * LISTING_LAG)
            bench.write_heartbeat(0)
            rental._poll_machines()
            assert not rental._state.find_missing_slots()
        assert [one.contract for one in list_attempts(bench.store, "fleet")] == [None]
        rental._poll_machines()
        (attempt,) = list_attempts(bench.store, "fleet")
        assert attempt.contract == Contract(instance_id=1)
    assert len(bench.vast.creates) == 1


@pytest.mark.parametrize("way", ["owner", "reap", "release"])
def test_a_lost_machine_without_a_contract_counts_if_it_has_sent_heartbeats(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    rental = bench.rent()
    rental.__enter__()
    fail_first_contracts(monkeypatch, 1)
    rental._fill_slots(threading.Event())
    bench.vast.clock.sleep(HOUR.total_seconds())
    bench.write_heartbeat(0)
    rental._stack.close()
    bench.vast.instances.clear()
    settings, vast = make_settings(bench.folder).ledger, cast("VastClient", bench.vast)
    if way == "reap":
        reap(settings, vast=vast)
    elif way == "release":
        release_rental(settings, "fleet", vast=vast)
    else:
        with bench.rent() as rental:
            rental.wait_until_ready()
            assert len(bench.vast.creates) == 2
            assert rental.cost == pytest.approx(0.5, rel=0.1)
    assert read_costs(bench)[0] == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("way", ["reap", "release"])
@pytest.mark.parametrize("repeat", [False, True])
def test_a_program_whose_end_only_others_have_seen_is_not_run_again(
    bench: Bench, way: str, *, repeat: bool
) -> None:
    with bench.rent(detached=True) as rental:
        rental.wait_until_ready()
    put(bench.store, MachineKeys(KEYS.make_machine_prefix(0)).program_exit, b'{"code": 0}')
    settings, vast = make_settings(bench.folder).ledger, cast("VastClient", bench.vast)
    if way == "reap":
        assert len(reap(settings, vast=vast).released) == 1
    else:
        assert release_rental(settings, "fleet", vast=vast) == 1
    with bench.rent(repeat=repeat) as rental:
        rental.wait_until_ready()
        assert len(bench.vast.creates) == 1 + repeat


@pytest.mark.parametrize("way", ["owner", "reap", "release"])
def test_an_intent_without_a_create_request_costs_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    rental = bench.rent()
    rental.__enter__()
    with monkeypatch.context() as patch:
        kill_before(patch, "tests.support.rentals.parts.FakeVast.create_instance")
        with pytest.raises(KilledError):
            rental.wait_until_ready()
    rental._stack.close()
    bench.vast.clock.sleep(30 * HOUR.total_seconds())
    settings, vast = make_settings(bench.folder).ledger, cast("VastClient", bench.vast)
    if way == "reap":
        reap(settings, vast=vast)
    elif way == "release":
        release_rental(settings, "fleet", vast=vast)
    else:
        with bench.rent() as rental:
            assert rental.cost == 0
    assert read_released_cost(bench) == 0


def test_machines_that_were_rented_with_a_replaced_key_are_released(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The identity of an account whose keys may not read it is that of the key."""
    with bench.rent(detached=True) as rental:
        rental.wait_until_ready()
    monkeypatch.setattr(bench.vast, "identify_account", lambda: "key-0123456789abcdef")
    settings, vast = make_settings(bench.folder).ledger, cast("VastClient", bench.vast)
    assert release_rental(settings, "fleet", vast=vast) == 1
    assert not bench.vast.instances
    assert read_costs(bench) != []


def read_costs(bench: Bench) -> list[float]:
    """Return the recorded costs of the released machines."""
    attempts = list_attempts(bench.store, "fleet")
    return [one.release_record.cost for one in attempts if one.release_record]


def compute_final_cost(bench: Bench) -> float:
    """Return what all machines have cost when the last one has reached its end."""
    return sum(one.compute_cost(one.deadline) for one in list_attempts(bench.store, "fleet"))


def test_detached_machines_of_an_owner_before_end_when_the_money_is_spent(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """The owner before had a deadline of a day, and counted the cost."""
    abandon(bench, machines=2, max_total=2.0)
    bench.vast.clock.sleep(HOUR.total_seconds())
    with bench.rent(detached=True, machines=2, max_total=2.0) as rental:
        bench.write_heartbeat(0)
        bench.write_heartbeat(1)
        rental.wait_until_ready()
    assert compute_final_cost(bench) == pytest.approx(2.0)
    assert "end at 2026-01-01 02:00 UTC, when max_total is spent" in caplog.text
    end = int((START + 2 * HOUR).timestamp())
    assert read(bench.store, KEYS.owner, max_size=100) == f"detached {end}".encode()
    settings, vast = make_settings(bench.folder).ledger, cast("VastClient", bench.vast)
    assert not reap(settings, vast=vast).released
    bench.vast.clock.sleep(HOUR.total_seconds())
    assert len(reap(settings, vast=vast).released) == 2


def test_an_end_stays_if_the_next_owner_cannot_begin(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandon(bench, max_total=1.0)
    with bench.rent(detached=True, max_total=1.0) as rental:
        bench.write_heartbeat(0)
        rental.wait_until_ready()
    told = read(bench.store, KEYS.owner, max_size=100)
    assert told.startswith(b"detached ")
    monkeypatch.setattr("millrace.rentals.rental.delete_detach_records", fail)
    with pytest.raises(errors.UnavailableError):
        bench.rent().__enter__()
    assert read(bench.store, KEYS.owner, max_size=100) == told


def test_a_detached_rental_that_begins_again_has_the_money_that_is_left(bench: Bench) -> None:
    with bench.rent(detached=True, max_total=2.0) as rental:
        rental.wait_until_ready()
    bench.vast.clock.sleep(3 * HOUR.total_seconds())
    put(bench.store, MachineKeys(KEYS.make_machine_prefix(0)).program_exit, b'{"code": 1}')
    settings, vast = make_settings(bench.folder).ledger, cast("VastClient", bench.vast)
    assert len(reap(settings, vast=vast).released) == 1
    with bench.rent(detached=True, max_total=2.0) as rental:
        rental.wait_until_ready()
    assert len(list_attempts(bench.store, "fleet")) == 2
    assert compute_final_cost(bench) == pytest.approx(2.0)
    assert read(bench.store, KEYS.owner, max_size=100) == b"detached"


def test_machines_are_not_detached_when_the_money_is_spent(bench: Bench) -> None:
    rental = bench.rent(detached=True, max_total=2.0)
    rental.__enter__()
    rental.wait_until_ready()
    bench.vast.clock.sleep(3.99 * HOUR.total_seconds())
    with pytest.raises(errors.BudgetError, match="are spent: all machines of fleet were"):
        rental.__exit__(None, None, None)
    assert not bench.vast.instances
    (attempt,) = list_attempts(bench.store, "fleet")
    assert not attempt.is_detached
