"""Clock of rentals. Tests replace it to simulate hours in seconds."""

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Time of day, elapsed time, and sleep."""

    def now(self) -> datetime:
        """Return the time of day, with its zone."""
        ...

    def monotonic(self) -> float:
        """Return the seconds since a fixed moment; the value never decreases."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class SystemClock:
    """Clock of this machine."""

    def now(self) -> datetime:
        """Return the time of day, with its zone."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Return the seconds since boot, including the time that the machine was suspended."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)
