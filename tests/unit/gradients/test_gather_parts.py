"""The parts of a gathering, each alone: the lister, the quota, the reader, and the results."""

import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from millrace.errors import ConfigurationError, UnavailableError
from millrace.gradients import ExcludedWorker, ExclusionReason, GatherSettings, GatherWindow
from millrace.gradients.codec.gradient_object import (
    CheckedGradient,
    ExpectedGradient,
    GradientError,
)
from millrace.gradients.gather_window import WaitLimit
from millrace.gradients.progress_events import GradientRefused, QuotaExceeded
from millrace.gradients.sync import bucket_lister, gradient_reader
from millrace.gradients.sync.bucket_lister import BucketLister, BucketListing, QuotaMonitor
from millrace.gradients.sync.gather_results import GatherResults
from millrace.gradients.sync.gradient_reader import (
    GradientReader,
    ReadGradient,
    ReadResult,
    read_in_process,
)
from millrace.progress import Event, ignore_event
from millrace.storage import Stat, Store, head, list_objects, open_store, put
from tests.unit.gradients.test_gather import KEYS, NOW, OPEN, body_of, send
from tests.unit.gradients.test_gradient_object import as_torch


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "bucket").as_uri())


@pytest.fixture
def other(tmp_path: Path) -> Store:
    return open_store((tmp_path / "other").as_uri())


def soon() -> WaitLimit:
    return WaitLimit(time.monotonic() + 5)


def lister_of(stores: dict[str, Store], **limits: int) -> BucketLister:
    return BucketLister(OPEN, stores, GatherSettings(**limits), soon())


def reader_of(
    read_gradient: ReadGradient = read_in_process, window: GatherWindow = OPEN
) -> GradientReader:
    return GradientReader(window, read_gradient, 2, soon())


def stat_of(uid: str, etag: str = "1") -> Stat:
    return Stat(KEYS.make_gradient_key(uid, 3), 10, etag, datetime.now(UTC))


def read_of(store: Store, uid: str) -> ReadResult:
    return reader_of().read(uid, store, head(store, KEYS.make_gradient_key(uid, 3)))


def unavailable() -> UnavailableError:
    error = UnavailableError("a test")
    error.status = 503
    return error


def refused_result(reason: ExclusionReason) -> ReadResult:
    return ReadResult(None, ExcludedWorker(reason=reason, sentence="A test."))


# -- the lister


def test_a_listing_finds_the_gradients_of_the_window_and_measures_each_worker(store):
    for uid in "012":
        send(store, uid)
    send(store, "0", window=2)
    put(store, f"{KEYS.make_worker_prefix('1')}notes", bytes(7))
    listing = lister_of({"0": store, "1": store}).list_bucket(["0", "1"])
    assert {uid: stat.key for uid, stat in listing.found.items()} == {
        uid: KEYS.make_gradient_key(uid, 3) for uid in "01"
    }
    assert listing.objects == {"0": 2, "1": 2}
    assert listing.size["1"] == len(body_of("1")) + 7
    assert not listing.failed


def test_a_listing_leaves_out_workers_that_are_not_asked_but_measures_them(store):
    for uid in "012":
        send(store, uid)
    listing = lister_of(dict.fromkeys("012", store)).list_bucket(["0", "2"])
    assert (set(listing.found), set(listing.objects)) == ({"0", "2"}, {"0", "1", "2"})


def test_a_safetensors_file_is_preferred_to_a_file_of_torchs(store):
    put(
        store, KEYS.make_gradient_key("0", 3).replace(".safetensors", ".pt"), as_torch(body_of("0"))
    )
    send(store, "0")
    found = lister_of({"0": store}).list_bucket(["0"]).found
    assert found["0"].key.endswith(".safetensors")


def test_of_a_worker_with_many_objects_in_its_own_bucket_the_gradient_is_looked_for(
    store, monkeypatch
):
    monkeypatch.setattr(bucket_lister, "_MOST_LISTED", 3)
    for number in range(9):
        put(store, f"{KEYS.make_worker_prefix('0')}a{number}", b"junk")
    send(store, "0")
    listing = lister_of({"0": store}).list_bucket(["0"])
    assert set(listing.found) == {"0"}
    assert listing.objects["0"] == 3


def test_after_a_long_listing_only_the_gradients_of_the_window_are_looked_for(monkeypatch):
    """A run of weeks has many gradients of earlier windows, and each poll has a page for each."""
    monkeypatch.setattr(bucket_lister, "_PAGE_SIZE", 10)
    store = open_store(f"memory://{secrets.token_hex(8)}")
    for uid in "012":
        for window in range(100, 150):
            put(store, KEYS.make_gradient_key(uid, window), b"old")
    listed: list[str] = []

    def record(store: Store, prefix: str) -> Iterator[Stat]:
        listed.append(prefix)
        return list_objects(store, prefix)

    lister = lister_of(dict.fromkeys("012", store))
    assert lister.list_bucket(["0", "1", "2"]).objects == dict.fromkeys("012", 50)
    monkeypatch.setattr(bucket_lister, "list_fairly", None)
    monkeypatch.setattr(bucket_lister, "list_objects", record)
    send(store, "0")
    send(store, "2")
    listing = lister.list_bucket(["0", "1", "2"])
    assert set(listing.found) == {"0", "2"}
    assert sorted(listed) == [f"{KEYS.make_worker_prefix(uid)}gradient-000000003-" for uid in "012"]
    assert (listing.objects, listing.failed) == ({}, {})
    assert set(lister.list_bucket(["0"]).found) == {"0"}


