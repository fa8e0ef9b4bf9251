"""A window gathered from buckets of real stores, and from some that refuse or hang."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from millrace.gradients import ExclusionReason, GatherSettings, Sender, gather
from millrace.gradients.progress_events import GradientAccepted
from millrace.progress import Event
from millrace.storage import Store, open_store
from millrace.testing.faults import Fault
from tests.stores import make_spec
from tests.unit.gradients.test_gather import OPEN, QUICK, body_of, send, workers


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "bucket").as_uri())


@pytest.mark.parametrize("kind", ["local", "memory", "rgw", "r2"])
def test_a_window_is_whole_when_all_have_sent(kind, request):
    store = open_store(make_spec(kind, request))
    for uid in range(5):
        send(store, str(uid))
        send(store, str(uid), window=2)
    heard: list[Event] = []
    found = gather(OPEN, workers(store, *range(5)), QUICK, progress=heard.append)
    assert set(found.taken) == {"0", "1", "2", "3", "4"}
    assert (found.excluded, found.spare) == ({}, ())
    assert found.size == sum(len(body_of(str(uid))) for uid in range(5))
    assert [type(event) for event in heard] == [GradientAccepted] * 5


def test_a_bucket_that_refuses_costs_its_own_workers_only(store, request):
    send(store, "0")
    spec = make_spec("rgw", request)
    refusing = open_store(spec.model_copy(update={"url": "s3://no-such-bucket-at-all"}))
    both = [Sender("0", store), Sender("1", refusing)]
    found = gather(replace(OPEN, closes=datetime.now(UTC)), both, QUICK)
    assert set(found.taken) == {"0"}
    assert found.excluded["1"].reason is ExclusionReason.UNAVAILABLE
    assert found.excluded["1"].sentence == "Its bucket is not there."  # and no word of the bucket's


@pytest.mark.parametrize("what", ["", "gradient-"])  # its listing, its object
def test_a_bucket_that_hangs_costs_its_own_workers_only(what, store, request):
    spec = make_spec("r2", request).model_copy(update={"retry_timeout": timedelta(seconds=1)})
    hanging = open_store(spec)
    send(hanging, "1")
    for uid in (0, 2):
        send(store, str(uid))
    proxy = request.getfixturevalue("r2")
    proxy.fail_next(Fault.STALL, 100, "GET", what, stall_seconds=600)
    try:
        some = [Sender("0", store), Sender("1", hanging), Sender("2", store)]
        brief = GatherSettings(poll_interval=QUICK.poll_interval, grace_period=timedelta(seconds=1))
        found = gather(replace(OPEN, closes=datetime.now(UTC)), some, brief)
    finally:
        proxy.reset()
    assert set(found.taken) == {"0", "2"}
    assert found.excluded["1"].reason is ExclusionReason.UNAVAILABLE
    assert "had not answered by the deadline" in found.excluded["1"].sentence
