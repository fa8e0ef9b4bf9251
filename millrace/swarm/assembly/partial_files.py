"""Partial files: the bytes of segments, and their lines in the journal.

This module owns which partial files the journal has, and how much of each waits to be flushed.
"""

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from millrace.swarm.assembly.arrivals import FileState
from millrace.swarm.journal import Journal, Range
from millrace.swarm.targets import Targets

_FLUSH_SIZE = 64 << 20  # bytes after which writing to the disk is begun


class PartialFiles:
    """Partial files of a run.

    Args:
        root: Folder that files go below; resolved.
        places: Paths of the files.
        journal: Journal that has their lines.
    """

    def __init__(self, root: Path, places: Targets, journal: Journal) -> None:
        self._root, self._places, self._journal = root, places, journal
        self._noted: set[Path] = set()  # partial files that the journal has
        self._unflushed: dict[Path, int] = {}  # bytes
        # Pieces of many files are written one after another: their many short system calls would
        # hand the interpreter's lock to and fro between the threads.
        self._writing = threading.Lock()

    def mark_noted(self, state: FileState) -> None:
        """Note that the journal has a partial file."""
        self._noted.add(state.place.partial)

    def make_relative(self, path: Path) -> str:
        """Return a path as the journal has it: below the root."""
        return path.relative_to(self._root).as_posix()

    def note_folder(self, folder: Path) -> None:
        """Note a folder for the next run to remove, should this one be killed."""
        self._journal.note_folder(self.make_relative(folder))

    def note_segments(self, segments: Sequence[tuple[FileState, Range, bytes]]) -> None:
        """Note segments that were written, each with its SHA-256."""
        self._journal.note_pieces(
            (state.place.object, span, digest.hex()) for state, span, digest in segments
        )

    def write(self, segments: Sequence[tuple[FileState, int, int]], data: memoryview) -> None:
        """Write the segments of a piece, those of final files excepted.

        Args:
            segments: File, first byte and size of each.
            data: Their bytes, one after another.
        """
        at = 0
        with self._writing if len(segments) > 1 else contextlib.nullcontext():
            for state, start, size in segments:
                if not state.final:
                    self._note_file(state)
                    self._write_segment(state, start, data[at : at + size])
                at += size

    def reopen(self, state: FileState) -> None:
        """Make a final file partial again: what is good of it is kept."""
        self._places.make_partial(state.place)
        state.final = False

    def _note_file(self, state: FileState) -> None:
        partial = state.place.partial
        if partial not in self._noted:
            self._noted.add(partial)
            self._journal.note_file(state.place.object, self.make_relative(partial))

    def _write_segment(self, state: FileState, start: int, data: memoryview) -> None:
        partial = state.place.partial
        descriptor = self._places.create(state.place)
        try:
            at = 0
            while at < len(data):
                at += os.pwrite(descriptor, data[at:], start + at)
            unflushed = self._unflushed.get(partial, 0) + len(data)
            if unflushed >= _FLUSH_SIZE:  # so that the last fsync has little left to do
                unflushed = 0
                os.fdatasync(descriptor)
            self._unflushed[partial] = unflushed
        finally:
            os.close(descriptor)
