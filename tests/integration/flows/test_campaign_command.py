"""The command `millrace campaign`: what it prints, and how it ends."""

import logging
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from prefect import flow, task

from blocks import Bucket
from examples.tiny_lm.begin import begin
from flows.campaign import run_campaign
from flows.campaign_command import read_campaign_plan, should_print
from flows.campaign_plan import LocalWorkerOptions
from millrace.cli import main
from millrace.errors import ConfigurationError, UnavailableError
from millrace.storage import open_store
from millrace.testing.process import REPOSITORY
from tests.prefect_server import PrefectServer
from tests.support.blocks import save_document
from tests.support.flows.campaigns import make_local_workers, make_plan_settings, make_text

NOISE = (
    "Traceback", "Crash detected", "Encountered exception", "Finished in state Crashed",
    "Finished in state Failed", "API",
)  # fmt: skip


def started(plan: Path, environment: dict[str, str]) -> "subprocess.Popen[str]":
    """Start the command as a shell does: with a process group of its own."""
    command = [str(Path(sys.executable).parent / "millrace"), "campaign", "run", str(plan)]
    return subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def written(folder: Path, plan: dict[str, Any]) -> Path:
    path = folder / "campaign.yaml"
    path.write_text(yaml.safe_dump(plan))
    return path


def test_init_writes_a_campaign_that_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_STORAGE_PATH", raising=False)
    path = tmp_path / "campaign.yaml"
    done = CliRunner().invoke(main, ["campaign", "init", str(path)])
    assert (done.exit_code, f"millrace campaign run {path}" in done.output) == (0, True)
    plan = read_campaign_plan(path)
    assert isinstance(plan.training.machines, LocalWorkerOptions)
    assert plan.bucket == plan.publish.bucket == "/tmp/millrace-campaign"
    monkeypatch.setenv("LOCAL_STORAGE_PATH", "/srv/millrace")
    assert (
        read_campaign_plan(path).bucket
        == read_campaign_plan(path).publish.bucket
        == "/srv/millrace"
    )
    named = set(re.findall(r"\$\{([A-Z0-9_]+)", path.read_text())) - {"NAME"}
    example = (REPOSITORY / ".env.example").read_text()
    assert named <= set(re.findall(r"^#? ?([A-Z0-9_]+)=", example, re.MULTILINE))
    again = CliRunner().invoke(main, ["campaign", "init", str(path)])
    assert (again.exit_code, "already there" in again.output) == (2, True)

    # What is commented out is valid, too.
    lines = path.read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("  machines:"))
    end = next(n for n, line in enumerate(lines) if line.startswith("  epochs:"))
    rented = [line.replace("  # ", "  ", 1) for line in lines[start + 3 : end]]
    path.write_text("\n".join([*lines[:start], *rented, *lines[end:]]))
    assert read_campaign_plan(path).training.machines.kind == "rented"


def test_a_block_that_cannot_be_loaded_is_a_sentence(
    prefect_api: PrefectServer, tmp_path: Path
) -> None:
    name = save_document(prefect_api, Bucket, {"role": "dataset", "url": "my-bucket"})
    refusals = {
        f"millrace-bucket/{name}": "is not valid. url: write r2://",
        "millrace-bucket/none": "There is no block millrace-bucket/none: write TYPE/NAME",
        "none": "There is no block none: write TYPE/NAME",
    }
    for slug, said in refusals.items():
        bucket = {"$ref": {"block_document_slug": slug}}
        plan = make_plan_settings("small", bucket, tmp_path, make_local_workers())
        with pytest.raises(ConfigurationError, match=re.escape(said)):
            read_campaign_plan(written(tmp_path, plan))


def test_without_a_file_it_says_which_command_writes_one(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["campaign", "run", str(tmp_path / "none.yaml")])
    assert done.exit_code == 2
    assert "`millrace campaign init` writes one" in done.output
    assert len(done.output.splitlines()) == 1


@pytest.mark.soak
def test_an_error_is_a_sentence_and_success_is_a_report(
    prefect_server: PrefectServer, tmp_path: Path
) -> None:
    make_text(tmp_path / "text")
    plan = make_plan_settings(
        "small", (tmp_path / "store").as_uri(), tmp_path / "text", make_local_workers()
    )
    process = started(written(tmp_path, plan), prefect_server.environment)
    _, said = process.communicate()
    assert process.returncode == 1, said
    assert not [one for one in NOISE if one in said], said
    last = said.strip().splitlines()[-1]
    assert last.startswith("millrace: ")
    assert last.endswith("has no undamaged checkpoint: save one, or name another job.")

    del plan["training"], plan["publish"]
    process = started(written(tmp_path, plan), prefect_server.environment)
    printed, said = process.communicate()
    assert process.returncode == 0, said
    assert "| Dataset | 60 samples in" in printed


def test_a_failure_of_a_stage_that_is_tolerated_is_printed(
    prefect_api: PrefectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command says at its end why the campaign failed; of the stages it says nothing then."""

    @task
    def fails(said: str) -> None:
        raise UnavailableError(said)

    @flow(name="prewarm")
    def stage() -> None:
        fails("No node could be reached.")

    @flow(name=run_campaign.name)
    def top() -> None:
        with suppress(UnavailableError):
            stage()
        fails("There is no dataset.")

    printed = logging.StreamHandler(StringIO())
    printed.addFilter(should_print)
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [printed])
    with pytest.raises(UnavailableError):
        top()
    lines = printed.stream.getvalue().splitlines()
    (said,) = [line for line in lines if "No node could be reached." in line]
    assert "Finished in state Failed" in said
    assert not [line for line in lines if "There is no dataset." in line or "Traceback" in line]


@pytest.mark.soak
def test_a_campaign_without_a_server_is_interrupted_quietly(tmp_path: Path) -> None:
    make_text(tmp_path / "text")
    store = tmp_path / "store"
    begin(open_store(store.as_uri()), "small/first")
    plan = make_plan_settings("small", store.as_uri(), tmp_path / "text", make_local_workers())
    waits = "import time; print('it trains', flush=True); time.sleep(600)"
    plan["training"] |= {"command": ["python", "-c", waits]}
    environment = {
        **{name: value for name, value in os.environ.items() if "PREFECT" not in name},
        "PREFECT_HOME": str(tmp_path / "home"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    process = started(written(tmp_path, plan), environment)
    assert process.stderr is not None
    before: list[str] = []
    for line in process.stderr:
        before.append(line)
        if "| it trains" in line:
            break
    else:
        raise AssertionError("".join(before))
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, said = process.communicate()
    assert process.returncode == 130, said
    assert not [one for one in NOISE if one in said], said
    assert said.strip().splitlines()[-1] == "Stopped. Run it again: it goes on where it was."
