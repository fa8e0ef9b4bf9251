"""The command that runs a campaign in its own process."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

import flows.campaign
from flows import campaign_command, local_server
from millrace.cli import main
from millrace.errors import UnavailableError
from tests.support.flows.campaigns import make_local_workers, make_plan_settings


def test_the_command_waits_for_a_server_as_long_as_a_deployment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    retries: list[int] = []

    def run_campaign(_: Any) -> None:
        retries.append(PREFECT_CLIENT_MAX_RETRIES.value())
        raise UnavailableError("enough")

    monkeypatch.setattr(flows.campaign, "run_campaign", run_campaign)
    # The server answers when the command begins, and not later.
    monkeypatch.setattr(local_server, "check_server", PREFECT_API_URL.value)
    monkeypatch.setattr(campaign_command, "interrupt_on_signal", lambda _: None)
    monkeypatch.setattr(campaign_command, "_find_console_handlers", list)
    plan = tmp_path / "campaign.yaml"  # JSON is YAML
    plan.write_text(
        json.dumps(make_plan_settings("small", tmp_path.as_uri(), tmp_path, make_local_workers()))
    )
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1/api"}):
        done = CliRunner().invoke(main, ["campaign", "run", str(plan), "--yes"])
    assert (done.exit_code, "enough" in done.output) == (1, True), done.output
    assert retries == [8]  # as in prefect.yaml, whose test counts the minutes
    assert PREFECT_CLIENT_MAX_RETRIES.value() != 8
