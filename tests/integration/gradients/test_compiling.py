"""Compiled functions that many processes keep in one cache."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.gradients.compiling_child import VALUES
from tests.support.fork_server import RUN_MODULE, ForkedProcess, get_fork_server

Start = Callable[..., ForkedProcess]

READ_SETTINGS = "import numba; numba.config.reload_config()"
"""Lets a process whose parent has imported numba use the cache of its own environment."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start processes that call a kernel, with an empty cache of their own."""
    with ExitStack() as stack:

        def started(*arguments: str) -> ForkedProcess:
            process = get_fork_server("numba").start(
                READ_SETTINGS + RUN_MODULE,
                "tests.integration.gradients.compiling_child",
                *arguments,
                env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")},
                stdin=True,
            )
            stack.callback(process.__exit__, None, None, None)
            stack.callback(process.kill)
            return process

        yield started


def heard(process: ForkedProcess) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: ForkedProcess) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_two_processes_that_compile_at_once_leave_no_wrong_pair_in_the_cache(start: Start) -> None:
    first = start("float32", "stop")
    assert heard(first) == "before the index"  # it has chosen the name of its file
    second = start("float64")
    said = heard(second)
    assert said in {"waiting", "3.0"}
    tell(first)
    assert heard(first) == "after the index"
    first.kill()  # and has not written it
    assert said == "waiting"
    assert heard(second) == "3.0"
    for layout in ("float32", "float64"):
        assert heard(start(layout)) == "3.0"


@pytest.mark.soak
def test_many_processes_that_begin_at_once_on_an_empty_cache_are_all_right(start: Start) -> None:
    for _ in range(2):  # the second time, all is there
        processes = [start(layout) for layout in VALUES for _ in range(2)]
        said = [process.communicate()[0].split("\n")[-2] for process in processes]
        assert said == ["3.0"] * len(processes)


def test_a_process_that_stops_within_the_lock_holds_up_no_other(start: Start) -> None:
    first = start("float32", "stop")
    assert heard(first) == "before the index"
    for layout in ("float64", "float32"):
        second = start(layout, "impatient")
        assert heard(second) == "waiting"
        assert heard(second) == "3.0"
    tell(first)
    assert heard(first) == "after the index"
    tell(first)
    assert heard(first) == "3.0"
    for layout in ("float32", "float64"):
        assert heard(start(layout)) == "3.0"
