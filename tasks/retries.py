"""Retries of tasks: a store that did not answer, a worker that was lost."""

from collections.abc import Callable
from typing import Any

from prefect import Task
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import exponential_backoff

from millrace.errors import UnavailableError, WorkerError

PAUSES: Callable[[int], list[float]] = exponential_backoff(backoff_factor=10)


def passing(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Tell whether a failed task is tried again; a refusal or a conflict is as final as a bug."""
    try:
        state.result()
    except (UnavailableError, WorkerError):
        return True
    except Exception:  # noqa: BLE001 - whatever it is, it would happen again
        return False
    return False
