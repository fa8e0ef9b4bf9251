"""Commands of a bucket say in a sentence what is wrong, and what to write."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from millrace.cleanup import CleanupKind, Rule
from millrace.cleanup.planner import describe_rule
from millrace.cli import main
from millrace.cli.common import show_failures
from millrace.storage import ObjectFailure, list_objects, open_store, put


def run(*arguments: str, code: int = 2) -> str:
    done = CliRunner().invoke(main, ["bucket", *arguments])
    assert done.exit_code == code, done.output
    assert not isinstance(done.exception, Exception)
    return done.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "pp#1"
    put(open_store(str(path)), "a.tmp", b"1")
    return path


def test_an_age_that_no_rule_can_have_is_refused(folder: Path) -> None:
    said = run("clean", str(folder), "--older-than", "1000000d")
    assert "'1000000d' is too long a duration: write at most 5000w." in said


def test_clean_takes_the_path_of_a_folder(folder: Path) -> None:
    run("clean", str(folder), "--older-than", "0s", "--suffix", ".tmp", "--yes", code=0)
    assert not any(one.key == "a.tmp" for one in list_objects(open_store(str(folder))))


@pytest.mark.parametrize("command", ["list", "usage", "clean"])
def test_a_missing_folder_is_no_missing_settings_file(command: str, tmp_path: Path) -> None:
    options = ["--older-than", "1s"] if command == "clean" else []
    said = run(command, str(tmp_path / "missing"), *options, code=1)
    assert "There is no folder" in said


@pytest.mark.parametrize("command", ["clean", "audit", "list"])
def test_a_missing_settings_file_names_no_template_of_datasets(
    command: str, tmp_path: Path
) -> None:
    said = run(command, str(tmp_path / "missing.yaml"))
    assert "There is no settings file" in said
    assert "init" not in said


@pytest.mark.parametrize("price", ["nan", "inf"])
def test_a_price_is_a_number(price: str, folder: Path) -> None:
    assert "is no price" in run("usage", str(folder), "--price", price)


@pytest.mark.parametrize("age", ["1h and 30m", "1H"])
def test_a_duration_that_is_refused_is_shown_right(age: str, folder: Path) -> None:
    said = " ".join(run("list", str(folder), "--older-than", age).split())
    assert "or several such parts: 1h30m. Small letters only" in said


def test_an_age_may_have_several_parts_with_spaces(folder: Path) -> None:
    assert "0 objects" in run("list", str(folder), "--older-than", "1h 30m", code=0)


@pytest.mark.parametrize(
    ("age", "shown"), [("1s", "1s"), ("5000w", "5000w"), ("48h", "2d"), ("90m", "90m")]
)
def test_the_age_of_a_rule_is_shown_as_a_duration(age: str, shown: str) -> None:
    rule = Rule.model_validate({"kinds": [CleanupKind.GRADIENTS], "older_than": age})
    assert describe_rule(rule) == f"gradients, older than {shown}"


def test_a_failure_with_a_long_key_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    key = "k" * 1000
    show_failures([ObjectFailure(key, f"s3://bucket/{key}: refused")])
    assert len(capsys.readouterr().err) < 1000
