"""Delete what belongs to other versions than the current one."""

from datetime import timedelta

from prefect import flow

from millrace.cleanup import Cleaned, CleaningPlan, CleanVersions
from millrace.settings import Duration
from tasks.cleaning import clean_by
from tasks.places import BucketLocation


@flow(name="clean-versions")
def clean_versions(
    bucket: BucketLocation,
    current: str,
    run: str = "",
    older_than: Duration = timedelta(0),
    dry_run: bool = True,  # noqa: FBT001, FBT002 - Prefect passes it by name
    beside: list[BucketLocation] = [],  # noqa: B006 - Prefect draws it
) -> Cleaned | CleaningPlan | None:
    """Delete gradients, start windows and gathers of every version but the current one.

    Args:
        bucket: A Millrace Bucket block with write credentials, its name, or a URL.
        current: The version whose objects stay, such as `0.2.11`.
        run: Only of this run.
        older_than: Only what is older than this, by the store's clock.
        dry_run: Only show what would be deleted.
        beside: Other buckets of the same runs: leases there protect what is here.
    """
    preset = CleanVersions(current=current, name=run, older_than=older_than)
    return clean_by(bucket, preset.rules(), beside=beside, dry_run=dry_run)
