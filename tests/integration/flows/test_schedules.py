"""Schedules of prefect.yaml, on a test server and with the flows that they start."""

import importlib
import logging
import re
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from prefect import Flow, State
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterState,
    FlowRunFilterStateName,
)
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ParameterTypeError, PrefectHTTPStatusError
from prefect.flow_engine import run_flow
from prefect.states import Pending

from blocks import Bucket, BucketRole
from flows.list_machines import list_machines
from flows.reap_machines import reap_machines
from millrace.errors import ConfigurationError
from millrace.testing.process import REPOSITORY
from millrace.testing.rgw import RGW
from tests.prefect_server import PrefectServer, wait_until
from tests.support.flows.fixtures import MakeBlock

BLOCKS = {"gradients", "dataset", "aggregator"}


def schedules() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """The name of each schedule that is on, its deployment, and the schedule itself."""
    made = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]
    return [
        (f"{one['name']}/{schedule['slug']}", one, schedule)
        for one in made
        for schedule in one.get("schedules", [])
        if schedule.get("active", True)
    ]


def renamed(value: Any, names: dict[str, str]) -> Any:
    """The same parameters, with other names of blocks."""
    match value:
        case str():
            return names.get(value, value)
        case list():
            return [renamed(one, names) for one in value]
        case dict():
            return {key: renamed(one, names) for key, one in value.items()}
        case _:
            return value


def import_flow(name: str) -> Flow[..., Any]:
    """The flow of a deployment."""
    made = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]
    (entrypoint,) = (one["entrypoint"] for one in made if one["name"] == name)
    module, _, function = entrypoint.rpartition(".")
    return getattr(importlib.import_module(module), function)


def run_scheduled(
    server: PrefectServer, name: str, parameters: dict[str, Any], others: dict[str, Any]
) -> State[Any]:
    """Run now, and with other parameters, what the server has scheduled for later."""
    with server.make_client() as client:
        deployment = client.read_deployment_by_name(f"{name}/{name}").id

        def find() -> FlowRun | None:
            runs = client.read_flow_runs(
                flow_run_filter=FlowRunFilter(
                    deployment_id=FlowRunFilterDeploymentId(any_=[deployment]),
                    state=FlowRunFilterState(name=FlowRunFilterStateName(any_=["Scheduled"])),
                ),
                sort=FlowRunSort.EXPECTED_START_TIME_DESC,
            )
            return next((one for one in runs if one.parameters == parameters), None)

        run = wait_until(find, f"a scheduled run of {name}")
        client.update_flow_run(run.id, parameters=others)
        client.set_flow_run_state(run.id, Pending(), force=True)
        return run_flow(
            import_flow(name), client.read_flow_run(run.id), others, return_type="state"
        )  # pyright: ignore[reportReturnType]


def warnings_of_runs(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings and errors that runs of flows and tasks have logged, and the engine in them."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING
        and record.name.startswith(("prefect.flow_runs", "prefect.task_runs", "millrace"))
    ]


