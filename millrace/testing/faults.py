"""Faults for the answers of an S3 server: selection, probabilities and counts."""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class Fault(StrEnum):
    """Kind of fault of one request."""

    ERROR500 = "error500"
    """500 InternalError. The request is not carried out."""
    ERROR503 = "error503"
    """503 ServiceUnavailable, with Retry-After if set. The request is not carried out."""
    ERROR429 = "error429"
    """429 TooManyRequests, with Retry-After if set. The request is not carried out."""
    CUT = "cut"
    """Connection closed midway: a GET sends half of its body, a PUT is not carried out."""
    LOST = "lost"
    """Request carried out; connection closed without an answer."""
    STALL = "stall"
    """Pause, then the connection is closed. The request is not carried out."""
    DAMAGE = "damage"
    """One flipped bit in the body of the request, before the server checks the body."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Probability of each fault per request. The sum is at most 1."""

    error500: float = 0.0
    error503: float = 0.0
    error429: float = 0.0
    cut: float = 0.0
    lost: float = 0.0
    stall: float = 0.0
    damage: float = 0.0
    seed: int = 0
    methods: tuple[str, ...] = ()
    """HTTP methods with faults; empty: all."""
    operations: tuple[str, ...] = ()
    """S3 operations with faults, such as ``CompleteMultipartUpload``; empty: all."""
    key_contains: str = ""
    """Text in the ``bucket/key`` of each request with faults."""
    retry_after: float | None = None
    """Header Retry-After of 429 and 503, in seconds."""
    stall_seconds: float = 30.0
    """Duration of a stall."""

    def __post_init__(self) -> None:
        """Check the probabilities and their sum."""
        if min(self.list_probabilities()) < 0 or sum(self.list_probabilities()) > 1 + 1e-9:
            raise ValueError("The probabilities must be from 0 to 1, their sum too.")

    def list_probabilities(self) -> list[float]:
        """Return the probability of each `Fault`, in the order of the enum."""
        return [getattr(self, kind.value) for kind in Fault]


@dataclass(slots=True)
class NextFault:
    """Fault for a number of the next matching requests."""

    kind: Fault
    times: int
    method: str | None = None
    operation: str | None = None
    key_contains: str = ""
    retry_after: float | None = None
    stall_seconds: float = 30.0


@dataclass(slots=True)
class Plan:
    """Fault chosen for one request."""

    kind: Fault
    retry_after: float | None
    stall_seconds: float
    reserved: NextFault | None = None


@dataclass(slots=True)
class FaultBox:
    """Choice of faults for requests, with counts of the faults that fired."""

    faults: Faults = field(default_factory=Faults)
    fired: Counter[Fault] = field(default_factory=Counter[Fault])
    _next: list[NextFault] = field(default_factory=list[NextFault])
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def use(self, faults: Faults) -> None:
        """Inject ``faults`` from now on, with a generator that starts from their seed."""
        self.faults = faults
        self._random = random.Random(faults.seed)

    def fail_next(self, fault: NextFault) -> None:
        """Fail the next ``fault.times`` matching requests. These faults precede random ones."""
        self._next.append(fault)

    def choose(
        self, method: str, operation: str, name: str, possible: Iterable[Fault]
    ) -> Plan | None:
        """Return the fault for a request: a deterministic fault first, else a random one.

        Args:
            method: HTTP method of the request.
            operation: S3 operation of the request.
            name: ``bucket/key`` of the request.
            possible: Faults that can happen to the request.
        """
        possible = set(possible)
        for one in self._next:
            asked = one.method in (None, method) and one.operation in (None, operation)
            if one.times and asked and one.key_contains in name and one.kind in possible:
                one.times -= 1
                return Plan(one.kind, one.retry_after, one.stall_seconds, one)
        faults = self.faults
        if (
            method not in (faults.methods or (method,))
            or operation not in (faults.operations or (operation,))
            or faults.key_contains not in name
        ):
            return None
        drawn = self._random.random()
        for kind, probability in zip(Fault, faults.list_probabilities(), strict=True):
            if drawn < probability:
                plan = Plan(kind, faults.retry_after, faults.stall_seconds)
                return plan if kind in possible else None
            drawn -= probability
        return None

    def fire(self, plan: Plan) -> None:
        """Count a fault that fires."""
        self.fired[plan.kind] += 1

    def give_back(self, plan: Plan) -> None:
        """Return a deterministic fault that did not fire to the queue, for another request."""
        if plan.reserved is not None:
            plan.reserved.times += 1

    def count_fired(self) -> dict[str, int]:
        """Return the number of faults of each kind that fired."""
        return {kind.value: self.fired[kind] for kind in Fault}

    def count_pending(self) -> int:
        """Return the number of deterministic faults that have not fired yet."""
        return sum(one.times for one in self._next)

    def reset(self) -> None:
        """Remove all faults, and set the counts to zero."""
        self.use(Faults())
        self.fired.clear()
        self._next.clear()
