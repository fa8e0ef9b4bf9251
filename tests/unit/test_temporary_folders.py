"""Temporary folders of killed processes are removed, and those of living processes are not."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.temporary_folders import make_temporary_folder

PREFIX = "millrace-datasets-"
CODE = f"""
import sys, time
from millrace.temporary_folders import make_temporary_folder
with make_temporary_folder({PREFIX!r}) as folder:
    (folder / "file").write_text("x")
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator["subprocess.Popen[str]"]:
    """A process that has a temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def read_folder(process: "subprocess.Popen[str]") -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


def test_the_folder_of_a_killed_process_is_removed_by_the_next(
    holder: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    folder = read_folder(holder)
    holder.kill()
    holder.wait()
    assert (folder / "file").exists()
    other = tmp_path / "another-program"
    other.mkdir()
    (tmp_path / f"{PREFIX}file").write_text("no folder")
    (tmp_path / f"{PREFIX}link").symlink_to(other)
    with make_temporary_folder(PREFIX) as own:
        assert not folder.exists()
        assert own.is_dir()
    assert not own.exists()
    left = {f"{PREFIX}file", f"{PREFIX}link", "another-program"}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_the_folder_of_a_living_process_stays(holder: "subprocess.Popen[str]") -> None:
    folder = read_folder(holder)
    with make_temporary_folder(PREFIX), make_temporary_folder(PREFIX) as own:
        assert (folder / "file").exists()
        assert own != folder
    assert (folder / "file").exists()


def test_a_folder_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made: list[str] = []
    make = tempfile.mkdtemp

    def make_and_lose(**options: str) -> str:
        made.append(make(**options))
        if len(made) == 1:
            Path(made[0]).rmdir()
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_lose)
    with make_temporary_folder(PREFIX) as folder:
        assert [str(folder)] == made[1:]
        assert folder.is_dir()
