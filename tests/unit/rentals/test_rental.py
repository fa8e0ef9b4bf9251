"""A rental from its first machine to its end, with an account in memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from millrace import errors
from millrace.keys.rentals import MachineKeys, RentalKeys
from millrace.lease import Holder, Lease, LeaseTerm
from millrace.progress import Event
from millrace.records import commit_once
from millrace.rentals import Rental, VastClient, reap, release_rental
from millrace.rentals.ledger import list_attempts
from millrace.rentals.messages import MachineHeartbeat
from millrace.rentals.progress_events import MachineRented
from millrace.rentals.releasing import MachineReleaser
from millrace.storage import Store, exists, open_store, put, read
from tests.support.rentals.parts import HOUR, START, FakeVast, make_offer_row, make_settings

KEYS = RentalKeys("fleet")


class Bench:
    """A folder, and an account whose machines are ready at once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.vast = folder, FakeVast(offers=[make_offer_row(1), make_offer_row(2)])

    @property
    def store(self) -> Store:
        return open_store(self.folder.as_uri())

    def rent(self, *, detached: bool = False, **more: Any) -> Rental:
        return Rental(
            make_settings(self.folder, **more),
            detached=detached,
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


class KilledError(BaseException):
    """End of an owner that no part of it handles."""


def kill_before(patch: pytest.MonkeyPatch, function: str) -> None:
    """Have the next call of a function end its process."""

    def kill(*_: object, **__: object) -> None:
        raise KilledError

    patch.setattr(function, kill)


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
    with bench.rent(detached=True, max_total=5.0) as rental:
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

    def fail(*_: object) -> None:
        raise errors.UnavailableError("503")

    monkeypatch.setattr(MachineReleaser, "release", fail)
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
