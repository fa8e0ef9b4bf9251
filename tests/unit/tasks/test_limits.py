"""The share of the uploads that all runs have together."""

from datetime import timedelta

import pytest
from prefect import flow

from blocks.limits import UPLOADS
from millrace.datasets import ExecutionSettings
from tasks.limits import share_of_uploads, slots_of, within
from tests.prefect_server import PrefectServer


def settings(workers: int, uploads: int) -> ExecutionSettings:
    return ExecutionSettings(workers=workers, uploads=uploads, lease=timedelta(seconds=30))


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
    lowered = within(limit, settings(*asked))
    assert (lowered.workers, lowered.uploads) == given
    assert slots_of(lowered) <= limit
    assert lowered.lease == timedelta(seconds=30)


def test_the_share_is_held_once_while_the_work_goes_on(
    prefect_api: PrefectServer, deployed: PrefectServer
) -> None:
    def taken() -> int:
        with deployed.client() as client:
            return client.read_global_concurrency_limit_by_name(UPLOADS).active_slots

    @flow(name="takes-its-share")
    def takes_its_share() -> tuple[int, int, int]:
        before = taken()
        with share_of_uploads(settings(2, 1)):
            during = taken()
        return before, during, taken()

    before, during, after = takes_its_share()
    assert during - before == 2
    assert after == before
