"""Abort uploads that were begun and never finished, on demand or every day."""

from datetime import timedelta

from prefect import flow

from millrace.cleanup import StaleUploads
from millrace.settings import Duration
from millrace.storage import Right
from tasks.cleaning import abort_stale_uploads, raise_failures, report_uploads
from tasks.forms import draw_form
from tasks.locations import (
    BucketLocation,
    describe_bucket,
    find_location,
    make_store_spec,
    skip_run,
)
from tasks.run_names import make_name


@draw_form
@flow(name="abort-uploads", flow_run_name=make_name("abort-uploads", "buckets"))
def abort_uploads(
    buckets: list[BucketLocation],
    older_than: Duration = timedelta(days=1),
    dry_run: bool = True,  # noqa: FBT001, FBT002 - Prefect passes it by name
) -> dict[str, StaleUploads] | None:
    """Abort unfinished uploads, which no listing shows and the store bills.

    Args:
        buckets: Millrace Bucket blocks with write credentials, their names, or URLs.
        older_than: Age of the uploads, by the store's clock. Choose more than any upload takes.
        dry_run: Only show the uploads.
    """
    found: dict[str, StaleUploads] = {}
    missing: list[str] = []
    for bucket in buckets:
        location = find_location(bucket)
        if location is None:
            missing.append(describe_bucket(bucket))
            continue
        spec = make_store_spec(location, Right.WRITE)
        found[spec.url] = abort_stale_uploads(spec, older_than, dry_run=dry_run)
    if missing:
        skipped_state = skip_run(missing, "nothing was looked at there, and nothing aborted")
        if not found:
            return skipped_state  # pyright: ignore[reportReturnType] - Prefect's way
    if found:
        report_uploads(found)
    for url, one in found.items():
        raise_failures(url, one.failures)
    return found
