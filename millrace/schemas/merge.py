"""Settings of the merge of gradients, in the settings of a run and in the links of its chain."""

from enum import StrEnum

from pydantic import Field

from millrace.records import RecordPart


class MergeRule(StrEnum):
    """Rule by which gradients are merged."""

    MEAN = "mean"  # over all workers; a value that a worker did not send is zero
    SENDERS = "senders"  # over the workers that sent the value (Templar)
    TOKENS = "tokens"  # over all workers, weighted by their tokens (Decoupled DiLoCo)
    SCORES = "scores"  # over all workers, weighted by the newest scores of a scorer (Templar)
    SIGN = "sign"  # the sign of the majority (signSGD with majority vote, 1810.05291)
    CENTERED_CLIP = "centered clip"  # Karimireddy et al. 2021, 2012.10333
    MULTI_KRUM = "multi-krum"  # Blanchard et al. 2017, 1703.02757
    MEDIAN = "median"  # of each coordinate (Yin et al. 2018, 1803.01498)
    TRIMMED = "trimmed mean"  # of each coordinate (Yin et al. 2018)


COORDINATE_WISE_RULES = frozenset({MergeRule.MEDIAN, MergeRule.TRIMMED})
"""Rules that judge each coordinate by itself, and need the same coordinates of all workers."""


class MergeSettings(RecordPart):
    """Settings of the merge of a window's gradients."""

    rule: MergeRule = Field(
        default=MergeRule.MEAN,
        description="`mean` averages over all workers; `senders` over the workers that sent a "
        "value; `tokens` weighs workers by their tokens, and `scores` by the newest scores of "
        "a scorer; `sign` takes the sign of the majority. "
        "`centered clip` and `multi-krum` tolerate Byzantine workers. "
        "`median` and `trimmed mean` need the same indices from all workers "
        "(the choice `shared` of the codec).",
    )
    clip: bool = Field(
        title="Clip norms",
        default=True,
        description="Before the rule, scale gradients with an L2 norm above the lower median down "
        "to it. With `faulty`, scale them to a norm that so many workers cannot "
        "choose.",
    )
    faulty: int = Field(
        title="Byzantine workers",
        default=0,
        ge=0,
        description="Number of Byzantine workers that the merge tolerates: for `clip`, "
        "`multi-krum`, `trimmed mean`, and the averages of buffers.",
    )
    radius: float | None = Field(
        title="Radius of centered clip",
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Distance from the centre within which `centered clip` counts a gradient "
        "fully; by default the median distance.",
    )
    iterations: int = Field(
        title="Iterations of centered clip",
        default=20,
        ge=1,
        le=1000,
        description="Iterations of `centered clip`.",
    )
    even_share: float = Field(
        title="Even share of scores",
        default=0.1,
        gt=0,
        le=1,
        description="Share of the merge that `scores` divides evenly, since a worker that has no "
        "score yet earns one by gradients that are merged.",
    )
    weights_per_object: int = Field(
        default=1 << 28,
        ge=1,
        description="Number of weights whose merged gradients are one object. A larger model has "
        "several objects.",
    )

    @property
    def fewest(self) -> int:
        """Least number of workers that the rule needs."""
        match self.rule:
            case MergeRule.MULTI_KRUM:
                return 2 * self.faulty + 3
            case MergeRule.TRIMMED:
                return 2 * self.faulty + 1
            case _:
                return 1

    def explain_too_few(self, taken: int) -> str:
        """Return why the rule cannot merge the gradients of ``taken`` workers; empty if it can."""
        if taken >= self.fewest:
            return ""
        return (
            f"{self.rule} bears {self.faulty} Byzantine workers (`faulty`) among at least "
            f"{self.fewest}"
        )
