"""Offsets of samples in tar shards, which several threads remember."""

import threading
from collections.abc import Iterator
from multiprocessing import get_context
from typing import Any

import pytest

from millrace.datasets.loader.sample_offsets import SampleOffsets


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_that_is_forked_while_offsets_are_noted_finds_them() -> None:
    offsets = SampleOffsets()
    begun, go_on = threading.Event(), threading.Event()

    def list_slowly() -> Iterator[tuple[int, int]]:
        begun.set()
        assert go_on.wait(60)
        yield 64, 70_000

    slow: Any = list_slowly()
    threading.Thread(target=offsets.add_shard, args=("a", slow)).start()
    assert begun.wait(60)
    threading.Timer(0.2, go_on.set).start()
    child = get_context("fork").Process(target=offsets.find, args=("a", 64))
    child.start()
    go_on.set()
    try:
        child.join(20)
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join()
