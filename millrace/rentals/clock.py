"""The time by which machines are rented: a seam, since hours of renting are tested in seconds."""

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Clock of the day, and waiting."""

    def now(self) -> datetime:
        """Return the time of day, with its zone."""
        ...

    def elapsed(self) -> float:
        """Seconds since some moment; never goes back."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class SystemClock:
    """This machine's."""

    def now(self) -> datetime:
        """Return the time of day, with its zone."""
        return datetime.now(UTC)

    def elapsed(self) -> float:
        """Seconds since some moment; they also pass while the machine is suspended."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)
