import itertools
import json
import os
import queue
import secrets
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from datetime import timedelta

import pytest
from pydantic import ValidationError

from millrace import errors
from millrace.checkpoints import MemberSettings
from millrace.datasets.settings import ExecutionSettings
from millrace.gradients.settings import AggregationSettings
from millrace.keys.leases import LeaseKeys
from millrace.lease import (
    MAX_TTL,
    MIN_TTL,
    Census,
    Heartbeat,
    HeldLease,
    Holder,
    Lease,
    StoreClock,
    acquire,
    await_lease,
    find_holder,
)
from millrace.processes import read_start_time
from millrace.storage import Store, list_fairly, list_objects, open_store, put

TTL = timedelta(seconds=30)
KEYS = LeaseKeys("run", "thing")


@pytest.fixture
def store():
    return open_store(f"memory://{secrets.token_hex(8)}")


@pytest.fixture
def clock(store):
    return StoreClock.read(store, "run", Holder.describe_this_process())


def later(clock: StoreClock, seconds: float) -> StoreClock:
    """The same clock, so much later: no test waits."""
    return replace(clock, base=clock.base + timedelta(seconds=seconds))


def test_a_lease_is_held_by_one(store, clock):
    mine = acquire(store, KEYS, Holder.describe_this_process(), TTL, clock)
    assert isinstance(mine, Lease)
    theirs = acquire(store, KEYS, Holder.describe_this_process(), TTL, clock)
    assert isinstance(theirs, HeldLease)
    assert theirs.holder == mine.holder
    assert find_holder(store, KEYS, clock).holder == mine.holder


def test_of_many_at_once_one_gets_it(store, clock):
    def attempt(_: int) -> Lease | HeldLease:
        return acquire(store, KEYS, Holder.describe_this_process(), TTL, clock)

    with ThreadPoolExecutor(16) as pool:
        taken = list(pool.map(attempt, range(32)))
    assert sum(isinstance(lease, Lease) for lease in taken) == 1


def test_given_back_it_is_free_and_a_new_term_begins(store, clock):
    first = acquire(store, KEYS, Holder.describe_this_process(), TTL, clock)
    first.release()
    first.release()
    assert find_holder(store, KEYS, clock) is None
    second = acquire(store, KEYS, Holder.describe_this_process(), TTL, clock)
    assert (first.term, second.term) == (0, 1)


def test_a_holder_that_is_not_heard_of_is_followed(store, clock):
    elsewhere = Holder.describe_this_process().model_copy(update={"machine": "another"})
    acquire(store, KEYS, elsewhere, TTL, clock)
    assert isinstance(
        acquire(store, KEYS, Holder.describe_this_process(), TTL, later(clock, 29)), HeldLease
    )
    assert isinstance(
        acquire(store, KEYS, Holder.describe_this_process(), TTL, later(clock, 40)), Lease
    )


def test_a_heartbeat_keeps_it(store, clock):
    elsewhere = Holder.describe_this_process().model_copy(update={"machine": "another"})
    lease = acquire(store, KEYS, elsewhere, TTL, clock)
    before = find_holder(store, KEYS, clock).until
    lease.beat()
    assert find_holder(store, KEYS, clock).until > before


