"""Delete all objects of a bucket, after a person has typed its name."""

from datetime import timedelta

from prefect import flow
from prefect.exceptions import FlowPauseTimeout
from prefect.flow_runs import pause_flow_run
from prefect.input import RunInput
from pydantic import Field

from millrace.cleanup import CleanupResult, StoreContents, make_confirmation
from millrace.cleanup.wiping import check_confirmation
from millrace.errors import ConfigurationError
from millrace.storage import Right, open_store
from tasks.cleaning import (
    delete_wipe_plan,
    describe_versions,
    execute_wipe,
    make_wipe_plan,
    raise_failures,
    report_cleaning,
    report_contents,
    survey_bucket,
)
from tasks.formatting import format_count, format_size
from tasks.forms import draw_form
from tasks.locations import BucketLocation, make_store_spec
from tasks.run_names import make_name

_CONFIRM_TIMEOUT = timedelta(hours=1)


class WipeConfirmation(RunInput):
    """Texts that a person types before a bucket is wiped."""

    bucket_name: str = Field(
        title="Bucket name", description="Name of the bucket, as it is written above."
    )


@draw_form
@flow(name="wipe-bucket", flow_run_name=make_name("wipe"))
def wipe_bucket(
    bucket: BucketLocation,
    dry_run: bool = True,  # noqa: FBT001, FBT002 - Prefect passes it by name
    delete_versions: bool = False,  # noqa: FBT001, FBT002
) -> CleanupResult | StoreContents:
    """Delete all objects below a bucket's URL, also those that rules protect.

    The flow pauses, and asks for the bucket's name. It is refused while a lease there is held.

    Args:
        bucket: A Millrace Bucket block with write credentials, its name, or a URL.
        dry_run: Only count the objects.
        delete_versions: Also delete older versions and delete markers of a versioned bucket.
    """
    spec = make_store_spec(bucket, Right.WRITE)
    found = survey_bucket(spec)
    if dry_run:
        report_contents(found)
        return found
    plan = make_wipe_plan(spec)
    location = open_store(spec, make_folder=False).location
    wanted = make_confirmation(location)
    whole = f"{format_count(plan.objects, 'object')} of `{spec.url}`, {format_size(plan.size)}"
    if delete_versions:
        whole += describe_versions(found.versions)
    asked = WipeConfirmation.with_initial_data(
        description=f"**All {whole}, will be deleted, and nothing brings them back.** To go on, "
        f"type `{wanted}`.",
    )
    try:
        typed = pause_flow_run(
            wait_for_input=asked, timeout=int(_CONFIRM_TIMEOUT.total_seconds()), poll_interval=2
        )
        check_confirmation(location, typed.bucket_name)
    except (FlowPauseTimeout, ConfigurationError):
        delete_wipe_plan(spec, plan)
        raise
    done = execute_wipe(spec, plan, typed.bucket_name, versions=delete_versions)
    report_cleaning(plan, done)
    raise_failures(spec.url, done.failures)
    return done
