"""Shard a dataset into a bucket, each sample exactly once."""

from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from millrace.datasets import (
    CardSettings,
    ExecutionSettings,
    PipelineSettings,
    ShardingSettings,
    ShardReport,
)
from millrace.datasets.sources import is_store_url
from millrace.errors import ConfigurationError
from millrace.keys.datasets import DatasetKeys
from millrace.rented_sharding import make_rental_name
from millrace.storage import Right
from tasks.assets import record_dataset
from tasks.forms import draw_form
from tasks.limits import reserve_upload_slots
from tasks.locations import BucketLocation, SourceInput, check_right, make_store_spec
from tasks.renting import RentalReference, make_release_hook
from tasks.sharding import (
    ShardingMachinesInput,
    make_shards,
    make_shards_on_machines,
    repair_shards,
    report_shards,
)


def make_run_name() -> str:
    """Return ``shard-NAME``, for the list of runs."""
    parameters: dict[str, Any] = flow_run.parameters or {}
    return f"shard-{parameters.get('dataset', 'dataset')}"


def find_sharding_rental(parameters: dict[str, Any]) -> RentalReference | None:
    """Return the rental of a run with these parameters; None if the run rents nothing."""
    machines: ShardingMachinesInput | None = parameters.get("machines")
    if machines is None:
        return None
    name = make_rental_name(parameters["dataset"])
    return RentalReference(name, parameters["destination"], machines.vast)


hook = make_release_hook(find_sharding_rental)


@draw_form
@flow(name="shard-dataset", flow_run_name=make_run_name, on_crashed=[hook], on_cancellation=[hook])
def shard_dataset(
    dataset: str,
    source: SourceInput,
    destination: BucketLocation,
    sharding: ShardingSettings | None = None,
    execution: ExecutionSettings | None = None,
    card: CardSettings | None = None,
    machines: ShardingMachinesInput | None = None,
    repair: bool = False,  # noqa: FBT001, FBT002 - a parameter of the form
) -> ShardReport:
    """Write a dataset as WebDataset or other shards to a bucket, each sample exactly once.

    If a run was stopped, cancelled or killed, start it again on any machine: the new run continues.
    Several runs at once share the work, as far as the limit `millrace-uploads` has slots for all.
    Rented machines are released in every case but a pause, in which they stay: cancel instead.

    Args:
        dataset: Name of the dataset: a prefix below the destination.
        source: Location of the samples, and the files to take.
        destination: A Millrace Bucket block with write credentials, its name, or a URL.
        sharding: Settings of the shards. They cannot change under the same name.
        execution: Settings of the execution. They never change the result.
        card: Write a dataset card beside the shards, by which `datasets.load_dataset` opens them.
        machines: Shard on machines that the run rents of Vast.ai. The destination has the ledger of
            the rental.
        repair: Verify every shard at the end, and make missing or damaged shards again.
    """
    DatasetKeys(dataset)
    if machines is not None and repair:
        raise ConfigurationError(
            "`repair` works on the worker's machine, and `machines` are rented: shard with "
            "`machines` first, then start a run with `repair` alone."
        )
    execution = execution or ExecutionSettings()
    settings = PipelineSettings(
        dataset=dataset,
        source=source.make_source(),
        store=make_store_spec(destination, Right.WRITE),
        sharding=sharding or ShardingSettings(),
        execution=execution,
        card=card,
    )
    check_right(destination, Right.WRITE, dataset)
    if is_store_url(str(source.location)) and not source.mirrors:  # a mirror serves instead
        check_right(source.location, Right.READ, source.prefix)
    if machines is not None:
        made = make_shards_on_machines(settings, machines.make_settings())
    else:
        with reserve_upload_slots(execution) as share:
            made = make_shards(settings.model_copy(update={"execution": share}), repair=repair)
    if repair:
        # A repair uploads one shard at a time.
        with reserve_upload_slots(ExecutionSettings(workers=0, uploads=1)):
            repair_shards(settings)
    record_dataset(made.report)
    report_shards(made)
    return made.report
