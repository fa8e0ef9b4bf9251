"""Delete the merged gradients of one version."""

from datetime import timedelta

from prefect import flow

from millrace.cleanup import CleanupPlan, CleanupResult, DeleteGatherPreset
from millrace.settings import Duration
from tasks.cleaning import clean_with_rules
from tasks.forms import draw_form
from tasks.locations import BucketLocation
from tasks.run_names import make_name


@draw_form
@flow(name="delete-gathers", flow_run_name=make_name("delete-gathers"))
def delete_gathers(
    bucket: BucketLocation,
    version: str,
    run: str = "",
    older_than: Duration = timedelta(0),
    dry_run: bool = True,  # noqa: FBT001, FBT002 - Prefect passes it by name
) -> CleanupResult | CleanupPlan | None:
    """Delete the merged gradients of a version, up to the newest checkpoint of each run.

    Later merged gradients stay: the newest weights cannot be made again without them.

    Args:
        bucket: The aggregator's Millrace Bucket block, with write credentials, or its name.
        version: Version such as `0.2.1`, or a range, such as `<0.2.11`.
        run: Only objects of this run.
        older_than: Only objects that are older than this, by the store's clock.
        dry_run: Only show what would be deleted.
    """
    preset = DeleteGatherPreset(version=version, name=run, older_than=older_than)
    return clean_with_rules(bucket, preset.make_rules(), dry_run=dry_run)
