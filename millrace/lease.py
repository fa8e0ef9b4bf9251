"""Leases: who holds what, for how long, by the store's clock.

Each time that a lease changes hands a new epoch is created, and only one caller can create it.
Its holder overwrites a heartbeat beside it; whoever has not been heard of for the lease's time
may be followed. A lease makes sure that work is not done twice for nothing. It is no lock: what
must happen once is a `commit_once`.
"""

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from millrace import errors
from millrace.keys import LeaseKeys, clock_probe_key, lease_prefix, parse_lease
from millrace.processes import read_start_time
from millrace.records import Record, commit_once, fetch
from millrace.settings import Duration
from millrace.storage import Stat, Store, create, delete, head, list_fairly, list_objects, put

MAX_TTL = timedelta(hours=1)  # that one is believed in, whatever its record says
MIN_TTL = timedelta(seconds=3)  # heartbeats come three times as often, and at most one a second
_POLL_INTERVAL = 1.0  # seconds between two looks at a lease that another has
_RELEASE_TIMEOUT = 3.0  # seconds that leaving waits for leases to be given back
_MAX_OBJECTS = 10_000  # of one lease, or of one member, that a census looks at
_CLOCK_RESOLUTION = timedelta(seconds=2)  # of Last-Modified, and of the clock read off it


class Holder(BaseModel):
    """Holder of a lease: enough for a person to find it, and for its neighbours to see it die.

    Attributes:
        id: Unique to this holder.
        host: The machine's name.
        machine: The boot and the process namespace, in which ``pid`` means something.
        pid: The process.
        started: When the process started, in the kernel's ticks.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    host: str
    machine: str
    pid: int
    started: str

    @classmethod
    def this_process(cls) -> "Holder":
        """Return a new holder in this process."""
        pid = os.getpid()
        return cls(
            id=secrets.token_hex(8),
            host=socket.gethostname(),
            machine=_identify_machine(),
            pid=pid,
            started=read_start_time(pid) or "",
        )

    @property
    def is_known_dead(self) -> bool:
        """True if it is known to be gone, because it ran here and its process does not."""
        return (
            self.machine != ""
            and self.machine == _identify_machine()
            and (read_start_time(self.pid) != self.started)
        )


class LeaseEpoch(Record):
    """Record of one holder's time."""

    record_kind: ClassVar[str] = "lease"

    holder: Holder
    ttl: Duration


@dataclass(slots=True)
class StoreClock:
    """The store's time of day, read once off an object written for it."""

    base: datetime
    read_at: float

    @classmethod
    def read(cls, store: Store, scope: str, holder: Holder) -> "StoreClock":
        """Read the clock. Three requests, that leave nothing behind."""
        key = clock_probe_key(scope, holder.id)
        put(store, key, b"")
        # Written at the latest now, perhaps after many tries. A clock that is slow waits for a
        # lease's end; one that is fast takes leases from those who hold them.
        written = _read_boot_clock()
        clock = cls(head(store, key).last_modified, written)
        delete(store, [key])
        return clock

    @classmethod
    def of_this_machine(cls) -> "StoreClock":
        """Return this machine's clock, for callers that may not write."""
        return cls(datetime.now(UTC), _read_boot_clock())

    def now(self) -> datetime:
        """Return the time by the store's clock, to about a second."""
        return self.base + timedelta(seconds=_read_boot_clock() - self.read_at)


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease that another has.

    Attributes:
        holder: Who.
        until: When it ends by the store's clock, should the holder not be heard of again.
    """

    holder: Holder
    until: datetime


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that is ours, until it ends or is given back."""

    store: Store = field(repr=False)
    keys: LeaseKeys
    epoch: int
    holder: Holder
    ttl: timedelta

    def beat(self) -> None:
        """Say that the holder lives. One request; at most one a second."""
        put(self.store, self.keys.beat(self.epoch), self.holder.id.encode())

    def is_superseded(self) -> bool:
        """Tell whether another has taken the lease since. One listing.

        Raises:
            UnavailableError: The store does not answer.
        """
        return _find_newest(self.keys, list_objects(self.store, self.keys.prefix))[0] > self.epoch

    def with_timeout(self, timeout: timedelta) -> "Lease":
        """Return the same lease with short retries, for requests that come again soon."""
        return replace(self, store=self.store.with_retry_timeout(timeout))

    def release(self) -> None:
        """Give it back, so that the next one need not wait."""
        try:
            create(self.store, self.keys.end(self.epoch), self.holder.id.encode())
        except errors.ExistsError:
            return


