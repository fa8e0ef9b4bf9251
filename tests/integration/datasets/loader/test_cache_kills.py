"""Processes share the cache of a node while one is killed. Files are judged by their bytes."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millrace.testing.process import REPOSITORY

BODY = random.Random(1).randbytes(100_000)
STEPS = ["reserved", "half", "whole", "renamed", "marking", "marked", "lent"]


@contextmanager
def start(folder: Path, boundary: str, max_bytes: int = 150_000) -> Iterator[subprocess.Popen]:
    """Start a process that waits at a boundary."""
    command = [sys.executable, "-m", "tests.support.cache_process", str(folder), boundary]
    with subprocess.Popen(
        [*command, str(max_bytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=REPOSITORY,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def wait_for(process: subprocess.Popen, boundary: str) -> list[str]:
    """Wait until a process is at a boundary; return the steps before it."""
    steps = []
    while (line := process.stdout.readline().strip()) != boundary:
        assert line, f"it ended before {boundary!r}: {steps}"
        steps.append(line)
    return steps


def go_on(process: subprocess.Popen) -> list[str]:
    """Let a process run to its end; return its further steps."""
    out, _ = process.communicate("\n")
    assert process.returncode == 0
    return out.split()


@pytest.mark.parametrize("boundary", STEPS)
def test_a_process_that_is_killed_does_not_hinder_the_next(boundary: str, tmp_path: Path):
    with start(tmp_path, boundary) as first:
        wait_for(first, boundary)
        with start(tmp_path, "none") as second:
            os.kill(first.pid, signal.SIGKILL)
            assert first.wait() == -signal.SIGKILL
            steps = go_on(second)
    assert steps[-1] == "read"
    # A file that has its final name is not fetched again, whatever its mark is.
    assert ("reserved" in steps) == (STEPS.index(boundary) < STEPS.index("renamed"))
    (file,) = (tmp_path / "files").iterdir()
    assert file.read_bytes() == BODY
    assert list((tmp_path / "parts").iterdir()) == []


@pytest.mark.parametrize("boundary", ["mend", "half", "whole", "renamed", "marked"])
def test_a_file_whose_mend_was_killed_is_mended_by_the_next_process(boundary: str, tmp_path: Path):
    with start(tmp_path, "none") as process:
        go_on(process)
    (file,) = (tmp_path / "files").iterdir()
    file.write_bytes(bytes(len(BODY)))
    with start(tmp_path, boundary, 250_000) as first:
        assert wait_for(first, boundary)[:1] == ["mend"][: boundary != "mend"]
        with start(tmp_path, "none", 250_000) as second:
            os.kill(first.pid, signal.SIGKILL)
            steps = go_on(second)
    assert ("mend" in steps) == (boundary in {"mend", "half", "whole"})
    assert "reserved" not in steps
    assert file.read_bytes() == BODY
    assert list((tmp_path / "parts").iterdir()) == []


def test_a_second_process_waits_for_the_first_and_fetches_nothing(tmp_path: Path):
    with start(tmp_path, "half") as first:
        wait_for(first, "half")
        with start(tmp_path, "none") as second:
            assert go_on(first)[-1] == "read"
            assert go_on(second) == ["lent", "read"]


def test_a_file_that_another_process_reads_is_kept(tmp_path: Path):
    from millrace.datasets.loader.disk_cache import DiskCache

    other = random.Random(2).randbytes(100_000)
    digest = "blake3:" + "0" * 64

    def download(file: int, _: Path | None) -> None:
        os.pwrite(file, other, 0)

    cache = DiskCache(tmp_path, 150_000)
    with start(tmp_path, "lent") as process:
        wait_for(process, "lent")
        assert cache.lend(digest, len(other), download) is None
        assert go_on(process) == ["read"]
    with cache.lend(digest, len(other), download) as lent:
        assert lent.path.read_bytes() == other
        assert cache.held_bytes == 100_000


def test_what_a_killed_process_has_reserved_is_free_again(tmp_path: Path):
    from millrace.datasets.loader.disk_cache import DiskCache

    with start(tmp_path, "half") as process:
        wait_for(process, "half")
    assert [part.stat().st_size for part in (tmp_path / "parts").iterdir()] == [100_000]
    cache = DiskCache(tmp_path, 150_000)
    with cache.lend("blake3:" + "0" * 64, 100_000, lambda *_: None):
        assert cache.held_bytes == 100_000
