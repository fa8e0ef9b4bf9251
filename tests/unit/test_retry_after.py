"""Pauses that servers ask for."""

import time
from datetime import UTC, datetime

import pytest

from millrace.retry_after import parse_retry_after


@pytest.fixture(autouse=True)
def _zone_of_this_machine(monkeypatch):
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    "date",
    [
        "Wed, 21 Oct 2099 07:28:00 GMT",
        "Wed Oct 21 07:28:00 2099",  # asctime, which names no zone
        "Wed, 21 Oct 2099 07:28:00 -0000",
    ],
)
def test_each_form_of_a_date_is_in_utc(date, monkeypatch):
    now = datetime(2099, 10, 21, 7, 27, tzinfo=UTC).timestamp()
    monkeypatch.setattr("millrace.retry_after.time.time", lambda: now)
    assert parse_retry_after(date) == 60.0


@pytest.mark.parametrize(
    "text", ["3601", "1e300", "inf", "9" * 400, "Wed, 21 Oct 9999 07:28:00 GMT"]
)
def test_no_pause_is_longer_than_an_hour(text):
    assert parse_retry_after(text) == 3600.0


@pytest.mark.parametrize("text", ["", "-5", "nan", "soon", "Wed, 21 Oct 99999 07:28:00 GMT"])
def test_a_value_that_asks_for_no_pause_is_none(text):
    assert parse_retry_after(text) == 0.0
