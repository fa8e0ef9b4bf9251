"""A dataset is sharded on rented machines: what they are sent, and what they may reach."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from pydantic import SecretStr

from millrace import errors
from millrace.cli import main
from millrace.datasets import PipelineSettings
from millrace.remote import VastSettings, make_sharding_rental
from millrace.settings import load_settings
from millrace.storage import Right
from millrace.testing.vast import VastServer

STORE = {
    "url": "s3://bucket/below",
    "endpoint": "http://127.0.0.1:9",
    "credentials": {"access_key_id": "parent", "secret_access_key": "of all secrets"},
}
VAST = VastSettings.model_validate(
    {
        "account": {"api_key": "the account's"},
        "request": {"max_hourly": 1.0, "max_total": 5.0},
        "repo_url": "https://example.org/millrace",
        "machines": 3,
    }
)


def settings(**more: Any) -> PipelineSettings:
    source = {"include": ["*.jsonl"], **STORE, "url": "s3://bucket/below/raw/words"}
    return PipelineSettings.model_validate(
        {"dataset": "words", "source": source, "store": STORE, "sharding": {"seed": 7}, **more}
    )


def test_machines_are_sent_settings_without_a_secret_that_they_can_read(tmp_path: Path) -> None:
    rent = make_sharding_rental(settings(), VAST)
    assert (rent.name, rent.machines, rent.program.command[:2]) == (
        "shard/words", 3, ("millrace", "run"),
    )  # fmt: skip
    assert {(one.prefix, one.access) for one in rent.storage_grants} == {
        ("raw/words/", Right.READ), ("words/", Right.WRITE),
    }  # fmt: skip
    (text,) = rent.program.files.values()
    assert "secrets" not in text
    assert "account" not in text
    (tmp_path / "sent.yaml").write_text(text)
    there = {"MILLRACE_STORE": "s3://bucket/below"}
    for right in ("READ", "WRITE"):
        there |= {
            f"MILLRACE_{right}_{name}": f"{right} {name}"
            for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN")
        }
    read = load_settings(tmp_path / "sent.yaml", PipelineSettings, there)
    assert (read.dataset, read.sharding, read.execution) == (
        "words",
        settings().sharding,
        settings().execution,
    )
    assert read.store.url == STORE["url"]
    assert read.source.store.url == "s3://bucket/below/raw/words"
    assert read.source.store.credentials
    assert read.source.store.credentials.access_key_id == "READ ACCESS_KEY_ID"
    assert read.store.credentials
    assert read.store.credentials.session_token == SecretStr("WRITE SESSION_TOKEN")


def test_a_source_elsewhere_is_refused() -> None:
    source = {**STORE, "url": "s3://another/raw"}
    with pytest.raises(errors.ConfigurationError, match="does not lie below s3://bucket/below"):
        make_sharding_rental(settings(source=source), VAST)


def test_run_use_vast_rents_and_gives_back(
    vast: VastServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The handlers would replace pytest's own.
    monkeypatch.setattr("millrace.cli.machine.release_on_signal", lambda: None)
    key = vast.reset(rate=300.0, strict=False, program=100.0)
    (tmp_path / "store/raw").mkdir(parents=True)
    (tmp_path / "store/raw/a.jsonl").write_text('{"text": "x"}\n')
    path = tmp_path / "millrace.yaml"
    store = (tmp_path / "store").as_uri()
    section = VAST.model_dump(mode="json", exclude_defaults=True)
    section |= {"account": {"api_key": key, "server_url": vast.url}, "machines": 1}
    path.write_text(
        yaml.safe_dump(
            {
                "dataset": "words",
                "source": {"url": f"{store}/raw"},
                "store": {"url": store},
                "vast": section,
            }
        )
    )
    assert CliRunner().invoke(main, ["plan", str(path)]).exit_code == 0
    refused = CliRunner().invoke(main, ["run", str(path), "--use-vast"], input="n\n")
    assert refused.exit_code == 1
    assert "Rent 1 machine for shard/words, for at most $5.00 in all?" in refused.stderr
    unanswered = CliRunner().invoke(main, ["run", str(path), "--use-vast"])
    assert (unanswered.exit_code, "Add --yes" in unanswered.stderr) == (2, True)
    assert vast.list_machines() == []
    done = CliRunner().invoke(main, ["run", str(path), "--use-vast", "--yes"])
    assert done.exit_code == 0, done.output
    assert "shard/words/0: released (done: the program ended with exit code 0)" in done.output
    assert vast.list_alive() == []
    unmended = CliRunner().invoke(main, ["run", str(path), "--use-vast", "--repair"])
    assert (unmended.exit_code, vast.list_alive()) == (2, [])
    assert "Shard with --use-vast first, then run --repair alone" in unmended.output
    vast.reset()
    missing = yaml.safe_load(path.read_text())
    del missing["vast"]
    path.write_text(yaml.safe_dump(missing))
    refused = CliRunner().invoke(main, ["run", str(path), "--use-vast"])
    assert refused.exit_code == 2
    assert "vast: Field required" in refused.output
