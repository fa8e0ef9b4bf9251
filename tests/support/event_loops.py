"""Asynchronous functions, called from a test that is not asynchronous."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import contextmanager
from inspect import isasyncgen, iscoroutine
from typing import Any, Self

from millrace.storage.asynchronous import AsyncWriter


class EventLoopThread:
    """Event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Wait for a call in the loop, and return its result."""
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that waits for an asynchronous one."""

        def call(*args: Any, **kwargs: Any) -> Any:
            made = function(*args, **kwargs)
            if iscoroutine(made):
                return self.run(made)
            return self._iterate(made) if isasyncgen(made) else self._write(made)

        return call

    def _iterate(self, items: AsyncIterator[Any]) -> Generator[Any]:
        async def take() -> list[Any]:
            async for item in items:
                return [item]
            return []

        async def close() -> None:
            await items.aclose()  # type: ignore[attr-defined]

        try:
            while found := self.run(take()):
                yield found[0]
        finally:
            self.run(close())

    @contextmanager
    def _write(self, writer: AsyncWriter) -> Generator[Any]:
        loop = self

        class Blocking:
            def write(self, data: bytes) -> int:
                return loop.run(writer.write(data))

        async def end(error: BaseException | None) -> None:
            await writer.__aexit__(None, error, None)

        self.run(writer.__aenter__())
        try:
            yield Blocking()
        except BaseException as error:
            self.run(end(error))
            raise
        self.run(end(None))
