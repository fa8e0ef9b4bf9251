"""Objects of which several stores have copies."""

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from millrace import errors


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
    """

    data: bytes
    location: int


class CopyStates:
    """State of the copies of one object.

    Attributes:
        unequal: Locations whose copies have other ETags than the listing.
        faults: Error of each copy that is not used.
    """

    def __init__(self) -> None:
        self.unequal: set[int] = set()
        self.faults: dict[int, errors.MillraceError] = {}


class ObjectTable:
    """States of the objects that were read last.

    Args:
        max_objects: Largest number of objects. The copies of a forgotten object are tried again.
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
