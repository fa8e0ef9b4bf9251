"""Settings of a run: how pseudo-gradients are gathered and merged, and when a run ends.

`RunOptions` have what the plan of a campaign may choose. `RunSettings` add what the campaign
derives from its plan: the name of the run, and the number of its windows.

This module imports neither numba nor torch, so that forms and settings files can be
read without them.
"""

from datetime import timedelta
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from millrace.keys.gradients import ChainKeys, GradientKeys
from millrace.keys.names import is_valid_name
from millrace.lease import MAX_TTL, MIN_TTL
from millrace.schemas.chain import OuterOptimizer
from millrace.schemas.gradient import CHUNK_SIZE, Codec, Support
from millrace.schemas.merge import COORDINATE_WISE_RULES, MergeSettings
from millrace.schemas.registration import KEY_PATTERN
from millrace.schemas.window import WindowOptions
from millrace.settings import Duration
from millrace.storage import StoreSpec


class RegistrationSettings(BaseModel):
    """Settings of a run whose workers register: they join and leave between windows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    warm_up: int = Field(
        title="Warm-up windows",
        default=2,
        ge=0,
        description="Number of consecutive windows with a valid gradient after which a worker "
        "counts. Until then its gradients are checked, and not merged.",
    )
    missed: int = Field(
        title="Missed windows",
        default=3,
        ge=1,
        description="Number of consecutive windows without a valid gradient after which a worker "
        "is removed. It may join again, and warms up again.",
    )
    most: int = Field(
        title="Most workers",
        default=64,
        ge=1,
        le=1000,
        description="Largest number of registered workers. Further ones wait until others leave.",
    )
    admitted: dict[str, Annotated[str, Field(pattern=KEY_PATTERN)]] | None = Field(
        title="Admitted workers",
        default=None,
        description="Public keys of the workers that may register, by the workers' names. "
        "`millrace gradient key` prints the key of a worker. By default, every worker whose "
        "credentials may write below the run's prefix may register.",
    )

    @field_validator("admitted")
    @classmethod
    def _check_admitted(cls, admitted: dict[str, str] | None) -> dict[str, str] | None:
        if admitted is not None and not admitted:
            raise ValueError("name at least one worker, or leave `admitted` out to admit everybody")
        make_prefix = GradientKeys("run", "1").make_worker_prefix
        wrong = [uid for uid in admitted or () if not is_valid_name(make_prefix, uid)]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is no name of a worker")
        return admitted


class RunOptions(WindowOptions):
    """Options of a run: all settings except its name and the number of its windows."""

    version: str = Field(
        title="Version of the workers",
        default="1",
        description="Version of the workers' program. Gradients of other versions are ignored.",
    )
    codec: Codec = Field(
        title="Compression",
        default=Codec(),
        description="Settings of the compression of gradients.",
    )
    residual_factor: float = Field(
        title="Factor of the residuals",
        default=1.0,
        ge=0,
        le=1,
        description="Factor of the residuals (the values that a worker has not sent) from one "
        "window to the next: 1 keeps all of them, 0 drops them.",
    )
    outer: OuterOptimizer = Field(
        title="Outer optimizer",
        default=OuterOptimizer(),
        description="Settings of the optimizer that applies merged gradients.",
    )
    merge: MergeSettings = Field(default=MergeSettings(), description="Settings of the merge.")
    steps: int = Field(
        title="Steps in a window",
        default=30,
        ge=1,
        description="Number of steps of a worker in each window.",
    )
    registration: RegistrationSettings | None = Field(
        title="Registration of workers",
        default=None,
        description="Settings of workers that join and leave the run between windows. By default, "
        "only the workers that the aggregator's settings name take part.",
    )

    @model_validator(mode="after")
    def _merge_can_work(self) -> Self:
        codec = self.codec
        own_indices = codec.support is Support.LARGEST and codec.k < CHUNK_SIZE
        if self.merge.rule in COORDINATE_WISE_RULES and own_indices:
            raise ValueError(
                f"{self.merge.rule} judges each index by itself, and the workers send different "
                "indices: set `codec` to `support: shared`, or choose `mean`, `centered clip` or "
                "`multi-krum`"
            )
        return self

    def check_workers(self, workers: int) -> None:
        """Check that a window can have enough gradients for the merge.

        Args:
            workers: Number of workers that are no reserves.

        Raises:
            ValueError: A window has fewer gradients than the merge needs.
        """
        gather = self.gather
        taken = max(workers if gather.wanted is None else gather.wanted, gather.quorum)
        if few := self.merge.explain_too_few(taken):
            raise ValueError(
                f"{few}, and a window takes {taken}: name more workers, declare fewer Byzantine "
                "ones, or choose `centered clip`"
            )


class RunSettings(RunOptions):
    """Settings that the aggregator and all workers of a run share."""

    run: str = Field(
        title="Name of the run", description="Name of the run: a prefix below the buckets' URLs."
    )
    windows: int | None = Field(
        title="Number of windows",
        default=None,
        ge=1,
        description="Number of windows after which the run is over; by default the run has no end.",
    )

    @property
    def name(self) -> str:
        """Name of the run, which settings files and records name ``run``."""
        return self.run

    @property
    def gradient_keys(self) -> GradientKeys:
        """Keys of the run's gradients."""
        return GradientKeys(self.run, self.version)

    @property
    def chain_keys(self) -> ChainKeys:
        """Keys of the run's chain."""
        return ChainKeys(self.run, self.version)


