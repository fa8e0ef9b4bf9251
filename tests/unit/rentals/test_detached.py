"""The limits of detached machines are those that their owner has recorded."""

from datetime import timedelta
from pathlib import Path

import pytest

from millrace.keys.rentals import MachineKeys, RentalKeys
from millrace.lease import Holder, StoreClock
from millrace.records import commit_once
from millrace.rentals import Instance
from millrace.rentals.destroy import record_release
from millrace.rentals.detached import DetachedBudget
from millrace.rentals.ledger import Attempt, find_attempt
from millrace.rentals.messages import MachineHeartbeat
from millrace.schemas.rental import DetachRecord, MoneyLimits, ReleaseReason
from millrace.storage import StoreSpec, open_store, put
from tests.support.rentals.parts import HOUR, START, make_attempt

KEYS = RentalKeys("fleet")


class Bench:
    """Detached rental with a ledger in a folder.

    Attributes:
        store: Store of the ledger.
        limits: Limits of the rental.
        prices: Prices of the listed machines, by their numbers.
    """

    def __init__(self, folder: Path, *, max_total: float, machines: int) -> None:
        self.store = open_store(StoreSpec(url=folder.as_uri()))
        self.limits = MoneyLimits(max_hourly=2.0, max_total=max_total, machines=machines)
        self.prices: dict[int, float] = {}

    def add(self, attempt: Attempt, *, cost: float | None = None, received: int = 0) -> None:
        """Write the records of a machine: detached and listed; released if a cost is given."""
        number, keys = attempt.number, KEYS
        commit_once(self.store, keys.make_intent_key(number), attempt.intent)
        assert attempt.contract
        commit_once(self.store, keys.make_contract_key(number), attempt.contract)
        if cost is not None:
            record_release(self.store, "fleet", attempt, ReleaseReason.DEAD, "", cost, START)
            return
        record = DetachRecord(since=START, limits=self.limits)
        commit_once(self.store, keys.make_detached_key(number), record)
        self.prices[attempt.contract.instance_id] = attempt.intent.dollars_per_hour
        heartbeat = MachineHeartbeat(number=1, received=received)
        reports = MachineKeys(keys.make_machine_prefix(number))
        put(self.store, reports.heartbeat, heartbeat.model_dump_json().encode())

    def find_excess(self, number: int, hours: float) -> str:
        """Return why a machine must end some hours after its start; empty if it may stay."""
        rows = [{"id": one, "dph_total": price} for one, price in self.prices.items()]
        instances = [Instance.from_row(row) for row in rows]
        clock = StoreClock.read(self.store, "clock", Holder.describe_this_process())
        budget = DetachedBudget(self.store, instances, clock, START + timedelta(hours=hours))
        attempt = find_attempt(self.store, "fleet", number)
        assert attempt
        instance = attempt.find_instance(instances)
        assert instance
        return budget.find_excess("fleet", attempt, instance)


def test_the_costs_of_released_machines_count(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_total=10.0, machines=1)
    bench.add(make_attempt(0, instance_id=10), cost=8.0)
    bench.add(make_attempt(1, instance_id=11))
    assert bench.find_excess(1, 3.5) == ""
    assert bench.find_excess(1, 3.8) == "$9.90 of $10.00 are spent"  # 17 minutes are reserved


def test_money_is_reserved_until_the_last_of_many_machines_is_destroyed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_total=20.0, machines=20)
    for number in range(20):
        bench.add(make_attempt(number, instance_id=number, slot=number))
    reserved = (15 + 2 + 1) / 60  # until the next run, the listings, and 20 destroy requests
    assert bench.find_excess(0, 2.0 - reserved - 0.01) == ""
    assert bench.find_excess(0, 2.0 - reserved + 0.01) == "$17.10 of $20.00 are spent"


def test_the_money_for_the_last_hours_is_not_reserved_twice(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_total=5.0, machines=1)
    bench.add(make_attempt(0, instance_id=10, deadline=START + 10 * HOUR))
    assert [bench.find_excess(0, hours) for hours in (1, 9.5, 9.9, 9.999)] == [""] * 4


@pytest.mark.parametrize(
    ("price", "reason"),
    [(2.001, "costs $2.001 an hour, and was offered"), (0.9, "more than its share"), (0.54, "")],
)
def test_a_raised_price_ends_its_machine_only(tmp_path: Path, price: float, reason: str) -> None:
    bench = Bench(tmp_path, max_total=16.0, machines=2)
    for number in (0, 1):
        bench.add(make_attempt(number, instance_id=10 + number, slot=number))
    bench.prices[10] = price
    found = bench.find_excess(0, 1.0)
    assert reason in found
    assert bool(reason) is bool(found)
    assert bench.find_excess(1, 1.0) == ""


def test_traffic_ends_one_of_several_machines_and_counts_its_share(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_total=16.0, machines=2)
    attempts = [
        make_attempt(number, instance_id=10 + number, slot=number, download_mbps=5000.0)
        for number in (0, 1)
    ]
    bench.add(attempts[0], received=4 * 10**12)  # 400 dollars
    bench.add(attempts[1])
    assert (
        bench.find_excess(0, 2.0)
        == "the traffic of the machine has cost $8.80, more than its share"
    )
    assert bench.find_excess(1, 2.0) == ""  # 8.80 dollars and four hours


def test_a_machine_that_is_not_listed_counts_until_its_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_total=4.0, machines=2)
    bench.add(make_attempt(0, instance_id=10, deadline=START + HOUR))
    bench.add(make_attempt(1, instance_id=11, slot=1))
    del bench.prices[10]
    assert bench.find_excess(1, 6.0) == ""
    assert bench.find_excess(1, 6.8) == "$3.90 of $4.00 are spent"
