"""Waiting for a file's final name."""

import threading
from datetime import timedelta
from pathlib import Path

import pytest

from millrace.errors import UnavailableError
from millrace.swarm import wait_for_path


def waiting(path: Path) -> tuple[threading.Thread, list[str]]:
    found: list[str] = []
    thread = threading.Thread(
        target=lambda: found.append(wait_for_path(path).read_text()), daemon=True
    )
    thread.start()
    return thread, found


def test_a_file_that_is_there_needs_no_waiting(tmp_path):
    file = tmp_path / "a"
    file.write_text("a")
    assert wait_for_path(str(file), timeout=timedelta(0)) == file


def test_a_file_is_awaited_also_in_a_folder_that_comes_later(tmp_path):
    file = tmp_path / "b" / "c" / "file"
    thread, found = waiting(file)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "other").write_text("other")
    (tmp_path / "b" / "c").mkdir()
    part = tmp_path / "b" / "c" / ".part"
    part.write_text("whole")
    part.rename(file)
    thread.join(30)
    assert found == ["whole"]


def test_a_folder_that_is_replaced_is_looked_at_again(tmp_path):
    folder = tmp_path / "b"
    folder.mkdir()
    thread, found = waiting(folder / "file")
    folder.rename(tmp_path / "gone")
    part = tmp_path / "part"
    part.write_text("new")
    folder.mkdir()
    part.rename(folder / "file")
    thread.join(30)
    assert found == ["new"]


def test_waiting_ends_with_a_sentence(tmp_path):
    with pytest.raises(UnavailableError, match="did not exist after"):
        wait_for_path(tmp_path / "never", timeout=timedelta(milliseconds=20))
