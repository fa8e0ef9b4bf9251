"""The share of the uploads that a run holds, on a Prefect server."""

from uuid import uuid4

import pytest
from prefect import flow
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate

from blocks.server_names import UPLOAD_LIMIT
from millrace.errors import ConfigurationError
from tasks import limits
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


def test_a_limit_of_0_stops_uploads(
    prefect_api: PrefectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"uploads-{uuid4().hex[:8]}"
    monkeypatch.setattr(limits, "UPLOAD_LIMIT", name)
    with prefect_api.make_client() as client:
        client.create_global_concurrency_limit(
            GlobalConcurrencyLimitCreate(name=name, limit=0, active=True)
        )
    with (
        pytest.raises(ConfigurationError, match=f"{name} is 0, so nothing may be uploaded"),
        reserve_upload_slots(settings(2, 1)),
    ):
        pytest.fail("the run uploads")
