"""The cache of loaders: one limit for all, and what one loader gives up stays for the others."""

import gc
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.datasets.loader.page_cache import ByteCache, CacheKind, CacheReference
from millrace.errors import ConfigurationError

PAGE, LAYOUT, TOKENS = CacheKind.PAGE, CacheKind.LAYOUT, CacheKind.TOKENS


def get(reference: CacheReference, key: Any, size: int = 10, kind: CacheKind = PAGE) -> bool:
    """Get a value, and return whether it had to be made."""
    made: list[Any] = []

    def make() -> tuple[Any, int]:
        made.append(key)
        return key, size

    assert reference.get(kind, key, make) == key
    return bool(made)


def test_the_end_of_a_loader_takes_nothing_from_another() -> None:
    cache = ByteCache(100)
    one, other = cache.open(), cache.open()
    assert get(one, "shared")
    assert not get(other, "shared")
    assert get(one, "own")
    one.close()
    assert (cache.held_bytes, len(cache)) == (10, 1)
    assert not get(other, "shared")
    with pytest.raises(ConfigurationError, match="was closed"):
        get(one, "shared")
    other.close()
    assert (cache.held_bytes, len(cache)) == (0, 0)


def test_a_loader_that_is_forgotten_gives_up_its_values() -> None:
    cache = ByteCache(100)
    one, other = cache.open(), cache.open()
    get(one, "a")
    get(other, "b")
    del one
    gc.collect()
    assert not get(other, "b")
    assert len(cache) == 1


def test_what_was_used_last_is_kept_longest_and_layouts_longer_than_pages() -> None:
    cache = ByteCache(30)
    one = cache.open()
    for key, kind in (("layout", LAYOUT), ("a", PAGE), ("b", TOKENS)):
        assert get(one, key, kind=kind)
    assert not get(one, "a")
    assert get(one, "c")  # evicts b
    assert [get(one, key) for key in ("a", "c")] == [False, False]
    assert not get(one, "layout", kind=LAYOUT)
    assert get(one, "second", 25, LAYOUT)  # evicts the pages and the other layout
    assert len(cache) == 1
    assert get(one, "page")  # there is no room, and no layout goes for it
    assert not get(one, "second", kind=LAYOUT)


def test_a_smaller_limit_holds_at_once() -> None:
    cache = ByteCache(100)
    one = cache.open()
    for key in range(10):
        get(one, key)
    cache.resize(35)
    assert (cache.held_bytes, cache.most_bytes) == (30, 100)
    assert not get(one, 9)


CALLS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([*CacheKind]), st.integers(0, 8), st.booleans())
)


@given(calls=CALLS, limit=st.integers(0, 60))
def test_the_limit_holds_always(calls: list[tuple[int, CacheKind, int, bool]], limit: int) -> None:
    cache = ByteCache(limit)
    references = [cache.open() for _ in range(3)]
    for user, kind, key, is_end in calls:
        if is_end:
            references[user].close()
            references[user] = cache.open()
        else:
            get(references[user], key, key * 3, kind)
        assert cache.held_bytes <= cache.most_bytes <= limit
    for reference in references:
        reference.close()
    assert (cache.held_bytes, len(cache)) == (0, 0)


def test_threads_wait_for_one_that_makes_a_value_and_get_its_error() -> None:
    cache = ByteCache(100)
    references = [cache.open() for _ in range(8)]
    started, go = threading.Event(), threading.Event()
    made: list[int] = []

    def make() -> tuple[str, int]:
        made.append(1)
        started.set()
        assert go.wait(60)
        raise KeyError("first")

    def call(reference: CacheReference) -> str:
        try:
            return reference.get(PAGE, "a", make)
        except KeyError:
            return "error"

    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(call, references[0])
        assert started.wait(60)
        others = [pool.submit(call, one) for one in references[1:]]
        go.set()
        found = [one.result() for one in (first, *others)]
    assert found == ["error"] * 8
    assert get(references[1], "a")


def test_many_threads_keep_the_accounts_right() -> None:
    cache = ByteCache(500)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(30):
            reference = cache.open()
            for _ in range(20):
                get(reference, rng.randrange(80), 10, rng.choice([*CacheKind]))
            reference.close()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(12)))
    assert (cache.held_bytes, len(cache)) == (0, 0)
    assert cache.most_bytes <= 500


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_the_child_of_a_fork_has_the_values_and_waits_for_no_thread_of_its_parent() -> None:
    cache = ByteCache(100)
    one = cache.open()
    get(one, "known")
    started, go = threading.Event(), threading.Event()

    def make() -> tuple[str, int]:
        started.set()
        assert go.wait(60)
        return "slow", 10

    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(one.get, PAGE, "slow", make)
        assert started.wait(60)
        child = os.fork()
        if not child:
            is_right = not get(one, "known") and get(one, "slow")
            os._exit(0 if is_right else 1)
        _, status = os.waitpid(child, 0)
        go.set()
        assert pending.result() == "slow"
    assert status == 0
