"""Delete all that a bucket holds, after a person has typed its name."""

from datetime import timedelta

from prefect import flow
from prefect.flow_runs import pause_flow_run
from prefect.input import RunInput
from pydantic import Field

from millrace.cleanup import Cleaned, Contents, name_to_type
from millrace.storage import Right, open_store
from tasks.cleaning import (
    count_all,
    describe_versions,
    refuse_failures,
    report_cleaning,
    report_contents,
    survey_bucket,
    wipe_all,
)
from tasks.places import BucketLocation, spec_of
from tasks.words import format_count, size

_PATIENCE = timedelta(hours=1)


class Typed(RunInput):
    """Texts that a person types before a bucket is wiped."""

    name: str = Field(title="Name", description="The bucket's name, as it is written above.")


@flow(name="wipe-bucket")
def wipe_bucket(
    bucket: BucketLocation,
    dry_run: bool = True,  # noqa: FBT001, FBT002 - Prefect passes it by name
    versions: bool = False,  # noqa: FBT001, FBT002
) -> Cleaned | Contents:
    """Delete all that is below a bucket's URL, also what rules protect.

    It pauses, and asks for the bucket's name. Refused while somebody works there.

    Args:
        bucket: A Millrace Bucket block with write credentials, its name, or a URL.
        dry_run: Only count what is there.
        versions: Delete older versions and delete markers, too, of a versioned bucket.
    """
    place = spec_of(bucket, Right.WRITE)
    found = survey_bucket(place)
    if dry_run:
        report_contents(found)
        return found
    plan = count_all(place)
    wanted = name_to_type(open_store(place, make_folder=False).location)
    whole = f"{format_count(plan.objects, 'object')} of `{place.url}`, {size(plan.size)}"
    if versions:
        whole += describe_versions(found.versions).removesuffix(
            ", which the option versions deletes"
        )
    asked = Typed.with_initial_data(
        description=f"**All {whole}, will be deleted, and nothing brings them back.** To go on, "
        f"type `{wanted}`.",
    )
    typed = pause_flow_run(
        wait_for_input=asked, timeout=int(_PATIENCE.total_seconds()), poll_interval=2
    )
    done = wipe_all(place, plan, typed.name, versions=versions)
    report_cleaning(plan, done)
    refuse_failures(place.url, done.failures)
    return done
