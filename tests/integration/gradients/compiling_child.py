"""Call a kernel: ``python -m tests.integration.gradients.compiling_child LAYOUT [stop|impatient]``.

It prints what the kernel says, or the error. With ``stop`` it says when it is about to write the
index of numba's cache, and once more when it has; each time it goes on with a line of its input. It
says ``waiting`` when another process holds the lock; with ``impatient`` it does not wait for long.
"""

import fcntl
import sys
from typing import Any

import numpy as np
from numba.core import caching

from millrace.gradients.codec import compiling, kernels

VALUES = {
    "float32": np.ones(3, np.float32),
    "float64": np.ones(3, np.float64),
    "strided": np.ones(6, np.float32)[::2],
    "reversed": np.ones(3, np.float64)[::-1],
}


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    layout, *more = sys.argv[1:]
    if "impatient" in more:
        compiling._WAIT = 0.2  # pyright: ignore[reportPrivateUsage]
    if "stop" in more:
        save = caching.IndexDataCacheFile._save_index  # pyright: ignore[reportPrivateUsage]

        def stopping(self: Any, overloads: Any) -> None:
            say("before the index")
            sys.stdin.readline()
            save(self, overloads)
            say("after the index")
            sys.stdin.readline()

        caching.IndexDataCacheFile._save_index = stopping  # pyright: ignore[reportPrivateUsage]
    lock, said = fcntl.flock, list[str]()

    def saying(descriptor: int, operation: int) -> None:
        try:
            lock(descriptor, operation)
        except BlockingIOError:
            if not said:
                said.append("waiting")
                say("waiting")
            raise

    fcntl.flock = saying
    try:
        say(str(kernels.sum_squares(VALUES[layout])))
    except TypeError as error:
        say(f"TypeError {error}")


if __name__ == "__main__":
    main()
