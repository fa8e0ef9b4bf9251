"""Cache of values with a limit of their bytes."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class ByteCache(Generic[T]):
    """Values by their keys, up to a number of bytes. The value that was used last is kept longest.

    A value that is evicted stays with those who use it. Threads that ask for the same value at once
    wait for one of them to make it.

    Args:
        max_bytes: Bytes of all values together.

    Attributes:
        held_bytes: Bytes of the values that are held.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
        self._pending: dict[Hashable, Future[T]] = {}
        self.held_bytes = 0

    def get(self, key: Hashable, make: Callable[[], tuple[T, int]]) -> T:
        """Return the value of a key.

        Args:
            key: The key.
            make: Function that makes the value, and tells its bytes. Its error is raised in all
                threads that wait for the value, and the next call tries again.
        """
        with self._lock:
            if found := self._values.get(key):
                self._values.move_to_end(key)
                return found[0]
            pending = self._pending.get(key)
            own = None if pending else self._pending.setdefault(key, Future[T]())
        if own is None:
            assert pending is not None
            return pending.result()
        try:
            value, size = make()
        except BaseException as error:
            self._finish(key)
            own.set_exception(error)
            raise
        self._finish(key, (value, size))
        own.set_result(value)
        return value

    def _finish(self, key: Hashable, made: tuple[T, int] | None = None) -> None:
        with self._lock:
            del self._pending[key]
            if made is None or made[1] > self._max_bytes:
                return
            self._values[key] = made
            self.held_bytes += made[1]
            while self.held_bytes > self._max_bytes:
                _, (_, size) = self._values.popitem(last=False)
                self.held_bytes -= size