def acquire(
    store: Store, keys: LeaseKeys, holder: Holder, ttl: timedelta, clock: StoreClock
) -> Lease | HeldLease:
    """Take a lease if it is free, given back, or its holder is not heard of.

    Args:
        store: Where it stands.
        keys: Its names.
        holder: Who wants it.
        ttl: For how long without a heartbeat.
        clock: The store's.

    Returns:
        The lease, or who has it.

    Raises:
        ConfigurationError: The time is too short for heartbeats.
    """
    if ttl < MIN_TTL:
        raise errors.ConfigurationError(
            f"A lease lasts at least {MIN_TTL.total_seconds():g} seconds."
        )
    number, held = _find_current(store, keys, clock)
    if held is not None:
        return held
    commit = commit_once(store, keys.epoch(number + 1), LeaseEpoch(holder=holder, ttl=ttl))
    if commit.mine:
        return Lease(store, keys, number + 1, holder, ttl)
    return HeldLease(commit.record.holder, clock.now() + commit.record.ttl)


def await_lease(
    store: Store, keys: LeaseKeys, holder: Holder, ttl: timedelta, clock: StoreClock
) -> Lease | HeldLease:
    """As `acquire`, but who has it must be heard of: it is waited for until it is free, or that.

    So whoever was killed is followed, and nobody is who lives.
    """
    first: HeldLease | None = None
    while True:
        got = acquire(store, keys, holder, ttl, clock)
        if isinstance(got, Lease):
            return got
        first = first or got
        if got.holder.id != first.holder.id or got.until > first.until:
            return got
        time.sleep(_POLL_INTERVAL)


def find_holder(store: Store, keys: LeaseKeys, clock: StoreClock) -> HeldLease | None:
    """Return the holder of a lease now; None if it is free."""
    return _find_current(store, keys, clock)[1]


def _find_current(store: Store, keys: LeaseKeys, clock: StoreClock) -> tuple[int, HeldLease | None]:
    """Return the newest epoch's number (-1 before the first), and its holder if there is one."""
    number, newest = _find_newest(keys, list_objects(store, keys.prefix))
    if not _is_taken(newest):
        return number, None
    return number, _find_live_holder(fetch(store, keys.epoch(number), LeaseEpoch), newest, clock)


def _find_newest(keys: LeaseKeys, stats: Iterable[Stat]) -> tuple[int, dict[str, Stat]]:
    """Return the newest epoch's number (-1 before the first), and the kinds of its objects."""
    number, newest = -1, dict[str, Stat]()
    for stat in stats:
        number, newest = _keep_newest(keys, stat, number, newest)
    return number, newest


def _keep_newest(
    keys: LeaseKeys, stat: Stat, number: int, newest: dict[str, Stat]
) -> tuple[int, dict[str, Stat]]:
    """Return the newer one of an epoch and that of an object: its number, and its objects."""
    parsed = keys.parse(stat.key)
    if parsed is None or parsed[0] < number:
        return number, newest
    return parsed[0], {**(newest if parsed[0] == number else {}), parsed[1]: stat}


def _is_taken(newest: Mapping[str, Stat]) -> bool:
    """Tell whether an epoch was taken and not given back."""
    return "json" in newest and "end" not in newest


def _find_live_holder(
    record: LeaseEpoch, newest: Mapping[str, Stat], clock: StoreClock
) -> HeldLease | None:
    """Return the holder by the newest epoch, unless nothing was heard of it for too long."""
    until = _compute_end(newest, record.ttl)
    if record.holder.is_known_dead or until < clock.now():
        return None
    return HeldLease(record.holder, until)


def _compute_end(newest: Mapping[str, Stat], ttl: timedelta) -> datetime:
    """Return when an epoch ends by the store's clock, should nothing more be heard of it."""
    heard = max(stat.last_modified for stat in newest.values())
    return heard.astimezone(UTC) + min(ttl, MAX_TTL) + _CLOCK_RESOLUTION


