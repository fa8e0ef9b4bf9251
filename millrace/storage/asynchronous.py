"""Asynchronous twins of the verbs of `millrace.storage`.

``from millrace.storage import asynchronous``, then ``await asynchronous.read(store, key)`` and
``async for stat in asynchronous.list_objects(store, "prefix/")``. The arguments, results, errors,
retries and checks are those of the verb, since a twin calls its verb in a thread. Up to 64 verbs of
a process run at a time, and others wait. If a task is cancelled, the request under way ends in its
thread, and may still succeed. It is not tried again, except for a page of a
listing, and for a part of `open_writer` until its context ends.
"""

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager
from functools import lru_cache, wraps
from itertools import islice
from typing import Any, Generic, ParamSpec, Self, TypeVar

from millrace import storage
from millrace.errors import ConfigurationError
from millrace.storage.retry import limit_retries
from millrace.storage.writer import Writer
from millrace.threads import DaemonThreadPool

P = ParamSpec("P")
T = TypeVar("T")

_MAX_THREADS = 64
_LISTED = 1000  # items of a listing that are passed on at once: those of a page


@lru_cache
def _get_pool() -> DaemonThreadPool:
    return DaemonThreadPool(_MAX_THREADS, "storage")


os.register_at_fork(after_in_child=_get_pool.cache_clear)  # a child has none of the threads


async def _run(call: Callable[[], T]) -> T:
    stopped = threading.Event()

    def run_in_thread() -> T:
        with limit_retries(stopped):
            return call()

    try:
        return await asyncio.wrap_future(_get_pool().submit(run_in_thread))
    except asyncio.CancelledError:
        stopped.set()
        raise


def _make_twin(verb: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    @wraps(verb)
    async def twin(*args: P.args, **kwargs: P.kwargs) -> T:
        return await _run(lambda: verb(*args, **kwargs))

    return twin


def _make_iterating_twin(
    verb: Callable[P, Iterator[T]], at_once: int
) -> Callable[P, AsyncGenerator[T]]:
    @wraps(verb)
    async def twin(*args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[T]:
        source = _Source(lambda: verb(*args, **kwargs))
        try:
            while items := await _run(lambda: source.take(at_once)):
                for item in items:
                    yield item
        finally:
            _get_pool().submit(source.close)

    return twin


class _Source(Generic[T]):
    """Iterator that threads use in turn."""

    def __init__(self, begin: Callable[[], Iterator[T]]) -> None:
        self._begin = begin
        self._items: Iterator[T] | None = None
        self._lock = threading.Lock()

    def take(self, count: int) -> list[T]:
        """Return up to a number of the next items."""
        with self._lock:
            if self._items is None:
                self._items = self._begin()
            return list(islice(self._items, count))

    def close(self) -> None:
        """End the iterator, after a call that is under way."""
        with self._lock:
            close: Callable[[], None] | None = getattr(self._items, "close", None)
            if close is not None:
                close()


class AsyncWriter:
    """Asynchronous context of a writer: ``async with open_writer(store, key) as writer``."""

    def __init__(self, manager: AbstractContextManager[Writer]) -> None:
        self._manager = manager
        self._lock = threading.Lock()
        self._writer: Writer | None = None

    async def __aenter__(self) -> Self:
        await _run(self._begin)
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        await asyncio.shield(_run(lambda: self._end(error)))

    async def write(self, data: bytes) -> int:
        """Write bytes, and return their number. They may still be sent when this returns."""
        return await _run(lambda: self._write(data))

    def _begin(self) -> None:
        self._writer = self._manager.__enter__()

    def _write(self, data: bytes) -> int:
        with self._lock:
            if self._writer is None:
                raise ConfigurationError(
                    "The writer is not open: write within `async with open_writer(...)`."
                )
            return self._writer.write(data)

    def _end(self, error: BaseException | None) -> None:
        """Complete the object, or abort it after an error, once no write is under way."""
        with self._lock:
            self._writer = None
            if error is None:
                self._manager.__exit__(None, None, None)
            else:
                self._manager.__exit__(type(error), error, error.__traceback__)


def _make_writing_twin(
    verb: Callable[P, AbstractContextManager[Writer]],
) -> Callable[P, AsyncWriter]:
    @wraps(verb)
    def twin(*args: P.args, **kwargs: P.kwargs) -> AsyncWriter:
        return AsyncWriter(verb(*args, **kwargs))

    return twin


abort_upload = _make_twin(storage.abort_upload)
copy = _make_twin(storage.copy)
create = _make_twin(storage.create)
delete = _make_twin(storage.delete)
delete_one = _make_twin(storage.delete_one)
describe_difference = _make_twin(storage.describe_difference)
exists = _make_twin(storage.exists)
hash_object = _make_twin(storage.hash_object)
head = _make_twin(storage.head)
list_folders = _make_twin(storage.list_folders)
put = _make_twin(storage.put)
read = _make_twin(storage.read)
read_and_hash = _make_twin(storage.read_and_hash)
read_range = _make_twin(storage.read_range)
read_views_and_hash = _make_twin(storage.read_views_and_hash)

list_fairly = _make_iterating_twin(storage.list_fairly, _LISTED)
list_objects = _make_iterating_twin(storage.list_objects, _LISTED)
list_sorted_keys = _make_iterating_twin(storage.list_sorted_keys, _LISTED)
list_uploads = _make_iterating_twin(storage.list_uploads, _LISTED)
stream = _make_iterating_twin(storage.stream, 1)

open_writer = _make_writing_twin(storage.open_writer)
