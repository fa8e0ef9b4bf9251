"""Arrival of pieces: the segments of each file that have arrived, and the waits for them.

This module owns the state of each file, and the lock of these states.
"""

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from millrace.errors import StoppedError
from millrace.swarm.cache_index import CacheEntry, read_identity
from millrace.swarm.catalogue import Catalogue, File, Segment, combine_segment_blocks
from millrace.swarm.journal import Range
from millrace.swarm.targets import Target, Targets


@dataclass(slots=True)
class FileState:
    """State of one file.

    Attributes:
        target: Paths of the file.
        segment_blocks: Joined block digests of each segment that has arrived; None for the others.
        missing: Number of segments that have not arrived.
        final: Whether the file has its final name.
        fresh: Whether the hash over the arriving bytes is valid: no hashed byte was replaced.
        drops: Number of dropped segments, over the whole run.
        void: Whether the digest of the file is ignored (`VoidDigest`).
        existing: Identity of the file of Millrace at the destination (`read_identity`), the only
            one that may be replaced; None if there was none.
        existing_links: The same for the further destinations, by their names: the identity of a
            file of Millrace that may be replaced; None for one with the right bytes.
        links: Identity of the file at each further destination, by its name, while the file has its
            final name.
    """

    target: Target
    segment_blocks: list[bytes | None]
    missing: int
    final: bool = False
    fresh: bool = True
    drops: int = 0
    void: bool = False
    existing: tuple[int, ...] | None = None
    existing_links: dict[str, tuple[int, ...] | None] = field(
        default_factory=dict[str, tuple[int, ...] | None]
    )
    links: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])

    @property
    def file(self) -> File:
        """File of the catalogue."""
        return self.target.file

    @property
    def wanted(self) -> str:
        """Digest that the bytes must have; empty if there is none."""
        return "" if self.void else self.file.digest

    @property
    def is_verified(self) -> bool:
        """True if the file has its final name, and a digest."""
        return self.final and bool(self.wanted)

    @property
    def path(self) -> Path:
        """Current path of the bytes: the final or the partial one."""
        return self.target.final if self.final else self.target.partial

    def note_segment(self, index: int, blocks: bytes) -> None:
        """Note a segment that has arrived, with its joined block digests."""
        if self.segment_blocks[index] is None:
            self.missing -= 1
        self.segment_blocks[index] = blocks

    def drop_segment(self, index: int) -> None:
        """Forget a segment, whose bytes were wrong."""
        if self.segment_blocks[index] is not None:
            self.segment_blocks[index] = None
            self.missing += 1
        self.fresh = False
        self.drops += 1

    def list_segment_blocks(self) -> list[bytes]:
        """Return the joined block digests of each segment that has arrived."""
        return [blocks for blocks in self.segment_blocks if blocks is not None]

    def make_entries(self, piece_size: int) -> list[CacheEntry]:
        """Return the entries of the cache index for the file and its further destinations."""
        file = self.file
        entry = CacheEntry(
            path=file.path,
            size=file.size,
            mtime_ns=self.path.stat().st_mtime_ns,
            etag=file.etag,
            origin=file.origin,
            digest=file.digest,
            piece_size=piece_size,
            digests=[blocks.hex() for blocks in self.list_segment_blocks()],
        )
        return [entry, *(replace(entry, path=name) for name in file.links)]


