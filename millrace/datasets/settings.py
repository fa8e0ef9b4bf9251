"""Settings of a sharding run."""

from datetime import timedelta
from typing import Annotated, Any, Self

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator, model_validator

from millrace.datasets.formats import FieldType, FormatName
from millrace.datasets.sources import (
    DownloadSettings,
    SourceFiles,
    SourceKind,
    SourceSettings,
    StoredDigests,
    complete_spec,
    is_web_url,
    open_files,
    open_mirrored_files,
)
from millrace.datasets.transforms import TransformList
from millrace.lease import MAX_TTL, MIN_TTL
from millrace.records import JsonInt
from millrace.schemas.dataset import SourceRecord
from millrace.settings import AsWritten, Duration, Size
from millrace.storage import StoreSettings, StoreSpec, read_spec_from_environment
from millrace.threads import count_processors

MAX_SHARD_BYTES = 1 << 30


class ShardingSettings(BaseModel):
    """Settings of the shards. They cannot change under the same dataset name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shard_bytes: Size = Field(
        title="Shard size",
        default=ByteSize(64 << 20),
        ge=10240,
        le=MAX_SHARD_BYTES,
        description="Largest size of a shard, such as `64MiB`. A larger sample is a shard of its "
        "own. Memory grows with it: `shard_bytes * (uploads + 1) * workers * formats`, and one "
        "larger sample for each worker (of JSON lines up to five times its size, and 18 times if "
        "it is a list of short values).",
    )
    formats: list[FormatName] = Field(
        default=[FormatName.WEBDATASET],
        min_length=1,
        description="Formats of the shards. Each has all samples, and all are made in one pass.",
    )
    types: dict[str, FieldType] = Field(
        default={},
        description='Types of fields, such as `{"cls": "int", "jpg": "bytes"}`, for formats whose '
        "fields have types. By default a field has the type of its extension: `txt` is text, "
        "`json` is JSON, `cls` and `id` are integers, and others are bytes.",
    )
    shard_samples: int = Field(
        title="Samples per shard",
        default=100_000,
        ge=1,
        description="Largest number of samples in a shard.",
    )
    partition_bytes: Size = Field(
        title="Partition size",
        default=ByteSize(512 << 20),
        ge=1024,
        description="Approximate size of a partition, in bytes of the source. One worker at a "
        "time works on a partition.",
    )
    partition_files: int = Field(
        title="Files per partition",
        default=10_000,
        ge=1,
        description="Approximate number of files in a partition (`files`), or of URLs (`urls`).",
    )
    seed: JsonInt | None = Field(
        default=0,
        description="Seed of the shuffle, below 2 to the 64th; null keeps the source's own order.",
    )
    holdout: float = Field(
        title="Share held out",
        default=0.0,
        ge=0.0,
        le=0.9,
        description="Share of the source's bytes that is held out as the split `val`.",
    )

    transforms: TransformList = Field(
        default=[],
        description="Transforms of the samples, in their order: `filter`, `rename`, `join`, "
        "`function` and `tokenize`.",
    )

    @field_validator("formats")
    @classmethod
    def _check_formats(cls, formats: list[FormatName]) -> list[FormatName]:
        if len(set(formats)) < len(formats):
            raise ValueError("a format is named twice: name each once")
        return sorted(formats)


class ExecutionSettings(BaseModel):
    """Settings of the execution. They never change the result."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    workers: int | None = Field(
        default=None,
        ge=0,
        le=4096,
        description="Number of workers, each of which reads one partition at a time; by default "
        "one for each CPU of this machine, or of the Ray cluster. 0 works in the main process.",
    )
    ray: str | None = Field(
        title="Ray cluster",
        default=None,
        min_length=1,
        description="Address of a Ray cluster whose nodes shard the partitions: `HOST:PORT`, or "
        "`auto` for the cluster of this machine. By default worker processes of this machine do.",
    )
    uploads: int = Field(
        default=2, ge=1, le=32, description="Number of shards that each worker uploads at once."
    )
    downloads: DownloadSettings = Field(
        default=DownloadSettings(),
        description="Requests to the servers of a list of URLs (`urls` only).",
    )
    lease_timeout: Duration = Field(
        default=timedelta(seconds=30),
        ge=MIN_TTL,
        le=MAX_TTL,
        description="Time without a heartbeat after which another machine takes over a partition.",
    )
    max_quarantined: float = Field(
        title="Largest share in quarantine",
        default=0.01,
        ge=0.0,
        le=1.0,
        description="Largest share of the source's rows that cannot be made into samples, from 0 "
        "to 1. A run with a larger share fails with the first reasons. Up to ten rows are always "
        "allowed if they are at most half of all rows, unless the share is 0.",
    )
    allow_empty: bool = Field(
        default=False,
        description="Complete a dataset that has no samples. Otherwise the run fails.",
    )

    @model_validator(mode="after")
    def _check_ray(self) -> Self:
        if self.ray and self.workers == 0:
            raise ValueError("with `ray`, the workers are on its nodes: workers is at least 1")
        return self

    def count_workers(self) -> int:
        """Return the number of worker processes on this machine."""
        return count_processors() if self.workers is None else self.workers


