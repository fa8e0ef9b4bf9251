"""A window gathered from the workers' buckets: what is right is kept, what is not harms nobody."""

import os
import secrets
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from millrace.errors import ConfigurationError, UnavailableError
from millrace.gradients import (
    ExclusionReason,
    GatherSettings,
    GatherWindow,
    QuorumError,
    Sender,
    encode,
    gather,
)
from millrace.gradients.codec.gradient_object import (
    CheckedGradient,
    ExpectedGradient,
    read_gradient,
)
from millrace.gradients.progress_events import GradientRefused, QuotaExceeded
from millrace.gradients.sync import bucket_lister
from millrace.keys.gradients import GradientKeys
from millrace.lease import StoreClock
from millrace.progress import Event
from millrace.storage import Stat, Store, head, list_fairly, list_objects, open_store, put
from tests.unit.gradients.test_gradient_object import CODEC, SHAPES, as_torch, bodies, made

KEYS = GradientKeys("runs/one", "1")
NOW = datetime.now(UTC)
QUICK = GatherSettings(poll_interval=timedelta(milliseconds=10))
OPEN = GatherWindow(
    keys=KEYS,
    number=3,
    base=120,
    codec=CODEC,
    shapes=SHAPES,
    opens=NOW - timedelta(hours=1),
    closes=NOW + timedelta(days=1),  # a run of all tests may take hours
)
RESERVES_DUE = replace(OPEN, opens=NOW - timedelta(days=9))
OVER = replace(OPEN, closes=datetime.now(UTC) - timedelta(seconds=1))


def now_over(window: GatherWindow = OPEN) -> GatherWindow:
    """A window that ends now."""
    return replace(window, closes=datetime.now(UTC))


def body_of(uid: str, **more: object) -> bytes:
    return made(uid=uid, bodies=bodies(seed=int(uid)), **more)


def send(store: Store, uid: str, body: bytes | None = None, window: int = 3) -> None:
    put(store, KEYS.make_gradient_key(uid, window), body_of(uid) if body is None else body)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "bucket").as_uri())


def workers(store: Store, *uids: int) -> list[Sender]:
    return [Sender(str(uid), store) for uid in uids]


def age(store: Store, uid: str, at: datetime) -> None:
    """Say when a gradient was written."""
    path = Path(store.location.bucket) / KEYS.make_gradient_key(uid, 3)
    os.utime(path, (at.timestamp(), at.timestamp()))


def test_workers_have_buckets_of_their_own(tmp_path):
    everybody = []
    for uid in range(3):
        store = open_store((tmp_path / str(uid)).as_uri())
        send(store, str(uid))
        everybody.append(Sender(str(uid), store))
    assert set(gather(OPEN, everybody, QUICK).taken) == {"0", "1", "2"}


def test_a_file_of_torchs_is_read_unless_the_worker_has_sent_the_other(store):
    for uid in (0, 1):
        key = KEYS.make_gradient_key(str(uid), 3).replace(".safetensors", ".pt")
        put(store, key, as_torch(body_of(str(uid), tokens=1)))
    send(store, "1")
    found = gather(OPEN, workers(store, 0, 1), QUICK)
    assert {uid: one.header.tokens for uid, one in found.taken.items()} == {"0": 1, "1": 0}


BAD = {
    ExclusionReason.FORMAT: b"no gradient",
    ExclusionReason.UID: body_of("4"),
    ExclusionReason.WINDOW: body_of("1", window=2),
    ExclusionReason.RUN: body_of("1", run="runs/two"),
    ExclusionReason.BASE: body_of("1", base=90),
    ExclusionReason.DIGEST: body_of("1")[:-1] + bytes([body_of("1")[-1] ^ 1]),
    ExclusionReason.TOO_LARGE: body_of("1") + bytes(1 << 20),
}


@pytest.mark.parametrize("reason", BAD)
def test_one_that_is_bad_is_out_with_a_reason_and_touches_nobody_else(store, reason):
    for uid in range(4):
        send(store, str(uid))
    send(store, "1", BAD[reason])
    found = gather(now_over(), workers(store, *range(4)), QUICK)
    assert set(found.taken) == {"0", "2", "3"}
    assert found.excluded["1"].reason is reason
    assert found.excluded["1"].sentence.endswith(".")


