"""`millrace deploy`, on a real server."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import yaml
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.schedules import CronSchedule
from pydantic import SecretStr

from blocks import VastCredentials
from millrace.testing.process import REPOSITORY
from tests.prefect_server import PrefectServer, wait_until

DEPLOY = [sys.executable, "-c", "from flows.server_commands import deploy; deploy()"]


@pytest.fixture
def fresh_server(tmp_path: Path) -> Iterator[PrefectServer]:
    """A server on which nothing was set up."""
    server = PrefectServer(tmp_path / "home")
    yield server
    server.stop()


def deploy(
    server: PrefectServer, folder: Path, *options: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*DEPLOY, *options], cwd=folder, env=server.environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


@pytest.mark.soak
def test_deploy_needs_no_setup_before_it(fresh_server: PrefectServer, tmp_path: Path) -> None:
    project = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())
    wanted = project["deployments"] = [
        one for one in project["deployments"] if one["name"] in {"campaign", "clean-bucket"}
    ]
    (tmp_path / "prefect.yaml").write_text(yaml.safe_dump(project))
    done = deploy(fresh_server, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "work pool millrace: created" in done.stdout
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.endswith(": deployed")] == [
        f"{one['name']}/{one['name']}: deployed" for one in wanted
    ]
    assert len(lines) < 12
    assert "clean-bucket: will delete by its new schedules: gradients-nightly (7 2" in done.stdout
    missing = "millrace-bucket/gradients, millrace-bucket/dataset, millrace-bucket/aggregator"
    assert f"Missing blocks: {missing}." in done.stdout
    assert "`millrace setup` makes them" in done.stdout
    with fresh_server.make_client() as client:
        assert {one.name for one in client.read_deployments()} == {one["name"] for one in wanted}
        assert client.read_work_pool("millrace").type == "process"


def test_what_prefect_says_is_shown_where_it_fails(
    prefect_server: PrefectServer, tmp_path: Path
) -> None:
    broken = {
        "name": "broken",
        "entrypoint": "flows/none.py:none",
        "work_pool": {"name": "millrace"},
    }
    (tmp_path / "prefect.yaml").write_text(yaml.safe_dump({"deployments": [broken]}))
    failed = deploy(prefect_server, tmp_path)
    assert failed.returncode == 1
    assert "flows/none.py" in failed.stdout
    assert "Some flows were not deployed" in failed.stderr
    again = deploy(prefect_server, tmp_path, "--json")
    found = json.loads(again.stdout)
    assert (again.returncode, found["is_complete"], found["deployed"]) == (1, False, [])
    assert "flows/none.py" in again.stderr


def test_deploy_elsewhere_than_in_the_clone_is_a_sentence(
    prefect_server: PrefectServer, tmp_path: Path
) -> None:
    refused = deploy(prefect_server, tmp_path)
    assert refused.returncode == 2
    assert f"There is no prefect.yaml in {tmp_path}" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_deploying_again_keeps_what_people_have_stopped_scheduled_and_set(
    prefect_api: PrefectServer, tmp_path: Path
) -> None:
    """Prefect's command would replace a block in parameters by its content, secrets included."""
    project = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())
    (wanted,) = (one for one in project["deployments"] if one["name"] == "reap-machines")
    wanted["name"] = f"reap-{uuid4().hex[:8]}"
    wanted["schedules"].append(
        {
            "cron": "1 1 * * *",
            "timezone": "UTC",
            "slug": "other",
            "parameters": {"dry_run": True},
        }
    )
    project["deployments"] = [wanted]
    (tmp_path / "prefect.yaml").write_text(yaml.safe_dump(project))
    made = deploy(prefect_api, tmp_path, "--json")
    found = json.loads(made.stdout)
    assert made.returncode == 0, made.stderr
    assert found["deployed"] == [f"reap-machines/{wanted['name']}"]
    assert (found["is_complete"], found["changes"]) == (True, [])
    assert f"{found['deployed'][0]}: deployed" in made.stderr
    name, secret = f"reap-machines/{wanted['name']}", f"key-{uuid4().hex}"
    account = VastCredentials(api_key=SecretStr(secret)).save(wanted["name"])
    own = {"vast": {"$ref": {"block_document_id": str(account)}}}
    with prefect_api.make_client() as client:
        first = client.read_deployment_by_name(name)
        (off,) = (one for one in first.schedules if one.slug == "every-15-minutes")
        client.update_deployment_schedule(first.id, off.id, active=False)
        (set_,) = (one for one in first.schedules if one.slug == "other")
        client.update_deployment_schedule(
            first.id, set_.id, schedule=CronSchedule(cron="9 4 * * *"),
            parameters={"dry_run": False, **own},
        )  # fmt: skip
        client.create_deployment_schedules(
            first.id, [(CronSchedule(cron="*/5 * * * *"), True)], parameters=own
        )
        client.update_deployment(first.id, DeploymentUpdate(parameters={"bucket": "mine", **own}))
        client.pause_deployment(first.id)

        again = deploy(prefect_api, tmp_path)
        assert again.returncode == 0, again.stdout + again.stderr
        for line in (
            "stays paused", "its schedule every-15-minutes stays off", "*/5 * * * *",
            "its parameter bucket is set as in prefect.yaml", "keeps its parameter vast",
            "keeps its parameter vast (schedule other)",
            "its parameter dry_run is set as in prefect.yaml (schedule other)",
            "its schedule other is set as in prefect.yaml: 1 1 * * *",
        ):  # fmt: skip
            assert line in again.stdout
        assert again.stdout.count("its parameter vast") == 2
        second = client.read_deployment_by_name(name)
        assert second.paused
        assert second.parameters == {"bucket": "dataset", **own}
        assert secret not in second.model_dump_json()
        found = {one.slug: one for one in second.schedules}
        stopped = found.pop("every-15-minutes")  # the server has removed its parameters
        assert (stopped.active, stopped.parameters) == (False, {"dry_run": False})
        other = found.pop("other")
        assert (other.active, other.parameters) == (True, {"dry_run": True, **own})
        (kept,) = found.values()
        assert isinstance(kept.schedule, CronSchedule)
        assert (kept.schedule.cron, kept.active, kept.parameters) == ("*/5 * * * *", True, own)
        client.delete_deployment(first.id)
        client.delete_block_document(account)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_deployment_that_is_stopped_keeps_what_people_have_set(
    prefect_api: PrefectServer, tmp_path: Path, number: signal.Signals
) -> None:
    """Prefect is ahead of the command, which is stopped before it has read the second name."""
    project = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())
    (wanted,) = (one for one in project["deployments"] if one["name"] == "verify-datasets")
    names = [f"verify-{uuid4().hex[:8]}" for _ in range(2)]
    project["deployments"] = [wanted | {"name": name} for name in names]
    (tmp_path / "prefect.yaml").write_text(yaml.safe_dump(project))
    assert deploy(prefect_api, tmp_path).returncode == 0
    own = {"bucket": "dataset", "depth": "digests"}
    with prefect_api.make_client() as client:
        ids = [client.read_deployment_by_name(f"verify-datasets/{name}").id for name in names]
        for each in ids:
            client.update_deployment(each, DeploymentUpdate(parameters=own))
        command = subprocess.Popen(
            DEPLOY, cwd=tmp_path, env=prefect_api.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=_hear_hangups,  # noqa: PLW1509 - it only sets a signal
        )  # fmt: skip
        assert command.stdout is not None
        next(line for line in command.stdout if line.endswith(": deployed\n"))  # the first one
        command.send_signal(signal.SIGSTOP)
        wait_until(
            lambda: "depth" not in client.read_deployment(ids[1]).parameters, "the second one"
        )
        command.send_signal(number)
        command.send_signal(signal.SIGCONT)
        _, said = command.communicate()
        assert command.returncode == 130, said
        assert "Stopped. Run it again" in said
        assert [client.read_deployment(each).parameters for each in ids] == [own, own]
        for each in ids:
            client.delete_deployment(each)


def _hear_hangups() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
