"""The share of the uploads that all runs have together."""

from datetime import timedelta

import pytest

from millrace.datasets import ExecutionSettings
from millrace.threads import count_processors
from tasks.limits import count_slots, fit_to_limit, resolve_workers


def settings(workers: int, uploads: int) -> ExecutionSettings:
    return ExecutionSettings(workers=workers, uploads=uploads, lease_timeout=timedelta(seconds=30))


@pytest.mark.parametrize(
    ("limit", "asked", "given"),
    [
        (32, (4, 2), (4, 2)),
        (8, (4, 4), (4, 2)),
        (3, (4, 4), (3, 1)),
        (1, (4, 4), (1, 1)),
        (1, (0, 4), (0, 1)),
        (5, (0, 4), (0, 4)),
    ],
)
def test_a_run_asks_for_no_more_than_there_is(
    limit: int, asked: tuple[int, int], given: tuple[int, int]
) -> None:
    lowered = fit_to_limit(limit, settings(*asked))
    assert (lowered.workers, lowered.uploads) == given
    assert count_slots(lowered) <= limit
    assert lowered.lease_timeout == timedelta(seconds=30)


def test_by_default_a_run_asks_for_slots_for_each_processor() -> None:
    resolved = resolve_workers(ExecutionSettings(uploads=3))
    assert resolved.workers == count_processors()
    assert count_slots(resolved) == 3 * count_processors()
