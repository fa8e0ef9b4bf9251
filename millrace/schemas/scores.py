"""Records of the scores of workers: the evidence of each window, and what follows from it."""

from enum import StrEnum
from math import inf
from typing import ClassVar

from pydantic import AwareDatetime, Field

from millrace.digest import OwnDigest
from millrace.records import JsonInt, Record, RecordPart


class ScoreFormula(StrEnum):
    """Formula of a worker's score, from its rating and its use of its own pages."""

    PROVEN = "proven"  # mean of the rating, times the proven use of own pages
    TEMPLAR = "templar"  # lower bound of the rating, times the moving average of the use


class ScoringRules(RecordPart):
    """Rules by which workers are scored. The numbers are those of Templar."""

    formula: ScoreFormula = Field(
        default=ScoreFormula.PROVEN,
        description="`proven` multiplies the mean of a worker's rating by its use of its own pages "
        "as far as it is proven. `templar` multiplies the lower bound of the rating, which is "
        "below 0 for half of the workers at first, by the moving average of the use.",
    )
    beta: float = Field(
        title="Spread of a result",
        default=7.0,
        gt=0,
        allow_inf_nan=False,
        description="Beta of the Plackett-Luce ratings: how much chance decides one comparison.",
    )
    tau: float = Field(
        title="Drift of a rating",
        default=0.1,
        ge=0,
        allow_inf_nan=False,
        description="Tau of the ratings: how much the skill of a worker may change in a window.",
    )
    decay: float = Field(
        title="Weight of the newest comparison",
        default=0.05,
        gt=0,
        le=1,
        description="Share of the newest window in the moving average of the comparisons of own "
        "with random pages.",
    )
    least_use: float = Field(
        title="Least use of own pages",
        default=0.1,
        ge=-1,
        le=1,
        description="Moving average below which a worker counts as one that does not train on its "
        "own pages, for `templar`.",
    )
    warmup: int = Field(
        title="Windows before use of own pages counts",
        default=10,
        ge=0,
        description="Number of evaluations of a worker before `least_use` applies, for `templar`.",
    )
    max_overlap: float = Field(
        title="Largest overlap",
        default=0.6,
        gt=0,
        le=1,
        description="Share of the indices of the later of two uploads that the earlier one has, "
        "beyond chance, from which the later one is a copy.",
    )


class LossPair(RecordPart):
    """Loss before and after a gradient was applied, on the same pages.

    Attributes:
        before: Loss of the weights before the window.
        after: Loss with the gradient; None if it was not finite.
    """

    before: float = Field(gt=0, allow_inf_nan=False)
    after: float | None = Field(allow_inf_nan=False)

    @property
    def improvement(self) -> float:
        """Decrease of the loss, relative to the loss before."""
        return -inf if self.after is None else (self.before - self.after) / self.before


class Evaluation(RecordPart):
    """Evaluation of a worker's gradient.

    Attributes:
        digest: Digest of the gradient's header, which has the digest of its values.
        written: Time of the upload, by the store's clock.
        random: Loss on the random pages of the window, which are the same for all workers.
        own: Loss on the worker's own pages of the window.
        value: Increase of the loss on the random pages if the window is merged without the worker;
            None if it was not measured, or is not finite.
    """

    digest: OwnDigest
    written: AwareDatetime
    random: LossPair
    own: LossPair
    value: float | None = Field(default=None, allow_inf_nan=False)


class CopiedGradient(RecordPart):
    """Gradient with many of the indices that another worker had sent before.

    Attributes:
        earlier: Worker with the earlier upload.
        overlap: Share of its indices that the earlier upload has, beyond chance.
    """

    earlier: str
    overlap: float = Field(ge=0, le=1)


class Standing(RecordPart):
    """Standing of a worker after a window.

    Attributes:
        mu: Mean of the rating.
        sigma: Standard deviation of the rating.
        use: Moving average of the comparisons: 1 where a gradient improved the loss on the worker's
            own pages more than that on random ones, and -1 where it did not.
        evaluations: Number of windows in which the worker was evaluated, since its last copy.
        evaluated: Last of these windows; 0 if there is none.
        missed: Number of the latest windows in a row without a valid gradient of the worker.
        absent: Number of the latest windows in a row without a gradient of the worker that did not
            wait for it.
        score: Score of the worker.
        weight: Share of the worker among all with a score above 0.
    """

    mu: float
    sigma: float
    use: float = 0.0
    evaluations: JsonInt = 0
    evaluated: JsonInt = 0
    missed: JsonInt = 0
    absent: JsonInt = 0
    score: float = 0.0
    weight: float = Field(default=0.0, ge=0, le=1)

    @property
    def ordinal(self) -> float:
        """Rating that the worker has at least, with a probability of 99.9 %."""
        return self.mu - 3 * self.sigma


class WindowEvidence(RecordPart):
    """Findings about the workers of a window, from which standings follow.

    Attributes:
        window: Number of the window.
        evaluations: Evaluations of the gradients that were chosen, by the workers' names.
        copies: Gradients that are copies, by the names of the workers that sent them later.
        valid: Workers with a valid gradient.
        missing: Workers that missed the window, by their own fault.
        absent: Workers without a gradient in the window, which did not wait for them.
    """

    window: JsonInt
    evaluations: dict[str, Evaluation]
    copies: dict[str, CopiedGradient]
    valid: tuple[str, ...]
    missing: tuple[str, ...]
    absent: tuple[str, ...] = ()


class WindowScores(Record):
    """Scores after a window. Whoever has the records of a run can compute its standings again.

    Attributes:
        run: Name of the run.
        rules: Rules of the scores.
        link: Digest of the window's link.
        previous: Digest of the record of the window before; empty for the first one.
        evidence: Findings of the window.
        standings: Standings after the window, by the workers' names.
    """

    record_kind: ClassVar[str] = "window-scores"
    record_bytes: ClassVar[int] = 16 << 20  # 20,000 workers

    run: str
    rules: ScoringRules
    link: OwnDigest
    previous: str
    evidence: WindowEvidence
    standings: dict[str, Standing]

    def rank(self) -> list[tuple[str, Standing]]:
        """Return the workers with their standings, the best first."""
        return sorted(self.standings.items(), key=lambda one: (-one[1].score, one[0]))
