"""Shard a dataset into a bucket, each sample exactly once."""

from typing import Any

from prefect import flow
from prefect.runtime import flow_run
from pydantic import ConfigDict, Field, model_validator

from blocks import Bucket
from millrace.keys import DatasetKeys
from millrace.shards import CutSettings, PipelineSettings, RunSettings, ShardReport, SourcePlace
from millrace.sources import SourceSettings
from millrace.storage import Right, StoreSpec
from tasks.limits import share_of_uploads
from tasks.places import check_right, spec_of
from tasks.sharding import cut_shards, report_shards


class Source(SourceSettings):
    """Where the samples are, and which of the files there to take."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str | None = Field(
        default=None,
        description="A place that needs no block: a folder on the worker as `file:///folder`, or "
        "`s3://bucket/prefix` with the credentials of the worker's environment.",
        json_schema_extra={"position": 0},
    )
    bucket: Bucket | None = Field(
        default=None,
        description="Or a Millrace Bucket block, opened for reading.",
        json_schema_extra={"position": 1},
    )
    prefix: str = Field(
        default="",
        description="With a block: the part of the bucket that the files are in.",
        json_schema_extra={"position": 2},
    )

    @model_validator(mode="after")
    def _one_place(self) -> "Source":
        if (self.url is None) == (self.bucket is None):
            raise ValueError("name either a url or a bucket block as the source")
        if self.prefix and self.bucket is None:
            raise ValueError("a prefix goes with a bucket block: write it into the url")
        return self

    @property
    def place(self) -> Bucket | str:
        """The block or the URL."""
        return self.bucket or self.url or ""

    def samples(self) -> dict[str, Any]:
        """Which samples: what the engine calls the source's settings."""
        return {name: getattr(self, name) for name in SourceSettings.model_fields}

    def store(self) -> StoreSpec:
        """Where the files are, with the credentials to read them."""
        spec = spec_of(self.place, Right.READ)
        prefix = self.prefix.strip("/")
        return spec.model_copy(update={"url": f"{spec.url}/{prefix}"}) if prefix else spec


def run_name() -> str:
    """``shard-NAME``, for the list of runs."""
    parameters: dict[str, Any] = flow_run.parameters or {}
    return f"shard-{parameters.get('dataset', 'dataset')}"


@flow(name="shard-dataset", flow_run_name=run_name)
def shard_dataset(
    dataset: str,
    source: Source,
    destination: Bucket | str,
    cut: CutSettings = CutSettings(),  # noqa: B008 - frozen
    run: RunSettings = RunSettings(),  # noqa: B008 - frozen
) -> ShardReport:
    """Cut a dataset into WebDataset shards in a bucket, each sample exactly once.

    A run that was stopped, cancelled or killed is finished by starting it again, here or on any
    machine. Several at once share the work.

    Args:
        dataset: Its name: what it will be called below the destination.
        source: Where the samples are, and which files to take.
        destination: A Millrace Bucket block with write credentials, or the URL of a folder.
        cut: How it is cut. This cannot change under the same name.
        run: How the work is done. This never changes what comes out.
    """
    DatasetKeys(dataset)
    settings = PipelineSettings(
        dataset=dataset,
        source=SourcePlace(store=source.store(), **source.samples()),
        store=spec_of(destination, Right.WRITE),
        cut=cut,
        run=run,
    )
    check_right(destination, Right.WRITE, dataset)
    check_right(source.place, Right.READ, source.prefix)
    with share_of_uploads(run) as share:
        made = cut_shards(settings.model_copy(update={"run": share}))
    report_shards(made)
    return made.report
