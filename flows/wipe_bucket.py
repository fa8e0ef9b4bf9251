"""Delete all objects of a bucket, after a person has typed its name."""

from datetime import timedelta

from prefect import flow
from prefect.flow_runs import pause_flow_run
from prefect.input import RunInput
from pydantic import Field

from millrace.cleanup import CleanupResult, StoreContents, make_confirmation
from millrace.cleanup.wiping import check_confirmation
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
from tasks.formatting import format_count, format_size, make_artifact_key
from tasks.forms import draw_form
from tasks.locations import BucketLocation, make_store_spec
from tasks.reports import format_code, format_markdown
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
    description = format_markdown(
        "**All {} of {}, {}{}, will be deleted, and nothing brings them back.** To go on, type {}.",
        format_count(plan.objects, "object"), format_code(spec.url), format_size(plan.size),
        describe_versions(found.versions) if delete_versions else "", format_code(wanted),
    )  # fmt: skip
    try:
        typed = pause_flow_run(
            wait_for_input=WipeConfirmation.with_initial_data(description=str(description)),
            timeout=int(_CONFIRM_TIMEOUT.total_seconds()),
            poll_interval=2,
            key=make_artifact_key(plan.name),  # a retry of the run asks again, about its own plan
        )
        check_confirmation(location, typed.bucket_name)
    except BaseException:
        delete_wipe_plan(spec, plan)
        raise
    done = execute_wipe(spec, plan, typed.bucket_name, versions=delete_versions)
    report_cleaning(plan, done)
    raise_failures(spec.url, done.failures, has_given_up=done.has_given_up)
    return done
