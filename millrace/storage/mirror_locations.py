"""Locations of a reader of mirrors: their stores, their health, and what they have done."""

import threading
import time
from dataclasses import dataclass, field

from millrace.storage.locations import Backend
from millrace.storage.mirror_policy import CircuitBreaker, RelativeRate
from millrace.storage.open import Store
from millrace.threads import DaemonThreadPool


@dataclass(frozen=True, slots=True)
class LocationReport:
    """Work of one location of a reader of mirrors.

    Attributes:
        name: URL of the location, with its endpoint if it has one.
        requests: Number of requests, with those of proofs and probes.
        served_bytes: Bytes that were used.
        unused_bytes: Bytes that arrived after another location was faster, or for a proof.
        failures: Number of requests that failed.
        hedges: Number of requests that were made since another location was slow.
        won_hedges: Number of these requests that were faster.
        differing: Number of objects whose copies differ.
        missing: Number of objects that have no copy.
        is_dropped: Whether the location is left out, since several of its objects differ.
    """

    name: str
    requests: int
    served_bytes: int
    unused_bytes: int
    failures: int
    hedges: int
    won_hedges: int
    differing: int
    missing: int
    is_dropped: bool


@dataclass(frozen=True, slots=True)
class MirrorReport:
    """Work of a reader of mirrors.

    Attributes:
        reads: Number of ranges that were read.
        locations: Work of each location.
    """

    reads: int
    locations: tuple[LocationReport, ...]

    @property
    def further_share(self) -> float:
        """Number of requests beyond one for each read, as a share of the reads."""
        requests = sum(location.requests for location in self.locations)
        return (requests - self.reads) / self.reads if self.reads else 0.0

    def describe(self) -> str:
        """Return a sentence for each location, on a line of its own."""
        return "\n".join(
            f"{one.name}: {one.served_bytes:,} bytes by {one.requests:,} requests, "
            f"{one.failures:,} failed, {one.hedges:,} hedges ({one.won_hedges:,} faster), "
            f"{one.unused_bytes:,} bytes unused"
            for one in self.locations
        )


@dataclass(slots=True)
class CopyLocation:
    """A store, and its health.

    Attributes:
        number: Number of the location.
        store: Store whose requests are tried once.
        name: URL and endpoint.
        breaker: Breaker of its requests.
        pool: Threads of its requests.
        rate: Measured rate.
        differing: Keys of the objects whose copies differ.
        missing: Keys of the objects that have no copy, up to a number.
    """

    number: int
    store: Store
    name: str
    breaker: CircuitBreaker
    pool: DaemonThreadPool
    rate: RelativeRate = field(default_factory=RelativeRate)
    lock: threading.Lock = field(default_factory=threading.Lock)
    requests: int = 0
    served: int = 0
    received: int = 0
    failures: int = 0
    hedges: int = 0
    won_hedges: int = 0
    differing: set[str] = field(default_factory=set[str])
    missing: set[str] = field(default_factory=set[str])
    is_dropped: bool = False

    @property
    def is_local(self) -> bool:
        """True if the location is a folder of this machine."""
        return self.store.location.backend is Backend.FILE

    @property
    def is_available(self) -> bool:
        """True if requests may be made now."""
        return not self.breaker.is_open and self.store.throttle.resume_at <= time.monotonic()

    def count_request(self) -> None:
        """Count a request."""
        with self.lock:
            self.requests += 1

    def add_received(self, size: int) -> None:
        """Count bytes that have arrived."""
        with self.lock:
            self.received += size

    def make_report(self) -> LocationReport:
        """Return the counts."""
        with self.lock:
            return LocationReport(
                self.name, self.requests, self.served, self.received - self.served, self.failures,
                self.hedges, self.won_hedges, len(self.differing), len(self.missing),
                self.is_dropped,
            )  # fmt: skip
