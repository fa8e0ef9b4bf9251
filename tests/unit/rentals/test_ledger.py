"""The ledger keeps the highest price of a machine that any process has seen."""

from pathlib import Path

import pytest

from millrace import errors
from millrace.keys.rentals import RentalKeys
from millrace.records import commit_once
from millrace.rentals.ledger import Attempt, find_attempt, record_price
from millrace.schemas.rental import PriceRaiseRecord
from millrace.storage import Store, exists, open_store, put
from tests.support.rentals.parts import HOUR, START, make_attempt

KEYS = RentalKeys("fleet")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path.as_uri())


@pytest.fixture
def attempt(store: Store) -> Attempt:
    """Return an attempt in the ledger, whose machine was offered for $0.50 an hour."""
    attempt = make_attempt(instance_id=1)
    commit_once(store, KEYS.make_intent_key(0), attempt.intent)
    return attempt


def read_price(store: Store) -> float:
    """Return the price of the machine by the ledger, as the next process reads it."""
    attempt = find_attempt(store, "fleet", 0)
    assert attempt is not None
    assert attempt.compute_cost(START + HOUR) == pytest.approx(attempt.dollars_per_hour)
    return attempt.dollars_per_hour


@pytest.mark.parametrize("price", [0.0, 0.4, 0.5])
def test_a_price_that_is_not_above_the_intent_leaves_no_record(
    store: Store, attempt: Attempt, price: float
) -> None:
    assert record_price(store, "fleet", attempt, price) is attempt
    assert not exists(store, KEYS.make_raised_key(0, 0))
    assert read_price(store) == 0.5


def test_the_highest_of_several_raised_prices_counts(store: Store, attempt: Attempt) -> None:
    for price in (0.8, 1.6, 1.2, 1.7):
        attempt = record_price(store, "fleet", attempt, price)
    assert attempt.dollars_per_hour == read_price(store) == 1.7
    assert exists(store, KEYS.make_raised_key(0, 2))
    assert not exists(store, KEYS.make_raised_key(0, 3))  # 1.2 is below the price before


@pytest.mark.parametrize("price", [1.2, 3.0])
def test_two_processes_that_record_prices_at_once_keep_the_higher_one(
    store: Store, attempt: Attempt, price: float
) -> None:
    """The other process has not seen the records of the first."""
    first = record_price(store, "fleet", attempt, 0.8)
    record_price(store, "fleet", first, 1.6)
    other = record_price(store, "fleet", attempt, price)
    assert other.dollars_per_hour == read_price(store) == max(1.6, price)


def test_a_damaged_record_of_a_price_counts_as_missing(store: Store, attempt: Attempt) -> None:
    attempt = record_price(store, "fleet", attempt, 0.8)
    record_price(store, "fleet", attempt, 1.6)
    put(store, KEYS.make_raised_key(0, 1), b"{")
    assert read_price(store) == 0.8
    found = find_attempt(store, "fleet", 0)
    assert found is not None
    record_price(store, "fleet", found, 1.6)
    assert read_price(store) == 1.6
    record_price(store, "fleet", attempt, 2.0)  # meets the damaged record
    assert read_price(store) == 2.0


def test_a_store_that_takes_no_record_fails_no_release(
    store: Store,
    attempt: Attempt,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise errors.UnavailableError("503")

    with monkeypatch.context() as patch:
        patch.setattr("millrace.rentals.ledger.commit_once", fail)
        assert record_price(store, "fleet", attempt, 0.8) is attempt
    assert "The price of machine fleet/0, $0.800 an hour, is not recorded: 503" in caplog.text
    record_price(store, "fleet", attempt, 0.8)  # at the next listing
    assert read_price(store) == 0.8


def test_the_last_price_has_the_highest_number(store: Store, attempt: Attempt) -> None:
    for number, price in ((999_999, 0.8), (1_000_000, 1.6)):
        key = KEYS.make_raised_key(0, number)
        commit_once(store, key, PriceRaiseRecord(dollars_per_hour=price))
    assert read_price(store) == 1.6
    found = find_attempt(store, "fleet", 0)
    assert found is not None
    record_price(store, "fleet", found, 2.0)
    assert exists(store, KEYS.make_raised_key(0, 1_000_001))
