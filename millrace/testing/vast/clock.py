"""Clock of the server, stored in a file."""

import os
import struct
import time
from pathlib import Path


class ClockFile:
    """Clock in a file, which one process sets and others read. Rentals read it very often.

    Args:
        folder: Folder of the server.
    """

    _FORMAT = struct.Struct("dd")  # time when the monotonic clock is zero, and the rate

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "clock", os.O_RDWR | os.O_CREAT)

    def set(self, now: float, rate: float) -> None:
        """Set the time in seconds since 1970, and the seconds that pass per real second."""
        os.pwrite(self._file, self._FORMAT.pack(now - time.monotonic() * rate, rate), 0)

    def read(self) -> float:
        """Return the time in seconds since 1970."""
        zero, rate = self._FORMAT.unpack(os.pread(self._file, self._FORMAT.size, 0))
        return zero + time.monotonic() * rate

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
