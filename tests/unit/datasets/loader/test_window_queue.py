"""Windows of a stream are loaded ahead, until the iteration ends."""

import threading
from concurrent.futures import CancelledError

import pytest

from millrace.datasets.loader.readers import DecodeRows
from millrace.datasets.loader.window_queue import ShuffleWindowQueue
from millrace.threads import DaemonThreadPool


def test_no_window_is_loaded_after_the_end_of_the_iteration() -> None:
    begun, go_on, loaded = threading.Event(), threading.Event(), list[int]()

    def load(window: int) -> list[DecodeRows]:
        loaded.append(window)
        begun.set()
        assert go_on.wait(60)
        return []

    pool = DaemonThreadPool(1, "windows")
    queue = ShuffleWindowQueue(load, range(9), depth=3, pool=pool)
    assert begun.wait(60)
    pool.shutdown()
    go_on.set()
    assert queue.take() == []  # it was being loaded
    with pytest.raises(CancelledError):
        queue.take()
    assert loaded == [0]
