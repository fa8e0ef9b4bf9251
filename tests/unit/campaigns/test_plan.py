"""What workers are sent, and what they reach."""

import base64
import json
import secrets
from datetime import timedelta
from pathlib import Path

import pytest
from botocore.exceptions import ClientError
from pydantic import SecretStr

from millrace.campaigns.worker import TrainingPlan, WorkerSettings, training_program, worker_file
from millrace.gradients import RunSettings
from millrace.keys import CampaignKeys, CheckpointKeys, CooldownKeys
from millrace.remote import CodeRepository
from millrace.rentals import Account, Instance, OfferRequest, RentSettings, node_key
from millrace.rentals.startup import environment
from millrace.settings import load
from millrace.storage import StoreSpec, open_store
from millrace.testing.rgw import RGW, Key
from tests.stores import credentials

PLAN = TrainingPlan(
    campaign="c", workers=3, run=RunSettings(run="c/run"), command=("true",), dataset="text",
    warm=timedelta(minutes=5),
)  # fmt: skip
REPOSITORY = CodeRepository(repo_url="https://example.org/x")


def rent(store: StoreSpec, key: str = "account", **more: str) -> RentSettings:
    program, reach = training_program(PLAN, store, REPOSITORY)
    return RentSettings(
        name="c", store=store, account=Account(api_key=SecretStr(key)), program=program,
        reach=reach, request=OfferRequest(max_hourly=1.0, max_total=1.0), count=3, **more,
    )  # fmt: skip


def test_the_file_of_a_worker_has_no_secret(rgw: RGW) -> None:
    pair = credentials(rgw.full)
    store = StoreSpec(url="s3://bucket", endpoint=rgw.endpoint, credentials=pair)
    text = worker_file(PLAN, store, 2)
    assert rgw.full.secret_access_key not in text
    assert rgw.full.access_key_id not in text


def test_a_machine_writes_its_own_gradients_and_never_the_chain(rgw: RGW, bucket: str) -> None:
    role = rgw.create_role(f"worker-{secrets.token_hex(4)}")
    full = StoreSpec(url=f"s3://{bucket}", endpoint=rgw.endpoint, credentials=credentials(rgw.full))
    settings = rent(full, role_arn=role)
    found = environment(
        open_store(full), settings, 0, 1, 0.0, lifetime=timedelta(hours=1), url="https://x"
    )
    order = json.loads(base64.b64decode(found["MILLRACE_ORDER"]))
    given = order["write"]["credentials"]
    pair = Key(given["access_key_id"], given["secret_access_key"], given["session_token"])
    client = rgw.client(pair)
    own = CooldownKeys("c/model", 3)
    for key in (
        "c/run/worker-1/gradient", "c/model/lease/members/worker-1/000000.json",
        own.vote("worker-1"), own.late("worker-1"), own.result("worker-1"), own.draft("worker-1"),
        own.part("worker-1", "a" * 64),
    ):  # fmt: skip
        client.put_object(Bucket=bucket, Key=key, Body=b"x")
    checkpoints = CheckpointKeys("c/model")
    for key in (
        "c/run/worker-0/gradient", "c/run/worker-10/gradient", "c/run/gathers/1/chain/000000001",
        "c/campaign/warming.json", "c/lease/campaign/0", "text/manifest.json", "_rentals/c/x",
        "c/model/lease/members/worker-0/000000.json", "c/campaign/plan.json",
        "c/model/lease/clock/x", "c/model/lease/members/worker-10/000000.json", "c/model/x", "x",
        own.roster, own.vote("worker-0"), own.vote("worker-10"), own.late("worker-2"),
        own.result("worker-2"), own.draft("worker-0"), own.part("worker-0", "a" * 64),
        checkpoints.epoch(3), checkpoints.metadata(3), checkpoints.part(3, "a" * 64),
        checkpoints.pin(3), checkpoints.share(3, "a", 0),
    ):  # fmt: skip
        with pytest.raises(ClientError, match=r"AccessDenied|403"):
            client.put_object(Bucket=bucket, Key=key, Body=b"x")
    assert order["node_key"] == node_key(settings.account, "c", 0).get_secret_value()
    assert "account" not in json.dumps(found)


def test_machines_that_listen_have_a_port_that_is_open() -> None:
    assert rent(StoreSpec(url="file:///x")).wanted.ports == 1


def test_the_key_of_an_agent_is_found_again_and_is_its_own() -> None:
    one = node_key(Account(api_key=SecretStr("a")), "c", 0)
    assert one == node_key(Account(api_key=SecretStr("a")), "c", 0)
    assert one != node_key(Account(api_key=SecretStr("a")), "c", 1)
    assert one != node_key(Account(api_key=SecretStr("a")), "d", 0)
    assert one != node_key(Account(api_key=SecretStr("b")), "c", 0)


def test_what_a_person_writes_is_filled_in_with_the_workers_number_and_nothing_else(
    tmp_path: Path,
) -> None:
    command = ("bash", "-c", "echo ${HOME} $${X} {slot}")
    plan = PLAN.model_copy(update={"command": command})
    path = tmp_path / "worker.yaml"
    path.write_text(worker_file(plan, StoreSpec(url="file:///x"), 2))
    settings = load(path, WorkerSettings, {"MILLRACE_STORE": "file:///x"})
    assert settings.command == ("bash", "-c", "echo ${HOME} $${X} 2")
    assert (settings.uid, settings.number, settings.workers) == ("worker-2", 2, 3)


@pytest.mark.parametrize("name", ["worker-0-b", "my-worker-01"])
def test_a_campaign_may_be_called_as_a_worker_is(name: str) -> None:
    keys = CampaignKeys(name)
    assert keys.list_write_prefixes("{slot}")[0] == f"{name}/run/worker-{{slot}}/"


@pytest.mark.parametrize(
    ("ports", "asked", "found"),
    [
        ({"22/tcp": 40022, "8080/tcp": 40080}, 8080, "1.2.3.4:40080"),
        ({"22/tcp": 40022}, 8080, ""),
        ({"22/tcp": 40022, "41234/tcp": 41234}, 70000, "1.2.3.4:41234"),
        ({"22/tcp": 22}, 70000, ""),
        ({"41234/tcp": 41234, "41235/tcp": 41235}, 70000, ""),  # which, nobody says
    ],
)
def test_where_a_machine_is_reached(ports: dict[str, int], asked: int, found: str) -> None:
    row = {
        "id": 1, "public_ipaddr": "1.2.3.4",
        "ports": {name: [{"HostPort": str(port)}] for name, port in ports.items()},
    }  # fmt: skip
    assert Instance.of(row).reached_at(asked) == found
    assert Instance.of({**row, "public_ipaddr": None}).reached_at(asked) == ""
