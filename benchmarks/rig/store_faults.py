"""Faults of the rig's store: which requests they affect, and how many were injected."""

import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class FaultKind(StrEnum):
    """Fault of one request."""

    FLIP = "flip"
    """One bit of the body is inverted, in the byte at ``offset`` or else in the middle byte."""
    TRUNCATE = "truncate"
    """The connection is closed at ``offset``, or else after half of the body."""
    STALL = "stall"
    """The body pauses for ``seconds`` at ``offset``, or else after its half, and then continues."""
    DELAY = "delay"
    """The response begins after ``seconds``."""
    DENY = "deny"
    """The response is 403 AccessDenied."""
    ERROR = "error"
    """The response is 500 InternalError."""


BODY_FAULTS = frozenset({FaultKind.FLIP, FaultKind.TRUNCATE, FaultKind.STALL})


@dataclass(frozen=True, slots=True)
class RigFault:
    """Fault of the requests that match its attributes.

    Attributes:
        kind: Kind of the fault.
        operation: S3 operation. An empty string matches all. Faults of a body require GetObject.
        key: Key of the object, or prefix of a listing. An empty string matches all.
        offset: Byte of the object that must be in the range of the request.
        times: Number of requests that meet the fault. None stands for all.
        share: Fraction of the matching requests that meet the fault, chosen at random.
        seed: Seed of the random choice.
        seconds: Duration of a stall or a delay in seconds.
    """

    kind: FaultKind
    operation: str = "GetObject"
    key: str = ""
    offset: int | None = None
    times: int | None = 1
    share: float = 1.0
    seed: int = 0
    seconds: float = 30.0

    def __post_init__(self) -> None:
        """Reject a combination that matches no request."""
        if self.kind in BODY_FAULTS and self.operation != "GetObject":
            raise ValueError(f"{self.kind} is a fault of the body of a GetObject.")

    def compute_offset(self, start: int, end: int) -> int:
        """Return the offset of the fault in a response with the bytes from ``start`` to ``end``."""
        return (start + end) // 2 if self.offset is None else self.offset


@dataclass(slots=True)
class _PendingFault:
    fault: RigFault
    remaining: float
    generator: random.Random


@dataclass(slots=True)
class RigFaults:
    """Faults for the requests of many threads.

    Attributes:
        fired: Number of injected faults by kind.
    """

    fired: Counter[str] = field(default_factory=Counter)
    _pending: list[_PendingFault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, fault: RigFault) -> None:
        """Add a fault for the next requests that match it."""
        remaining = float("inf") if fault.times is None else fault.times
        with self._lock:
            self._pending.append(_PendingFault(fault, remaining, random.Random(fault.seed)))

    def choose(self, operation: str, key: str, start: int = 0, end: int = 0) -> RigFault | None:
        """Choose the fault for a request.

        It is counted before it is injected, so that no client sees a fault before its count. The
        caller calls `restore` if it could not inject the fault.

        Args:
            operation: S3 operation.
            key: Key of the object, or prefix of a listing.
            start: First byte of the range of a GetObject.
            end: End of the range, exclusive.
        """
        with self._lock:
            for pending in self._pending:
                fault = pending.fault
                matches = fault.operation in ("", operation) and fault.key in ("", key)
                covers = fault.offset is None or start <= fault.offset < end
                covers &= fault.kind not in BODY_FAULTS or start < end
                available = pending.remaining > 0 and matches and covers
                if available and pending.generator.random() < fault.share:
                    pending.remaining -= 1
                    self.fired[fault.kind] += 1
                    return fault
        return None

    def restore(self, fault: RigFault) -> None:
        """Keep a fault for another request, because the client was disconnected before it."""
        with self._lock:
            for pending in self._pending:  # empty if the faults were cleared meanwhile
                if pending.fault is fault:
                    pending.remaining += 1
                    self.fired[fault.kind] -= 1

    def count_pending(self) -> int:
        """Return how many requests are still to meet faults with a limited number of requests."""
        with self._lock:
            return int(sum(p.remaining for p in self._pending if p.fault.times is not None))

    def clear(self) -> None:
        """Remove all faults, and set the counts to zero."""
        with self._lock:
            self.fired.clear()
            self._pending.clear()
