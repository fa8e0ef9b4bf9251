"""Partial files that an earlier run left, or that another program removes."""

import errno
import os
from pathlib import Path

import pytest

from millrace.swarm import targets
from tests.unit.swarm.assembly.test_user_files import OLD, Run, make_file

open_file = os.open


def find_partial(root: Path) -> Path:
    return next((root / "model").glob(".*.part"))


def open_as_user(path: Path, flags: int, *mode: int) -> int:
    """Open a file as a user who is not root does."""
    wants_write = flags & (os.O_WRONLY | os.O_RDWR)
    if wants_write and os.path.lexists(path) and not os.stat(path).st_mode & 0o200:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return open_file(path, flags, *mode)


@pytest.mark.parametrize("mode", [0o444, 0o000])
def test_a_run_continues_after_a_kill_when_the_file_had_its_final_mode(tmp_path, monkeypatch, mode):
    file = make_file(mode=mode)
    run = Run(tmp_path, {file: OLD})
    run.assembler.open()
    run.write(0)
    run.assembler.close()
    find_partial(tmp_path).chmod(mode)
    monkeypatch.setattr(targets.os, "open", open_as_user)
    run = Run(tmp_path, {file: OLD})
    assert [number for number, _ in run.assembler.open()] == [0]
    run.write(1)
    run.assembler.close()
    assert run.finished == [0]
    assert (tmp_path / "model" / "m").stat().st_mode & 0o777 == mode
