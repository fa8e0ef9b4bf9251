"""Slots of a global concurrency limit, reserved once for a whole run."""

from collections.abc import Iterator
from contextlib import contextmanager

from prefect import get_client, get_run_logger
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound

from blocks.server_names import UPLOAD_LIMIT
from millrace.datasets import ExecutionSettings
from millrace.datasets.ray_tasks import count_ray_slots
from millrace.errors import ConfigurationError

_SLOT_LEASE = 60.0  # seconds that the slots of a dead process stay taken: Prefect's minimum


@contextmanager
def reserve_upload_slots(execution: ExecutionSettings) -> Iterator[ExecutionSettings]:
    """Wait for slots of the limit on uploads, and hold the slots while the block lasts.

    Args:
        execution: Wanted number of uploads: ``uploads`` for each of ``workers``.

    Yields:
        The same settings, lowered to the limit. Without a limit on the server they are unchanged.

    Raises:
        ConfigurationError: The limit is 0.
    """
    limit = _read_limit(UPLOAD_LIMIT)
    if limit is None:
        yield execution
        return
    if limit == 0:
        raise ConfigurationError(
            f"The limit {UPLOAD_LIMIT} is 0, so nothing may be uploaded. Raise it (`prefect gcl "
            f"update {UPLOAD_LIMIT} --limit 32`), and start this run again: it continues where it "
            "was."
        )
    execution = fit_to_limit(limit, resolve_workers(execution))
    slots = count_slots(execution)
    logger = get_run_logger()
    logger.info("Waiting for %d of the %d slots of %s", slots, limit, UPLOAD_LIMIT)
    with concurrency(UPLOAD_LIMIT, occupy=slots, lease_duration=_SLOT_LEASE):
        logger.info("Uploading at most %d shards at once", slots)
        yield execution


def resolve_workers(execution: ExecutionSettings) -> ExecutionSettings:
    """Return settings with a number of workers: by default the CPUs of the machine or cluster."""
    if execution.workers is not None:
        return execution
    workers = count_ray_slots(execution.ray) if execution.ray else execution.count_workers()
    return execution.model_copy(update={"workers": workers})


def count_slots(execution: ExecutionSettings) -> int:
    """Return the number of concurrent uploads."""
    return execution.uploads * max(1, execution.count_workers())


def fit_to_limit(limit: int, execution: ExecutionSettings) -> ExecutionSettings:
    """Return settings that need no more slots than the limit has."""
    if count_slots(execution) <= limit:
        return execution
    workers = min(execution.count_workers(), limit)
    return execution.model_copy(
        update={
            "workers": workers,
            "uploads": max(1, min(execution.uploads, limit // max(1, workers))),
        }
    )


def _read_limit(name: str) -> int | None:
    with get_client(sync_client=True) as client:
        try:
            found = client.read_global_concurrency_limit_by_name(name)
        except ObjectNotFound:
            return None
    return found.limit if found.active else None
