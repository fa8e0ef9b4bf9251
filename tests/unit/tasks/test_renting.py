"""Machines of a rental, as tasks find them."""

from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import SecretStr

from blocks import VastCredentials
from millrace.rentals import Instance, MachineStatus, VastAccount, derive_node_key
from millrace.schemas.rental import DetachRecord
from tasks import renting
from tests.support.rentals.parts import HOUR, START, make_attempt


def make_status(number: int, slot: int) -> MachineStatus:
    """Return a machine with an agent that listens on an identity port."""
    port = 41_000 + number
    row = {
        "id": number, "label": f"label-{number}", "actual_status": "running",
        "public_ipaddr": "10.0.0.1", "ports": {f"{port}/tcp": [{"HostPort": str(port)}]},
    }  # fmt: skip
    attempt = make_attempt(number, instance_id=number, slot=slot)
    return MachineStatus(Instance.from_row(row), "fleet", attempt, "", 0.0, "")


def test_a_lost_machine_that_is_still_listed_is_no_host_beside_the_one_in_its_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machines = [make_status(3, 0), make_status(2, 1), make_status(1, 0)]
    monkeypatch.setattr(renting, "fetch_machines", lambda _: machines)
    vast = VastCredentials(api_key=SecretStr("the key"))
    hosts = renting.find_node_hosts("fleet", tmp_path.as_uri(), vast).hosts
    assert [(one.name, one.url) for one in hosts] == [
        ("fleet/0", "http://10.0.0.1:41003"),
        ("fleet/1", "http://10.0.0.1:41002"),
    ]
    account = VastAccount(api_key=SecretStr("the key"))
    assert hosts[0].key == derive_node_key(account, "fleet", 3)


def test_a_detached_machine_is_listed_with_the_time_at_which_its_money_is_spent() -> None:
    owned = make_status(1, 0)
    record = DetachRecord(since=START, deadline=START + 2 * HOUR)
    attempt = replace(owned.attempt, is_detached=True, detach_record=record)
    rows = [renting._make_row(one) for one in (owned, replace(owned, attempt=attempt))]
    assert [row[3:5] for row in rows] == [
        ("01 Jan 00:00", "01 Jan 10:00"),
        ("01 Jan 00:00", "01 Jan 02:00"),
    ]
