"""Make a chain of the gradients of a Templar run."""

from prefect import flow

from millrace.gradients import RunSettings, TemplarImportSettings
from millrace.storage import Right
from tasks.forms import draw_form
from tasks.initial_weights import InitialWeightsInput
from tasks.locations import BucketLocation, check_right, make_store_spec
from tasks.merging import AggregationResult, count_merged_windows, import_windows, report_windows
from tasks.run_names import make_field_name
from tasks.templar import TemplarInput


@draw_form
@flow(name="import-gradients", flow_run_name=make_field_name("import", "run", "run", "gradients"))
def import_gradients(
    templar: TemplarInput,
    bucket: BucketLocation,
    run: RunSettings,
    initial_weights: InitialWeightsInput | None = None,
) -> AggregationResult:
    """Make a chain of the gradients of a Templar run, window after window.

    Each payload is read as data, checked, and compressed again with the codec of the run. A worker
    with a fault is excluded with the reason. After a kill, the next start of this flow continues.

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
        initial_weights=initial_weights and initial_weights.make_weights(),
        initial_weights_store=initial_weights and initial_weights.make_spec(),
    )
    check_right(bucket, Right.WRITE, run.chain_keys.job)
    check_right(templar.bucket, Right.READ)
    after = count_merged_windows(settings)
    try:
        return import_windows(settings, after)
    finally:
        report_windows(settings, after)  # earlier windows are imported, and stay so
