"""Compile functions with numba, and keep the result where other processes find it.

numba (0.68) keeps an index of signatures and one file for each compiled function. It reads the
index, chooses a file name, writes the index, then the file. Two processes that compile different
signatures of a function at once choose the same name, and one of them may leave an index that calls
the other's code by its own signature: every later process that loads that pair fails on each call
(`TypeError`), however right the bytes that it is given. So one process at a time compiles or loads
here, by a lock on a file. The lock ends with its process. Names hold the digest of the source file
and numba's version, so that an index never refers to code of another version.
"""

import fcntl
import hashlib
import inspect
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba import njit
from numba.core.compiler_lock import global_compiler_lock

F = TypeVar("F", bound=Callable[..., Any])

_LOCK = "millrace-kernels.lock"
_held = 0  # how often this process is within `_alone`; changed under numba's own lock


def compiled(function: F) -> F:
    """Compile a function for each signature that it is called with, once for all processes."""
    source = Path(inspect.getfile(function)).read_bytes()
    digest = hashlib.sha256(source + numba.__version__.encode()).hexdigest()[:16]
    function.__qualname__ = f"{function.__qualname__}-{digest}"
    made: Any = njit(cache=True, nogil=True)(function)
    folder = Path(made.stats.cache_path)
    compile_one = made.compile

    def locked(signature: Any) -> Any:
        with _alone(folder):
            return compile_one(signature)

    made.compile = locked
    return made


@contextmanager
def _alone(folder: Path) -> Generator[None]:
    """Hold the lock of a cache's folder; a function may compile another one meanwhile."""
    global _held  # noqa: PLW0603
    with global_compiler_lock:
        if _held:
            yield
            return
        descriptor = _locked(folder / _LOCK)
        try:
            _held += 1
            yield
        finally:
            _held -= 1
            if descriptor is not None:
                os.close(descriptor)


def _locked(path: Path) -> int | None:
    """Wait for the lock of a file; None on a file system that has no locks, or is read-only."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
