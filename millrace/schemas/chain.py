"""Records of an aggregator: a link a window, each naming the one before."""

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from typing import ClassVar

from pydantic import Field

from millrace.records import Record, RecordPart
from millrace.schemas.gradient import Codec, Refusal


class OuterKind(StrEnum):
    """Kind of optimizer that applies merged gradients to weights."""

    SGD = "sgd"
    NESTEROV = "nesterov"  # DiLoCo, 2311.08105
    SIGN = "sign"  # DeMo, 2411.19870


class OuterOptimizer(RecordPart):
    """Optimizer that applies merged gradients to the weights, the same for all workers."""

    kind: OuterKind = Field(
        default=OuterKind.SGD, description="`sgd`, `nesterov` (DiLoCo) or `sign` (DeMo)."
    )
    lr: float = Field(
        title="Learning rate", default=1.0, gt=0, description="Factor of the merged gradient."
    )
    momentum: float = Field(default=0.9, ge=0, lt=1, description="Momentum of `nesterov`.")


class ChainStart(Record):
    """The first link: the weights that the run begins with.

    Attributes:
        run: Which.
        job: Whose checkpoint it is.
        step: Of which step.
        root: The digest of its content.
        state: The digest of the weights.
    """

    record_kind: ClassVar[str] = "chain-start"
    run: str
    job: str
    step: int
    root: str
    state: str


class MergedWorker(RecordPart):
    """A worker whose gradient is in a merge.

    Attributes:
        weight: What it counts there.
        norm: The L2 norm of what it sent.
        sha256: Of its header, which names that of all else.
        size: Bytes of the object.
        tokens: That it says it was made of.
    """

    weight: float
    norm: float
    sha256: str
    size: int
    tokens: int


class ExcludedWorker(RecordPart):
    """A worker whose gradient is not.

    Attributes:
        reason: Why, in a word.
        sentence: Why, in a sentence.
    """

    reason: Refusal
    sentence: str


class Update(RecordPart):
    """An object of merged gradients.

    Attributes:
        key: Of the object.
        sha256: Of it.
        size: Bytes of it.
        tensors: How many it has; of a link's, in their order, each has those that come next.
    """

    key: str
    sha256: str
    size: int
    tensors: int


def count_reasons(out: Iterable[ExcludedWorker]) -> str:
    """Count the workers that are out by reason: ``2 late, 1 norm``; empty if none is."""
    counts = Counter(str(one.reason) for one in out)
    return ", ".join(f"{number} {reason}" for reason, number in sorted(counts.items()))


class ChainLink(Record):
    """Result of a window.

    Attributes:
        run: Which.
        window: Its number.
        step: That the weights are at after it.
        updates: The merged gradients; none if there were none, and the weights stay as they are.
        codec: What it is merged of.
        names: The tensors, in its order.
        shapes: Theirs.
        outer: How it is applied.
        rule: By which it was merged.
        taken: Who is in.
        out: Who is not, and why.
        seconds: How long gathering took.
        previous: The digest of the link before.
        state: The digest of the weights after it.
    """

    record_kind: ClassVar[str] = "chain-link"
    record_bytes: ClassVar[int] = 16 << 20  # 150,000 tensors, or 50,000 workers
    record_version: ClassVar[int] = 2  # with buffers, whose values are set

    run: str
    window: int
    step: int
    updates: tuple[Update, ...]
    codec: Codec
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    outer: OuterOptimizer
    rule: str
    taken: dict[str, MergedWorker]
    out: dict[str, ExcludedWorker]
    seconds: float
    previous: str
    state: str

    @property
    def size(self) -> int:
        """Bytes of the merged gradients."""
        return sum(update.size for update in self.updates)
