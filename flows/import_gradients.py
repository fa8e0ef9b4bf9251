"""Make a chain of the gradients of a Templar run."""

from typing import Any

from prefect import flow
from prefect.runtime import flow_run
from pydantic import BaseModel, ConfigDict, Field

from flows.aggregate_gradients import InitialWeightsInput
from millrace.gradients import (
    RunSettings,
    TemplarImportSettings,
    TemplarOptions,
    TemplarSource,
)
from millrace.storage import Right
from tasks.forms import draw_form
from tasks.locations import (
    BucketLocation,
    InputLocation,
    check_right,
    make_store_spec,
)
from tasks.merging import AggregationResult, find_newest_window, import_windows, report_windows


class TemplarWorkerBucket(BaseModel):
    """A Templar worker that has a bucket of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uid: int = Field(title="Number", ge=0, description="Number of the worker.")
    bucket: BucketLocation = Field(
        description="A Millrace Bucket block with read credentials, its name, or a URL."
    )


class TemplarInput(InputLocation, TemplarOptions):
    """Gradients of a Templar run, at the root of a bucket."""

    worker_buckets: tuple[TemplarWorkerBucket, ...] = Field(
        default=(), description="Workers that have a bucket of their own."
    )

    def make_source(self) -> TemplarSource:
        """Return the gradients as the engine takes them."""
        options = {name: getattr(self, name) for name in TemplarOptions.model_fields}
        stores = {one.uid: make_store_spec(one.bucket, Right.READ) for one in self.worker_buckets}
        return TemplarSource(store=self.make_spec(), worker_stores=stores, **options)


def make_run_name() -> str:
    """Return ``import-RUN``, for the list of runs."""
    parameters: dict[str, Any] = flow_run.parameters or {}
    run = parameters.get("run")
    name = run.get("run") if isinstance(run, dict) else getattr(run, "run", None)
    return f"import-{name or 'gradients'}"


@draw_form
@flow(name="import-gradients", flow_run_name=make_run_name)
def import_gradients(
    templar: TemplarInput,
    bucket: BucketLocation,
    run: RunSettings,
    initial_weights: InitialWeightsInput | None = None,
) -> AggregationResult:
    """Make a chain of the gradients of a Templar run, window after window.

    Each payload is read as data, checked, and compressed again with the codec of the run. A worker
    with a fault is excluded with the reason. After a kill, the next run continues.

    Args:
        templar: Gradients of the Templar run, and their windows.
        bucket: A Millrace Bucket block with write credentials, its name, or a URL. The chain is
            written there, below `{run}/gathers/`.
        run: Run that is made: its codec, its merge and its outer optimizer make the weights.
        initial_weights: Checkpoint with the weights before the first window, if the run has not
            begun.
    """
    settings = TemplarImportSettings(
        templar=templar.make_source(),
        run=run,
        store=make_store_spec(bucket, Right.WRITE),
        initial_weights=initial_weights and initial_weights.make_initial_weights(),
    )
    check_right(bucket, Right.WRITE, run.chain_keys.job)
    check_right(templar.location, Right.READ, templar.prefix)
    after = find_newest_window(settings)
    try:
        return import_windows(settings, after)
    finally:
        report_windows(settings, after)  # earlier windows are imported, and stay so
