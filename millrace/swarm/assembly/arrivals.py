"""Arrival of pieces: which segments of which files are here, and who waits for them.

This module owns the state of each file, and the lock that guards it.
"""

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from millrace.errors import ChangedError
from millrace.swarm.cache_index import CacheEntry
from millrace.swarm.journal import Range
from millrace.swarm.pieces import Catalogue, File, Segment, digest_of
from millrace.swarm.targets import Target


@dataclass(slots=True)
class FileState:
    """One file on its way.

    Attributes:
        place: Paths of the file.
        digests: SHA-256 of each segment that is here.
        missing: Number of segments that are not.
        final: Whether the file has its final name.
        fresh: Whether no byte of it was replaced after it had been hashed.
        drops: Number of times that a segment of it was dropped.
        void: Whether the digest that it was said to have is none of its bytes.
    """

    place: Target
    digests: list[bytes | None]
    missing: int
    final: bool = False
    fresh: bool = True
    drops: int = 0
    void: bool = False

    @property
    def file(self) -> File:
        """The file."""
        return self.place.file

    @property
    def wanted(self) -> str:
        """The digest that it must have; empty if nothing says one."""
        return "" if self.void else self.file.digest

    @property
    def is_verified(self) -> bool:
        """True if all of the file is here, and is what its digest says."""
        return self.final and bool(self.wanted)

    @property
    def path(self) -> Path:
        """Path at which its bytes are at the moment."""
        return self.place.final if self.final else self.place.partial

    def note_segment(self, index: int, digest: bytes) -> None:
        """Note a segment that is here."""
        if self.digests[index] is None:
            self.missing -= 1
        self.digests[index] = digest

    def drop_segment(self, index: int) -> None:
        """Forget a segment, whose bytes were wrong."""
        if self.digests[index] is not None:
            self.digests[index] = None
            self.missing += 1
        self.fresh = False
        self.drops += 1

    def list_digests(self) -> list[bytes]:
        """Return the digests of the segments that are here."""
        return [digest for digest in self.digests if digest is not None]

    def make_entry(self, piece_size: int) -> CacheEntry:
        """Return the entry of the cache index that says that the file is ours."""
        file = self.file
        return CacheEntry(
            path=file.path,
            size=file.size,
            mtime_ns=self.path.stat().st_mtime_ns,
            etag=file.etag,
            origin=file.origin,
            sha256=file.sha256,
            piece_size=piece_size,
            digests=[digest.hex() for digest in self.list_digests()],
            md5=file.md5,
        )


