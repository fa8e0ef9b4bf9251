"""Offsets of samples in tar shards: those of the manifest, and those that readers have found."""

import os
import threading
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

_STEP = 64  # samples between two that are remembered
_MAX_SHARDS = 10_000  # shards whose offsets are remembered

# One lock for all offsets, which is held while the process is forked. Otherwise the child could get
# a lock that no thread will release.
_lock = threading.Lock()
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)


class SampleOffsets:
    """Offsets of some samples of each shard. Threads may share them.

    A tar file has no table of its samples. With these offsets, a reader that begins in the middle
    of a shard reads few bytes before its first sample. A new process begins with those of the
    manifest. Memory: 16 bytes for 64 samples, of the 10,000 shards that were read last.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[array[int], array[int]]] = {}  # rows and offsets of a shard

    def add_shard(self, shard: str, offsets: Sequence[tuple[int, int]]) -> None:
        """Remember samples and their offsets, as a manifest has them, unless the shard is known."""
        with _lock:
            if shard not in self._known:
                rows, places = zip(_FIRST, *offsets, strict=True)
                self._remember(shard, array("q", rows), array("q", places))

    def find(self, shard: str, row: int) -> tuple[int, int]:
        """Return the last known row that is not after a row, and the offset of its sample.

        Args:
            shard: Name of the shard.
            row: Number of the sample within its shard.
        """
        with _lock:
            if shard not in self._known:
                return _FIRST
            rows, offsets = self._known[shard]
            found = bisect_right(rows, row) - 1
            return rows[found], offsets[found]

    def note(self, shard: str, row: int, offset: int) -> None:
        """Remember the offset of a sample, unless that of a sample shortly before is known."""
        with _lock:
            known = self._known.pop(shard, None)
            rows, offsets = known or (array("q", _FIRST[:1]), array("q", _FIRST[1:]))
            self._remember(shard, rows, offsets)
            at = bisect_right(rows, row)
            if row - rows[at - 1] >= _STEP:
                rows.insert(at, row)
                offsets.insert(at, offset)

    def _remember(self, shard: str, rows: "array[int]", offsets: "array[int]") -> None:
        """Make a shard the last one, and forget the first one if there are too many."""
        self._known[shard] = rows, offsets
        if len(self._known) > _MAX_SHARDS:
            del self._known[next(iter(self._known))]

    def __reduce__(self) -> tuple[Any, ...]:
        """Begin without offsets in a new process."""
        return (SampleOffsets, ())


_FIRST = (0, 0)  # row and offset of the first sample