@pytest.mark.parametrize("limit", [{"max_stored": 5000}, {"max_objects": 3}])
@pytest.mark.parametrize("shared", [True, False])
def test_who_stores_more_than_its_quota_is_named_and_its_gradient_is_taken(tmp_path, limit, shared):
    stores = [open_store((tmp_path / ("all" if shared else uid)).as_uri()) for uid in "012"]
    everybody = [Sender(uid, store) for uid, store in zip("012", stores, strict=True)]
    for worker in everybody:
        send(worker.store, worker.uid)
    for number in range(3):
        put(stores[1], f"{KEYS.make_worker_prefix('1')}a/b{number}", bytes(3000))
    put(stores[0], "runs/one/10/x", bytes(9000))  # is nobody's that is asked
    heard: list[Event] = []
    settings = QUICK.model_copy(update=limit)
    found = gather(OPEN, everybody, settings, progress=heard.append)
    assert set(found.taken) == {"0", "1", "2"}
    over = [event for event in heard if isinstance(event, QuotaExceeded)]
    stored = 9000 + len(body_of("1"))
    assert over == [QuotaExceeded(uid="1", objects=4, size=stored)]


def test_a_worker_over_its_quota_is_named_once_a_window_though_it_is_looked_at_again(store):
    put(store, f"{KEYS.make_worker_prefix('1')}x", bytes(100))
    heard: list[Event] = []
    settings = QUICK.model_copy(update={"max_stored": 10, "quorum": 0})
    gather(now_over(), workers(store, 0, 1), settings, progress=heard.append)
    soon = replace(OPEN, closes=datetime.now(UTC) + timedelta(milliseconds=200))
    gather(soon, workers(store, 0, 1), settings, progress=heard.append)
    assert [event.uid for event in heard if isinstance(event, QuotaExceeded)] == ["1", "1"]
    assert len(heard) == 2


def test_a_worker_with_many_objects_makes_the_listing_of_all_no_longer(monkeypatch):
    """It sorts before the others, and its own gradient behind its other objects."""
    monkeypatch.setattr(bucket_lister, "_MOST_LISTED", 20)
    store = open_store(f"memory://{secrets.token_hex(8)}")
    for number in range(2000):
        put(store, f"{KEYS.make_worker_prefix('0')}a{number:04d}", b"")
    for uid in "012":
        send(store, uid)
    listed: list[str] = []

    def count(*args: Any, **options: Any) -> Iterator[Stat]:
        for stat in list_fairly(*args, **options):
            listed.append(stat.key)
            yield stat

    monkeypatch.setattr(bucket_lister, "list_fairly", count)
    found = gather(OPEN, workers(store, 0, 1, 2), QUICK)
    assert set(found.taken) == {"0", "1", "2"}
    assert len(listed) < 100


def test_who_sends_nothing_early_or_late_is_out(store):
    for uid in (0, 1, 2):
        send(store, str(uid))
    age(store, "0", OVER.closes - timedelta(minutes=1))
    age(store, "1", OVER.opens - timedelta(minutes=1))
    age(store, "2", OVER.closes + timedelta(seconds=1))
    found = gather(OVER, workers(store, 0, 1, 2, 3), QUICK)
    assert set(found.taken) == {"0"}
    reasons = {uid: one.reason for uid, one in found.excluded.items()}
    assert reasons == {
        "1": ExclusionReason.EARLY,
        "2": ExclusionReason.LATE,
        "3": ExclusionReason.MISSING,
    }


def test_who_sends_what_another_has_sent_is_out(store):
    body = made(uid="1", bodies=bodies(seed=0))
    send(store, "0")
    send(store, "1", body)
    age(store, "1", NOW - timedelta(minutes=5))  # it was first, and who came later has copied
    found = gather(now_over(), workers(store, 0, 1), QUICK)
    assert set(found.taken) == {"1"}
    assert found.excluded["0"].reason is ExclusionReason.DUPLICATE


def test_a_copy_whose_endpoint_states_an_earlier_time_is_out(store, tmp_path):
    own = open_store((tmp_path / "own").as_uri(), is_foreign=True)
    send(store, "0")
    send(own, "1", made(uid="1", bodies=bodies(seed=0)))
    age(own, "1", NOW - timedelta(minutes=5))
    found = gather(now_over(), [*workers(store, 0), *workers(own, 1)], QUICK)
    assert set(found.taken) == {"0"}
    assert found.excluded["1"].reason is ExclusionReason.DUPLICATE


