"""Leases in a store: their holders, and their ends by the store's clock.

Each new holder of a lease begins a term, and only one process can begin a term. The holder
overwrites a heartbeat. After the lease's time without a heartbeat, another process may take the
lease. Leases only save duplicate work. They are not locks: `commit_once` decides what happens once.
"""

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from millrace import errors
from millrace.keys.leases import (
    MEMBERS,
    LeaseKeys,
    make_clock_probe_key,
    make_lease_prefix,
    parse_lease,
)
from millrace.processes import has_ended, read_start_time
from millrace.records import Record, commit_once, fetch
from millrace.settings import Duration
from millrace.storage import Stat, Store, create, delete, head, list_fairly, list_objects, put
from millrace.threads import DaemonThreadPool

_log = logging.getLogger(__name__)

MAX_TTL = timedelta(hours=1)  # limit for any lease, also if its record has a longer time
MIN_TTL = timedelta(seconds=3)  # three heartbeats in this time, at most one a second
_POLL_INTERVAL = 1.0  # seconds between reads of a lease that another holder has
_RELEASE_TIMEOUT = 3.0  # seconds that the end of a heartbeat waits for releases
_MAX_UNDER_WAY = 2  # heartbeats of one lease: one that is stalled, and another one
_CONCURRENCY = 16 * _MAX_UNDER_WAY  # heartbeats that are sent at once
_MAX_OBJECTS = 10_000  # objects of one member, which others may write, that a census reads
_CLOCK_RESOLUTION = timedelta(seconds=2)  # of Last-Modified, and of a clock that is read from it


class Holder(BaseModel):
    """Process that holds a lease. Other processes of the machine can see its end.

    Attributes:
        id: Identifier, unique to this holder.
        host: Name of the machine.
        machine: Identifiers of the boot and of the process namespace that ``pid`` belongs to.
        pid: Number of the process.
        started: Start of the process, in the kernel's ticks.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    host: str
    machine: str
    pid: int
    started: str

    @classmethod
    def describe_this_process(cls) -> "Holder":
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
        """True if the holder ran on this machine, and its process has ended."""
        return (
            self.machine != ""
            and self.machine == _identify_machine()
            and has_ended(self.pid, self.started)
        )


class LeaseTerm(Record):
    """Record of one holder of a lease.

    Attributes:
        holder: Holder of the lease in this term.
        ttl: Time after the last heartbeat at which the lease ends.
    """

    record_kind: ClassVar[str] = "lease"

    holder: Holder
    ttl: Annotated[Duration, Field(ge=MIN_TTL)]


@dataclass(slots=True)
class StoreClock:
    """Clock of a store, from the modification time of an object that was written once.

    Attributes:
        base: Modification time of the object, by the store's clock.
        read_at: Time of the write, by this machine's boot clock.
    """

    base: datetime
    read_at: float

    @classmethod
    def read(cls, store: Store, scope: str, holder: Holder) -> "StoreClock":
        """Read the store's clock. Three requests, which leave no object."""
        key = make_clock_probe_key(scope, holder.id)
        put(store, key, b"")
        # After many tries, the object may be older than this time. So the clock may be slow, and
        # then a lease ends later. A fast clock would take leases from live holders.
        written = _read_boot_clock()
        clock = cls(head(store, key).last_modified, written)
        delete(store, [key])
        return clock

    @classmethod
    def read_if_permitted(cls, store: Store, scope: str) -> "StoreClock":
        """Read the store's clock, or this machine's clock if the credentials may only read."""
        try:
            return cls.read(store, scope, Holder.describe_this_process())
        except errors.DeniedError:
            return cls.read_machine_clock()

    @classmethod
    def read_machine_clock(cls) -> "StoreClock":
        """Return the clock of this machine, for callers that may not write to the store."""
        return cls(datetime.now(UTC), _read_boot_clock())

    def now(self) -> datetime:
        """Return the time by the store's clock, which is exact to about a second."""
        return self.base + timedelta(seconds=_read_boot_clock() - self.read_at)


@dataclass(frozen=True, slots=True)
class HeldLease:
    """Lease that another holder has.

    Attributes:
        holder: Holder of the lease.
        since: Begin of the holder's term, by the store's clock.
        until: End of the lease without another heartbeat, by the store's clock.
    """

    holder: Holder
    since: datetime
    until: datetime


