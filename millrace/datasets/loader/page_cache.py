"""Cache of what loaders read, with one limit of its bytes for all loaders of a process."""

import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from millrace.errors import ConfigurationError

T = TypeVar("T")

DEFAULT_BYTES = 256 << 20
"""Limit of the cache that the loaders of a process share."""


class CacheKind(StrEnum):
    """Kind of a cached value."""

    LAYOUT = "layout"  # places of the pages of a file
    PAGE = "page"
    TOKENS = "tokens"


Key = tuple[CacheKind, Hashable]

# One lock for all caches, since it is held while the process is forked. Otherwise the child could
# get a cache in the middle of a change, or a lock that no thread will release.
_lock = threading.Lock()
_caches: "weakref.WeakSet[ByteCache]" = weakref.WeakSet()


@dataclass(slots=True)
class _CacheEntry:
    """Cached value.

    Attributes:
        value: The value.
        size: Its bytes.
        users: Numbers of the references that have used the value.
    """

    value: Any
    size: int
    users: set[int] = field(default_factory=set[int])


class ByteCache:
    """Values by their keys, up to a number of bytes. Several loaders share a cache.

    A value is kept while a reference that has used it is open, and there is room. Pages and tokens
    are evicted first, those that were used last at the end, and then layouts in the same order. A
    value that is evicted stays with those who use it.

    Args:
        max_bytes: Bytes of all values together.

    Attributes:
        held_bytes: Bytes of the values that are held.
        most_bytes: Largest number of bytes that were held at one time.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._layouts: OrderedDict[Key, _CacheEntry] = OrderedDict()
        self._pages: OrderedDict[Key, _CacheEntry] = OrderedDict()
        self._pending: dict[Key, Future[Any]] = {}
        self._last = 0
        self._references: dict[int, set[Key]] = {}
        self._abandoned: deque[int] = deque()
        self.held_bytes = self.most_bytes = 0
        _caches.add(self)

    def open(self) -> "CacheReference":
        """Return a reference to the cache. Its values stay until the reference is closed."""
        with _lock:
            self._close_abandoned()
            self._last += 1
            self._references[self._last] = set()
            return CacheReference(self, self._last)

    def resize(self, max_bytes: int) -> None:
        """Change the limit, and evict what is over it."""
        with _lock:
            self._max_bytes = max_bytes
            self._evict()

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self._layouts) + len(self._pages)

    def get(self, reference: int, key: Key, make: Callable[[], tuple[T, int]]) -> T:
        """Return the value of a key, see `CacheReference.get`."""
        with _lock:
            self._close_abandoned()
            used = self._references.get(reference)
            if used is None:
                raise ConfigurationError("The loader was closed. Open the dataset again.")
            values = self._select(key)
            if found := values.get(key):
                values.move_to_end(key)
                found.users.add(reference)
                used.add(key)
                return found.value
            pending = self._pending.get(key)
            own = None if pending else self._pending.setdefault(key, Future[Any]())
        if own is None:
            assert pending is not None
            value = pending.result()
            with _lock:
                if (kept := values.get(key)) and reference in self._references:
                    kept.users.add(reference)
                    self._references[reference].add(key)
            return value
        try:
            value, size = make()
        except BaseException as error:
            with _lock:
                self._pending.pop(key, None)
            own.set_exception(error)
            raise
        with _lock:
            self._pending.pop(key, None)
            self._keep(reference, key, _CacheEntry(value, size, {reference}))
        own.set_result(value)
        return value

    def close(self, reference: int) -> None:
        """Forget a reference, and the values that no other one has used."""
        with _lock:
            self._close(reference)

    def abandon(self, reference: int) -> None:
        """Close a reference at the next call. A finalizer may run while this thread has the lock.

        Args:
            reference: Number of the reference.
        """
        self._abandoned.append(reference)

    def forget_pending(self) -> None:
        """Forget values that are being made. The child of a fork has no thread that makes them."""
        self._pending.clear()

    def _close_abandoned(self) -> None:
        while self._abandoned:
            self._close(self._abandoned.popleft())

    def _close(self, reference: int) -> None:
        for key in self._references.pop(reference, set()):
            entry = self._select(key)[key]
            entry.users.discard(reference)
            if not entry.users:
                self._drop(key)

    def _select(self, key: Key) -> OrderedDict[Key, _CacheEntry]:
        return self._layouts if key[0] is CacheKind.LAYOUT else self._pages

    def _keep(self, reference: int, key: Key, entry: _CacheEntry) -> None:
        used = self._references.get(reference)
        if used is None or entry.size > self._max_bytes:
            return
        self._evict(entry.size if key[0] is CacheKind.LAYOUT else 0)
        # Room for a page is made among the pages. Layouts were more expensive to fetch.
        while self.held_bytes + entry.size > self._max_bytes and self._pages:
            self._drop(next(iter(self._pages)))
        if self.held_bytes + entry.size > self._max_bytes:
            return
        self._select(key)[key] = entry
        used.add(key)
        self.held_bytes += entry.size
        self.most_bytes = max(self.most_bytes, self.held_bytes)

    def _evict(self, room: int = 0) -> None:
        """Drop values until there is room for another one."""
        for values in (self._pages, self._layouts):
            while values and self.held_bytes + room > self._max_bytes:
                self._drop(next(iter(values)))

    def _drop(self, key: Key) -> None:
        entry = self._select(key).pop(key)
        self.held_bytes -= entry.size
        for user in entry.users:
            if used := self._references.get(user):
                used.discard(key)


class CacheReference:
    """Reference of a loader to a cache.

    Args:
        cache: The cache.
        number: Number of the reference.
    """

    def __init__(self, cache: ByteCache, number: int) -> None:
        self._cache, self._number = cache, number
        self._finalizer = weakref.finalize(self, cache.abandon, number)
        self._finalizer.atexit = False

    def get(self, kind: CacheKind, key: Hashable, make: Callable[[], tuple[T, int]]) -> T:
        """Return the value of a key. Threads that ask for a value at once wait for one to make it.

        Args:
            kind: Kind of the value.
            key: Key among the values of the kind.
            make: Function that makes the value, and tells its bytes. Its error is raised in all
                threads that wait for the value, and the next call tries again.

        Raises:
            ConfigurationError: The reference was closed.
        """
        return self._cache.get(self._number, (kind, key), make)

    def close(self) -> None:
        """Give up the values. Those that other references have used stay."""
        self._finalizer.detach()
        self._cache.close(self._number)


_shared = ByteCache(DEFAULT_BYTES)


def get_shared_cache() -> ByteCache:
    """Return the cache that the loaders of this process share by default."""
    return _shared


def get_cache_lock() -> threading.Lock:
    """Return a lock that is free in the child of a fork. Only short work is done under it."""
    return _lock


def _continue_in_child() -> None:
    for cache in _caches:
        cache.forget_pending()
    _lock.release()


os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_continue_in_child
)
