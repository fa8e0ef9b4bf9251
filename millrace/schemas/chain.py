"""Records of an aggregator: one link per window, with the digest of the link before."""

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from typing import ClassVar

from pydantic import AwareDatetime, Field

from millrace.digest import OwnDigest
from millrace.records import JsonInt, Record, RecordPart
from millrace.schemas.gradient import Codec, ExclusionReason
from millrace.schemas.merge import MergeSettings


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
        title="Learning rate",
        default=1.0,
        gt=0,
        allow_inf_nan=False,
        description="Factor of the merged gradient.",
    )
    momentum: float = Field(default=0.9, ge=0, lt=1, description="Momentum of `nesterov`.")


class ChainStart(Record):
    """The first link: the weights that the run begins with.

    Attributes:
        run: Name of the run.
        job: Job of the checkpoint with the initial weights.
        step: Step of that checkpoint.
        root: Digest of the checkpoint's content.
        state: Digest of the weights.
    """

    record_kind: ClassVar[str] = "chain-start"
    record_version: ClassVar[int] = 2  # with BLAKE3 digests
    run: str
    job: str
    step: JsonInt
    root: str
    state: str


class TakenGradient(RecordPart):
    """Gradient that was taken. With a share of 0, the rule has left it out.

    Attributes:
        scale: Factor of the gradient before the rule, which clips its norm.
        sum_factor: Factor of the gradient in the sum, with its scale.
        share: Share of the worker in the average of a buffer. With 0, no update has the gradient.
        norm: L2 norm of the gradient.
        digest: Digest of the gradient's header, which has the digest of its values.
        size: Size of the object in bytes.
        tokens: Number of tokens that the worker reports.
        samples: Digest of its samples that the worker reports; empty if it reports none.
        written: Time of the upload, by the store's clock.
    """

    scale: float = Field(ge=0, le=1)
    sum_factor: float = Field(ge=0, le=2)  # at most 1, but for rounding
    share: float = Field(ge=0, le=1)
    norm: float
    digest: OwnDigest
    size: JsonInt
    tokens: JsonInt
    samples: str = ""
    written: AwareDatetime


class ExcludedWorker(RecordPart):
    """Worker that is excluded from a window: it sent no gradient that counts.

    A refused gradient excludes its worker, unless the worker sends a valid one in time.

    Attributes:
        reason: Kind of the reason.
        sentence: Reason in a sentence.
    """

    reason: ExclusionReason
    sentence: str


class UpdateEntry(RecordPart):
    """Entry of a link for an update: an object from which the weights after a window follow.

    The update has, of each tensor, the gradients of the merged workers, or the merged values if
    these are shorter.

    Attributes:
        key: Key of the update.
        digest: Digest of the update.
        size: Size of the update in bytes.
        tensors: Number of tensors in the update. The updates of a link have its tensors in order.
    """

    key: str
    digest: OwnDigest
    size: JsonInt
    tensors: JsonInt


def count_reasons(excluded: Iterable[ExcludedWorker]) -> str:
    """Count excluded workers by reason: ``2 late, 1 norm``; empty if there are none."""
    counts = Counter(one.reason.label for one in excluded)
    return ", ".join(f"{number} {reason}" for reason, number in sorted(counts.items()))


class ChainLink(Record):
    """Result of a window.

    Attributes:
        run: Name of the run.
        window: Number of the window.
        step: Step of the weights after the window.
        updates: Entries of the window's updates; empty if no gradient was merged.
        codec: Settings of the compression of the workers' gradients.
        names: Names of the tensors, in the order of the updates.
        shapes: Shapes of these tensors.
        outer: Optimizer that applies the merged gradients.
        merge: Settings of the merge.
        scores: Digest of the scores by which the merge weighs workers; empty without scores.
        taken: Gradients that were taken, by the workers' names.
        excluded: Excluded workers with the reasons.
        seconds: Duration of the gathering.
        previous: Digest of the link before.
        state: Digest of the weights after the window.
    """

    record_kind: ClassVar[str] = "chain-link"
    record_bytes: ClassVar[int] = 16 << 20  # 150,000 tensors, or 50,000 workers
    record_version: ClassVar[int] = 7  # with `sum_factor`

    run: str
    window: JsonInt
    step: JsonInt
    updates: tuple[UpdateEntry, ...]
    codec: Codec
    names: tuple[str, ...]
    shapes: tuple[tuple[JsonInt, ...], ...]
    outer: OuterOptimizer
    merge: MergeSettings
    scores: str
    taken: dict[str, TakenGradient]
    excluded: dict[str, ExcludedWorker]
    seconds: float
    previous: str
    state: str

    @property
    def size(self) -> int:
        """Bytes of the updates."""
        return sum(update.size for update in self.updates)
