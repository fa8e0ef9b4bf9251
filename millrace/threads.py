"""Threads that a process does not wait for when it ends."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonPool:
    """Run calls in daemon threads.

    The threads of a `ThreadPoolExecutor` are joined when the interpreter ends, so one request to a
    store that sends a byte now and then would keep a process alive after its work.

    Args:
        threads: How many calls run at once, at most.
        name: What the threads' names begin with.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._most, self._name = threads, name
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads = 0

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call a function in a thread, as soon as one is free."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.append((future, lambda: call(*args, **kwargs)))
            begin = self._threads < self._most
            self._threads += begin
        if begin:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def shutdown(self) -> None:
        """Cancel the calls that have not begun. Those that have are not waited for."""
        with self._lock:
            waiting = list(self._waiting)
            self._waiting.clear()
        for future, _ in waiting:
            future.cancel()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                future, call = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
                future.set_exception(error)
            else:
                future.set_result(result)
