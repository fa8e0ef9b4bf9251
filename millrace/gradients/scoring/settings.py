"""Settings of a scorer: what is evaluated, and by which rules."""

from datetime import timedelta

from pydantic import BaseModel, ConfigDict, Field

from millrace.keys.gradients import ChainKeys
from millrace.schemas.scores import ScoringRules
from millrace.settings import Duration
from millrace.storage import StoreSpec


class ScorerOptions(BaseModel):
    """Options of a scorer: which windows it scores, and how it evaluates gradients."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: int = Field(
        title="Workers per window",
        default=20,
        ge=2,
        description="Largest number of workers that are evaluated in a window. They are drawn from "
        "the digest of the window's link, which nobody knows before.",
    )
    step_size: float = Field(
        title="Factor of a gradient",
        default=0.2,
        gt=0,
        description="Factor of a gradient that is applied alone, besides the learning rate of the "
        "outer optimizer. With 1, a good gradient of few samples may do more harm than noise.",
    )
    with_values: bool = Field(
        title="Measure the merge without each worker",
        default=False,
        description="Also measure how the loss on random pages changes if the window is merged "
        "without the worker. It costs a merge for each worker.",
    )
    rules: ScoringRules = Field(default=ScoringRules(), description="Rules of the scores.")
    until: int | None = Field(
        title="Last window",
        default=None,
        ge=1,
        description="Number of the last window to score; by default there is none.",
    )
    threads: int = Field(default=2, ge=1, le=64, description="Number of threads.")


class ScorerSettings(BaseModel):
    """Settings of a scorer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store: StoreSpec = Field(
        description="Bucket of the aggregator, with the chain. The scores are written there."
    )
    run: str = Field(description="Name of the run.")
    version: str = Field(default="1", description="Version of the workers' program.")
    loss: str = Field(
        description="Function that makes the function which computes losses: `module:function` of "
        "an installed module, or `./loss.py:function` of a file."
    )
    follow: bool = Field(
        default=False,
        description="Wait for further windows, instead of ending after the newest one.",
    )
    poll_interval: Duration = Field(
        default=timedelta(seconds=10),
        gt=timedelta(0),
        description="Interval between two looks for a new window.",
    )
    scoring: ScorerOptions = Field(
        default=ScorerOptions(),
        description="Options of the scorer: which windows it scores, and how it evaluates "
        "gradients.",
    )

    @property
    def chain_keys(self) -> ChainKeys:
        """Keys of the run's chain."""
        return ChainKeys(self.run, self.version)
