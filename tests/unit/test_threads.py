"""Calls on threads: of a pool of daemon threads, and of slices, in any nesting and after a fork."""

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from millrace.threads import DaemonThreadPool, map_slices


def test_a_pool_that_is_shut_down_cancels_the_calls_that_have_not_begun():
    pool, begun, go_on = DaemonThreadPool(1, "calls"), threading.Event(), threading.Event()

    def wait() -> str:
        begun.set()
        assert go_on.wait(60)
        return "done"

    running, waiting = pool.submit(wait), pool.submit(wait)
    assert begun.wait(60)
    pool.shutdown()
    later = pool.submit_urgent(wait)
    assert pool.is_shut_down
    assert waiting.cancelled()
    assert later.cancelled()
    go_on.set()
    assert running.result(60) == "done"


@contextmanager
def no_new_threads() -> Generator[None]:
    """Let the system refuse to start threads, since their stacks exceed the address space."""
    size = threading.stack_size(1 << 47)
    try:
        yield
    finally:
        threading.stack_size(size)


@pytest.mark.parametrize("kind", ["submit", "submit_urgent"])
def test_a_call_for_which_no_thread_starts_is_refused_and_the_next_one_runs(kind):
    pool, called = DaemonThreadPool(1, "calls"), list[str]()
    submit = getattr(pool, kind)
    with no_new_threads(), pytest.raises(RuntimeError, match="can't start new thread"):
        submit(called.append, "refused")
    submit(called.append, "next").result(60)
    assert called == ["next"]


def test_threads_that_do_not_start_are_started_later():
    pool, go_on = DaemonThreadPool(1, "calls"), threading.Event()
    running = pool.submit(go_on.wait, 60)
    waiting = [pool.submit(lambda: "done") for _ in range(3)]
    with no_new_threads(), pytest.raises(RuntimeError, match="can't start new thread"):
        pool.set_max_threads(3)
    pool.set_max_threads(3)
    assert [call.result(60) for call in waiting] == ["done"] * 3
    go_on.set()
    assert running.result(60)


@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 300])
def test_each_element_is_in_one_slice_and_the_results_are_in_order(count, threads):
    slices = map_slices(lambda one: one, count, step=7, threads=threads)
    assert [number for one in slices for number in range(one.start, one.stop)] == list(range(count))
    assert all(one.start % 7 == 0 for one in slices)


def test_several_threads_work_at_once():
    both = threading.Barrier(2, timeout=60)
    map_slices(lambda _: both.wait(), 2, step=1, threads=2)


def test_a_call_may_itself_process_slices():
    def process(one: slice) -> int:
        return sum(map_slices(lambda inner: inner.start, 8, step=1, threads=8)) + one.start

    assert map_slices(process, 50, step=1, threads=8) == [28 + number for number in range(50)]


def test_the_error_of_the_first_slice_is_raised():
    later = threading.Event()

    def process(one: slice) -> None:
        if one.start == 2:
            later.wait(60)
            raise ValueError(one.start)
        if one.start == 3:
            later.set()
            raise ValueError(one.start)

    with pytest.raises(ValueError, match="2"):
        map_slices(process, 4, step=1, threads=2)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")  # from Python 3.12 on
def test_a_child_of_a_fork_starts_its_own_threads():
    map_slices(lambda one: one, 4, step=1, threads=2)
    child = os.fork()
    if not child:
        status = 1
        try:
            both = threading.Barrier(2, timeout=60)
            map_slices(lambda _: both.wait(), 2, step=1, threads=2)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
