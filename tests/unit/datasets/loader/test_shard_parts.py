"""Parts of a shard: which are requested, when, and the bytes that they give."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from millrace.datasets.loader.shard_parts import PartGrowth, ShardParts
from millrace.digest import BLOCK_SIZE
from millrace.errors import CorruptError
from millrace.threads import DaemonThreadPool

BLOCKS = 20
BODY = Random(1).randbytes(BLOCKS * BLOCK_SIZE - 1000)


class Requests:
    """Blocks that were requested, in order."""

    def __init__(self) -> None:
        self.made: list[tuple[int, int]] = []
        self.pool = DaemonThreadPool(1, "requests")

    def fetch(self, first: int, end: int) -> list[memoryview]:
        self.made.append((first, end))
        body = memoryview(BODY)[first * BLOCK_SIZE : end * BLOCK_SIZE]
        return [body[: len(body) // 3], body[len(body) // 3 :]]

    def open(self, growth: PartGrowth | None = None, ahead: int = 2) -> ShardParts:
        return ShardParts(
            "s", len(BODY), self.fetch, self.pool, part_blocks=4, parts_ahead=ahead, growth=growth
        )  # fmt: skip

    def read_in_order(self, shard: ShardParts, first: int) -> None:
        for block in range(first, BLOCKS):
            at = block * BLOCK_SIZE
            assert shard.read_on(at)[:9] == BODY[at : at + 9]
            shard.release(at)


def test_the_parts_of_a_stream_grow_and_go_on_in_its_next_shard() -> None:
    requests, growth = Requests(), PartGrowth()
    requests.read_in_order(requests.open(growth, ahead=0), 15)
    assert requests.made == [(15, 16), (16, 17), (17, 19), (19, 20)]
    requests.made.clear()
    requests.read_in_order(requests.open(growth, ahead=0), 0)
    assert requests.made == [(0, 4), (4, 8), (8, 12), (12, 16), (16, 20)]


def test_the_first_part_of_a_stream_waits_for_no_other() -> None:
    requests = Requests()
    shard = requests.open(PartGrowth())
    assert len(shard.read(100, 200)) == 100
    assert requests.made == [(0, 1)]
    shard.read(BLOCK_SIZE, BLOCK_SIZE + 1)
    requests.pool.submit(int).result()  # after the parts that are fetched ahead
    assert requests.made == [(0, 1), (1, 2), (2, 4)]
    shard.read(2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1)
    requests.pool.submit(int).result()
    assert requests.made[3:] == [(4, 6), (6, 10)]


def test_without_growth_all_parts_are_of_one_length() -> None:
    requests = Requests()
    shard = requests.open()
    shard.read(0, 1)
    requests.pool.submit(int).result()
    assert requests.made == [(0, 4), (4, 8), (8, 12)]


@pytest.mark.parametrize("seed", range(20))
def test_any_ranges_are_those_of_the_shard(seed: int) -> None:
    rng, requests = Random(seed), Requests()
    shard = requests.open(PartGrowth() if seed % 2 else None, ahead=seed % 3)
    for _ in range(30):
        start = rng.randrange(len(BODY) + 1)
        end = min(len(BODY), start + rng.choice([0, 1, 1000, BLOCK_SIZE, 6 * BLOCK_SIZE]))
        match rng.randrange(4):
            case 0 if start < len(BODY):
                view = shard.read_on(start)
                assert len(view) > 0
                assert view == memoryview(BODY)[start : start + len(view)]
            case 1:
                assert shard.read_once(start, end) == memoryview(BODY)[start:end]
            case 2:
                shard.release(start)
            case _:
                assert shard.read(start, end) == memoryview(BODY)[start:end]


def test_bytes_after_the_end_are_refused() -> None:
    shard = Requests().open(PartGrowth())
    with pytest.raises(CorruptError, match="ends before"):
        shard.read(0, BLOCKS * BLOCK_SIZE + 1)


def test_a_window_is_read_before_the_parts_after_others() -> None:
    gate, order = threading.Event(), list[int]()

    def fetch(first: int, last: int) -> list[memoryview]:
        gate.wait(60)
        order.append(first)
        return [memoryview(bytes((last - first) << 20))]

    pool = DaemonThreadPool(1, "requests")
    shard = ShardParts("s", 8 << 20, fetch, pool, part_blocks=1, parts_ahead=2)
    other = ShardParts("t", 8 << 20, fetch, pool, part_blocks=1, parts_ahead=2)
    with ThreadPoolExecutor(2) as readers:
        first = readers.submit(shard.read, 0, 10)
        until(lambda: len(shard._parts) == 3)
        second = readers.submit(other.read, 2 << 20, 4 << 20)
        until(lambda: len(other._parts) == 4)
        gate.set()
        assert (len(first.result(60)), len(second.result(60))) == (10, 2 << 20)
        assert order[:3] == [0, 2, 3]
        assert len(shard.read(1 << 20, 2 << 20)) == 1 << 20


def until(holds: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    while not holds():
        time.sleep(0.001)
