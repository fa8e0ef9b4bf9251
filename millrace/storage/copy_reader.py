"""Read ranges of the copies of objects: copies with an equal ETag, or any if bytes are checked."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from millrace import errors
from millrace.storage.mirror_locations import CopyLocation
from millrace.storage.mirror_policy import Clock, DurationWindow, HedgeBudget
from millrace.storage.mirrored_objects import CopyStates, MirroredObject
from millrace.storage.read import read_range

IsOver = Callable[[], bool]
"""Function that tells whether bytes are not needed any more."""


class UnprovenCopyError(errors.ConfigurationError):
    """A copy has no equal ETag, and its bytes would not be checked."""

    def __init__(self) -> None:
        super().__init__(
            "no equal ETag proves its copy, and there are no checksums by which to compare it"
        )


class WantedRange(NamedTuple):
    """A range of an object.

    Attributes:
        item: The object.
        state: State of its copies.
        start: Offset of the first byte.
        end: Offset after the last byte.
        is_checked: Whether the caller checks the bytes, so that any copy may be read.
    """

    item: MirroredObject
    state: CopyStates
    start: int
    end: int
    is_checked: bool


class CopyReader:
    """Reads the copies of objects.

    Args:
        locations: Locations of the copies.
        budget: Budget of the further requests.
        durations: Durations of earlier requests.
        clock: Clock of durations, in seconds.
    """

    def __init__(
        self,
        locations: Sequence[CopyLocation],
        budget: HedgeBudget,
        durations: DurationWindow,
        clock: Clock,
    ) -> None:
        self._locations, self._budget = locations, budget
        self._durations, self._clock = durations, clock

    def read(self, wanted: WantedRange, location: CopyLocation, is_over: IsOver) -> bytes:
        """Read a range of a copy. One request.

        Args:
            wanted: The range.
            location: Location of the copy.
            is_over: Function that tells whether the bytes are not needed any more.

        Raises:
            UnprovenCopyError: The copy has another ETag, and the bytes would not be checked.
            ChangedError: The copy has another size, or the listed copy has changed.
            StoppedError: The bytes are not needed any more.
        """
        item, is_listed = wanted.item, wanted.item.listed_by == location.number
        etag = item.etag if is_listed or not wanted.is_checked else None
        try:
            return self.request(
                location, item, wanted.start, wanted.end,
                etag=etag, size=item.size, is_over=is_over,
            )  # fmt: skip
        except errors.ChangedError:
            if is_listed or wanted.is_checked:
                raise
            wanted.state.unequal.add(location.number)
            self._budget.spend()
            raise UnprovenCopyError from None

    def request(
        self,
        location: CopyLocation,
        item: MirroredObject,
        start: int,
        end: int,
        *,
        etag: str | None,
        size: int | None = None,
        is_over: IsOver | None = None,
    ) -> bytes:
        """Read a range of a copy, and note the duration. One request.

        Args:
            location: Location of the copy.
            item: The object.
            start: Offset of the first byte.
            end: Offset after the last byte.
            etag: ETag that the copy must have; None allows any.
            size: Size that the copy must have; None allows any.
            is_over: Function that tells whether the bytes are not needed any more.

        Raises:
            MillraceError: The copy cannot be read.
        """

        def handle_block(size: int) -> None:
            location.add_received(size)
            if is_over is not None and is_over():
                raise errors.StoppedError("Another location was faster.")

        location.count_request()
        began = self._clock()
        try:
            data = read_range(
                location.store, item.key, start, end, etag=etag, size=size, on_block=handle_block
            )
        except errors.StoppedError:
            self._record_duration(location, end - start, self._clock() - began)
            raise
        self._record_duration(location, end - start, self._clock() - began)
        if len(data) != end - start:
            raise errors.ChangedError(f"it has fewer than {end:,} bytes")
        return data

    def can_use(self, wanted: WantedRange, location: CopyLocation) -> bool:
        """Decide whether a copy may be read: the caller checks the bytes, or its ETag may be equal.

        ETags of S3 are computed from the bytes. With a key service, they are random, so that two of
        them are never equal.
        """
        item = wanted.item
        if wanted.is_checked or item.listed_by == location.number:
            return True
        if item.listed_by is None or not item.etag or location.number in wanted.state.unequal:
            return False
        listed = self._locations[item.listed_by]
        return listed.store.is_s3_compatible and location.store.is_s3_compatible

    def _record_duration(self, location: CopyLocation, size: int, seconds: float) -> None:
        usual = self._durations.find_quantile(size, 0.5)
        with location.lock:
            location.rate.record(seconds, usual)
        if not location.is_local:
            self._durations.record(size, seconds)
