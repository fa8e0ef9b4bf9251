"""Merge the gradients of a run, window after window, and keep the chain of what they came to."""

from typing import Any

from prefect import flow, get_run_logger
from prefect.runtime import flow_run
from prefect.states import Completed
from pydantic import BaseModel, ConfigDict, Field

from millrace.errors import ConfigurationError, HeldError, MillraceError
from millrace.gradients import (
    AggregatorSettings,
    FollowSettings,
    InitialWeights,
    RunSettings,
    WeightsSource,
)
from millrace.storage import Right
from tasks.merging import Aggregated, aggregate_windows, last_window, report_windows
from tasks.places import BucketLocation, InputLocation, check_right, spec_of


class OwnBucket(BaseModel):
    """A worker that has a bucket of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uid: str = Field(description="The worker's name.")
    bucket: BucketLocation = Field(
        description="A Millrace Bucket block, to be read, its name, or a URL."
    )


class First(InputLocation, WeightsSource):
    """The checkpoint whose weights a run begins with."""

    def beginning(self) -> InitialWeights:
        """Return the checkpoint as the engine takes it."""
        which = {name: getattr(self, name) for name in WeightsSource.model_fields}
        return InitialWeights(**dict(self.store()), **which)


def run_name() -> str:
    """``aggregate-RUN``, for the list of runs."""
    parameters: dict[str, Any] = flow_run.parameters or {}
    run = parameters.get("run")
    name = run.get("run") if isinstance(run, dict) else getattr(run, "run", None)
    return f"aggregate-{name or 'gradients'}"


@flow(name="aggregate-gradients", flow_run_name=run_name)
def aggregate_gradients(
    bucket: BucketLocation,
    run: RunSettings,
    workers: list[str],
    gradients: BucketLocation | None = None,
    own: list[OwnBucket] | None = None,
    reserves: list[str] | None = None,
    first: First | None = None,
    care: FollowSettings = FollowSettings(),  # noqa: B008 - frozen
) -> Aggregated:
    """Merge the gradients of a run into one change of its weights, window after window.

    One window, so many, or until the run is over. Killed or cancelled at any moment, the next run
    goes on from the newest checkpoint that the chain names; a second one beside it does nothing.

    Args:
        bucket: A Millrace Bucket block with write credentials, its name, or a URL: the chain
            is written there, below `{run}/gathers/`.
        run: Settings that all workers of the run have in common.
        workers: The names of those who are asked first in each window.
        gradients: The bucket that the workers share, with read credentials; left out, `bucket`.
        own: Workers that have a bucket of their own.
        reserves: The names of those who stand in, in this order.
        first: If the run has not begun: the checkpoint that it begins with.
        care: How long the run is followed, and which checkpoints are kept.
    """
    if not workers:
        raise ConfigurationError("Name at least one worker whose gradients are merged.")
    shared = bucket if gradients is None else gradients
    settings = AggregatorSettings(
        run=run,
        store=spec_of(bucket, Right.WRITE),
        gradients=spec_of(shared, Right.READ),
        workers=tuple(workers),
        reserves=tuple(reserves or ()),
        buckets={each.uid: spec_of(each.bucket, Right.READ) for each in own or ()},
        begin=first and first.beginning(),
        **care.model_dump(),
    )
    check_right(bucket, Right.WRITE, run.chain.job)
    check_right(shared, Right.READ, run.run)
    for each in own or ():
        try:
            check_right(each.bucket, Right.READ, run.gradients.worker(each.uid))
        except MillraceError as error:  # it costs its own worker, which is out with a reason
            get_run_logger().warning("The bucket of %s cannot be read: %s", each.uid, error)
    before = last_window(settings)
    try:
        done = aggregate_windows(settings, before)
    except HeldError as error:  # as it should be: one of them is enough
        return Completed(message=str(error))  # pyright: ignore[reportReturnType] - Prefect's way
    except BaseException:
        report_windows(settings, before)  # what came before is merged, and stays so
        raise
    report_windows(settings, before)
    return done
