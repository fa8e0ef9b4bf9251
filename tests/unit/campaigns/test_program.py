"""Settings and credentials of workers."""

from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr

from millrace.campaigns.worker import (
    SharedWorkerSettings,
    WorkerOptions,
    WorkerSettings,
    make_training_program,
    make_worker_environment,
    render_worker_settings,
)
from millrace.gradients import RunSettings
from millrace.keys.campaigns import CampaignKeys
from millrace.rentals import (
    CodeRepository,
    Instance,
    OfferRequest,
    RentalSettings,
    VastAccount,
    derive_node_key,
)
from millrace.settings import load_settings
from millrace.storage import Credentials, StoreSpec
from tests.support.rentals.parts import make_attempt, receive_program

SETTINGS = SharedWorkerSettings(
    campaign="c", run=RunSettings(run="c/run"), dataset="text",
    training=WorkerOptions(command=("true",), workers=3), prewarm_timeout=timedelta(minutes=5),
)  # fmt: skip
REPOSITORY = CodeRepository(repo_url="https://example.org/x")


def rent(store: StoreSpec, key: str = "account", **more: str) -> RentalSettings:
    program, storage_grants = make_training_program(SETTINGS, store, REPOSITORY)
    return RentalSettings(
        name="c", store=store, account=VastAccount(api_key=SecretStr(key)), program=program,
        storage_grants=storage_grants, request=OfferRequest(max_hourly=1.0, max_total=1.0),
        machines=3, **more,
    )  # fmt: skip


def test_machines_that_listen_have_a_port_that_is_open() -> None:
    assert rent(StoreSpec(url="file:///x")).effective_request.ports == 1


def test_the_key_of_an_agent_is_found_again_and_is_its_own() -> None:
    one = derive_node_key(VastAccount(api_key=SecretStr("a")), "c", 0)
    assert one == derive_node_key(VastAccount(api_key=SecretStr("a")), "c", 0)
    assert one != derive_node_key(VastAccount(api_key=SecretStr("a")), "c", 1)
    assert one != derive_node_key(VastAccount(api_key=SecretStr("a")), "d", 0)
    assert one != derive_node_key(VastAccount(api_key=SecretStr("b")), "c", 0)


@pytest.mark.parametrize("is_rented", [False, True])
def test_what_a_person_writes_is_filled_in_with_the_workers_number_and_nothing_else(
    is_rented: bool, tmp_path: Path
) -> None:
    command = ("bash", "-c", "echo ${HOME} $${X} ${1} {slot}")
    training = SETTINGS.training.model_copy(update={"command": command})
    shared = SETTINGS.model_copy(update={"training": training})
    store = StoreSpec(url=tmp_path.as_uri())
    path = tmp_path / "millrace-worker.yaml"
    environment = {"MILLRACE_STORE": store.url}
    if is_rented:
        program, _ = make_training_program(shared, store, REPOSITORY)
        rental = rent(store).model_copy(update={"program": program})
        environment = receive_program(rental, tmp_path, make_attempt(slot=2))
    else:
        path.write_text(render_worker_settings(shared, store, store, 2))
    settings = load_settings(path, WorkerSettings, environment)
    assert settings.training.command == ("bash", "-c", "echo ${HOME} $${X} ${1} 2")
    assert (settings.uid, settings.number, settings.training.workers) == ("worker-2", 2, 3)


def test_a_local_worker_has_the_mirrors_with_credentials_of_their_own(tmp_path: Path) -> None:
    pairs = [
        Credentials(access_key_id=n, secret_access_key=f"secret-{n}", session_token=f"secret-{n}t")
        for n in "ab"
    ]
    mirrors = [
        StoreSpec(url="r2://account/one", account_id="account", credentials=pairs[0]),
        StoreSpec(url="s3://two", endpoint="http://localhost:1", credentials=pairs[1]),
        StoreSpec(url="file:///three/${X}"),
    ]
    store = StoreSpec(url=tmp_path.as_uri())
    path = tmp_path / "millrace-worker.yaml"
    path.write_text(render_worker_settings(SETTINGS, store, store, 2, mirrors))
    assert "secret-" not in path.read_text()
    settings = load_settings(path, WorkerSettings, make_worker_environment(store, store, mirrors))
    assert list(settings.mirrors) == mirrors


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
    assert Instance.from_row(row).find_address(asked) == found
    assert Instance.from_row({**row, "public_ipaddr": None}).find_address(asked) == ""
