"""Delete objects of other versions than the current one."""

from datetime import timedelta

from prefect import flow

from millrace.cleanup import CleanupPlan, CleanupResult, CleanVersionsPreset
from millrace.settings import Duration
from tasks.cleaning import clean_with_rules
from tasks.forms import draw_form
from tasks.locations import BucketLocation
from tasks.run_names import make_name


@draw_form
@flow(name="clean-versions", flow_run_name=make_name("clean-versions"))
def clean_versions(
    bucket: BucketLocation,
    current_version: str,
    run: str = "",
    older_than: Duration = timedelta(0),
    dry_run: bool = True,  # noqa: FBT001, FBT002 - Prefect passes it by name
    related_buckets: list[BucketLocation] = [],  # noqa: B006 - Prefect draws it
) -> CleanupResult | CleanupPlan | None:
    """Delete gradients, start windows and gathers of every version but the current one.

    Args:
        bucket: A Millrace Bucket block with write credentials, its name, or a URL.
        current_version: The version whose objects stay, such as `0.2.11`.
        run: Only objects of this run.
        older_than: Only objects that are older than this, by the store's clock.
        dry_run: Only show what would be deleted.
        related_buckets: Other buckets of the same runs. Leases there protect objects here.
    """
    preset = CleanVersionsPreset(current_version=current_version, name=run, older_than=older_than)
    return clean_with_rules(
        bucket, preset.make_rules(), related_buckets=related_buckets, dry_run=dry_run
    )
