from datetime import timedelta

import pytest

from millrace import errors
from millrace.storage import create, open_store, put, read, stream
from millrace.storage.retry import seconds_of
from tests.servers.faults import Fault
from tests.stores import spec_of


@pytest.fixture
def store(request):
    return open_store(spec_of("r2", request))


@pytest.mark.parametrize("kind", [Fault.ERROR500, Fault.ERROR503, Fault.CUT, Fault.LOST])
def test_a_fault_that_passes_is_not_seen(kind, store, r2):
    data = bytes(range(256)) * 5000
    r2.fail_next(kind, 1, method="PUT")
    put(store, "a", data)
    r2.fail_next(kind, 2, method="GET")
    assert b"".join(stream(store, "a", block=300_000)) == data
    assert r2.counts()[kind] == 3
    assert r2.pending() == 0


def test_retry_after_is_honoured_by_every_later_request(store, r2):
    put(store, "a", b"data")
    r2.reset()
    # The HEAD after the first refusal reads the header that the refusal itself does not show.
    r2.fail_next(Fault.ERROR503, 1, method="GET", retry_after=2)
    r2.fail_next(Fault.ERROR503, 1, method="HEAD", retry_after=2)
    assert read(store, "a") == b"data"
    seen = [(r["method"], r["status"], r["arrived"]) for r in r2.requests()]
    assert [(method, status) for method, status, _ in seen] == [
        ("GET", 503),
        ("HEAD", 503),
        ("GET", 200),
    ]
    assert seen[2][2] - seen[1][2] >= 2


def test_a_store_that_keeps_failing_is_given_up_when_the_budget_is_spent(request, r2):
    store = open_store(spec_of("r2", request), patience=timedelta(milliseconds=300))
    r2.fail_next(Fault.ERROR500, 1000)
    with pytest.raises(errors.UnavailableError, match=r"given up after \d+ tries"):
        read(store, "a")
    assert r2.counts()[Fault.ERROR500] > 1


def test_nothing_is_tried_again_that_cannot_pass(store, r2):
    with pytest.raises(errors.NotFoundError):
        read(store, "none")
    assert len(r2.requests()) == 1


def test_a_create_whose_answer_was_lost_is_met_again(store, r2):
    r2.fail_next(Fault.LOST, 1, method="PUT")
    with pytest.raises(errors.ExistsError):
        create(store, "a", b"mine")
    assert read(store, "a") == b"mine"


def test_two_writes_a_second_to_one_key_are_waited_for(store, r2):
    for i in range(3):
        put(store, "hot", str(i).encode())
    assert read(store, "hot") == b"2"
    assert r2.refusals()


def test_retry_after_is_a_number_or_a_date():
    assert seconds_of("7") == 7
    assert seconds_of("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert seconds_of("soon") == 0
    assert seconds_of("") == 0
