"""Objects of which several stores have copies, and the proof that a copy is equal."""

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from millrace import errors
from millrace.digest import compute_digest

SAMPLE_BYTES = 64 << 10
"""Bytes at the end of a proven copy that other copies are compared with, at least."""
_MAX_SAMPLE = 1 << 20  # bytes of a range that is taken for it


@dataclass(frozen=True, slots=True)
class MirroredObject:
    """An object as its listing or its record describes it.

    Attributes:
        key: Key below the URL of each location.
        size: Size in bytes.
        etag: ETag in the listing; empty without a listing.
        listed_by: Number of the location that was listed; None without a listing.
        digest: Digest of the bytes, from a record; empty if none is known.
        blocks: Joined digests of the blocks, which fit the digest; empty if they are not known.
    """

    key: str
    size: int
    etag: str = ""
    listed_by: int | None = None
    digest: str = ""
    blocks: bytes = field(default=b"", repr=False, compare=False)


class FetchedRange(NamedTuple):
    """A range of an object, and the copy that it is from.

    Attributes:
        data: The bytes.
        location: Number of the location.
        etag: ETag of the copy.
        is_proven: Whether the copy is known to be equal. Otherwise the caller checks the bytes.
    """

    data: bytes
    location: int
    etag: str
    is_proven: bool


class SampledRange(NamedTuple):
    """A range of a proven copy, which other copies are compared with.

    Attributes:
        start: Offset of the first byte.
        end: Offset after the last byte.
        digest: Digest of the bytes.
    """

    start: int
    end: int
    digest: str


class CopyStates:
    """State of the copies of one object.

    Attributes:
        pinned: ETag of each copy that is proven, by the number of its location.
        described: ETag of each copy that has the right size, and is not proven.
        unequal: Locations whose copies have other ETags than the listing.
        faults: Error of each copy that is not used.
        sample: End of a proven copy; None before it is read.
        lock: Lock for the proof by a whole read, and for the read of the sample.
    """

    def __init__(self) -> None:
        self.pinned: dict[int, str] = {}
        self.described: dict[int, str] = {}
        self.unequal: set[int] = set()
        self.faults: dict[int, errors.MillraceError] = {}
        self.sample: SampledRange | None = None
        self.lock = threading.Lock()

    def pin(self, location: int, etag: str) -> None:
        """Read a copy by this ETag from now on."""
        self.pinned[location] = etag

    def keep_sample(self, size: int, start: int, data: bytes) -> None:
        """Keep the digest of a range of a proven copy, if it is the end and there is none yet.

        Args:
            size: Size of the object.
            start: Offset of the range.
            data: Bytes of the range.
        """
        is_end = start <= find_sample_start(size) and start + len(data) == size
        if self.sample is None and is_end and 0 < len(data) <= _MAX_SAMPLE:
            self.sample = SampledRange(start, size, compute_digest(data))


def find_sample_start(size: int) -> int:
    """Return the offset of the bytes at the end that copies of an object are compared by."""
    return max(0, size - SAMPLE_BYTES)


class ObjectTable:
    """States of the objects that were read last.

    Args:
        max_objects: Largest number of objects. The copies of a forgotten object are proven again.
    """

    def __init__(self, max_objects: int = 100_000) -> None:
        self._max_objects = max_objects
        self._lock = threading.Lock()
        self._states: OrderedDict[MirroredObject, CopyStates] = OrderedDict()

    def get(self, item: MirroredObject) -> CopyStates:
        """Return the state of an object."""
        with self._lock:
            state = self._states.get(item)
            if state is None:
                state = self._states[item] = CopyStates()
                if len(self._states) > self._max_objects:
                    self._states.popitem(last=False)
            else:
                self._states.move_to_end(item)
            return state

    def forget(self, item: MirroredObject) -> None:
        """Forget the state of an object, so that its copies are tried and proven again."""
        with self._lock:
            self._states.pop(item, None)
