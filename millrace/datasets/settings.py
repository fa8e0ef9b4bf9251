"""Settings of a sharding run."""

import os
from datetime import timedelta
from typing import Any

from pydantic import BaseModel, ByteSize, ConfigDict, Field

from millrace.datasets.sources import SourceSettings
from millrace.settings import Duration
from millrace.storage import StoreSettings, StoreSpec, read_spec_from_environment

MAX_SHARD_BYTES = 1 << 30


class ShardingSettings(BaseModel):
    """Settings of the sharding. The plan pins them: they cannot change under the same name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shard_bytes: ByteSize = Field(
        default=ByteSize(64 << 20),
        ge=10240,
        le=MAX_SHARD_BYTES,
        description="A shard is closed before it would be larger, such as 64MiB; at most 1GiB. "
        "Memory follows it: shard_bytes * (uploads + 1) * workers, and the samples that are "
        "larger: one for each worker, of JSON lines up to five times.",
    )
    shard_samples: int = Field(
        default=100_000, ge=1, description="A shard is closed when it has as many samples."
    )
    partition_bytes: ByteSize = Field(
        default=ByteSize(512 << 20),
        ge=1024,
        description="About how many bytes of the source one worker takes at a time.",
    )
    partition_files: int = Field(
        default=10_000,
        ge=1,
        description="Number of files, about, that one worker takes at a time (`files` only).",
    )
    seed: int | None = Field(
        default=0, description="Seed of the shuffle; null keeps the source's own order."
    )
    holdout: float = Field(
        default=0.0,
        ge=0.0,
        le=0.9,
        description="Share of the source's bytes that is held out as the split `val`.",
    )


class ExecutionSettings(BaseModel):
    """Settings of the execution. They never change the result."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    workers: int = Field(
        default_factory=lambda: len(os.sched_getaffinity(0)),
        ge=0,
        le=256,
        description="Worker processes that run at once; 0 works in the main process.",
    )
    uploads: int = Field(
        default=2, ge=1, le=32, description="Shards that each worker uploads at once."
    )
    lease_timeout: Duration = Field(
        default=timedelta(seconds=30),
        ge=timedelta(seconds=3),
        description="Time after which another machine takes over the partition of a silent one.",
    )
    max_quarantined: float = Field(
        default=0.01,
        ge=0.0,
        le=1.0,
        description="Share of the rows that may make no sample, from 0 to 1. A run above it "
        "fails with the first reasons. Ten rows are always allowed, unless it is 0.",
    )
    allow_empty: bool = Field(
        default=False, description="Complete a dataset that has no samples; otherwise it fails."
    )


class SourceLocation(SourceSettings, StoreSettings):
    """Location of a source: the store of its files, and the settings that choose samples."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PipelineSettings(BaseModel):
    """Settings of one dataset, from its source to its shards: the FILE of `millrace run FILE`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dataset: str = Field(description="Name of the dataset: a prefix below the store's URL.")
    source: SourceLocation
    store: StoreSpec = Field(
        default_factory=read_spec_from_environment,
        description="Destination of the shards. Default: the store that STORAGE_BACKEND and its "
        "companions describe.",
    )
    sharding: ShardingSettings = ShardingSettings()
    execution: ExecutionSettings = ExecutionSettings()
    vast: Any = Field(
        default=None,
        exclude=True,
        repr=False,
        description="Machines of `millrace run --use-vast`. Other commands ignore it.",
    )
