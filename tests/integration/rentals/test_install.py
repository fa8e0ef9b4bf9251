"""Refs that a rented machine checks out, by real git."""

import subprocess
from pathlib import Path

import pytest

from millrace.rentals.guest.install import clone


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
    for ref in ("gone", "0" * 40, "deadbeef"):
        with pytest.raises(RuntimeError, match=f"has no {ref}: name a branch, a tag or a commit"):
            checked_out(tmp_path / "clone", ref, monkeypatch)