@dataclass(frozen=True, slots=True)
class Lease:
    """Lease that this holder acquired. The lease may have ended since.

    Attributes:
        store: Store of the lease.
        keys: Keys of the lease.
        term: Number of the term that this holder created.
        holder: This holder.
        ttl: Time after the last heartbeat at which the lease ends.
    """

    store: Store = field(repr=False)
    keys: LeaseKeys
    term: int
    holder: Holder
    ttl: timedelta

    def beat(self) -> None:
        """Write a heartbeat. One request. Callers wait at least a second between two calls."""
        put(self.store, self.keys.make_beat_key(self.term), self.holder.id.encode())

    def is_superseded(self) -> bool:
        """Decide whether another holder has taken the lease since. One listing.

        Raises:
            UnavailableError: The store does not answer.
        """
        return _find_newest(self.keys, list_objects(self.store, self.keys.prefix))[0] > self.term

    def with_timeout(self, timeout: timedelta) -> "Lease":
        """Return the same lease with another limit on the time for retries."""
        return replace(self, store=self.store.with_retry_timeout(timeout))

    def release(self) -> None:
        """Give the lease back, so that the next holder need not wait."""
        try:
            create(self.store, self.keys.make_end_key(self.term), self.holder.id.encode())
        except errors.ExistsError:
            return


def acquire(
    store: Store, keys: LeaseKeys, holder: Holder, ttl: timedelta, clock: StoreClock
) -> Lease | HeldLease:
    """Take a lease that is free, released, or without a heartbeat for the lease's time.

    Args:
        store: Store of the lease.
        keys: Keys of the lease.
        holder: New holder.
        ttl: Time after the last heartbeat at which the lease ends.
        clock: Clock of the store.

    Returns:
        The lease, or the other holder of the lease.

    Raises:
        ConfigurationError: The time is too short for heartbeats, or longer than `MAX_TTL`.
        CorruptError: The record of the newest term cannot be read, and the lease may be held: until
            `MAX_TTL` after its last heartbeat.
    """
    if not MIN_TTL <= ttl <= MAX_TTL:
        word, limit = ("least", MIN_TTL) if ttl < MIN_TTL else ("most", MAX_TTL)
        raise errors.ConfigurationError(
            f"The lease {keys.prefix} cannot last {ttl.total_seconds():g} s: choose at {word} "
            f"{limit.total_seconds():g} s."
        )
    number, held = _find_current(store, keys, clock)
    if held is not None:
        return held
    commit = commit_once(store, keys.make_term_key(number + 1), LeaseTerm(holder=holder, ttl=ttl))
    if commit.mine:
        return Lease(store, keys, number + 1, holder, ttl)
    now = clock.now()
    return HeldLease(commit.record.holder, now, now + commit.record.ttl)


def await_lease(
    store: Store, keys: LeaseKeys, holder: Holder, ttl: timedelta, clock: StoreClock
) -> Lease | HeldLease:
    """Acquire a lease, or wait until its holder sends a heartbeat.

    So the lease of a killed process is taken at its end. A live holder is returned at its next
    heartbeat.

    Args:
        store: Store of the lease.
        keys: Keys of the lease.
        holder: New holder.
        ttl: Time after the last heartbeat at which the lease ends.
        clock: Clock of the store.

    Returns:
        The lease, or the live holder that has the lease.

    Raises:
        ConfigurationError: The time is too short for heartbeats.
        CorruptError: As in `acquire`.
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
    """Return the current holder of a lease; None if the lease is free.

    Raises:
        CorruptError: As in `acquire`.
    """
    return _find_current(store, keys, clock)[1]


def find_term_start(store: Store, keys: LeaseKeys) -> datetime | None:
    """Return when the newest term of a lease began, by the store's clock; None without a term."""
    record = _find_newest(keys, list_objects(store, keys.prefix))[1].get("json")
    return record and record.last_modified.astimezone(UTC)


