"""Retries of tasks."""

import pytest
from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from millrace import errors
from tasks.retries import should_retry
from tests.prefect_server import PrefectServer

FINAL = [
    errors.ArchiveError,
    errors.BudgetError,
    errors.ChangedError,
    errors.ConfigurationError,
    errors.ConflictError,
    errors.CorruptError,
    errors.DeniedError,
    errors.ExistsError,
    errors.HeldError,
    errors.MachineError,
    errors.NoProgressError,
    errors.NoSpaceError,
    errors.NotFoundError,
    errors.QuarantineError,
    errors.StoppedError,
    ZeroDivisionError,
]


@pytest.mark.parametrize(
    ("error", "tries"),
    [(errors.UnavailableError, 3), (errors.WorkerError, 3), *((error, 1) for error in FINAL)],
)
def test_only_what_may_pass_is_tried_again(
    prefect_api: PrefectServer, error: type[Exception], tries: int
) -> None:
    seen: list[None] = []

    @task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=0, retry_condition_fn=should_retry)
    def fails() -> None:
        seen.append(None)
        raise error("as it is")

    @flow(name="fails")
    def run() -> None:
        fails()

    with pytest.raises(error, match="as it is"):
        run()
    assert len(seen) == tries


def test_every_error_of_the_engine_is_one_or_the_other() -> None:
    known = {errors.UnavailableError, errors.WorkerError, errors.MillraceError, *FINAL}
    assert set(errors.MillraceError.__subclasses__()) <= known
