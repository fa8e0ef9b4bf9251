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

from blocks import Bucket, BucketRole
from flows.list_machines import list_machines
from flows.reap_machines import reap_machines
from millrace.errors import ConfigurationError
from millrace.testing.process import REPOSITORY
from tests.prefect_server import PrefectServer

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
    prefect_api: PrefectServer, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = next((one, schedule) for each, one, schedule in schedules() if each == name)
    parameters = {**found[0].get("parameters", {}), **found[1].get("parameters", {})}
    names = {each: f"{each}-{uuid4().hex[:8]}" for each in BLOCKS}  # none has such a block
    module, _, function = found[0]["entrypoint"].rpartition(".")
    run: Flow[..., Any] = getattr(importlib.import_module(module), function)

    state: State[Any] = run(**renamed(parameters, names), return_state=True)

    assert state.is_completed(), state.message
    said = re.fullmatch(
        r"There is no Millrace Bucket block [a-z]+-[0-9a-f]{8}.*: n.+\. "
        "`millrace setup` makes blocks.",
        state.message or "",
    )
    assert said, state.message
    assert warnings_of_runs(caplog) == []


def test_the_reaper_is_quiet_where_there_is_no_account(
    prefect_api: PrefectServer, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    """And who asks by hand what is rented hears that it is not known, not that it is nothing."""
    (tmp_path / "store").mkdir()
    name = f"dataset-{uuid4().hex[:8]}"
    Bucket(role=BucketRole.DATASET, url=(tmp_path / "store").as_uri()).save(name)
    nobody = f"vast-{uuid4().hex[:8]}"
    state: State[Any] = reap_machines(name, nobody, dry_run=False, return_state=True)
    assert state.is_completed()
    assert f"no Vast.ai Credentials block {nobody}: nothing was looked at" in (state.message or "")
    assert warnings_of_runs(caplog) == []
    with pytest.raises(ConfigurationError, match=r"no Vast\.ai Credentials block"):
        list_machines(name, nobody)
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