def _find_current(store: Store, keys: LeaseKeys, clock: StoreClock) -> tuple[int, HeldLease | None]:
    """Return the newest term's number (-1 before the first), and its live holder or None.

    Raises:
        CorruptError: As in `acquire`.
    """
    number, newest = _find_newest(keys, list_objects(store, keys.prefix))
    if not _is_taken(newest):
        return number, None
    record = _read_term(store, keys.make_term_key(number), newest, clock)
    return number, record and _find_live_holder(record, newest, clock)


def _read_term(
    store: Store, key: str, newest: Mapping[str, Stat], clock: StoreClock, *, strict: bool = True
) -> LeaseTerm | None:
    """Return the record of a term; None if the lease is free, since the record is gone or damaged.

    Raises:
        CorruptError: The record cannot be read, ``strict`` is true, and the lease may be held.
    """
    try:
        return fetch(store, key, LeaseTerm)
    except errors.NotFoundError:  # deleted since the listing
        return None
    except errors.CorruptError:
        # No lease is held for longer than `MAX_TTL` without a heartbeat.
        if strict and _compute_end(newest, MAX_TTL) >= clock.now():
            raise
        return None


def _find_newest(keys: LeaseKeys, stats: Iterable[Stat]) -> tuple[int, dict[str, Stat]]:
    """Return the newest term's number (-1 before the first), and its objects by kind."""
    number, newest = -1, dict[str, Stat]()
    for stat in stats:
        number, newest = _keep_newest(keys, stat, number, newest)
    return number, newest


def _keep_newest(
    keys: LeaseKeys, stat: Stat, number: int, newest: dict[str, Stat]
) -> tuple[int, dict[str, Stat]]:
    """Compare the newest term with that of an object; return the newer one and its objects."""
    parsed = keys.parse(stat.key)
    if parsed is None or parsed[0] < number:
        return number, newest
    return parsed[0], {**(newest if parsed[0] == number else {}), parsed[1]: stat}


def _is_taken(newest: Mapping[str, Stat]) -> bool:
    """Decide whether a term has a holder that has not released the lease."""
    return "json" in newest and "end" not in newest


def _find_live_holder(
    record: LeaseTerm, newest: Mapping[str, Stat], clock: StoreClock
) -> HeldLease | None:
    """Return the holder of the newest term; None if the lease has ended or the holder is dead."""
    until = _compute_end(newest, record.ttl)
    if record.holder.is_known_dead or until < clock.now():
        return None
    return HeldLease(record.holder, newest["json"].last_modified.astimezone(UTC), until)


def _compute_end(newest: Mapping[str, Stat], ttl: timedelta) -> datetime:
    """Return when a term ends without another heartbeat, by the store's clock."""
    last_write = max(stat.last_modified for stat in newest.values())
    return last_write.astimezone(UTC) + min(ttl, MAX_TTL) + _CLOCK_RESOLUTION


class Census:
    """Holders of all leases under a prefix. Records are read once, since they never change.

    Args:
        store: Store of the leases.
        scope: Scope of the leases.
        group: Folder that the leases' names begin with; empty for all leases.
        clock: Clock of the store.
        strict: Whether an unreadable record is an error as long as its lease may be held.
            Otherwise the lease counts as free.

    Attributes:
        listed: Number of objects in the last listing of the leases.
    """

    def __init__(
        self, store: Store, scope: str, group: str, clock: StoreClock, *, strict: bool = True
    ) -> None:
        self._store, self._scope, self._clock, self._strict = store, scope, clock, strict
        self._prefix = f"{make_lease_prefix(scope)}{group}/" if group else make_lease_prefix(scope)
        self._members = "" if group else f"{MEMBERS}/"  # folder below the prefix
        self._records: dict[str, LeaseTerm] = {}
        self.listed = 0

    def find_holders(self) -> dict[str, HeldLease]:
        """Return the holder of each held lease, by the last part of the lease's name.

        One listing, and one GET for each new term. Of a member's objects, the first 10,000 are
        listed. All objects of other leases are listed, since the newest term decides.

        Raises:
            UnavailableError: The store does not answer.
            CorruptError: A record cannot be read, and ``strict`` is true.
        """
        found: dict[LeaseKeys, tuple[int, dict[str, Stat]]] = {}
        self.listed = 0
        listed = list_fairly(self._store, self._prefix, within=self._members, limit=_MAX_OBJECTS)
        for stat in listed:
            self.listed += 1
            keys = parse_lease(self._scope, stat.key)
            if keys is not None:
                found[keys] = _keep_newest(keys, stat, *found.get(keys, (-1, {})))
        held: dict[str, HeldLease] = {}
        for keys, (number, newest) in found.items():
            record = (
                self._read_term(keys.make_term_key(number), newest) if _is_taken(newest) else None
            )
            if record is not None and (holder := _find_live_holder(record, newest, self._clock)):
                held[keys.name.rpartition("/")[2]] = holder
        return held

    def _read_term(self, key: str, newest: Mapping[str, Stat]) -> LeaseTerm | None:
        """Return the record of a term, which is read once; None if the lease counts as free."""
        record = self._records.get(key) or _read_term(
            self._store, key, newest, self._clock, strict=self._strict
        )
        if record is not None:
            self._records[key] = record
        return record