def test_a_copy_whose_endpoint_states_the_etag_of_an_earlier_object_is_out(
    store, tmp_path, monkeypatch
):
    own = open_store((tmp_path / "own").as_uri(), is_foreign=True)
    send(own, "1", b"junk")
    taken: list[str] = []

    def copy_later(event: Event) -> None:
        if isinstance(event, GradientRefused):
            send(store, "0")
            send(own, "1", made(uid="1", bodies=bodies(seed=0)))
            age(own, "1", NOW - timedelta(minutes=5))
        else:
            taken.append(str(event))

    class Clock(StoreClock):
        def now(self) -> datetime:
            return OPEN.closes + timedelta(seconds=1) if len(taken) == 2 else datetime.now(UTC)

    def list_with_one_etag(*args: Any, **options: Any) -> Iterator[Stat]:
        return (replace(stat, etag="x") for stat in list_objects(*args, **options))

    def reading(uid: str, store: Store, stat: Stat, expected: ExpectedGradient) -> CheckedGradient:
        return read_gradient(store, head(store, stat.key), expected)

    monkeypatch.setattr(bucket_lister, "list_objects", list_with_one_etag)
    found = gather(
        OPEN,
        [*workers(store, 0), *workers(own, 1)],
        QUICK,
        read_gradient=reading,
        clock=Clock(NOW, 0.0),
        progress=copy_later,
    )
    assert set(found.taken) == {"0"}
    assert found.excluded["1"].reason is ExclusionReason.DUPLICATE


def test_workers_without_a_change_are_no_copies_of_each_other(store):
    nothing = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    still = {name: encode(tensor, CODEC) for name, tensor in nothing.items()}
    for uid in (0, 1):
        send(store, str(uid), made(uid=str(uid), bodies=still))
    assert set(gather(now_over(), workers(store, 0, 1), QUICK).taken) == {"0", "1"}


def test_reserves_stand_in_for_who_is_bad_without_waiting(store):
    send(store, "0")
    send(store, "1", b"bad")
    for uid in (7, 8):
        send(store, str(uid))
    found = gather(OPEN, workers(store, 0, 1), QUICK, reserves=workers(store, 7, 8))
    assert list(found.taken) == ["0", "7"]
    assert found.excluded["1"].reason is ExclusionReason.FORMAT


def test_reserves_are_read_before_the_deadline_when_others_are_late(store):
    for uid in (0, 8, 7):
        send(store, str(uid))
    found = gather(RESERVES_DUE, workers(store, 0, 1), QUICK, reserves=workers(store, 7, 8))
    assert list(found.taken) == ["0", "7"]
    assert found.spare == ("8",)


def test_whoever_was_asked_first_counts_before_reserves(store):
    for uid in (0, 1, 7):
        send(store, str(uid))
    found = gather(RESERVES_DUE, workers(store, 0, 1), QUICK, reserves=workers(store, 7))
    assert list(found.taken) == ["0", "1"]


def test_a_worker_that_warms_up_is_checked_and_not_taken(store):
    for uid in (0, 1, 7):
        send(store, str(uid))
    send(store, "8", b"bad")
    found = gather(OPEN, workers(store, 0, 1), QUICK, observed=workers(store, 7, 8))
    assert set(found.taken) == {"0", "1"}
    reasons = {uid: one.reason for uid, one in found.excluded.items()}
    assert reasons == {"7": ExclusionReason.WARM_UP, "8": ExclusionReason.FORMAT}


def test_a_complete_window_waits_for_who_warms_up_until_half_of_its_time(store):
    now = datetime.now(UTC)  # the module may have been read long before
    early = replace(OPEN, opens=now - timedelta(minutes=1), closes=now + timedelta(hours=1))
    send(store, "0")
    heard: list[Event] = []

    def send_later(event: Event) -> None:
        heard.append(event)
        if len(heard) == 1:  # the window is complete
            send(store, "7")

    found = gather(early, workers(store, 0), QUICK, observed=workers(store, 7), progress=send_later)
    assert found.excluded["7"].reason is ExclusionReason.WARM_UP
    found = gather(RESERVES_DUE, workers(store, 0), QUICK, observed=workers(store, 8))
    assert set(found.taken) == {"0"}
    assert found.excluded["8"].reason is ExclusionReason.MISSING


