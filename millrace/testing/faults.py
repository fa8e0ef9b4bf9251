"""Faults to inject into an S3 server's answers: which, how often, and how many really fired."""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class Fault(StrEnum):
    """Fault of one request."""

    ERROR500 = "error500"
    """500 InternalError; nothing done."""
    ERROR503 = "error503"
    """503 ServiceUnavailable, with Retry-After if one is set; nothing done."""
    ERROR429 = "error429"
    """429 TooManyRequests, with Retry-After if one is set; nothing done."""
    CUT = "cut"
    """The connection is closed midway: a GET has half of its body, a PUT is not done."""
    LOST = "lost"
    """It is done, and the connection closed without an answer."""
    STALL = "stall"
    """Nothing for a while, then the connection is closed; nothing done."""
    DAMAGE = "damage"
    """A bit of the body changes on its way to the server, before the server checks the body."""


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
    """HTTP methods to which they apply; none: all."""
    operations: tuple[str, ...] = ()
    """S3's operations (``CompleteMultipartUpload``) to which they apply; none: all."""
    key_contains: str = ""
    """They apply to requests whose bucket and key contain this."""
    retry_after: float | None = None
    """Seconds, the header of 429 and 503."""
    stall_seconds: float = 30.0

    def __post_init__(self) -> None:
        """Refuse what is not a probability."""
        if min(self.list_probabilities()) < 0 or sum(self.list_probabilities()) > 1 + 1e-9:
            raise ValueError("The probabilities must be from 0 to 1, their sum too.")

    def list_probabilities(self) -> list[float]:
        """Return one probability for each `Fault`, in order."""
        return [getattr(self, kind.value) for kind in Fault]


@dataclass(slots=True)
class NextFault:
    """A fault that the next matching requests meet."""

    kind: Fault
    times: int
    method: str | None = None
    operation: str | None = None
    key_contains: str = ""
    retry_after: float | None = None
    stall_seconds: float = 30.0


@dataclass(slots=True)
class Plan:
    """The fault that one request is to meet."""

    kind: Fault
    retry_after: float | None
    stall_seconds: float
    reserved: NextFault | None = None


@dataclass(slots=True)
class FaultBox:
    """Chooses faults, and counts those that fired."""

    faults: Faults = field(default_factory=Faults)
    fired: Counter[Fault] = field(default_factory=Counter)
    _next: list[NextFault] = field(default_factory=list)
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def use(self, faults: Faults) -> None:
        """Begin to inject ``faults``, from the start of their seed."""
        self.faults = faults
        self._random = random.Random(faults.seed)

    def fail_next(self, fault: NextFault) -> None:
        """Let the next ``fault.times`` matching requests meet it, before any chance."""
        self._next.append(fault)

    def choose(
        self, method: str, operation: str, name: str, possible: Iterable[Fault]
    ) -> Plan | None:
        """Return the fault for a request: a deterministic one first, else one drawn.

        Args:
            method: Its HTTP method.
            operation: What it asks for, in S3's words.
            name: Its ``bucket/key``.
            possible: The faults that can befall it at all.
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
        """Count a fault that is being done."""
        self.fired[plan.kind] += 1

    def give_back(self, plan: Plan) -> None:
        """Give back a fault that could not be done: another request shall meet it."""
        if plan.reserved is not None:
            plan.reserved.times += 1

    def count_fired(self) -> dict[str, int]:
        """Return how often each kind of fault fired."""
        return {kind.value: self.fired[kind] for kind in Fault}

    def count_pending(self) -> int:
        """Return the number of deterministic faults that wait for their request."""
        return sum(one.times for one in self._next)

    def reset(self) -> None:
        """Remove all faults, and set the counts to zero."""
        self.use(Faults())
        self.fired.clear()
        self._next.clear()
