"""Compilation of functions with numba, with a cache that processes share safely.

numba (0.68) keeps an index of signatures, and one file for each compiled function. It reads the
index, chooses a file name, writes the index, then the file. Two processes that compile different
signatures at once choose the same name. Then the index of one may name the code of the other, and
each call in later processes raises `TypeError`.

Therefore only one process at a time compiles or loads, under a lock on a file. The lock ends with
its process. If a stopped process (SIGSTOP, a debugger) holds the lock, other processes soon compile
without the cache. Names include the digest of the source file and numba's version, so an index
never refers to code of another version.
"""

import fcntl
import hashlib
import inspect
import logging
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba import njit
from numba.core.caching import NullCache
from numba.core.compiler_lock import global_compiler_lock

F = TypeVar("F", bound=Callable[..., Any])

_LOCK = "millrace-kernels.lock"
_WAIT = 30.0  # seconds that a process waits for the lock once: far longer than one compilation
_LOOK = 0.05
_held = 0  # nested uses of the lock by this process; changed under numba's own lock
_gave_up = False  # whether the wait for the lock has timed out
_log = logging.getLogger(__name__)


def compile_once(function: F) -> F:
    """Compile a function for each signature of its calls, once for all processes."""
    source = Path(inspect.getfile(function)).read_bytes()
    digest = hashlib.sha256(source + numba.__version__.encode()).hexdigest()[:16]
    function.__qualname__ = f"{function.__qualname__}-{digest}"
    made: Any = njit(cache=True, nogil=True)(function)
    folder = Path(made.stats.cache_path)
    compile_one = made.compile

    def compile_locked(signature: Any) -> Any:
        with _hold_cache_lock(folder) as is_alone:
            if is_alone:
                return compile_one(signature)
            cache, made._cache = made._cache, NullCache()  # noqa: SLF001
            try:
                return compile_one(signature)
            finally:
                made._cache = cache  # noqa: SLF001

    made.compile = compile_locked
    return made


@contextmanager
def _hold_cache_lock(folder: Path) -> Generator[bool]:
    """Hold the lock of a cache's folder. The lock may be taken again within the block.

    Yields:
        Whether the cache may be used: false if another process holds the lock for too long.
    """
    global _held  # noqa: PLW0603
    with global_compiler_lock:
        if _held:
            yield True
            return
        try:
            descriptor = _acquire_lock(folder / _LOCK)
        except TimeoutError:
            yield False
            return
        try:
            _held += 1
            yield True
        finally:
            _held -= 1
            if descriptor is not None:
                os.close(descriptor)


def _acquire_lock(path: Path) -> int | None:
    """Wait for the lock of a file; return None if the file system has no locks or is read-only.

    Raises:
        TimeoutError: Another process holds it for too long.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except OSError:
        return None
    try:
        _wait_for(descriptor, path)
    except TimeoutError:
        os.close(descriptor)
        raise
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _wait_for(descriptor: int, path: Path) -> None:
    global _gave_up  # noqa: PLW0603
    deadline = time.monotonic() + _WAIT
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if _gave_up or time.monotonic() > deadline:
                if not _gave_up:
                    _log.warning(
                        "Another process has locked %s for more than %.0f s: kernels are compiled "
                        "without their cache.", path, _WAIT,
                    )  # fmt: skip
                _gave_up = True
                raise TimeoutError(str(path)) from None
            time.sleep(_LOOK)
        else:
            return
