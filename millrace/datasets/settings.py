"""Settings of a sharding run."""

import os
from datetime import timedelta
from typing import Any

from pydantic import BaseModel, ByteSize, ConfigDict, Field

from millrace.datasets.sources import SourceSettings
from millrace.settings import Duration
from millrace.storage import StoreSettings, StoreSpec, from_environment

LARGEST_SHARD = 1 << 30


class CutSettings(BaseModel):
    """Settings of the cut. The plan pins these: they cannot change under the same name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shard_bytes: ByteSize = Field(
        default=ByteSize(64 << 20),
        ge=10240,
        le=LARGEST_SHARD,
        description="A shard is closed before it would be larger, such as 64MiB; at most 1GiB. "
        "Memory follows it: shard_bytes * (uploads + 1) * workers, and the samples that are "
        "larger: one for each worker, of JSON lines up to five times.",
    )
    shard_samples: int = Field(
        default=100_000, ge=1, description="A shard is closed when it has as many samples."
    )
    split_bytes: ByteSize = Field(
        default=ByteSize(512 << 20),
        ge=1024,
        description="About how many bytes of the source one worker takes at a time.",
    )
    split_files: int = Field(
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
        description="The share of the source's bytes that is held out as the partition `val`.",
    )


class ExecutionSettings(BaseModel):
    """Settings of the execution. They never change the result."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    workers: int = Field(
        default_factory=lambda: len(os.sched_getaffinity(0)),
        ge=0,
        le=256,
        description="Processes that cut splits side by side; 0 does all in this process.",
    )
    uploads: int = Field(
        default=2, ge=1, le=32, description="Shards that each worker uploads at once."
    )
    lease: Duration = Field(
        default=timedelta(seconds=30),
        ge=timedelta(seconds=3),
        description="Longest time that a split stays claimed by a machine that is not heard of.",
    )
    max_quarantined: float = Field(
        default=0.01,
        ge=0.0,
        le=1.0,
        description="The share of the rows that may make no sample, from 0 to 1. A run above it "
        "fails with the first reasons. Ten rows are always allowed, unless it is 0.",
    )
    allow_empty: bool = Field(
        default=False, description="Complete a dataset that has no samples; otherwise it fails."
    )


class SourcePlace(SourceSettings, StoreSettings):
    """A source: the store that its files are in, and which samples to take of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PipelineSettings(BaseModel):
    """One dataset from its source to its shards: what `millrace run FILE` reads."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dataset: str = Field(description="The dataset's name: a prefix below the store's URL.")
    source: SourcePlace
    store: StoreSpec = Field(
        default_factory=from_environment,
        description="Destination of the shards. Left out: that of STORAGE_BACKEND and its "
        "companions.",
    )
    cut: CutSettings = CutSettings()
    run: ExecutionSettings = ExecutionSettings()
    vast: Any = Field(
        default=None,
        exclude=True,
        repr=False,
        description="Machines of `millrace run --use-vast`: read by that alone.",
    )
