"""Settings of the import of a Templar run. This module imports neither numba nor torch."""

from datetime import timedelta
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from millrace.gradients.settings import InitialWeights, RunSettings
from millrace.lease import MAX_TTL, MIN_TTL
from millrace.schemas.gradient import CHUNK_SIZE, Transform
from millrace.settings import Duration
from millrace.storage import StoreSpec


class TemplarOptions(BaseModel):
    """Gradients of a Templar run: their version, their windows and their form."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str = Field(description="Version of the workers' program, such as `0.2.80`.")
    first_window: int = Field(
        ge=0,
        description="Number of the first window. It becomes window 1 of the run, so leave it as it "
        "is to import later windows.",
    )
    last_window: int = Field(ge=0, description="Number of the last window.")
    k: int = Field(
        title="Values per tile",
        ge=1,
        le=CHUNK_SIZE,
        description="Number of values that a worker sends of each tile (`topk_compression`): 32 in "
        "v0.2.80, and 64 in v2.1.28.",
    )
    transform: Transform = Field(
        default=Transform.NONE,
        description="Transform of the tiles: `dct` for v0.2.80, and `none` for v2.1.28.",
    )
    max_workers: int = Field(
        title="Most workers",
        default=64,
        ge=1,
        le=4096,
        description="Largest number of workers that are read in a window: those with the lowest "
        "numbers.",
    )

    @model_validator(mode="after")
    def _windows_are_in_order(self) -> Self:
        if self.last_window < self.first_window:
            raise ValueError(
                f"the last window {self.last_window} is before the first, {self.first_window}"
            )
        return self


class TemplarSource(TemplarOptions):
    """Gradients of a Templar run, and their buckets."""

    store: StoreSpec = Field(
        description="Bucket with gradients at its root, with credentials to read. It may hold "
        "those of several workers, as a copy of their buckets does."
    )
    worker_stores: dict[int, StoreSpec] = Field(
        default_factory=dict[int, StoreSpec],
        description="Buckets of workers that have a bucket of their own, by the workers' numbers. "
        "Their times of uploads are not compared with those of `store`.",
    )


class TemplarImportSettings(BaseModel):
    """Settings of an import: the Templar run, the run that is made of it, and its initial weights.

    The names of the weights are those of Templar's parameters.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    templar: TemplarSource = Field(description="Gradients of the Templar run.")
    run: RunSettings = Field(
        description="Run that is made. Its codec compresses the gradients again, and its merge and "
        "outer optimizer make the weights. Gradients that are fewer than its quorum change nothing."
    )
    store: StoreSpec = Field(description="Bucket of the chain of the run, which is written.")
    initial_weights: InitialWeights | None = Field(
        default=None,
        description="Checkpoint with the weights before the first window. Without it, the run must "
        "have begun.",
    )
    initial_weights_store: StoreSpec | None = Field(
        default=None, description="Store of that checkpoint; by default the bucket of the chain."
    )
    every: int = Field(
        title="Windows between checkpoints",
        default=10,
        ge=1,
        description="Number of windows from one checkpoint to the next.",
    )
    lease_timeout: Duration = Field(
        default=timedelta(minutes=1),
        ge=MIN_TTL,
        le=MAX_TTL,
        description="Time without a heartbeat after which another import takes over.",
    )
    threads: int = Field(default=2, ge=1, le=64, description="Number of threads.")
