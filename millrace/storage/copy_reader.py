"""Read ranges of the copies of objects, each of which is proven equal before it is used."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

from millrace import errors
from millrace.digest import (
    BLOCK_SIZE,
    compute_digest,
    find_differing_blocks,
    get_algorithm,
    hash_blocks,
    make_hasher,
    slice_blocks,
)
from millrace.storage.mirror_locations import CopyLocation
from millrace.storage.mirror_policy import Clock, DurationWindow, HedgeBudget
from millrace.storage.mirrored_objects import (
    CopyStates,
    FetchedRange,
    MirroredObject,
    SampledRange,
)
from millrace.storage.read import head, read_range, stream

IsOver = Callable[[], bool]
"""Function that tells whether bytes are not needed any more."""


class UnprovenCopyError(errors.ChangedError):
    """A copy cannot be compared with the object."""


class UnsampledCopyError(UnprovenCopyError):
    """A copy cannot be compared before the end of a proven copy is read."""


class WantedRange(NamedTuple):
    """A range of an object, for which any proven copy may be read.

    Attributes:
        item: The object.
        state: State of its copies.
        start: Offset of the first byte.
        end: Offset after the last byte.
        allow_unproven: Whether the caller checks the bytes.
    """

    item: MirroredObject
    state: CopyStates
    start: int
    end: int
    allow_unproven: bool


class CopyReader:
    """Reads and proves the copies of objects.

    Args:
        locations: Locations of the copies.
        budget: Budget of the requests for proofs.
        durations: Durations of earlier requests.
        clock: Clock of durations, in seconds.
        retry_seconds: Time budget of a proof by a whole read.
    """

    def __init__(
        self,
        locations: Sequence[CopyLocation],
        budget: HedgeBudget,
        durations: DurationWindow,
        clock: Clock,
        retry_seconds: float,
    ) -> None:
        self._locations, self._budget, self._durations = locations, budget, durations
        self._clock, self._retry_seconds = clock, retry_seconds

    def read(self, wanted: WantedRange, location: CopyLocation, is_over: IsOver) -> FetchedRange:
        """Read a range of a copy. The first read of a copy also proves it.

        Args:
            wanted: The range.
            location: Location of the copy.
            is_over: Function that tells whether the bytes are not needed any more.

        Raises:
            UnprovenCopyError: The copy cannot be compared.
            UnsampledCopyError: The end of a proven copy must be read first.
            ChangedError, CorruptError: The copy differs.
            StoppedError: The bytes are not needed any more.
        """
        item, state, number = wanted.item, wanted.state, location.number
        start, end = wanted.start, wanted.end
        pinned = state.pinned.get(number)
        if pinned is not None:
            data = self.request(location, item, start, end, etag=pinned, is_over=is_over)
            return FetchedRange(data, number, pinned, is_proven=True)
        if item.listed_by == number or self._has_equal_etags(item, state, location):
            try:
                data = self.request(
                    location, item, start, end, etag=item.etag, size=item.size, is_over=is_over
                )
            except errors.ChangedError:
                if item.listed_by == number:
                    raise
                state.unequal.add(number)
                self._budget.spend()
            else:
                state.pin(number, item.etag)
                return FetchedRange(data, number, item.etag, is_proven=True)
        etag = state.described.get(number) or self._describe(location, item, state)
        if item.blocks:
            data = self._read_blocks(wanted, location, etag, is_over)
        elif wanted.allow_unproven:
            if state.sample is not None:
                self._compare_sample(location, item, state.sample, etag)
            elif item.listed_by is not None and not item.digest:
                raise UnsampledCopyError(
                    f"{location.name} has another ETag for {item.key}, and the end of the object, "
                    "by which the copy is compared, was not read elsewhere."
                )
            data = self.request(location, item, start, end, etag=etag, is_over=is_over)
            return FetchedRange(data, number, etag, is_proven=False)
        elif item.digest:
            with state.lock:
                if number not in state.pinned:
                    self._compare_digest(location, item, etag)
                    state.pin(number, etag)
            data = self.request(location, item, start, end, etag=etag, is_over=is_over)
        else:
            raise UnprovenCopyError(
                f"{location.name} has another ETag for {item.key}, and no digest is known by which "
                "the copy could be compared."
            )
        state.pin(number, etag)
        return FetchedRange(data, number, etag, is_proven=True)

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
        """Read a range of a copy by its ETag, and note the duration. One request.

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

    def can_prove(self, wanted: WantedRange, location: CopyLocation) -> bool:
        """Decide whether a copy can be proven equal, if the caller does not check the bytes."""
        item, state, number = wanted.item, wanted.state, location.number
        return bool(
            wanted.allow_unproven
            or number in state.pinned
            or item.digest
            or item.listed_by == number
            or self._has_equal_etags(item, state, location)
        )

    def _has_equal_etags(
        self, item: MirroredObject, state: CopyStates, location: CopyLocation
    ) -> bool:
        """Decide whether a copy may have the ETag of the listing, which proves that it is equal.

        ETags of S3 are computed from the bytes. With a key service, they are random, so that two of
        them are never equal.
        """
        if item.listed_by is None or not item.etag or location.number in state.unequal:
            return False
        listed = self._locations[item.listed_by]
        return listed.store.is_s3_compatible and location.store.is_s3_compatible

    def _describe(self, location: CopyLocation, item: MirroredObject, state: CopyStates) -> str:
        """Return the ETag of a copy, whose size is compared. One request."""
        self._budget.spend()
        location.count_request()
        found = head(location.store, item.key)
        if found.size != item.size:
            raise errors.ChangedError(f"it has {found.size:,} bytes, not {item.size:,}")
        if not found.etag:
            raise errors.ChangedError("the store gives no ETag, so a change would not be seen")
        state.described[location.number] = found.etag
        return found.etag

    def _read_blocks(
        self, wanted: WantedRange, location: CopyLocation, etag: str, is_over: IsOver
    ) -> bytes:
        """Read the blocks that a range is in, compare their digests, and return the range."""
        item, start, end = wanted.item, wanted.start, wanted.end
        blocks = range(start // BLOCK_SIZE, -(-end // BLOCK_SIZE))
        first, last = blocks.start * BLOCK_SIZE, min(item.size, blocks.stop * BLOCK_SIZE)
        data = self.request(location, item, first, last, etag=etag, is_over=is_over)
        expected = slice_blocks(item.blocks, blocks)
        if find_differing_blocks(hash_blocks(data), expected):
            raise errors.CorruptError("its bytes do not have the digests of their blocks")
        return data[start - first : end - first]

    def _compare_sample(
        self, location: CopyLocation, item: MirroredObject, sample: SampledRange, etag: str
    ) -> None:
        """Compare a range of a copy with that of a proven one. One request."""
        self._budget.spend()
        data = self.request(location, item, sample.start, sample.end, etag=etag)
        if compute_digest(data) != sample.digest:
            raise errors.CorruptError(
                f"its bytes {sample.start:,} to {sample.end:,} are others than elsewhere"
            )

    def _compare_digest(self, location: CopyLocation, item: MirroredObject, etag: str) -> None:
        """Read a copy whole, and compare its digest."""
        hasher = make_hasher(get_algorithm(item.digest))
        store = location.store.with_retry_timeout(timedelta(seconds=self._retry_seconds))
        for data in stream(store, item.key, end=item.size, etag=etag):
            self._budget.spend()
            location.count_request()
            location.add_received(len(data))
            hasher.update(data)
        if hasher.compute() != item.digest:
            raise errors.CorruptError("its bytes do not have the digest of the object")

    def _record_duration(self, location: CopyLocation, size: int, seconds: float) -> None:
        usual = self._durations.find_quantile(size, 0.5)
        with location.lock:
            location.rate.record(seconds, usual)
        if not location.is_local:
            self._durations.record(size, seconds)
