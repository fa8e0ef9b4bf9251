"""Asynchronous twins beside each other, cancelled, and in a forked process."""

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace import errors, storage
from millrace.storage import Store, asynchronous, open_store
from tests.support.s3 import Refusal, Request, S3Endpoint, serve_s3


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path.as_uri())


def test_calls_run_beside_each_other_and_the_loop(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All calls wait for each other, so they would never end one after the other."""
    storage.put(store, "a", b"data")
    together = threading.Barrier(20)

    def read(store: Store, key: str) -> bytes:
        together.wait(60)
        return storage.read(store, key)

    twin = asynchronous._make_twin(read)

    async def read_all() -> list[bytes]:
        return await asyncio.gather(*(twin(store, "a") for _ in range(20)))

    assert asyncio.run(read_all()) == [b"data"] * 20


def test_a_twin_has_the_arguments_the_result_and_the_words_of_its_verb(store: Store) -> None:
    assert asynchronous.read_range.__doc__ == storage.read_range.__doc__

    async def use() -> list[str]:
        await asynchronous.put(store, "a/b", b"data")
        assert await asynchronous.read_range(store, "a/b", 1, 3) == b"at"
        with pytest.raises(errors.NotFoundError, match="none"):
            await asynchronous.read(store, "none")
        return [stat.key async for stat in asynchronous.list_objects(store, "a/")]

    assert asyncio.run(use()) == ["a/b"]


def test_a_cancelled_task_ends_at_once_and_its_iterator_is_closed() -> None:
    asked, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    def iterate() -> Iterator[int]:
        try:
            yield 1
            asked.set()
            go_on.wait(60)
            yield 2
        finally:
            closed.set()

    twin = asynchronous._make_iterating_twin(iterate, 1)

    async def use() -> None:
        async def consume() -> None:
            async for _ in twin():
                pass

        task = asyncio.create_task(consume())
        await asyncio.to_thread(asked.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not closed.is_set()  # the request under way ends in its thread

    asyncio.run(use())
    go_on.set()
    assert closed.wait(60)


def test_a_request_of_a_cancelled_task_is_not_tried_again() -> None:
    """A later try could overwrite what was written meanwhile."""
    arrived, cancelled, ended = threading.Event(), threading.Event(), threading.Event()

    def put(store: Store, key: str, data: bytes) -> None:
        try:
            storage.put(store, key, data)
        finally:
            ended.set()

    async def use(endpoint: S3Endpoint) -> None:
        task = asyncio.create_task(asynchronous._make_twin(put)(endpoint.open(), "a", b"old"))
        await asyncio.to_thread(arrived.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        cancelled.set()
        await asyncio.to_thread(ended.wait, 60)
        await asynchronous.put(endpoint.open(), "a", b"new")

    with serve_s3() as endpoint:
        answer = endpoint.answer

        def answer_late(request: Request) -> tuple[int, bytes] | None:
            arrived.set()
            cancelled.wait(60)
            return answer(request)

        endpoint.answer = answer_late
        endpoint.refusals = [Refusal("PUT", 503, "SlowDown")]
        asyncio.run(use(endpoint))
        assert [one.body for one in endpoint.requests if one.method == "PUT"] == [b"old", b"new"]
        assert endpoint.objects == {"a": b"new"}


def test_a_writer_publishes_its_object_at_the_end_of_its_context(store: Store) -> None:
    async def write(*, fails: bool) -> None:
        async with asynchronous.open_writer(store, "object") as writer:
            assert await writer.write(b"data") == 4
            assert not storage.exists(store, "object")
            if fails:
                raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        asyncio.run(write(fails=True))
    assert not storage.exists(store, "object")
    asyncio.run(write(fails=False))
    assert storage.read(store, "object") == b"data"


def test_a_writer_outside_of_its_context_is_refused(store: Store) -> None:
    async def write() -> Any:
        return await asynchronous.open_writer(store, "object").write(b"data")

    with pytest.raises(errors.ConfigurationError, match="write within `async with"):
        asyncio.run(write())


def test_a_forked_child_has_threads_of_its_own() -> None:
    twin = asynchronous._make_twin(threading.get_ident)

    async def call() -> int:
        return await twin()

    assert asyncio.run(call()) != threading.get_ident()
    child = os.fork()
    if not child:
        os._exit(asyncio.run(call()) == threading.get_ident())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
