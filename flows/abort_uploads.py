"""Abort uploads that were begun and never finished, by hand or every day."""

from datetime import timedelta

from prefect import flow

from millrace.cleanup import Aborted
from millrace.settings import Duration
from millrace.storage import Right
from tasks.cleaning import abort_stale, refuse_failures, report_uploads
from tasks.places import BucketLocation, known, named_bucket, skipped, spec_of


@flow(name="abort-uploads")
def abort_uploads(
    buckets: list[BucketLocation],
    older_than: Duration = timedelta(days=1),
    dry_run: bool = True,  # noqa: FBT001, FBT002 - Prefect passes it by name
) -> dict[str, Aborted] | None:
    """Abort unfinished uploads: no listing shows them, and they are billed.

    Args:
        buckets: Millrace Bucket blocks with write credentials, their names, or URLs.
        older_than: Those begun before this long, by the store's clock; longer than any upload
            takes.
        dry_run: Only show them.
    """
    found: dict[str, Aborted] = {}
    missing: list[str] = []
    for bucket in buckets:
        place = known(bucket)
        if place is None:
            missing.append(named_bucket(bucket))
            continue
        spec = spec_of(place, Right.WRITE)
        found[spec.url] = abort_stale(spec, older_than, dry_run=dry_run)
    if missing:
        nothing = skipped(missing, "nothing was looked at there, and nothing aborted")
        if not found:
            return nothing  # pyright: ignore[reportReturnType] - Prefect's way
    if found:
        report_uploads(found)
    for url, one in found.items():
        refuse_failures(url, one.failures)
    return found
