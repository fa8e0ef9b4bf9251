"""Faults that the rig's store does on demand: which request meets one, and how many were done."""

import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class FaultKind(StrEnum):
    """Fault of one request."""

    FLIP = "flip"
    """One bit of the body is another: of the byte at ``offset``, else of the one in its middle."""
    TRUNCATE = "truncate"
    """The connection is closed at ``offset``, else when half of the body is sent."""
    STALL = "stall"
    """No byte for ``seconds`` at ``offset``, else when half of the body is sent; then the rest."""
    DENY = "deny"
    """403 AccessDenied."""
    ERROR = "error"
    """500 InternalError."""


BODY = frozenset({FaultKind.FLIP, FaultKind.TRUNCATE, FaultKind.STALL})


@dataclass(frozen=True, slots=True)
class Fault:
    """One order for faults.

    Attributes:
        kind: What goes wrong.
        operation: In S3's words. The kinds that befall a body want GetObject; empty: any.
        key: Of the object (of a listing, its prefix) that it happens to; empty: any.
        offset: Only requests whose range covers this byte of the object meet it.
        times: How many meet it; None: no end.
        share: Of the requests that could, seeded: 1 is every one.
        seed: For the share.
        seconds: How long a stall lasts.
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
        """Refuse what can befall no request."""
        if self.kind in BODY and self.operation != "GetObject":
            raise ValueError(f"{self.kind} befalls the body of a GetObject.")

    def place(self, start: int, end: int) -> int:
        """Return the offset of the fault, when the bytes from ``start`` to ``end`` are sent."""
        return (start + end) // 2 if self.offset is None else self.offset


@dataclass(slots=True)
class _Order:
    fault: Fault
    left: float
    dice: random.Random


@dataclass(slots=True)
class Faults:
    """Chooses faults for requests; used by many threads."""

    fired: Counter[str] = field(default_factory=Counter)
    _orders: list[_Order] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def order(self, fault: Fault) -> None:
        """Let the next requests that it fits meet a fault."""
        left = float("inf") if fault.times is None else fault.times
        with self._lock:
            self._orders.append(_Order(fault, left, random.Random(fault.seed)))

    def choose(self, operation: str, key: str, start: int = 0, end: int = 0) -> Fault | None:
        """Choose the fault for a request.

        Of a GetObject, one for the bytes from ``start`` to ``end``.

        It counts as done from now on, so that no client sees one before it is counted. Whoever
        could not do it calls `give_back`.
        """
        with self._lock:
            for order in self._orders:
                fault = order.fault
                fits = fault.operation in ("", operation) and fault.key in ("", key)
                covers = fault.offset is None or start <= fault.offset < end
                covers &= fault.kind not in BODY or start < end
                if order.left > 0 and fits and covers and order.dice.random() < fault.share:
                    order.left -= 1
                    self.fired[fault.kind] += 1
                    return fault
        return None

    def give_back(self, fault: Fault) -> None:
        """Another request shall meet it: the client was gone before."""
        with self._lock:
            for order in self._orders:  # none, if they were cleared meanwhile
                if order.fault is fault:
                    order.left += 1
                    self.fired[fault.kind] -= 1

    def pending(self) -> int:
        """Count the limited faults that wait for their request."""
        with self._lock:
            return int(sum(o.left for o in self._orders if o.fault.times is not None))

    def clear(self) -> None:
        """No orders, and counts of zero."""
        with self._lock:
            self.fired.clear()
            self._orders.clear()
