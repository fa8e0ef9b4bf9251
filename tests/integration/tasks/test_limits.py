"""The share of the uploads that a run holds, on a Prefect server."""

from prefect import flow

from blocks.server_names import UPLOAD_LIMIT
from tasks.limits import reserve_upload_slots
from tests.prefect_server import PrefectServer
from tests.unit.tasks.test_limits import settings


def test_the_share_is_held_once_while_the_work_goes_on(
    prefect_api: PrefectServer, deployed: PrefectServer
) -> None:
    def taken() -> int:
        with deployed.make_client() as client:
            return client.read_global_concurrency_limit_by_name(UPLOAD_LIMIT).active_slots

    @flow(name="takes-its-share")
    def takes_its_share() -> tuple[int, int, int]:
        before = taken()
        with reserve_upload_slots(settings(2, 1)):
            during = taken()
        return before, during, taken()

    before, during, after = takes_its_share()
    assert during - before == 2
    assert after == before