class Arrivals:
    """Pieces and files of a catalogue that are here.

    Args:
        catalogue: Files and pieces.
        places: Paths of each file.

    Attributes:
        states: State of each file, by its number.
        digests: Digest of each piece that is here; empty for one that is not.
        changed: Condition that is notified when bytes or final names have come; it has the lock.
    """

    def __init__(self, catalogue: Catalogue, places: Sequence[Target]) -> None:
        self._catalogue = catalogue
        self._being_written: set[int] = set()  # pieces
        self._closing = False
        self.states = [
            FileState(place, [None] * count, count)
            for place, count in zip(places, _count_segments(catalogue), strict=True)
        ]
        self.digests: list[str] = [""] * len(catalogue.pieces)
        self.changed = threading.Condition(threading.Lock())

    def has(self, number: int) -> bool:
        """Tell whether a piece is here."""
        return bool(self.digests[number])

    def list_pieces(self) -> list[tuple[int, str]]:
        """Return the pieces that are here, with their digests."""
        return [(number, digest) for number, digest in enumerate(self.digests) if digest]

    def iterate_coming(self) -> Iterable[FileState]:
        """Iterate over the files that have no final name yet."""
        return (state for state in self.states if not state.final)

    def begin_write(self, number: int) -> bool:
        """Note that a piece is being written; return False if it is already, or is here."""
        with self.changed:
            if self.digests[number] or number in self._being_written:
                return False
            self._being_written.add(number)
            return True

    def cancel_write(self, number: int) -> None:
        """Note that a piece could not be written."""
        with self.changed:
            self._being_written.discard(number)

    def end_write(self, number: int, parts: Sequence[bytes]) -> list[int]:
        """Note that a piece is written; return the files that are complete now.

        The caller holds the lock.

        Args:
            number: Piece.
            parts: SHA-256 of each of its segments.
        """
        self._being_written.discard(number)
        self.digests[number] = digest_of(parts)
        complete: list[int] = []
        for segment, part in zip(self._catalogue.pieces[number], parts, strict=True):
            state = self.states[segment.file]
            if state.final:
                continue
            state.note_segment(self.get_index(segment), part)
            if state.missing == 0:
                complete.append(segment.file)
        self.changed.notify_all()
        return complete

    def note_pieces(self) -> None:
        """Note the pieces that are here: those whose segments all are."""
        for number, piece in enumerate(self._catalogue.pieces):
            parts = [self.states[s.file].digests[self.get_index(s)] for s in piece]
            known = [part for part in parts if part is not None]
            if len(known) == len(parts):
                self.digests[number] = digest_of(known)

    def get_index(self, segment: Segment) -> int:
        """Return the position of a segment in its file."""
        return segment.start // self._catalogue.piece_size

    def list_spans(self, state: FileState) -> list[Range]:
        """Return the first byte and size of each segment of a file."""
        size, step = state.file.size, self._catalogue.piece_size
        return [(at, min(step, size - at)) for at in range(0, max(size, 1), step)]

    def count_unallocated(self) -> int:
        """Return the bytes that are still to come and for which no room was made on the disk."""
        small = self._catalogue.piece_size
        return sum(s.file.size for s in self.iterate_coming() if s.file.size < small)

    def wait_for_byte(self, number: int, at: int) -> int:
        """Wait until a file's byte is here; returns how many bytes follow it, 0 at its end.

        Raises:
            ChangedError: The run has ended before.
        """
        state, size = self.states[number], self._catalogue.piece_size
        if at >= state.file.size:
            return 0
        index = at // size if state.file.size >= size else 0
        self._wait_until(state, lambda: state.digests[index] is not None)
        return min(state.file.size, (index + 1) * size) - at

    def wait_final(self, number: int) -> None:
        """Wait until a file has its final name.

        Raises:
            ChangedError: The run has ended before.
        """
        state = self.states[number]
        self._wait_until(state, lambda: state.final)

    def open_current(self, number: int) -> int:
        """Open a file, under whichever name it has at the moment."""
        state = self.states[number]
        try:
            return os.open(state.path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:  # it got its final name meanwhile
            return os.open(state.path, os.O_RDONLY | os.O_NOFOLLOW)

    def rename(self, state: FileState) -> None:
        """Give a file its final name, and wake whoever waits for it."""
        with self.changed:  # whoever opens it looks for it under one name or the other
            state.place.partial.rename(state.place.final)
            state.final = True
            self.changed.notify_all()

    def stop(self) -> None:
        """Wake whoever waits for bytes: none come any more."""
        with self.changed:
            self._closing = True
            self.changed.notify_all()

    def _wait_until(self, state: FileState, there: Callable[[], bool]) -> None:
        with self.changed:
            while not there():
                if self._closing:
                    raise ChangedError(f"The run ended before {state.file.path} was complete.")
                self.changed.wait()


class ArrivingFile:
    """A file read from its beginning while it arrives: what unpacks an archive reads this.

    Args:
        arrivals: Files that arrive.
        number: Number of the file.
    """

    def __init__(self, arrivals: Arrivals, number: int) -> None:
        self._arrivals, self._number, self._at = arrivals, number, 0

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, at most so many; waits for them. Empty at the end."""
        ready = self._arrivals.wait_for_byte(self._number, self._at)
        size = ready if size < 0 else min(size, ready)
        if size == 0:
            return b""
        descriptor = self._arrivals.open_current(self._number)
        try:
            data = os.pread(descriptor, size, self._at)
        finally:
            os.close(descriptor)
        self._at += len(data)
        return data


def _count_segments(catalogue: Catalogue) -> list[int]:
    counts = [0] * len(catalogue.files)
    for piece in catalogue.pieces:
        for segment in piece:
            counts[segment.file] += 1
    return counts
