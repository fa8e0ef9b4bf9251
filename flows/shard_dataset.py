"""Shard a dataset into a bucket, each sample exactly once."""

from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from millrace.datasets import (
    CutSettings,
    ExecutionSettings,
    PipelineSettings,
    ShardReport,
    SourcePlace,
)
from millrace.keys import DatasetKeys
from millrace.storage import Right
from tasks.limits import share_of_uploads
from tasks.places import BucketLocation, SourceInput, check_right, spec_of
from tasks.sharding import cut_shards, repair_shards, report_shards


def run_name() -> str:
    """``shard-NAME``, for the list of runs."""
    parameters: dict[str, Any] = flow_run.parameters or {}
    return f"shard-{parameters.get('dataset', 'dataset')}"


@flow(name="shard-dataset", flow_run_name=run_name)
def shard_dataset(
    dataset: str,
    source: SourceInput,
    destination: BucketLocation,
    cut: CutSettings = CutSettings(),  # noqa: B008 - frozen
    run: ExecutionSettings = ExecutionSettings(),  # noqa: B008 - frozen
    repair: bool = False,  # noqa: FBT001, FBT002 - a parameter of the form
) -> ShardReport:
    """Cut a dataset into WebDataset shards in a bucket, each sample exactly once.

    A run that was stopped, cancelled or killed is finished by starting it again, here or on any
    machine. Several at once share the work.

    Args:
        dataset: Its name: what it will be called below the destination.
        source: Location of the samples, and the files to take.
        destination: A Millrace Bucket block with write credentials, its name, or a URL.
        cut: Settings of the shards. They cannot change under the same name.
        run: Settings of the execution. They never change the result.
        repair: Then verify every shard, and make again what is missing or damaged.
    """
    DatasetKeys(dataset)
    settings = PipelineSettings(
        dataset=dataset,
        source=SourcePlace(**dict(source.store()), **source.samples()),
        store=spec_of(destination, Right.WRITE),
        cut=cut,
        run=run,
    )
    check_right(destination, Right.WRITE, dataset)
    check_right(source.place, Right.READ, source.prefix)
    with share_of_uploads(run) as share:
        made = cut_shards(settings.model_copy(update={"run": share}), repair=repair)
    if repair:
        repair_shards(settings)
    report_shards(made)
    return made.report