@pytest.mark.parametrize("name", [name for name, _, _ in schedules()])
def test_a_scheduled_run_without_its_blocks_completes_and_says_so(
    deployed: PrefectServer,
    prefect_api: PrefectServer,
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = next((one, schedule) for each, one, schedule in schedules() if each == name)
    parameters = {**found[0].get("parameters", {}), **found[1].get("parameters", {})}
    names = {each: f"{each}-{uuid4().hex[:8]}" for each in BLOCKS}  # none has such a block

    state = run_scheduled(deployed, found[0]["name"], parameters, renamed(parameters, names))

    assert state.is_completed(), state.message
    said = re.fullmatch(
        r"There is no Millrace Bucket block [a-z]+-[0-9a-f]{8}.*: n.+\. "
        "`millrace setup` makes blocks.",
        state.message or "",
    )
    assert said, state.message
    assert warnings_of_runs(caplog) == []


TYPED: dict[str, dict[str, Any]] = {
    "abort-uploads": {"buckets": ["dataset"]},
    "audit-access": {"buckets": [{"bucket": "dataset"}]},
    "clean-bucket": {"bucket": "dataset", "related_buckets": []},
    "clean-versions": {"bucket": "dataset", "related_buckets": [], "current_version": "0.2.11"},
    "delete-gathers": {"bucket": "dataset", "version": "0.2.1"},
    "reap-machines": {"bucket": "dataset"},
    "verify-checkpoints": {"bucket": "dataset"},
    "verify-datasets": {"bucket": "dataset"},
}
"""Parameters with the name of a bucket, for each flow that a schedule may start without a block."""


@pytest.mark.parametrize("name", TYPED)
def test_a_name_that_a_person_has_mistyped_fails_the_run(
    deployed: PrefectServer, prefect_api: PrefectServer, name: str
) -> None:
    typed = f"datasett-{uuid4().hex[:8]}"
    done = deployed.run_here(f"{name}/{name}", **renamed(TYPED[name], {"dataset": typed}))
    assert done.code == 1, done.output
    assert f"There is no Millrace Bucket block '{typed}'. There" in done.output
    with pytest.raises(ConfigurationError, match=f"no Millrace Bucket block '{typed}'"):
        import_flow(name)(**renamed(TYPED[name], {"dataset": typed}))


def test_a_scheduled_cleaning_fails_without_a_related_bucket(
    deployed: PrefectServer, prefect_api: PrefectServer, tmp_path: Path
) -> None:
    """The bucket has a block. Otherwise it would never be cleaned, and every night be green."""
    given = {"bucket": "aggregator", "related_buckets": ["gradients"], "dry_run": False}
    none = f"none-{uuid4().hex[:8]}"
    others = {**given, "bucket": tmp_path.as_uri(), "related_buckets": [none]}
    state = run_scheduled(deployed, "clean-bucket", given, others)
    assert state.is_failed(), state.message
    assert f"There is no Millrace Bucket block {none} (`related_buckets`)" in (state.message or "")
    assert "set `related_buckets: []` if no other" in (state.message or "")


@pytest.mark.parametrize("name", ["abort-uploads", "audit-access"])
def test_a_list_without_buckets_is_refused(
    deployed: PrefectServer, prefect_api: PrefectServer, name: str
) -> None:
    """By the form, by the command line and by a call. Such a run would be green for ever."""
    with deployed.make_client() as client:
        deployment = client.read_deployment_by_name(f"{name}/{name}")
        with pytest.raises(PrefectHTTPStatusError, match="buckets"):
            client.create_flow_run_from_deployment(deployment.id, parameters={"buckets": []})
        with pytest.raises(PrefectHTTPStatusError, match="buckets"):
            client.update_deployment(deployment.id, DeploymentUpdate(parameters={"buckets": []}))
    with pytest.raises(ParameterTypeError, match="buckets: List should have at least 1 item"):
        import_flow(name)(buckets=[])


@pytest.mark.parametrize(
    ("name", "slug", "location"),
    [
        ("abort-uploads", "daily", "buckets"),
        ("clean-bucket", "dataset-nightly", "bucket"),
        ("reap-machines", "every-15-minutes", "bucket"),
    ],
)
def test_a_schedule_that_has_lost_its_parameters_fails(
    deployed: PrefectServer, prefect_api: PrefectServer, tmp_path: Path,
    name: str, slug: str, location: str,
) -> None:  # fmt: skip
    """Prefect removes them when it is switched off or on. Each run would be a dry run for ever."""
    found = next((one, schedule) for each, one, schedule in schedules() if each == f"{name}/{slug}")
    parameters = {**found[0].get("parameters", {}), **found[1].get("parameters", {})}
    folder = tmp_path.as_uri()
    others = {location: [folder] if location == "buckets" else folder}
    state = run_scheduled(deployed, name, parameters, others)
    assert state.is_failed()
    assert "The schedule of this run does not set `dry_run`." in (state.message or "")


def test_a_scheduled_audit_names_the_blocks_that_are_missing(
    deployed: PrefectServer, prefect_api: PrefectServer, rgw: RGW, bucket: str, block: MakeBlock
) -> None:
    slug = block(bucket, read=rgw.read_only, write=rgw.full)["$ref"]["block_document_slug"]
    made, none = slug.removeprefix("millrace-bucket/"), f"none-{uuid4().hex[:8]}"
    given = {"buckets": [{"bucket": name} for name in ("gradients", "dataset", "aggregator")]}
    others = {"buckets": [{"bucket": made}, {"bucket": none}]}
    state = run_scheduled(deployed, "audit-access", given, others)
    assert state.is_completed(), state.message
    run = state.state_details.flow_run_id
    assert run is not None
    report = prefect_api.read_artifacts(run)["audited-access"]
    assert "18 operations tried, all as they should be." in report
    assert f"There is no Millrace Bucket block {none}" in report
    Bucket.delete(made)


def test_the_reaper_is_quiet_where_there_is_no_account(
    deployed: PrefectServer,
    prefect_api: PrefectServer,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Any,
) -> None:
    """And who asks by hand what is rented hears that it is not known, not that it is nothing."""
    (tmp_path / "store").mkdir()
    name = f"dataset-{uuid4().hex[:8]}"
    Bucket(role=BucketRole.DATASET, url=(tmp_path / "store").as_uri()).save(name)
    nobody = f"vast-{uuid4().hex[:8]}"
    given = {"bucket": "dataset", "dry_run": False}
    state = run_scheduled(
        deployed, "reap-machines", given, {**given, "bucket": name, "vast": nobody}
    )
    assert state.is_completed()
    assert f"no Vast.ai Credentials block {nobody}: nothing was looked at" in (state.message or "")
    assert warnings_of_runs(caplog) == []
    for asked in (list_machines, reap_machines):
        with pytest.raises(ConfigurationError, match=r"no Vast\.ai Credentials block"):
            asked(name, nobody)
    Bucket.delete(name)


EVERY = {
    r"\*/(\d+) \* \* \* \*": "every-{}-minutes",
    r"\d+ \d+ \* \* \*": "(daily|nightly|{}nightly)",
    r"\d+ \d+ \* \* \d": "weekly",
}


@pytest.mark.parametrize("name", [name for name, _, _ in schedules()])
def test_a_schedule_is_called_by_when_it_runs(name: str) -> None:
    _, schedule = next((one, schedule) for each, one, schedule in schedules() if each == name)
    for cron, called in EVERY.items():
        if match := re.fullmatch(cron, schedule["cron"]):
            wanted = called.format(match[1] if match.groups() else "[a-z]+-")
            assert re.fullmatch(wanted, schedule["slug"])
            return
    raise AssertionError(schedule)


@pytest.mark.soak
def test_what_deploying_before_setup_says_is_explained(
    deployed: PrefectServer, tmp_path: Path
) -> None:
    made = (
        (REPOSITORY / "prefect.yaml")
        .read_text()
        .replace("name: millrace\n    job", "name: none\n    job")
    )
    (tmp_path / "prefect.yaml").write_text(made)
    said = deployed.run_prefect("deploy", "--all", "--prefect-file", str(tmp_path / "prefect.yaml"))
    assert said.returncode == 1
    sentence = "This deployment configuration references work pool 'none' which does not exist"
    assert sentence in " ".join(said.stdout.split())
    explained = " ".join((REPOSITORY / "docs/operations.md").read_text().split())
    at = explained.index(sentence.replace("none", "millrace"))
    assert "`millrace setup`" in explained[at : at + 300]
    assert "`millrace deploy`" in explained[at : at + 300]