def test_a_listing_that_fails_has_a_reason_for_each_worker(store, monkeypatch):
    def fail(*_arguments: object, **_options: object) -> None:
        raise unavailable()

    monkeypatch.setattr(bucket_lister, "list_fairly", fail)
    listing = lister_of({"0": store, "1": store}).list_bucket(["0", "1"])
    excluded = ExcludedWorker(
        reason=ExclusionReason.UNAVAILABLE, sentence="Its bucket answers 503."
    )
    assert listing.failed == {"0": excluded, "1": excluded}
    assert (listing.found, listing.objects, listing.size) == ({}, {}, {})


def test_a_bucket_is_listed_once_for_its_workers_and_not_while_it_is_listed(store, other):
    lister = lister_of({"0": store, "1": store, "2": other})
    begun = lister.begin(["0", "1", "2"])
    assert len(begun) == 2
    assert not lister.begin(["0", "2"])
    assert lister.is_listing("1")
    wait(lister.pending, 30)
    assert len(lister.take_finished()) == 2
    assert not lister.is_listing("1")
    assert not lister.take_finished()
    assert not lister.begin(["0", "1", "2"], exclude=begun)


# -- the quota


@pytest.mark.parametrize("limit", [{"max_stored": 99}, {"max_objects": 3}])
def test_a_worker_over_its_quota_is_reported_once(limit):
    heard: list[Event] = []
    quota = QuotaMonitor(GatherSettings(**limit), heard.append)
    listing = BucketListing()
    listing.objects.update({"a": 3, "b": 4})
    listing.size.update({"a": 99, "b": 100})
    for _ in range(2):
        quota.check(listing, ["a", "b", "c"])
    assert heard == [QuotaExceeded(uid="b", objects=4, size=100)]


# -- the reader


def test_a_read_returns_the_gradient_with_its_size_and_time(store):
    send(store, "0")
    stat = head(store, KEYS.make_gradient_key("0", 3))
    result = reader_of().read("0", store, stat)
    assert result.gradient is not None
    assert (result.exclusion, result.size, result.written) == (None, stat.size, stat.last_modified)


@pytest.mark.parametrize(
    ("window", "reason"),
    [
        (replace(OPEN, opens=NOW + timedelta(days=1)), ExclusionReason.EARLY),
        (replace(OPEN, closes=NOW - timedelta(minutes=30)), ExclusionReason.LATE),
    ],
)
def test_what_was_written_outside_the_window_is_not_read(store, window, reason):
    def read(*_arguments: object) -> CheckedGradient:
        raise AssertionError("it was read")

    send(store, "0")
    result = reader_of(read, window).read("0", store, head(store, KEYS.make_gradient_key("0", 3)))
    assert result.exclusion is not None
    assert result.exclusion.reason is reason


@pytest.mark.parametrize(
    ("error", "reason", "calls"),
    [
        (GradientError(ExclusionReason.NORM, "It is large."), ExclusionReason.NORM, 1),
        (unavailable(), ExclusionReason.UNAVAILABLE, 1),
        (RecursionError(), ExclusionReason.FORMAT, 2),  # the bytes may not have caused it
    ],
)
def test_an_error_of_a_read_excludes_its_worker(store, error, reason, calls):
    called: list[str] = []

    def read(uid: str, _store: Store, _stat: Stat, _expected: ExpectedGradient) -> CheckedGradient:
        called.append(uid)
        raise error

    result = reader_of(read).read("0", store, stat_of("0"))
    assert result.exclusion is not None
    assert (result.gradient, result.exclusion.reason) == (None, reason)
    assert called == ["0"] * calls


def test_an_error_of_the_aggregator_is_raised_to_who_takes_the_results(store):
    def read(*_arguments: object) -> CheckedGradient:
        raise ConfigurationError("A test.")

    reader = reader_of(read)
    reader.begin("0", store, stat_of("0"))
    wait(reader.pending, 30)
    with pytest.raises(ConfigurationError, match=r"A test\."):
        reader.take_finished()


