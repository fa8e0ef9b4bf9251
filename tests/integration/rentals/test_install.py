"""Refs that a rented machine checks out, by real git."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.rentals.guest.install import can_install_elsewhere, clone, make_environment
from millrace.testing.process import REPOSITORY


class Origin:
    """A repository that machines clone."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.git("init", "-q", "-b", "main")

    def git(self, *words: str) -> str:
        who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        command = ["git", "-C", str(self.folder), *who, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self, text: str) -> str:
        (self.folder / "program.txt").write_text(text)
        self.git("add", "-A")
        self.git("commit", "-q", "-m", text)
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Origin:
    made = Origin(tmp_path / "origin")
    monkeypatch.setenv("MILLRACE_REPO_URL", made.folder.as_uri())
    return made


def checked_out(folder: Path, ref: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    monkeypatch.setenv("MILLRACE_REPO_REF", ref)
    return clone(folder), (folder / "program.txt").read_text()


@pytest.mark.parametrize("names", ["heads", "tags", "default"])
def test_a_branch_or_a_tag_named_like_a_pinned_commit_does_not_win(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    pinned = origin.commit("right")
    evil = origin.commit("evil")
    folder = "heads" if names == "default" else names
    origin.git("update-ref", f"refs/{folder}/{pinned}", evil)
    if names == "default":
        origin.git("symbolic-ref", "HEAD", f"refs/heads/{pinned}")
    assert checked_out(tmp_path / "clone", pinned, monkeypatch) == (pinned, "right")
    assert checked_out(tmp_path / "clone", pinned, monkeypatch) == (pinned, "right")  # again


def test_a_pinned_commit_that_no_branch_leads_to_is_fetched(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin.commit("first")
    pinned = origin.commit("pinned")
    origin.git("reset", "-q", "--hard", "HEAD^")
    assert checked_out(tmp_path / "clone", pinned, monkeypatch) == (pinned, "pinned")


def test_an_abbreviated_commit_that_is_also_a_branch_is_refused(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = origin.commit("right")
    evil = origin.commit("evil")
    assert checked_out(tmp_path / "clone", pinned[:12], monkeypatch) == (pinned, "right")
    origin.git("update-ref", f"refs/heads/{pinned[:12]}", evil)
    with pytest.raises(RuntimeError, match=f"beginning of the commit {pinned}: write the whole"):
        checked_out(tmp_path / "clone", pinned[:12], monkeypatch)


def test_branches_and_tags_are_found_and_what_is_not_there_is_said(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = origin.commit("first")
    origin.git("tag", "-a", "v1", "-m", "v1")
    second = origin.commit("second")
    assert checked_out(tmp_path / "clone", "v1", monkeypatch) == (first, "first")
    assert checked_out(tmp_path / "clone", "main", monkeypatch) == (second, "second")
    third = origin.commit("third")  # the branch goes on
    assert checked_out(tmp_path / "clone", "main", monkeypatch) == (third, "third")
    origin.git("tag", "-f", "v1")  # is moved
    assert checked_out(tmp_path / "clone", "v1", monkeypatch) == (third, "third")
    for ref in ("gone", "0" * 40, "deadbeef"):
        with pytest.raises(RuntimeError, match=f"has no {ref}: name a branch, a tag or a commit"):
            checked_out(tmp_path / "clone", ref, monkeypatch)


def test_an_environment_uses_the_pip_of_the_image_and_is_where_pip_installs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", f"{sys.base_prefix}/bin/python3")
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    folder = tmp_path / "env"
    pip = make_environment(folder)
    assert not list(folder.glob("lib/*/site-packages/pip"))
    for command in (pip, (str(folder / "bin/pip"),)):
        listed = subprocess.run(
            [*command, "--disable-pip-version-check", "inspect", "--local"],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        assert '"installed": []' in listed.stdout


@pytest.mark.parametrize(
    ("version", "is_new"), [("22.2.2", False), ("22.3", True), ("23.0.1", True), ("9.0", False)]
)
def test_an_environment_has_a_pip_of_its_own_if_the_image_has_an_old_one(
    monkeypatch: pytest.MonkeyPatch, version: str, is_new: bool
) -> None:
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    assert can_install_elsewhere() is is_new
    monkeypatch.setattr(sys, "prefix", "/an/environment")
    assert can_install_elsewhere() is False


def test_the_reason_of_a_failure_reaches_the_owner_though_the_disk_is_full(
    origin: Origin, tmp_path: Path
) -> None:
    origin.commit("first")
    report = tmp_path / "setup.json"
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(tmp_path),
        "MILLRACE_REPO_URL": origin.folder.as_uri(), "MILLRACE_REPO_REF": "gone",
        "MILLRACE_REPORT_URL": report.as_uri(),
    }  # fmt: skip
    script = (REPOSITORY / "millrace/rentals/guest/install.py").read_text()
    with Path("/dev/full").open("wb") as full:  # for the log beside the clone
        subprocess.run(
            [sys.executable, "-I", "-c", script], cwd=tmp_path, env=environment, check=False,
            stdout=full, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    told = json.loads(report.read_text())
    assert told["state"] == "failed"
    assert "has no gone" in told["detail"]