def test_a_copy_by_who_warms_up_is_out(store):
    send(store, "0")
    send(store, "7", made(uid="7", bodies=bodies(seed=0)))
    age(store, "0", NOW - timedelta(minutes=5))
    found = gather(RESERVES_DUE, workers(store, 0), QUICK, observed=workers(store, 7))
    assert set(found.taken) == {"0"}
    assert found.excluded["7"].reason is ExclusionReason.DUPLICATE


def test_what_nobody_foresees_costs_a_gradient_its_place_when_it_happens_twice(store):
    asked: list[str] = []

    def reading(uid: str, store: Store, stat: Stat, expected: ExpectedGradient) -> CheckedGradient:
        asked.append(uid)
        if uid == "2" or (uid == "1" and asked.count(uid) == 1):
            raise KeyError(uid)
        return read_gradient(store, stat, expected)

    for uid in range(3):
        send(store, str(uid))
    found = gather(now_over(), workers(store, 0, 1, 2), QUICK, read_gradient=reading)
    assert set(found.taken) == {"0", "1"}
    assert found.excluded["2"].reason is ExclusionReason.FORMAT
    assert found.excluded["2"].sentence.endswith("cannot be read (KeyError).")
    assert sorted(asked) == ["0", "1", "1", "2", "2"]


def test_without_a_quorum_it_has_failed(store):
    send(store, "0")
    closed = replace(OPEN, closes=datetime.now(UTC))
    with pytest.raises(QuorumError, match="1 gradients of window 3 arrived in time, and 2") as one:
        gather(
            closed,
            workers(store, 0, 1),
            GatherSettings(poll_interval=QUICK.poll_interval, quorum=2),
        )
    reasons = {uid: one.reason for uid, one in one.value.gathered.excluded.items()}
    assert reasons == {"0": ExclusionReason.QUORUM, "1": ExclusionReason.MISSING}
    assert not one.value.gathered.taken


def test_as_many_as_the_quorum_are_waited_for(store):
    for uid in (0, 1, 7):
        send(store, str(uid))
    few = GatherSettings(poll_interval=QUICK.poll_interval, wanted=2, quorum=3)
    found = gather(OPEN, workers(store, 0, 1), few, reserves=workers(store, 7))
    assert list(found.taken) == ["0", "1", "7"]


def test_what_cannot_be_asked_is_refused(store):
    with pytest.raises(ConfigurationError, match="named twice"):
        gather(OPEN, workers(store, 0, 0), QUICK)
    with pytest.raises(ConfigurationError, match="3 gradients are needed from 2"):
        gather(OPEN, workers(store, 0, 1), GatherSettings(wanted=3))


@pytest.mark.parametrize("reason", [*BAD, ExclusionReason.EARLY, ExclusionReason.DUPLICATE])
def test_a_right_gradient_that_overwrites_a_refused_one_counts(store, reason):
    """An earlier run of the same name may have left them, until this run's workers have sent."""
    heard: list[Event] = []

    def sends_the_right_one(event: Event) -> None:
        heard.append(event)
        if isinstance(event, GradientRefused):
            send(store, event.uid)
        elif reason is ExclusionReason.DUPLICATE and len(heard) == 2:
            send(store, "1")

    send(store, "0")
    match reason:
        case ExclusionReason.EARLY:
            send(store, "1")
            age(store, "1", OPEN.opens - timedelta(days=1))
        case ExclusionReason.DUPLICATE:
            send(store, "1", made(uid="1", bodies=bodies(seed=0)))
        case _:
            send(store, "1", BAD[reason])
    found = gather(OPEN, workers(store, 0, 1), QUICK, progress=sends_the_right_one)
    assert set(found.taken) == {"0", "1"}
    assert found.excluded == {}


def test_a_gradient_that_is_overwritten_again_and_again_is_read_three_times(store):
    """A worker that overwrites before each poll keeps no reader busy, and costs few bytes."""
    asked: list[str] = []
    heard: list[Event] = []
    looks = 0

    class Clock(StoreClock):
        def now(self) -> datetime:
            nonlocal looks
            looks += 1
            send(store, "1", f"wrong {looks}".encode())
            reasons = [event.reason for event in heard if isinstance(event, GradientRefused)]
            over = ExclusionReason.OVERWRITTEN in reasons or asked.count("1") > 3
            return OPEN.closes + timedelta(seconds=1 if over else -1)

    def reading(uid: str, store: Store, stat: Stat, expected: ExpectedGradient) -> CheckedGradient:
        asked.append(uid)
        return read_gradient(store, stat, expected)

    send(store, "0")
    found = gather(
        OPEN,
        workers(store, 0, 1),
        QUICK,
        read_gradient=reading,
        clock=Clock(NOW, 0.0),
        progress=heard.append,
    )
    assert asked.count("1") == 3
    assert set(found.taken) == {"0"}
    assert found.excluded["1"].reason is ExclusionReason.OVERWRITTEN
    assert "was overwritten after it was read 3 times" in found.excluded["1"].sentence


