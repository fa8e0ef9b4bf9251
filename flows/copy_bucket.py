"""Copy the objects of a bucket into another one, on demand or as a backup by a schedule."""

from prefect import flow

from millrace.cleanup import CopyResult, ObjectFilter
from millrace.storage import Right
from tasks.copying import copy_bucket_objects, raise_copy_failures, report_copied_objects
from tasks.forms import draw_form
from tasks.locations import BucketLocation, check_right, make_store_spec
from tasks.run_names import make_name


@draw_form
@flow(name="copy-bucket", flow_run_name=make_name("copy", "source"))
def copy_bucket(
    source: BucketLocation,
    destination: BucketLocation,
    prefix: str = "",
    pattern: str = "*",
    exclude: list[str] = [],  # noqa: B006 - Prefect draws it
    overwrite: bool = False,  # noqa: FBT001, FBT002 - Prefect passes it by name
    dry_run: bool = False,  # noqa: FBT001, FBT002
) -> CopyResult:
    """Copy the objects of a bucket under the same keys, and prove that each copy is right.

    Objects that are at the destination with the same bytes are skipped, so another run continues a
    run that was stopped. Objects that differ stay, and fail the run, unless `overwrite` is on.

    Args:
        source: A Millrace Bucket block with read credentials, its name, or a URL.
        destination: A Millrace Bucket block with write credentials, its name, or a URL.
        prefix: Text that the keys begin with.
        pattern: Pattern of the keys, such as `runs/*.pt`. `*` matches slashes, too.
        exclude: Patterns of keys that are not copied, such as `*.tmp`.
        overwrite: Replace objects at the destination that differ.
        dry_run: Only compare the buckets.
    """
    here, there = make_store_spec(source, Right.READ), make_store_spec(destination, Right.WRITE)
    if not dry_run:
        check_right(destination, Right.WRITE)
    objects = ObjectFilter(prefix=prefix, pattern=pattern, exclude=tuple(exclude))
    found = copy_bucket_objects(here, there, objects, overwrite=overwrite, dry_run=dry_run)
    report_copied_objects(found, dry_run=dry_run)
    if not dry_run:
        raise_copy_failures(found)
    return found