class Census:
    """Holders of the leases under a prefix, looked at often: what cannot change is kept.

    Args:
        store: Where they stand.
        scope: What they stand under.
        group: The folder that their names begin with; empty for all.
        clock: The store's.
        strict: Whether a record that cannot be read is an error, as long as its lease may be held;
            else it is nobody's.
    """

    def __init__(
        self, store: Store, scope: str, group: str, clock: StoreClock, *, strict: bool = True
    ) -> None:
        self._store, self._scope, self._clock, self._strict = store, scope, clock, strict
        self._prefix = f"{lease_prefix(scope)}{group}/" if group else lease_prefix(scope)
        self._depth = 1 if group else 2  # folders of a lease's name below the prefix
        self._records: dict[str, LeaseEpoch] = {}

    def find_holders(self) -> dict[str, HeldLease]:
        """Return the holder of each lease, by the last part of its name.

        A listing, and a GET for each new one.

        Raises:
            UnavailableError: The store does not answer.
            CorruptError: What stands there is no lease.
        """
        found: dict[LeaseKeys, tuple[int, dict[str, Stat]]] = {}
        listed = list_fairly(self._store, self._prefix, depth=self._depth, limit=_MAX_OBJECTS)
        for stat in listed:
            keys = parse_lease(self._scope, stat.key)
            if keys is not None:
                found[keys] = _keep_newest(keys, stat, *found.get(keys, (-1, {})))
        held: dict[str, HeldLease] = {}
        for keys, (number, newest) in found.items():
            record = self._read_epoch(keys.epoch(number), newest) if _is_taken(newest) else None
            if record is not None and (who := _find_live_holder(record, newest, self._clock)):
                held[keys.name.rpartition("/")[2]] = who
        return held

    def _read_epoch(self, key: str, newest: Mapping[str, Stat]) -> LeaseEpoch | None:
        """Return the record of an epoch; None if it says nothing of a holder.

        Raises:
            CorruptError: What stands there is no lease.
        """
        try:
            if key not in self._records:
                self._records[key] = fetch(self._store, key, LeaseEpoch)
        except errors.NotFoundError:  # deleted since the listing
            return None
        except errors.CorruptError:
            # Whatever it says, no lease is held for longer than the longest time.
            if self._strict and _compute_end(newest, MAX_TTL) >= self._clock.now():
                raise
            return None
        return self._records[key]


class Heartbeat:
    """A thread that keeps leases alive while the work goes on.

    Use it as a context: leaving it gives back what is still held.
    """

    def __init__(self, ttl: timedelta) -> None:
        self._pause = max(1.0, ttl.total_seconds() / 3)
        self._leases: dict[str, Lease] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._leaving: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        # A store that does not answer must not hold up whoever leaves: a lease ends by itself.
        for lease in list(self._leases.values()):
            thread = threading.Thread(target=_try_release, args=(lease,), daemon=True)
            thread.start()
            self._leaving.append(thread)
        deadline = time.monotonic() + _RELEASE_TIMEOUT
        for thread in (self._thread, *self._leaving):
            thread.join(max(0.0, deadline - time.monotonic()))

    def keep(self, lease: Lease) -> None:
        """Beat for this lease from now on."""
        with self._lock:
            self._leases[lease.keys.prefix] = lease

    def release(self, lease: Lease) -> None:
        """Stop beating for it and give it back."""
        with self._lock:
            self._leases.pop(lease.keys.prefix, None)
        lease.release()

    def _run(self) -> None:
        while not self._stop.wait(self._pause):
            with self._lock:
                leases = list(self._leases.values())
            for lease in leases:
                if self._stop.is_set():
                    return
                try:
                    # Until the next is due: one that fails for long must not silence the others.
                    lease.with_timeout(timedelta(seconds=self._pause)).beat()
                except errors.MillraceError:
                    continue  # the next beat may come through; else the lease ends, as it should


def _try_release(lease: Lease) -> None:
    with contextlib.suppress(errors.MillraceError):
        lease.with_timeout(timedelta(seconds=2)).release()


def _identify_machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _read_boot_clock() -> float:
    """Seconds that also pass while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