def test_a_worker_that_was_not_there_in_the_last_listing_is_missing_whatever_failed_before(
    store, monkeypatch
):
    failed: list[str] = []

    def fail_once(store: Store, prefix: str, **options: Any) -> Iterator[Stat]:
        if not failed:
            failed.append(prefix)
            raise UnavailableError("503")
        return list_fairly(store, prefix, **options)

    class Clock(StoreClock):
        def now(self) -> datetime:
            return OPEN.closes + timedelta(seconds=1 if failed else -1)

    send(store, "0")
    monkeypatch.setattr(bucket_lister, "list_fairly", fail_once)
    found = gather(OPEN, workers(store, 0, 1), QUICK, clock=Clock(NOW, 0.0))
    assert set(found.taken) == {"0"}
    assert found.excluded["1"].reason is ExclusionReason.MISSING


def test_requests_that_fail_do_not_count_as_reads(store):
    """A bucket that recovers costs its worker nothing."""
    asked = 0

    def reading(uid: str, store: Store, stat: Stat, expected: ExpectedGradient) -> CheckedGradient:
        nonlocal asked
        asked += 1
        if asked < 6:
            raise UnavailableError("503")
        return read_gradient(store, stat, expected)

    send(store, "0")
    found = gather(OPEN, workers(store, 0), QUICK, read_gradient=reading)
    assert set(found.taken) == {"0"}


def test_what_an_earlier_run_has_left_does_not_end_a_window_before_its_time(store):
    for uid in (0, 1):
        send(store, str(uid))
        age(store, str(uid), OPEN.opens - timedelta(days=1))
    looks = 0

    class Clock(StoreClock):
        def now(self) -> datetime:
            nonlocal looks
            looks += 1
            return OPEN.closes + timedelta(seconds=looks - 5)

    clock = Clock(NOW, 0.0)
    found = gather(
        OPEN,
        workers(store, 0, 1),
        GatherSettings(poll_interval=QUICK.poll_interval, quorum=0),
        clock=clock,
    )
    assert {one.reason for one in found.excluded.values()} == {ExclusionReason.EARLY}
    assert looks > 5


def test_a_reserve_that_was_not_needed_is_not_missing(store):
    for uid in (0, 1):
        send(store, str(uid))
    found = gather(now_over(), workers(store, 0, 1), QUICK, reserves=workers(store, 7))
    assert (set(found.taken), found.excluded, found.spare) == ({"0", "1"}, {}, ())
    found = gather(now_over(), workers(store, 0, 1, 2), QUICK, reserves=workers(store, 7))
    reasons = {uid: one.reason for uid, one in found.excluded.items()}
    assert reasons == {"2": ExclusionReason.MISSING, "7": ExclusionReason.MISSING}


def test_the_grace_counts_once(store, monkeypatch):
    """Whatever is waited for when time is up: a listing, another one, what is read."""
    waited = 0.0

    def wait(_futures: object, timeout: float, **_: object) -> None:
        nonlocal waited
        waited += timeout  # in no time, and nothing comes meanwhile

    clock = SimpleNamespace(monotonic=lambda: waited, sleep=lambda _seconds: None)
    monkeypatch.setattr("millrace.gradients.sync.gather.time", clock)
    monkeypatch.setattr("millrace.gradients.gather_window.time", clock)
    monkeypatch.setattr("millrace.gradients.sync.gather.wait", wait)
    answered = threading.Event()

    def hangs(uid: str, store: Store, stat: Stat, expected: ExpectedGradient) -> CheckedGradient:
        answered.wait()
        return read_gradient(store, stat, expected)

    send(store, "0")
    grace = timedelta(seconds=10)
    gather(
        now_over(),
        workers(store, 0, 1),
        GatherSettings(grace_period=grace, quorum=0),
        read_gradient=hangs,
    )
    answered.set()
    assert waited == grace.total_seconds()
