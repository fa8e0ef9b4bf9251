"""Offsets of samples in tar shards, which a loader remembers from the headers that it has read."""

import threading
from array import array
from bisect import bisect_right
from typing import Any

_STEP = 64  # samples between two that are remembered
_MAX_SHARDS = 10_000  # shards whose offsets are remembered


class SampleOffsets:
    """Offsets of some samples of each shard. Threads may share them.

    A tar file has no index. With these offsets, a reader that begins in the middle of a shard reads
    few bytes before its first sample, once the headers were read by another one. A new process
    begins with none. Memory: 16 bytes for 64 samples, of the 10,000 shards that were read last.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, tuple[array[int], array[int]]] = {}  # rows and offsets of a shard

    def find(self, shard: str, row: int) -> tuple[int, int]:
        """Return the last known row that is not after a row, and the offset of its sample.

        Args:
            shard: Name of the shard.
            row: Number of the sample within its shard.
        """
        with self._lock:
            rows, offsets = self._known.get(shard, (_FIRST, _FIRST))
            found = bisect_right(rows, row) - 1
            return rows[found], offsets[found]

    def note(self, shard: str, row: int, offset: int) -> None:
        """Remember the offset of a sample, unless that of a sample shortly before is known."""
        with self._lock:
            rows, offsets = self._known.pop(shard, None) or (_FIRST[:], _FIRST[:])
            self._known[shard] = rows, offsets  # now the last one
            if len(self._known) > _MAX_SHARDS:
                del self._known[next(iter(self._known))]
            at = bisect_right(rows, row)
            if row - rows[at - 1] >= _STEP:
                rows.insert(at, row)
                offsets.insert(at, offset)

    def __reduce__(self) -> tuple[Any, ...]:
        """Begin without offsets in a new process."""
        return (SampleOffsets, ())


_FIRST = array("q", [0])
