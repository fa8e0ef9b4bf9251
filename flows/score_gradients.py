"""Score the workers of a run by what their gradients do to the loss."""

from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from millrace.gradients import ScorerOptions, ScorerSettings
from millrace.storage import Right
from tasks.forms import draw_form
from tasks.locations import BucketLocation, check_right, make_store_spec
from tasks.scoring import ScoringResult, report_scores, score_windows


def make_run_name() -> str:
    """Return ``score-RUN``, for the list of runs."""
    parameters: dict[str, Any] = flow_run.parameters or {}
    return f"score-{parameters.get('run') or 'gradients'}"


@draw_form
@flow(name="score-gradients", flow_run_name=make_run_name)
def score_gradients(
    bucket: BucketLocation,
    run: str,
    loss: str,
    version: str = "1",
    scoring: ScorerOptions | None = None,
) -> ScoringResult:
    """Score the workers of a run by what their gradients do to the loss.

    Each merged window without scores is scored: on random pages, and on the pages that a worker was
    to train on. After a kill, the next start of this flow continues. The report has the standings
    of the workers.

    Args:
        bucket: A Millrace Bucket block with write credentials, its name, or a URL: the bucket of
            the aggregator. The scores are written there, below `{run}/gathers/`.
        run: Name of the run.
        loss: Function that makes the function which computes losses: `module:function` of a module
            that is installed where the worker of this pool runs.
        version: Version of the program of the run's workers.
        scoring: Options of the scorer: which windows it scores, and how it evaluates gradients.
    """
    settings = ScorerSettings(
        store=make_store_spec(bucket, Right.WRITE),
        run=run,
        version=version,
        loss=loss,
        scoring=scoring or ScorerOptions(),
    )
    check_right(bucket, Right.WRITE, settings.chain_keys.job)
    try:
        return score_windows(settings)
    finally:
        report_scores(settings)  # earlier windows are scored, and stay so
