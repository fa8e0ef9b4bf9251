"""Window to gather: its keys, times and limits; and the senders of its gradients."""

import time
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from millrace.gradients.codec.gradient_object import ExpectedGradient, Shapes
from millrace.keys.gradients import GradientKeys
from millrace.schemas.gradient import Codec
from millrace.storage import Store


@dataclass(frozen=True, slots=True)
class Sender:
    """Worker that may send a gradient.

    Attributes:
        uid: Name of the worker.
        store: Bucket that the worker writes to: its own, or a shared one.
    """

    uid: str
    store: Store


@dataclass(frozen=True, slots=True)
class GatherWindow:
    """Window whose gradients are gathered.

    Attributes:
        keys: Keys of the run's gradients.
        number: Number of the window.
        base: Step of the weights that the gradients change.
        codec: Settings of the compression.
        shapes: Shapes of the model's tensors by their names.
        opens: Begin by the stores' clock. Earlier objects are refused.
        closes: End by the stores' clock. Later objects are refused.
        max_norm: Largest L2 norm of a gradient; None for the limit of float32.
    """

    keys: GradientKeys
    number: int
    base: int
    codec: Codec
    shapes: Shapes = field(repr=False)
    opens: datetime
    closes: datetime
    max_norm: float | None = None

    def make_expected(self, uid: str) -> ExpectedGradient:
        """Return the conditions that a worker's gradient must meet."""
        return ExpectedGradient(
            run=self.keys.run,
            uid=uid,
            window=self.number,
            base=self.base,
            codec=self.codec,
            shapes=self.shapes,
            max_norm=self.max_norm,
        )


@dataclass(slots=True)
class WaitLimit:
    """End of all waits of a gathering, which moves with its progress.

    Attributes:
        until: End by the monotonic clock.
    """

    until: float

    def limit_retries(self, store: Store) -> Store:
        """Return a store with retries until the end only, and for at least a second."""
        left = max(1.0, self.until - time.monotonic())
        return store.with_retry_timeout(min(store.spec.retry_timeout, timedelta(seconds=left)))
