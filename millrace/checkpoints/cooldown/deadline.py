"""Time limit of an epoch's end, from the side of one member."""

import time
from datetime import timedelta


class Deadline:
    """Time limit that can be extended a number of times.

    Args:
        limit: Time limit, and the length of each extension.
        extensions: Largest number of extensions.

    Attributes:
        times: Number of times that an extension was asked for.
    """

    def __init__(self, limit: timedelta, extensions: int) -> None:
        self._limit, self._extensions = limit.total_seconds(), extensions
        self._began = time.monotonic()
        self._due = self._began + self._limit
        self.times = 0

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    @property
    def is_over(self) -> bool:
        """True if the time limit and its extensions are over."""
        return time.monotonic() > self._due

    def extend(self) -> bool:
        """Extend the time limit, and return whether it could be extended once more."""
        self.times += 1
        if self.times > self._extensions:
            return False
        self._due += self._limit
        return True