def test_a_read_is_pending_until_its_result_is_taken(store):
    go = threading.Event()

    def read(uid: str, store: Store, stat: Stat, expected: ExpectedGradient) -> CheckedGradient:
        go.wait(30)
        return read_in_process(uid, store, stat, expected)

    send(store, "0")
    reader = reader_of(read)
    reader.begin("0", store, head(store, KEYS.make_gradient_key("0", 3)))
    assert reader.is_reading("0")
    assert not reader.take_finished()
    go.set()
    wait(reader.pending, 30)
    assert reader.take_finished()["0"].gradient is not None
    assert not reader.is_reading("0")
    assert not reader.pending


def test_a_read_of_a_slow_bucket_does_not_hold_up_the_others(store, monkeypatch):
    go, begun = threading.Event(), threading.Event()

    def read(uid: str, store: Store, stat: Stat, expected: ExpectedGradient) -> CheckedGradient:
        if uid == "0":
            begun.set()
            go.wait(60)
        return read_in_process(uid, store, stat, expected)

    reader = GradientReader(OPEN, read, 1, soon())
    for uid in "01":
        send(store, uid)
        reader.begin(uid, store, head(store, KEYS.make_gradient_key(uid, 3)))
    assert begun.wait(60)
    assert not reader.take_finished()
    monkeypatch.setattr(gradient_reader, "_SLOW_READ", -1.0)  # as if it had run for long
    reader.take_finished()
    wait(reader.pending, 60, return_when=FIRST_COMPLETED)
    assert reader.take_finished()["1"].gradient is not None
    go.set()
    wait(reader.pending, 60)
    assert reader.take_finished()["0"].gradient is not None


# -- the results


def test_of_equal_gradients_only_the_earliest_is_valid(store):
    send(store, "0")
    first = read_of(store, "0")
    results = GatherResults("ab", ignore_event)
    assert first.written is not None
    later = replace(first, written=first.written + timedelta(seconds=1))
    results.note("a", later, is_last=False)
    results.note("b", first, is_last=False)
    assert results.select_valid() == ["b"]
    assert results.explain_exclusion("a", is_pending=False).reason is ExclusionReason.DUPLICATE


def test_an_error_that_may_pass_is_final_only_at_the_end():
    heard: list[Event] = []
    results, stat = GatherResults("a", heard.append), stat_of("a")
    assert results.should_read("a", stat)
    assert not results.should_read("a", stat)
    results.note("a", refused_result(ExclusionReason.CHANGED), is_last=False)
    assert not results.has("a")
    assert results.explain_exclusion("a", is_pending=False).reason is ExclusionReason.CHANGED
    assert results.should_read("a", stat)  # again
    assert heard == []
    results.note("a", refused_result(ExclusionReason.CHANGED), is_last=True)
    assert results.has("a")
    assert heard == [GradientRefused(uid="a", reason=ExclusionReason.CHANGED)]


def test_a_worker_that_overwrites_its_gradient_is_read_three_times():
    heard: list[Event] = []
    results = GatherResults("a", heard.append)
    for number in range(3):
        assert results.should_read("a", stat_of("a", str(number)))
        results.note("a", refused_result(ExclusionReason.NORM), is_last=False)
    assert not results.should_read("a", stat_of("a", "3"))
    assert not results.should_read("a", stat_of("a", "4"))
    assert results.explain_exclusion("a", is_pending=False).reason is ExclusionReason.OVERWRITTEN
    reasons = [ExclusionReason.NORM] * 3 + [ExclusionReason.OVERWRITTEN]
    assert heard == [GradientRefused(uid="a", reason=reason) for reason in reasons]


def test_an_object_that_was_not_read_does_not_count_as_a_read():
    results = GatherResults("a", ignore_event)
    for number in range(9):
        assert results.should_read("a", stat_of("a", str(number)))
        results.note("a", refused_result(ExclusionReason.TOO_LARGE), is_last=False)


def test_a_worker_without_a_result_is_missing_or_its_bucket_does_not_answer():
    results = GatherResults("ab", ignore_event)
    assert results.explain_exclusion("a", is_pending=False).reason is ExclusionReason.MISSING
    assert results.explain_exclusion("a", is_pending=True).reason is ExclusionReason.UNAVAILABLE
    denied = ExcludedWorker(
        reason=ExclusionReason.UNAVAILABLE, sentence="Its bucket refuses to be read."
    )
    results.note_listing("a", {"a": denied})
    assert results.explain_exclusion("a", is_pending=False) is denied
    assert results.explain_exclusion("a", is_pending=True) is denied  # it is listed once more
    results.note_listing("b", {})  # another bucket
    assert results.explain_exclusion("a", is_pending=False) is denied
    results.note_listing("a", {})
    assert results.explain_exclusion("a", is_pending=False).reason is ExclusionReason.MISSING


def test_a_listing_that_succeeds_does_not_remove_the_reason_of_a_read():
    results = GatherResults("a", ignore_event)
    assert results.should_read("a", stat_of("a"))
    results.note("a", refused_result(ExclusionReason.CHANGED), is_last=False)
    results.note_listing("a", {})
    assert results.explain_exclusion("a", is_pending=False).reason is ExclusionReason.CHANGED
