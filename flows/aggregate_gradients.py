"""Merge the gradients of a run, window after window, and write the chain of results."""

from prefect import flow, get_run_logger
from prefect.states import Completed
from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from millrace.errors import HeldError, MillraceError
from millrace.gradients import AggregationSettings, AggregatorSettings, RunSettings
from millrace.storage import Right
from tasks.forms import draw_form
from tasks.initial_weights import InitialWeightsInput
from tasks.locations import BucketLocation, check_right, make_store_spec
from tasks.merging import AggregationResult, count_merged_windows, report_windows, run_aggregator
from tasks.run_names import make_field_name


class WorkerBucket(BaseModel):
    """A worker that has a bucket of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uid: str = Field(title="Name", description="Name of the worker.")
    bucket: BucketLocation = Field(
        description="A Millrace Bucket block with read credentials, its name, or a URL."
    )


@draw_form
@flow(
    name="aggregate-gradients",
    flow_run_name=make_field_name("aggregate", "run", "run", "gradients"),
)
def aggregate_gradients(
    bucket: BucketLocation,
    run: RunSettings,
    workers: list[str] | None = None,
    *,
    gradients_bucket: BucketLocation | None = None,
    worker_buckets: list[WorkerBucket] | None = None,
    reserves: list[str] | None = None,
    initial_weights: InitialWeightsInput | None = None,
    until: PositiveInt | None = None,
    aggregation: AggregationSettings | None = None,
) -> AggregationResult:
    """Merge the gradients of a run into one change of its weights, window after window.

    The flow merges all windows of the training run, or those up to `until`. After a kill or a
    cancellation, the next start of this flow continues from the newest checkpoint that the chain
    names. A second start at the same time does nothing.

    Args:
        bucket: A Millrace Bucket block with write credentials, its name, or a URL. The chain is
            written there, below `{run}/gathers/`.
        run: Settings that all workers of the run share.
        workers: Names of the workers that are read first in each window. May be left out if workers
            register (`registration` of the run).
        gradients_bucket: Bucket that the workers share, with read credentials; by default
            `bucket`.
        worker_buckets: Workers that have a bucket of their own.
        reserves: Names of the workers that replace missing ones, in this order.
        initial_weights: Checkpoint that the run begins with, if it has not begun.
        until: Number of the last window to merge; by default the last of the run.
        aggregation: Number of windows without gradients that end the flow, and checkpoint rules.
    """
    shared = bucket if gradients_bucket is None else gradients_bucket
    settings = AggregatorSettings(
        run=run,
        store=make_store_spec(bucket, Right.WRITE),
        gradients_store=make_store_spec(shared, Right.READ),
        workers=tuple(workers or ()),
        reserves=tuple(reserves or ()),
        worker_stores={
            each.uid: make_store_spec(each.bucket, Right.READ) for each in worker_buckets or ()
        },
        initial_weights=initial_weights and initial_weights.make_weights(),
        initial_weights_store=initial_weights and initial_weights.make_spec(),
        until=until,
        aggregation=aggregation or AggregationSettings(),
    )
    check_right(bucket, Right.WRITE, run.chain_keys.job)
    check_right(shared, Right.READ, run.name)
    for each in worker_buckets or ():
        try:
            check_right(each.bucket, Right.READ, run.gradient_keys.make_worker_prefix(each.uid))
        except MillraceError as error:  # only this worker is left out, with a reason
            get_run_logger().warning("The bucket of %s cannot be read: %s", each.uid, error)
    after = count_merged_windows(settings)
    try:
        done = run_aggregator(settings, after)
    except HeldError as error:  # one aggregator is enough; Prefect returns None to a caller
        return Completed(message=str(error))  # pyright: ignore[reportReturnType] - Prefect's way
    except BaseException:
        report_windows(settings, after)  # earlier windows are merged and stay so
        raise
    report_windows(settings, after)
    return done
