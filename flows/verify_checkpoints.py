"""Look at a job's checkpoints before they are needed, by hand or every night."""

from prefect import flow

from millrace.checkpoints import VerifyDepth
from millrace.errors import CorruptError
from millrace.storage import Right
from tasks.checkpointing import SeenCheckpoint, all_jobs, report_checkpoints, verify_job
from tasks.places import BucketLocation, check_right, known, named_bucket, skipped, spec_of


@flow(name="verify-checkpoints")
def verify_checkpoints(
    bucket: BucketLocation,
    jobs: list[str] | None = None,
    check: VerifyDepth = VerifyDepth.DIGESTS,
) -> list[SeenCheckpoint] | None:
    """Check that every file of every checkpoint is there, and is what was saved.

    Changes nothing: a damaged checkpoint is moved away by whoever loads next.

    Args:
        bucket: A Millrace Bucket block with read credentials, its name, or a URL.
        jobs: Jobs whose checkpoints are verified. Left out: all jobs below the bucket's URL.
        check: `sizes` takes a request a file; `digests` reads all of it.
    """
    found_bucket = known(bucket)
    if found_bucket is None:
        return skipped([named_bucket(bucket)], "nothing was verified")  # pyright: ignore[reportReturnType] - Prefect's way
    place = spec_of(found_bucket, Right.READ)
    check_right(found_bucket, Right.READ)
    found = [seen for job in jobs or all_jobs(place) for seen in verify_job(place, job, check)]
    report_checkpoints(place.url, found, check)
    damaged = [seen for seen in found if seen.damage]
    if damaged:
        names = ", ".join(f"{seen.job} step {seen.step}" for seen in damaged[:5])
        raise CorruptError(
            f"{len(damaged)} checkpoints of {place.url} are damaged ({names}): the report names "
            "each file. The ones before them can be loaded; save these steps anew."
        )
    return found
