"""Abort uploads that were begun and never finished, on demand or every day."""

from datetime import timedelta
from typing import Annotated

from prefect import flow
from pydantic import Field

from blocks import Bucket
from millrace.cleanup import Age, StaleUploads
from millrace.errors import MillraceError, format_error
from millrace.storage import Right
from tasks.cleaning import (
    abort_stale_uploads,
    raise_bucket_errors,
    raise_failures,
    report_uploads,
)
from tasks.forms import draw_form
from tasks.locations import (
    BucketLocation,
    find_location,
    make_store_spec,
    skip_run,
)
from tasks.run_names import make_name
from tasks.schedules import check_schedule


@draw_form
@flow(name="abort-uploads", flow_run_name=make_name("abort-uploads", "buckets"))
def abort_uploads(
    buckets: Annotated[list[BucketLocation], Field(min_length=1)],
    older_than: Age = timedelta(days=1),
    dry_run: bool = True,  # noqa: FBT001, FBT002 - Prefect passes it by name
) -> dict[str, StaleUploads] | None:
    """Abort unfinished uploads, which no listing shows and the store bills.

    Args:
        buckets: Millrace Bucket blocks with write credentials, their names, or URLs.
        older_than: Age of the uploads, by the store's clock. Choose more than any upload takes.
        dry_run: Only show the uploads.
    """
    check_schedule()
    locations = [find_location(bucket) for bucket in buckets]
    missing = [one for one, location in zip(buckets, locations, strict=True) if location is None]
    if missing:
        skipped_state = skip_run(missing, "nothing was looked at there, and nothing aborted")
        if len(missing) == len(buckets):
            return skipped_state  # pyright: ignore[reportReturnType] - Prefect's way
    found: dict[str, StaleUploads] = {}
    faults: dict[str, MillraceError] = {}
    for location in locations:
        if location is None:
            continue
        url = location.url if isinstance(location, Bucket) else location
        try:
            spec = make_store_spec(location, Right.WRITE)
            found[url] = abort_stale_uploads(spec, older_than, dry_run=dry_run)
        except MillraceError as error:  # the other buckets are cleaned
            faults[url] = error
    report_uploads(found, {url: format_error(error) for url, error in faults.items()})
    for url, one in found.items():
        try:
            raise_failures(url, one.failures)
        except MillraceError as error:
            faults[url] = error
    raise_bucket_errors(faults)
    return found
