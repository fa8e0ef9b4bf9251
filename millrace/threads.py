"""Daemon threads, which do not delay the end of a process."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreadPool:
    """Pool of daemon threads that run calls.

    The interpreter joins the threads of a `ThreadPoolExecutor` when it ends. There, one request to
    a very slow store would keep the process alive after its work.

    Args:
        max_threads: Largest number of concurrent calls.
        name: Name of the threads.
    """

    def __init__(self, max_threads: int, name: str) -> None:
        self._max_threads, self._name = max_threads, name
        self._lock = threading.Lock()
        self._pending: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads = 0

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call a function in a thread, as soon as a thread is free."""
        future: Future[T] = Future()
        with self._lock:
            self._pending.append((future, lambda: call(*args, **kwargs)))
            begin = self._threads < self._max_threads
            self._threads += begin
        if begin:
            threading.Thread(target=self._run_calls, name=self._name, daemon=True).start()
        return future

    def shutdown(self) -> None:
        """Cancel the calls that have not begun, without waiting for the others."""
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
            except BaseException as error:  # noqa: BLE001 - `Future.result` raises it
                future.set_exception(error)
            else:
                future.set_result(result)
