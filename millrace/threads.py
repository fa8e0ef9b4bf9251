"""Threads that a process does not wait for when it ends."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreadPool:
    """Run calls in daemon threads.

    The threads of a `ThreadPoolExecutor` are joined when the interpreter ends, so one request to a
    store that sends a byte now and then would keep a process alive after its work.

    Args:
        max_threads: How many calls run at once, at most.
        name: What the threads' names begin with.
    """

    def __init__(self, max_threads: int, name: str) -> None:
        self._max_threads, self._name = max_threads, name
        self._lock = threading.Lock()
        self._pending: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads = 0

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call a function in a thread, as soon as one is free."""
        future: Future[T] = Future()
        with self._lock:
            self._pending.append((future, lambda: call(*args, **kwargs)))
            begin = self._threads < self._max_threads
            self._threads += begin
        if begin:
            threading.Thread(target=self._run_calls, name=self._name, daemon=True).start()
        return future

    def shutdown(self) -> None:
        """Cancel the calls that have not begun. Those that have are not waited for."""
        with self._lock:
            waiting = list(self._pending)
            self._pending.clear()
        for future, _ in waiting:
            future.cancel()

    def _run_calls(self) -> None:
        while True:
            with self._lock:
                if not self._pending:
                    self._threads -= 1
                    return
                future, call = self._pending.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
                future.set_exception(error)
            else:
                future.set_result(result)
