"""A share of a global concurrency limit: taken once for a whole run, and passed down."""

from collections.abc import Iterator
from contextlib import contextmanager

from prefect import get_client, get_run_logger
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound

from blocks.limits import UPLOADS
from millrace.datasets import ExecutionSettings

_LEASE = 60.0  # seconds that the slots of a dead process stay taken: the least that Prefect knows


@contextmanager
def share_of_uploads(run: ExecutionSettings) -> Iterator[ExecutionSettings]:
    """Wait for a place among all runs that upload, and hold it.

    Args:
        run: How many uploads are wanted: ``uploads`` for each of ``workers``.

    Yields:
        The same settings, lowered to what the limit allows at all. Without a limit on the
        server they are as they were.
    """
    limit = _limit(UPLOADS)
    if limit is None:
        yield run
        return
    run = within(limit, run)
    slots = slots_of(run)
    logger = get_run_logger()
    logger.info("Waiting for %d of the %d slots of %s", slots, limit, UPLOADS)
    with concurrency(UPLOADS, occupy=slots, lease_duration=_LEASE):
        logger.info("Uploading at most %d shards at once", slots)
        yield run


def slots_of(run: ExecutionSettings) -> int:
    """Return uploads at once."""
    return run.uploads * max(1, run.workers)


def within(limit: int, run: ExecutionSettings) -> ExecutionSettings:
    """Return settings that need no more slots than there are."""
    if slots_of(run) <= limit:
        return run
    workers = min(run.workers, limit)
    return run.model_copy(
        update={"workers": workers, "uploads": max(1, min(run.uploads, limit // max(1, workers)))}
    )


def _limit(name: str) -> int | None:
    with get_client(sync_client=True) as client:
        try:
            found = client.read_global_concurrency_limit_by_name(name)
        except ObjectNotFound:
            return None
    return found.limit if found.active and found.limit > 0 else None