class Arrivals:
    """Pieces and files of a catalogue that the node has.

    Args:
        catalogue: Files and pieces.
        targets: Paths of each file.

    Attributes:
        states: State of each file, by its number.
        piece_digests: Digest of each piece that the node has; empty for the others.
        changed: Condition that is notified after each new segment or final name; it has the lock.
    """

    def __init__(self, catalogue: Catalogue, targets: Sequence[Target]) -> None:
        self._catalogue = catalogue
        self._being_written: set[int] = set()  # pieces
        self._closing = False
        self.states = [
            FileState(target, [None] * count, count)
            for target, count in zip(targets, _count_segments(catalogue), strict=True)
        ]
        self.piece_digests: list[str] = [""] * len(catalogue.pieces)
        self.changed = threading.Condition(threading.Lock())

    def has(self, number: int) -> bool:
        """Tell whether the node has a piece."""
        return bool(self.piece_digests[number])

    def list_pieces(self) -> list[tuple[int, str]]:
        """Return the pieces that the node has, with their digests."""
        return [(number, digest) for number, digest in enumerate(self.piece_digests) if digest]

    def iterate_coming(self) -> Iterable[FileState]:
        """Iterate over the files that have no final name yet."""
        return (state for state in self.states if not state.final)

    def begin_write(self, number: int) -> bool:
        """Note that a thread writes a piece; return False if it is written or being written."""
        with self.changed:
            if self.piece_digests[number] or number in self._being_written:
                return False
            self._being_written.add(number)
            return True

    def cancel_write(self, number: int) -> None:
        """Note that a piece could not be written."""
        with self.changed:
            self._being_written.discard(number)

    def end_write(self, number: int, block_digests: Sequence[bytes]) -> list[int]:
        """Note that a piece is written, and return the files that are complete with it.

        The caller holds the lock.

        Args:
            number: Piece.
            block_digests: Block digests of each of its segments.
        """
        self._being_written.discard(number)
        self.piece_digests[number] = combine_segment_blocks(block_digests)
        complete: list[int] = []
        for segment, blocks in zip(self._catalogue.pieces[number], block_digests, strict=True):
            state = self.states[segment.file]
            if state.final:
                continue
            state.note_segment(self.get_index(segment), blocks)
            if state.missing == 0:
                complete.append(segment.file)
        self.changed.notify_all()
        return complete

    def note_pieces(self) -> None:
        """Note the pieces whose segments were all found on the disk."""
        for number, piece in enumerate(self._catalogue.pieces):
            found = [self.states[s.file].segment_blocks[self.get_index(s)] for s in piece]
            known = [blocks for blocks in found if blocks is not None]
            if len(known) == len(found):
                self.piece_digests[number] = combine_segment_blocks(known)

    def get_index(self, segment: Segment) -> int:
        """Return the position of a segment in its file."""
        return segment.start // self._catalogue.piece_size

    def list_spans(self, state: FileState) -> list[Range]:
        """Return the first byte and size of each segment of a file."""
        size, step = state.file.size, self._catalogue.piece_size
        return [(at, min(step, size - at)) for at in range(0, max(size, 1), step)]

    def count_unallocated(self) -> int:
        """Return the bytes of incomplete files that have no allocated disk space."""
        small = self._catalogue.piece_size
        return sum(s.file.size for s in self.iterate_coming() if s.file.size < small)

    def wait_for_byte(self, number: int, at: int) -> int:
        """Wait until a byte of a file has arrived.

        Args:
            number: File.
            at: Position of the byte.

        Returns:
            Number of bytes from this position to the end of its segment; 0 at the end of the file.

        Raises:
            StoppedError: The run has ended, also if the byte has arrived.
        """
        state, size = self.states[number], self._catalogue.piece_size
        if at >= state.file.size:
            return 0
        index = at // size if state.file.size >= size else 0
        self._wait_until(state, lambda: state.segment_blocks[index] is not None)
        self.check_open(number)
        return min(state.file.size, (index + 1) * size) - at

    def check_open(self, number: int) -> None:
        """Check that the run has not ended, so that its threads end soon after `stop`.

        Args:
            number: File that the caller reads next.

        Raises:
            StoppedError: The run has ended.
        """
        if self._closing:
            raise _make_end_error(self.states[number])

    def wait_final(self, number: int) -> None:
        """Wait until a file has its final name.

        Raises:
            StoppedError: The run ended before.
        """
        state = self.states[number]
        self._wait_until(state, lambda: state.final)

    def call_unless_dropped(self, number: int, drops: int, call: Callable[[], None]) -> bool:
        """Call a function, and return True, unless a further segment of a file was dropped.

        Args:
            number: File.
            drops: Number of dropped segments before.
            call: Function that reports a result of the file's bytes. The lock is held.
        """
        with self.changed:
            if self.states[number].drops != drops:
                return False
            call()
            return True

    def open_current(self, number: int) -> int:
        """Open a file under its current name."""
        state = self.states[number]
        try:
            return os.open(state.path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:  # the file is being renamed, or was
            with self.changed:
                return os.open(state.path, os.O_RDONLY | os.O_NOFOLLOW)

    def rename(self, state: FileState, drops: int, targets: Targets) -> bool:
        """Give a file its final name, and end the waits for this name.

        Args:
            state: Complete file.
            drops: Number of dropped segments when the file was seen to be complete.
            targets: Paths of the files.

        Returns:
            False if a segment was dropped since. The file is submitted again when it is complete.

        Raises:
            ConfigurationError: A file that Millrace did not make is at the destination.
        """
        with self.changed:  # `open_current` waits until the file and `path` agree
            if state.drops != drops:
                return False
            targets.make_final(state.target, state.existing)
            state.existing = read_identity(state.target.final)
            state.final = True
            self.changed.notify_all()
            return True

    def stop(self) -> None:
        """End the waits for bytes: no further bytes arrive."""
        with self.changed:
            self._closing = True
            self.changed.notify_all()

    def _wait_until(self, state: FileState, has_arrived: Callable[[], bool]) -> None:
        with self.changed:
            while not has_arrived():
                if self._closing:
                    raise _make_end_error(state)
                self.changed.wait()


class ArrivingFile:
    """Reader of a file from its beginning, while the file arrives. Archives are unpacked from it.

    Args:
        arrivals: Files that arrive.
        number: Number of the file.
    """

    def __init__(self, arrivals: Arrivals, number: int) -> None:
        self._arrivals, self._number, self._at = arrivals, number, 0

    def read(self, size: int = -1) -> bytes:
        """Wait for the next bytes, and return up to `size` of them, none at the end."""
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


def _make_end_error(state: FileState) -> StoppedError:
    return StoppedError(f"The run ended before {state.file.path} was complete.")


def _count_segments(catalogue: Catalogue) -> list[int]:
    counts = [0] * len(catalogue.files)
    for piece in catalogue.pieces:
        for segment in piece:
            counts[segment.file] += 1
    return counts
