"""Progress events of gathering and merging the windows of a run."""

from dataclasses import dataclass
from typing import ClassVar

from millrace.progress import Event
from millrace.schemas.gradient import Refusal


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
    """Event after the gradient of a worker was refused.

    Attributes:
        uid: Name of the worker.
        reason: Reason of the refusal.
    """

    kind: ClassVar[str] = "gradient.refused"

    uid: str
    reason: Refusal


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
        accepted: Number of workers whose gradients were merged.
        refused: Number of workers whose gradients were not merged.
    """

    kind: ClassVar[str] = "window.merged"

    run: str
    window: int
    accepted: int
    refused: int


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
