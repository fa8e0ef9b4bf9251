"""Notice a partition that gets no rows, such as of a function that hangs.

The process that shards a partition notes its rows in memory that a worker shares with its driver.
The driver looks there, so it also notices code that holds Python's lock (the GIL), such as a
regular expression. Without workers, one process does both, and such code stops the watching.
"""

import mmap
import struct
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

STALL_TIMEOUT = 300.0  # seconds without a row between two looks

_NOTE = struct.Struct("<Q240p")  # number of rows, and name of the last one, cut to 239 bytes


class Stall(NamedTuple):
    """Time without a row.

    Attributes:
        last_row: Name of the last row; empty before the first.
        seconds: Time without a row, at least.
    """

    last_row: str
    seconds: float


class RowNotes:
    """Notes of a process about the rows of its partition.

    Args:
        file: Descriptor of a file with `SIZE` bytes, for memory that processes share. By default
            the memory is of this process only.
    """

    SIZE = _NOTE.size

    def __init__(self, file: int = -1) -> None:
        self._memory = mmap.mmap(file, self.SIZE)
        self._rows = 0

    def begin_partition(self) -> None:
        """Note that the next row is the first one of a partition."""
        self.note_row("")

    def note_row(self, name: str) -> None:
        """Note that a row was read."""
        self._rows += 1
        _NOTE.pack_into(self._memory, 0, self._rows, name.encode("utf-8", "backslashreplace"))

    def get_last(self) -> tuple[int, str]:
        """Return the number of notes, and the name of the last row."""
        rows, name = _NOTE.unpack_from(self._memory)
        return rows, name.decode("utf-8", "replace")


class StallWatch:
    """Watch of one partition, with a look after each `STALL_TIMEOUT`.

    Args:
        notes: Notes of the process that shards the partition.
    """

    def __init__(self, notes: RowNotes) -> None:
        self._notes, self._rows, self._seconds = notes, -1, 0.0

    def look(self) -> Stall | None:
        """Return the time without a row if there was none since the last look."""
        rows, name = self._notes.get_last()
        self._seconds = self._seconds + STALL_TIMEOUT if rows == self._rows else 0.0
        self._rows = rows
        return Stall(name, self._seconds) if self._seconds else None


@contextmanager
def watch_in_thread(notes: RowNotes, report: Callable[[Stall], None]) -> Generator[None]:
    """Watch a partition that this process shards, and report each time without a row."""
    stop, watch = threading.Event(), StallWatch(notes)

    def look_repeatedly() -> None:
        while not stop.wait(STALL_TIMEOUT):
            if stall := watch.look():
                report(stall)

    with ThreadPoolExecutor(1, thread_name_prefix="stalls") as pool:
        watching = pool.submit(look_repeatedly)
        try:
            yield
        finally:
            stop.set()
        watching.result()