class InitialWeights(BaseModel):
    """Weights that a run begins with: a checkpoint, and their names in it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: str = Field(description="Job that the checkpoint belongs to.")
    step: int | None = Field(
        default=None, description="Step of the checkpoint; by default the newest."
    )
    tensors: str = Field(
        title="Prefix of the tensors",
        default="",
        description="Prefix of the weights' names in the checkpoint, such as `model.`. The "
        "workers use the names without it.",
    )


class AggregationSettings(BaseModel):
    """Options of an aggregator: when it ends without gradients, and which checkpoints it keeps."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    idle: int = Field(
        title="Idle windows before the end",
        default=3,
        ge=1,
        description="Number of consecutive windows without a gradient after which the aggregator "
        "ends, or the campaign that it works for. A later start continues the run.",
    )
    every: int = Field(
        title="Windows between checkpoints",
        default=10,
        ge=1,
        description="Number of windows from one checkpoint to the next.",
    )
    keep: int = Field(
        title="Checkpoints to keep",
        default=3,
        ge=1,
        description="Number of newest checkpoints to keep, besides the one that the run begins "
        "with.",
    )
    lease_timeout: Duration = Field(
        default=timedelta(minutes=1),
        ge=MIN_TTL,
        le=MAX_TTL,
        description="Time without a heartbeat after which another aggregator takes over.",
    )
    threads: int = Field(default=2, ge=1, le=64, description="Number of threads.")
    ray: str | None = Field(
        title="Ray cluster",
        default=None,
        description="Address of a Ray cluster, or `auto` for the cluster of this machine. The "
        "weights and the merge are distributed over its nodes. By default this "
        "machine does all the work.",
    )


class AggregatorSettings(BaseModel):
    """Settings of an aggregator: its options, the run, the workers, and their buckets."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: RunSettings = Field(description="Settings that all workers of the run share.")
    store: StoreSpec = Field(description="Bucket of the aggregator: the chain is written there.")
    gradients_store: StoreSpec | None = Field(
        default=None,
        description="Bucket that the workers share, with credentials to read; by default the "
        "aggregator's.",
    )
    workers: tuple[str, ...] = Field(
        default=(),
        description="Names of the workers that are read first in each window. May be empty if "
        "workers register.",
    )
    reserves: tuple[str, ...] = Field(
        default=(), description="Names of the workers that replace missing ones, in this order."
    )
    worker_stores: dict[str, StoreSpec] = Field(
        default_factory=dict[str, StoreSpec],
        description="Buckets of workers that have a bucket of their own, by the workers' names.",
    )
    initial_weights: InitialWeights | None = Field(
        default=None,
        description="Checkpoint with the weights that the run begins with. Without it, the run "
        "must have begun.",
    )
    initial_weights_store: StoreSpec | None = Field(
        default=None,
        description="Store of that checkpoint; by default the aggregator's bucket.",
    )
    max_windows: int | None = Field(
        title="Largest number of windows",
        default=None,
        ge=1,
        description="Largest number of windows to merge; by default all until the run is over.",
    )
    until: int | None = Field(
        title="Last window", default=None, ge=1, description="Number of the last window to merge."
    )
    aggregation: AggregationSettings = Field(
        default=AggregationSettings(),
        description="Options of the aggregator: when it ends without gradients, and which "
        "checkpoints it keeps.",
    )

    @property
    def last_window(self) -> int | None:
        """Number of the last window; None if the run has no end."""
        ends = [end for end in (self.run.windows, self.until) if end is not None]
        return min(ends, default=None)

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        names = [*self.workers, *self.reserves]
        twice = sorted({uid for uid in names if names.count(uid) > 1})
        if twice:
            raise ValueError(f"the worker {twice[0]!r} is named twice")
        strange = sorted(set(self.worker_stores) - set(names))
        if strange:
            raise ValueError(f"{strange[0]!r} has a bucket, and is neither worker nor reserve")
        gather, registration = self.run.gather, self.run.registration
        most = max(gather.quorum, gather.wanted or 0)
        if registration is not None:
            if most > len(names) + registration.most:
                raise ValueError(
                    f"{most} gradients are needed, and at most {len(names) + registration.most} "
                    "workers may take part: raise `most` of the registration, or lower `quorum` "
                    "or `wanted`"
                )
            return self  # further workers may register
        if not self.workers:
            raise ValueError(
                "name at least one worker in `workers`, or let workers register (`registration` "
                "of the run)"
            )
        if most > len(names):
            raise ValueError(f"{most} gradients are needed from {len(names)} workers and reserves")
        self.run.check_workers(len(self.workers))
        return self
