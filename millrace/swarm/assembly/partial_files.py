"""Partial files: the bytes of segments, and their lines in the journal.

This module owns the list of the partial files in the journal, and the bytes that are not flushed.
"""

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from millrace.swarm.assembly.arrivals import FileState
from millrace.swarm.journal import Journal, Range
from millrace.swarm.targets import Targets

_FLUSH_SIZE = 64 << 20  # written bytes of a file after which they are flushed to the disk


class PartialFiles:
    """Partial files of a run.

    Args:
        root: Folder that all destinations are below; resolved.
        targets: Paths of the files.
        journal: Journal of the partial files.
    """

    def __init__(self, root: Path, targets: Targets, journal: Journal) -> None:
        self._root, self._targets, self._journal = root, targets, journal
        self._noted: set[Path] = set()  # partial files in the journal
        self._unflushed: dict[Path, int] = {}  # bytes
        # Pieces of many files are written one after another: with many short system calls, threads
        # would compete for the lock of the interpreter.
        self._writing = threading.Lock()

    def mark_noted(self, state: FileState) -> None:
        """Note that a partial file is in the journal."""
        self._noted.add(state.target.partial)

    def make_relative(self, path: Path) -> str:
        """Return a path relative to the root, as in the journal."""
        return path.relative_to(self._root).as_posix()

    def note_folder(self, folder: Path) -> None:
        """Note a folder that the next run removes, if this run is killed."""
        self._journal.note_folder(self.make_relative(folder))

    def note_segments(self, segments: Sequence[tuple[FileState, Range, bytes]]) -> None:
        """Add written segments to the journal, each with its block digests."""
        self._journal.note_ranges(
            (state.target.object, span, digest.hex()) for state, span, digest in segments
        )

    def forget_segment(self, state: FileState, span: Range) -> None:
        """Note in the journal that the bytes of a segment were wrong."""
        self._journal.forget_range(state.target.object, span)

    def write(self, segments: Sequence[tuple[FileState, int, int]], data: memoryview) -> None:
        """Write the segments of a piece, except those of final files.

        Args:
            segments: File, first byte and size of each.
            data: Bytes of the segments, one after another.
        """
        at = 0
        with self._writing if len(segments) > 1 else contextlib.nullcontext():
            for state, start, size in segments:
                if not state.final:
                    self._note_file(state)
                    self._write_segment(state, start, data[at : at + size])
                at += size

    def reopen(self, state: FileState) -> None:
        """Make a final file partial again, to replace some of its segments.

        Its further destinations are removed. A file that another program has put there stays, and
        is a conflict when the file is complete again.

        Raises:
            ConfigurationError: Another program has replaced the file since.
        """
        self._targets.unlink(state.target, state.links)
        for name in state.links:
            state.existing_links.pop(name, None)
        state.links = {}
        if state.existing is not None:
            self._targets.make_partial(state.target, state.existing)
        state.final, state.existing = False, None

    def _note_file(self, state: FileState) -> None:
        partial = state.target.partial
        if partial not in self._noted:
            self._noted.add(partial)
            self._journal.note_file(state.target.object, self.make_relative(partial))

    def _write_segment(self, state: FileState, start: int, data: memoryview) -> None:
        partial = state.target.partial
        descriptor = self._targets.create(state.target)
        try:
            at = 0
            while at < len(data):
                at += os.pwrite(descriptor, data[at:], start + at)
            unflushed = self._unflushed.get(partial, 0) + len(data)
            if unflushed >= _FLUSH_SIZE:  # so that the last fsync is short
                unflushed = 0
                os.fdatasync(descriptor)
            self._unflushed[partial] = unflushed
        finally:
            os.close(descriptor)
