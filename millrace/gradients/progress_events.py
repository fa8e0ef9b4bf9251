"""Progress events of gathering and merging the windows of a run."""

from dataclasses import dataclass
from typing import ClassVar

from millrace.progress import Event
from millrace.schemas.gradient import ExclusionReason


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientAccepted(Event):
    """Event after the gradient of a worker was read, and is valid.

    Attributes:
        uid: Name of the worker.
        size: Bytes of the gradient.
        norm: Norm of the gradient.
    """

    kind: ClassVar[str] = "gradient.taken"

    uid: str
    size: int
    norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientRefused(Event):
    """Event after a gradient failed a check. Its worker is not excluded if a valid one follows.

    Attributes:
        uid: Name of the worker.
        reason: Reason why the gradient is refused.
    """

    kind: ClassVar[str] = "gradient.refused"

    uid: str
    reason: ExclusionReason


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadConverted(Event):
    """Event after a payload of a Templar worker was checked and converted.

    Attributes:
        uid: Name of the worker in the run.
        window: Number of the window in the run.
        size: Bytes of the payload.
        lost: Share of the payload's norm that the codec of the run changed.
    """

    kind: ClassVar[str] = "payload.converted"

    uid: str
    window: int
    size: int
    lost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersAwaited(Event):
    """Event when a window is not opened, since fewer workers than its quorum have registered.

    Attributes:
        run: Name of the run.
        window: Number of the window.
        found: Number of workers of the window.
        quorum: Number of workers that the window waits for.
    """

    kind: ClassVar[str] = "workers.awaited"

    run: str
    window: int
    found: int
    quorum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterChanged(Event):
    """Event when the registered workers of a window are others than those of the window before.

    Attributes:
        run: Name of the run.
        window: Number of the window.
        active: Number of registered workers whose gradients are read.
        joined: Names of the workers that have joined.
        counting: Names of the workers whose warm-up has ended.
        left: Names of the workers that have left.
        removed: Names of the workers that were removed, as they missed too many windows.
    """

    kind: ClassVar[str] = "roster.changed"

    run: str
    window: int
    active: int
    joined: tuple[str, ...]
    counting: tuple[str, ...]
    left: tuple[str, ...]
    removed: tuple[str, ...]

    def describe(self) -> str:
        """Return the changes in words: ``joined: a, b; left: c``."""
        groups = {
            "joined": self.joined,
            "counting now": self.counting,
            "left": self.left,
            "removed": self.removed,
        }
        return "; ".join(f"{what}: {', '.join(uids)}" for what, uids in groups.items() if uids)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaExceeded(Event):
    """Event after a listing shows that a worker stores too much, once in each window.

    Attributes:
        uid: Name of the worker.
        objects: Number of objects below the worker's prefix.
        size: Bytes of these objects.
    """

    kind: ClassVar[str] = "quota.exceeded"

    uid: str
    objects: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSent(Event):
    """Event after a worker has sent its own gradient.

    Attributes:
        uid: Name of the worker.
        window: Number of the window.
        size: Bytes of the gradient.
    """

    kind: ClassVar[str] = "gradient.sent"

    uid: str
    window: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStored(Event):
    """Event after an update of a window is in the store, before the window's link is committed.

    Attributes:
        key: Key of the update.
        window: Number of the window.
        size: Bytes of the update.
    """

    kind: ClassVar[str] = "update.stored"

    key: str
    window: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowMerged(Event):
    """Event after the link of a window is committed.

    Attributes:
        run: Name of the run.
        window: Number of the window.
        taken: Number of workers whose gradients were merged.
        excluded: Number of excluded workers.
    """

    kind: ClassVar[str] = "window.merged"

    run: str
    window: int
    taken: int
    excluded: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowScored(Event):
    """Event after the scores of a window are committed.

    Attributes:
        run: Name of the run.
        window: Number of the window.
        evaluated: Number of workers whose gradients were evaluated.
        copies: Number of gradients that are copies.
    """

    kind: ClassVar[str] = "window.scored"

    run: str
    window: int
    evaluated: int
    copies: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkApplied(Event):
    """Event after the link of a merged window was applied to the weights.

    Attributes:
        run: Name of the run.
        window: Number of the window.
        step: Step of the weights.
    """

    kind: ClassVar[str] = "chain.applied"

    run: str
    window: int
    step: int