class CardSettings(BaseModel):
    """Settings of the dataset card. They can change at every run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    license: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9.+-]*$",
        max_length=100,
        description="Identifier of the license, as the Hugging Face Hub has it, such as "
        "`cc-by-4.0` or `other`.",
    )


def check_mirrored_source(settings: SourceSettings, url: str) -> None:
    """Refuse mirrors of a source that cannot have any.

    Args:
        settings: Settings of the source.
        url: URL of its first location.

    Raises:
        ValueError: The source cannot be read from several locations.
    """
    if settings.kind is SourceKind.HUGGINGFACE:
        raise ValueError(
            "`mirrors` are not for the kind `huggingface`: read the files of the dataset by "
            "another kind, such as `parquet`"
        )
    if is_web_url(url) and not settings.paths:
        raise ValueError(
            "with `mirrors`, write the URL of the folder of a web server into `url`, and the "
            "files below it into `paths`"
        )


class SourceLocation(SourceSettings, StoreSettings):
    """Location of a source: the store of its files, and the settings that choose samples."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mirrors: list[StoreSpec] = Field(
        default=[],
        max_length=8,
        description="Other locations of the same files, each with `url` and, where needed, "
        "`credentials`, `endpoint` or `options`. When a location fails, files are read from the "
        "next one whose files are proven equal. They can change at every run. Not for the kind "
        "`huggingface`.",
    )

    @model_validator(mode="after")
    def _check_mirrors(self) -> Self:
        if not self.mirrors:
            return self
        check_mirrored_source(self, self.url)
        named = {(spec.url.rstrip("/"), spec.endpoint) for spec in (self.store, *self.mirrors)}
        if len(named) <= len(self.mirrors):
            raise ValueError("a location is named twice: name each once")
        return self

    def list_locations(self) -> list[StoreSpec]:
        """Return the locations of the source, each with its whole URL."""
        return [complete_spec(spec) for spec in (self.store, *self.mirrors)]

    def open_files(
        self, committed: SourceRecord | None = None, digests: StoredDigests | None = None
    ) -> SourceFiles:
        """Open the files of the source. Nothing is sent.

        Args:
            committed: Source in the plan of the dataset; None if there is no plan.
            digests: Digests by which files of mirrors are compared; None stores none.

        Raises:
            NotFoundError: There is no such folder.
            ConfigurationError: The URL names no store, or the settings do not fit it.
        """
        if self.mirrors:
            return open_mirrored_files(
                self.list_locations(),
                paths=self.paths,
                allow_private=self.allow_private,
                committed=committed,
                digests=digests,
            )
        return open_files(
            self.store,
            paths=self.paths,
            allow_private=self.allow_private,
            committed=committed.url if committed else "",
        )


class PipelineSettings(BaseModel):
    """Settings of one dataset, from its source to its shards."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dataset: str = Field(description="Name of the dataset: a prefix below the store's URL.")
    source: SourceLocation = Field(description="Location of the samples, and the files to take.")
    store: StoreSpec = Field(
        default_factory=read_spec_from_environment,
        description="Destination of the shards; by default the store that STORAGE_BACKEND and its "
        "companions describe.",
    )
    sharding: ShardingSettings = Field(
        default=ShardingSettings(), description="Settings of the shards."
    )
    execution: ExecutionSettings = Field(
        default=ExecutionSettings(), description="Settings of the execution."
    )
    card: CardSettings | None = Field(
        default=None,
        description="Write a dataset card, `README.md`, beside the shards, by which "
        "`datasets.load_dataset` opens them. `{}` writes it without a license. By default none is "
        "written.",
    )
    vast: Annotated[Any, AsWritten] = Field(
        default=None,
        exclude=True,
        repr=False,
        description="Rented machines for `millrace run --use-vast`. Other commands ignore this "
        "section, and variables in it.",
    )