class Heartbeat:
    """Thread that sends the heartbeats of leases, those of 16 leases at once.

    A heartbeat is a context manager. The end of the block releases the leases that are still held.

    Args:
        ttl: Time after the last heartbeat at which the leases end. The thread sends three
            heartbeats in this time.
        is_alive: Function that decides before each heartbeat whether the holder still works. While
            the result is false, no heartbeat is sent, and the leases end.
    """

    def __init__(self, ttl: timedelta, is_alive: Callable[[], bool] = lambda: True) -> None:
        self._pause = max(1.0, ttl.total_seconds() / 3)
        self._is_alive = is_alive
        self._leases: dict[str, Lease] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._leaving: list[threading.Thread] = []
        self._under_way: list[tuple[Lease, Future[None]]] = []
        self._pool = DaemonThreadPool(_CONCURRENCY, "heartbeats")
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        # The wait is short, also if the store does not answer: leases end without a release.
        for lease in list(self._leases.values()):
            thread = threading.Thread(target=_try_release, args=(lease,), daemon=True)
            thread.start()
            self._leaving.append(thread)
        deadline = time.monotonic() + _RELEASE_TIMEOUT
        for thread in (self._thread, *self._leaving):
            thread.join(max(0.0, deadline - time.monotonic()))
        wait(
            [beat for _, beat in list(self._under_way)],
            timeout=max(0.0, deadline - time.monotonic()),
        )

    def keep(self, lease: Lease) -> None:
        """Begin to send heartbeats for a lease."""
        with self._lock:
            self._leases[lease.keys.prefix] = lease

    def release(self, lease: Lease) -> None:
        """Stop the heartbeats of a lease, and give the lease back."""
        with self._lock:
            self._leases.pop(lease.keys.prefix, None)
        lease.release()

    def _run(self) -> None:
        while not self._stop.wait(self._pause):
            try:
                self._send_heartbeats()
            except BaseException:  # noqa: BLE001 - such as a lack of memory
                self._log_fault()

    def _send_heartbeats(self) -> None:
        with self._lock:
            leases = list(self._leases.values())
        # One stalled request may take longer than a lease lasts, so no heartbeat waits for another.
        # Those that end late do no harm: they renew no lease that was released or has a newer term.
        self._under_way = [(lease, beat) for lease, beat in self._under_way if not beat.done()]
        counts = Counter(lease.keys.make_beat_key(lease.term) for lease, _ in self._under_way)
        for lease in leases:
            if counts[lease.keys.make_beat_key(lease.term)] >= _MAX_UNDER_WAY:
                continue
            try:
                self._under_way.append((lease, self._pool.submit(self._try_beat, lease)))
            except (RuntimeError, MemoryError):  # the system starts no more threads
                self._try_beat(lease)

    def _try_beat(self, lease: Lease) -> None:
        try:
            if not self._stop.is_set() and self._is_alive():
                # Retries end when the next beat is due.
                lease.with_timeout(timedelta(seconds=self._pause)).beat()
        except errors.MillraceError:
            pass  # the next beat may succeed; otherwise the lease ends
        except BaseException:  # noqa: BLE001 - a panic of obstore is no `Exception`
            self._log_fault()

    def _log_fault(self) -> None:
        _log.exception(
            "Heartbeats of leases were not sent. The next ones are due in %.0f s.", self._pause
        )


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
    """Return seconds of a clock that also runs while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
