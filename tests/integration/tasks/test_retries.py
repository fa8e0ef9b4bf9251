"""Retries of tasks."""

from pathlib import Path

import pytest
from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from millrace import errors, gradients
from millrace.storage import StoreSpec
from tasks.merging import AggregationResult, run_aggregator
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


def test_an_aggregator_is_tried_again_after_another_has_merged_its_window(
    prefect_api: PrefectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tries: list[None] = []

    def conflict_once(*_arguments: object, **_options: object) -> list[gradients.ChainLink]:
        tries.append(None)
        if len(tries) == 1:
            raise errors.ConflictError("Another aggregator merged window 1 differently.")
        return []

    monkeypatch.setattr(gradients, "aggregate_run", conflict_once)
    aggregate = run_aggregator.with_options(retry_delay_seconds=0)
    settings = gradients.AggregatorSettings(
        run=gradients.RunSettings(run="runs/one"), store=StoreSpec(url=tmp_path.as_uri()),
        workers=("a",),
    )  # fmt: skip

    @flow(name="aggregates")
    def run() -> AggregationResult:
        return aggregate(settings, 0)

    assert run().windows == 0
    assert len(tries) == 2


def test_every_error_of_the_engine_is_one_or_the_other() -> None:
    known = {errors.UnavailableError, errors.WorkerError, errors.MillraceError, *FINAL}
    assert set(errors.MillraceError.__subclasses__()) <= known
