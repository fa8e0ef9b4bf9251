"""Verify a job's checkpoints before they are needed, on demand or every night."""

from prefect import flow

from millrace.checkpoints import VerifyDepth
from millrace.errors import format_error
from millrace.storage import Right
from tasks.checkpointing import (
    CheckpointVerification,
    check_verification,
    list_jobs,
    report_checkpoints,
    verify_job,
)
from tasks.forms import draw_form
from tasks.locations import (
    BucketLocation,
    check_right,
    find_location,
    make_store_spec,
    skip_run,
)
from tasks.run_names import make_name


@draw_form
@flow(name="verify-checkpoints", flow_run_name=make_name("verify-checkpoints"))
def verify_checkpoints(
    bucket: BucketLocation,
    jobs: list[str] | None = None,
    depth: VerifyDepth = VerifyDepth.DIGESTS,
) -> list[CheckpointVerification] | None:
    """Check that every file of every checkpoint exists, and has the bytes that were saved.

    The flow changes nothing: the next load moves a damaged checkpoint away.

    Args:
        bucket: A Millrace Bucket block with read credentials, its name, or a URL.
        jobs: Jobs whose checkpoints are verified. By default all jobs below the bucket's URL.
            A named job without a checkpoint is an error.
        depth: `sizes` takes one request per file; `digests` reads all bytes.
    """
    found_bucket = find_location(bucket)
    if found_bucket is None:
        return skip_run([bucket], "nothing was verified")  # pyright: ignore[reportReturnType] - Prefect's way
    spec = make_store_spec(found_bucket, Right.READ)
    check_right(found_bucket, Right.READ)
    found: list[CheckpointVerification] = []
    try:
        for job in jobs or list_jobs(spec):
            found += verify_job(spec, job, depth)
    except BaseException as error:
        if found:
            report_checkpoints(spec.url, found, depth, format_error(error))
        raise
    report_checkpoints(spec.url, found, depth)
    check_verification(spec.url, jobs or (), found)
    return found