def test_a_neighbour_that_died_is_followed_at_once(store, clock):
    code = (
        "from millrace.lease import Holder; print(Holder.describe_this_process().model_dump_json())"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    dead = Holder.model_validate_json(child.stdout)
    assert dead.is_known_dead
    assert not Holder.describe_this_process().is_known_dead
    acquire(store, KEYS, dead, TTL, clock)
    assert isinstance(acquire(store, KEYS, Holder.describe_this_process(), TTL, clock), Lease)


def test_a_live_process_that_the_system_hides_is_not_known_dead(monkeypatch):
    """With `hidepid`, /proc hides the processes of other users."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        live = Holder.describe_this_process()
        hidden = live.model_copy(update={"pid": child.pid, "started": read_start_time(child.pid)})
        assert not hidden.is_known_dead
        assert hidden.model_copy(update={"started": "1"}).is_known_dead
        monkeypatch.setattr("millrace.processes._read_stat", lambda _pid: None)
        assert not hidden.is_known_dead
    assert hidden.is_known_dead
    assert live.model_copy(update={"pid": 1 << 70}).is_known_dead


def test_leaving_the_heartbeat_gives_back_what_is_held(store, clock):
    with Heartbeat(TTL) as heartbeat:
        lease = acquire(store, KEYS, Holder.describe_this_process(), TTL, clock)
        heartbeat.keep(lease)
        assert find_holder(store, KEYS, clock) is not None
    assert find_holder(store, KEYS, clock) is None


def test_the_heartbeats_of_many_leases_are_sent_at_once(store, clock, monkeypatch):
    names = [f"{number:02d}" for number in range(16)]
    together, calls = threading.Barrier(len(names)), itertools.count()
    beaten: queue.Queue[str] = queue.Queue()

    def put_together(store: Store, key: str, data: bytes) -> None:
        if next(calls) < len(names):
            together.wait()  # a single thread would wait in vain
        beaten.put(key)

    holder, leases = Holder.describe_this_process(), []
    for name in names:
        lease = acquire(store, LeaseKeys("run", name), holder, TTL, clock)
        assert isinstance(lease, Lease)
        leases.append(lease)
    monkeypatch.setattr("millrace.lease.put", put_together)
    heartbeat = Heartbeat(MIN_TTL)
    for lease in leases:
        heartbeat.keep(lease)
    with heartbeat:
        first = {beaten.get(timeout=10) for _ in names}
    assert first == {lease.keys.make_beat_key(0) for lease in leases}


def test_a_stalled_heartbeat_holds_up_no_other_one(store, clock, monkeypatch):
    sent, unblock = queue.Queue[str](), threading.Event()

    def put_or_stall(store: Store, key: str, data: bytes) -> None:
        sent.put(key)
        if key == keys[0]:
            assert unblock.wait(30)

    holder, leases = Holder.describe_this_process(), []
    for name in ("stalled", "other"):
        lease = acquire(store, LeaseKeys("run", name), holder, TTL, clock)
        assert isinstance(lease, Lease)
        leases.append(lease)
    keys = [lease.keys.make_beat_key(0) for lease in leases]
    monkeypatch.setattr("millrace.lease.put", put_or_stall)
    heartbeat = Heartbeat(TTL)
    for lease in leases:
        heartbeat.keep(lease)

    def send(*expected: str) -> None:
        heartbeat._send_heartbeats()
        assert sorted(sent.get(timeout=10) for _ in expected) == sorted(expected)
        wait([beat for lease, beat in heartbeat._under_way if lease is leases[1]], timeout=10)

    send(*keys)
    send(*keys)  # one request may fail alone
    send(keys[1])
    assert sent.empty()  # the stalled requests of one lease do not pile up
    assert not unblock.is_set()
    unblock.set()
    wait([beat for _, beat in heartbeat._under_way], timeout=10)
    send(*keys)


@pytest.mark.parametrize("count", [1, 2])
def test_heartbeats_are_sent_where_the_system_starts_no_more_threads(
    store, clock, monkeypatch, count
):
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    heartbeat, beaten = Heartbeat(TTL), list[str]()
    for number in range(count):
        keys = LeaseKeys("run", f"{number}")
        heartbeat.keep(acquire(store, keys, Holder.describe_this_process(), TTL, clock))
    monkeypatch.setattr(heartbeat._pool, "submit", refuse)
    monkeypatch.setattr("millrace.lease.put", lambda _store, key, _data: beaten.append(key))
    heartbeat._send_heartbeats()
    assert len(beaten) == count


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), BaseException("panic")])
@pytest.mark.parametrize("count", [1, 2])
def test_an_error_ends_no_later_heartbeats(store, clock, caplog, error, count):
    errors_left, asked = [error], queue.Queue[None]()

    def is_alive() -> bool:
        asked.put(None)
        if errors_left:
            raise errors_left.pop()
        return True

    with Heartbeat(MIN_TTL, is_alive) as heartbeat:
        for number in range(count):
            keys = LeaseKeys("run", f"{number}")
            heartbeat.keep(acquire(store, keys, Holder.describe_this_process(), TTL, clock))
        for _ in range(2 * count):
            asked.get(timeout=10)
    (line,) = caplog.records
    assert line.getMessage().startswith("Heartbeats of leases were not sent.")
    assert line.exc_info[1] is error


def test_the_clock_is_the_stores(store):
    clock = StoreClock.read(store, "run", Holder.describe_this_process())
    assert list(list_objects(store, "run/lease/clock/")) == []
    assert clock.now() >= clock.base


def test_a_time_too_short_for_heartbeats_is_refused(store, clock):
    with pytest.raises(errors.ConfigurationError, match="choose at least 3 s"):
        acquire(store, KEYS, Holder.describe_this_process(), timedelta(seconds=1), clock)


def test_a_time_longer_than_any_lease_is_refused(store, clock):
    """Between the heartbeats of a lease of 4 h, its holder would look dead."""
    with pytest.raises(errors.ConfigurationError, match="choose at most 3600 s"):
        acquire(store, KEYS, Holder.describe_this_process(), timedelta(hours=4), clock)


@pytest.mark.parametrize("settings", [ExecutionSettings, AggregationSettings, MemberSettings])
def test_settings_refuse_a_time_longer_than_any_lease(settings):
    source = {"url": "memory://x", "job": "job"}
    others = {"store": {"url": "memory://x"}, "job": "job", "epoch": 0, "source": source}
    values = {key: value for key, value in others.items() if key in settings.model_fields}
    assert settings.model_validate(values | {"lease_timeout": "1h"}).lease_timeout == MAX_TTL
    with pytest.raises(ValidationError, match="less than or equal to 1 hour"):
        settings.model_validate(values | {"lease_timeout": "4h"})


@pytest.mark.parametrize(
    "key",
    [
        "b/0000005.json",  # whose term would be at another key
        "b/a/000009.json",  # with the name of another member
        "b/ghost/000000.json",
        "b/000005.json",
    ],
)
@pytest.mark.parametrize("body", [b"", b"junk"])
def test_what_a_member_writes_below_its_lease_hides_and_adds_no_other(store, clock, key, body):
    mine = acquire(store, LeaseKeys("job", "members/a"), Holder.describe_this_process(), TTL, clock)
    put(store, f"job/lease/members/{key}", body)
    census = Census(store, "job", "members", clock, strict=False)
    assert {name: one.holder for name, one in census.find_holders().items()} == {"a": mine.holder}


def test_a_lease_that_cannot_be_read_is_over_when_the_longest_one_is(store, clock):
    put(store, "job/lease/members/b/000005.json", b"junk")
    with pytest.raises(errors.CorruptError):
        Census(store, "job", "", clock).find_holders()
    assert Census(store, "job", "", later(clock, 3700)).find_holders() == {}


@pytest.mark.parametrize("version", [1, 2])
def test_an_unreadable_lease_is_taken_when_the_longest_one_is_over(store, clock, version):
    body = b'{"kind":"lease","nonce":"","record":{},"version":%d}' % version
    put(store, KEYS.make_term_key(4), body)
    holder = Holder.describe_this_process()
    for take in (acquire, await_lease):
        with pytest.raises(errors.CorruptError):
            take(store, KEYS, holder, TTL, later(clock, 3500))
    with pytest.raises(errors.CorruptError):
        find_holder(store, KEYS, later(clock, 3500))
    assert find_holder(store, KEYS, later(clock, 3700)) is None
    lease = acquire(store, KEYS, holder, TTL, later(clock, 3700))
    assert isinstance(lease, Lease)
    assert lease.term == 5
    assert find_holder(store, KEYS, clock).holder == holder


def test_heartbeats_keep_an_unreadable_lease(tmp_path):
    """Such as the lease of a living holder of a later version."""
    store = open_store(tmp_path.as_uri())
    clock = StoreClock.read(store, "run", Holder.describe_this_process())
    for key in (KEYS.make_term_key(0), KEYS.make_beat_key(0)):
        put(store, key, b"junk")
    os.utime(tmp_path / KEYS.make_term_key(0), (0, 0))
    with pytest.raises(errors.CorruptError):
        acquire(store, KEYS, Holder.describe_this_process(), TTL, clock)


def test_an_unreadable_lease_that_was_released_is_free(store, clock):
    put(store, KEYS.make_term_key(0), b"junk")
    put(store, KEYS.make_end_key(0), b"")
    assert isinstance(acquire(store, KEYS, Holder.describe_this_process(), TTL, clock), Lease)


@pytest.mark.parametrize("ttl", ["-P999999999D", "-PT1S", "PT0S", "P999999999D"])
def test_a_lease_of_any_duration_stops_no_census(store, clock, ttl):
    """Also with a duration that no date can be added to."""
    mine = acquire(store, LeaseKeys("run", "mine"), Holder.describe_this_process(), TTL, clock)
    record = {"holder": {"id": "a", "host": "h", "machine": "", "pid": 1, "started": ""}}
    body = {"kind": "lease", "version": 1, "nonce": "", "record": record | {"ttl": ttl}}
    put(store, LeaseKeys("run", "theirs").make_term_key(0), json.dumps(body).encode())
    holders = Census(store, "run", "", clock, strict=False).find_holders()
    assert holders["mine"].holder == mine.holder
    assert ("theirs" in holders) == (not ttl.startswith(("-", "PT0")))
    end = clock.base + timedelta(days=365)
    assert all(lease.until < end for lease in holders.values())


@pytest.mark.parametrize("group", ["", "members"])
def test_a_holder_of_many_terms_is_found(store, clock, monkeypatch, group):
    monkeypatch.setattr("millrace.lease._MAX_OBJECTS", 50)
    keys = LeaseKeys("job", "owner")
    for number in range(60):
        put(store, keys.make_term_key(number), b"")
        put(store, keys.make_end_key(number), b"")
    for member in ("a", "c"):
        for number in range(60):
            put(store, f"job/lease/members/{member}/x{number:06d}", b"")
    owner = acquire(store, keys, Holder.describe_this_process(), TTL, clock)
    member = acquire(
        store, LeaseKeys("job", "members/b"), Holder.describe_this_process(), TTL, clock
    )
    expected = {"b": member.holder} | ({} if group else {"owner": owner.holder})
    held = Census(store, "job", group, clock).find_holders()
    assert {name: one.holder for name, one in held.items()} == expected


def test_a_member_with_many_objects_makes_the_census_no_longer(store, clock, monkeypatch):
    monkeypatch.setattr("millrace.lease._MAX_OBJECTS", 50)
    for number in range(3000):
        put(store, f"job/lease/members/b/x{number:06d}", b"")
    mine = acquire(store, LeaseKeys("job", "members/c"), Holder.describe_this_process(), TTL, clock)
    listed: list[str] = []

    def count(*args, **options):
        for stat in list_fairly(*args, **options):
            listed.append(stat.key)
            yield stat

    monkeypatch.setattr("millrace.lease.list_fairly", count)
    for group in ("members", ""):
        listed.clear()
        held = Census(store, "job", group, clock).find_holders()
        assert {name: one.holder for name, one in held.items()} == {"c": mine.holder}
        assert len(listed) < 60
