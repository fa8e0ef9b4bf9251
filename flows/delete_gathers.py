"""Delete what the aggregators of one version have merged."""

from datetime import timedelta

from prefect import flow

from millrace.cleanup import Cleaned, CleaningPlan, DeleteGather
from millrace.settings import Duration
from tasks.cleaning import clean_by
from tasks.places import BucketLocation


@flow(name="delete-gathers")
def delete_gathers(
    bucket: BucketLocation,
    version: str,
    run: str = "",
    older_than: Duration = timedelta(0),
    dry_run: bool = True,  # noqa: FBT001, FBT002 - Prefect passes it by name
) -> Cleaned | CleaningPlan | None:
    """Delete the merged gradients of a version, up to the newest checkpoint of each run.

    What came after that checkpoint stays: without it the newest weights could not be made again.

    Args:
        bucket: The aggregator's Millrace Bucket block, with write credentials, or its name.
        version: Version such as `0.2.1`, or a range, such as `<0.2.11`.
        run: Only of this run.
        older_than: Only what is older than this, by the store's clock.
        dry_run: Only show what would be deleted.
    """
    preset = DeleteGather(version=version, name=run, older_than=older_than)
    return clean_by(bucket, preset.rules(), dry_run=dry_run)
