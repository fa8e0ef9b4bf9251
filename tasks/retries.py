"""Failures of tasks: which of them are tried again, and which a flow tolerates."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from prefect import Task, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import exponential_backoff

from millrace.errors import UnavailableError, WorkerError, format_error

RETRY_DELAYS: Callable[[int], list[float]] = exponential_backoff(backoff_factor=10)


def should_retry(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Decide whether a failed task is tried again; a refusal or a conflict is final."""
    try:
        state.result()
    except (UnavailableError, WorkerError):
        return True
    except Exception:  # noqa: BLE001 - any other error is final
        return False
    return False


retried_task = task(
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=should_retry,
)
"""Decorator of a task that is tried again after a store did not answer or a worker was lost."""


@contextmanager
def tolerate(kind: type[Exception], consequence: str) -> Generator[None]:
    """Continue after an error of the block, and log it.

    Args:
        kind: Kind of the errors that are tolerated.
        consequence: Consequence of an error, for the log.
    """
    try:
        yield
    except kind as error:
        get_run_logger().warning("%s: %s", consequence, format_error(error))
