"""Assembly of pieces into files: preallocated partial files, the journal, and final names.

Every byte is written once, at its final offset. A file gets its final name when all bytes have
arrived, have the digest of the file, and are synced to the disk. After a kill, the next agent
reads the written pieces from the journal, and hashes them before it uses them.

The folder ``.millrace/`` below the root has the journal and ``files.jsonl``, the list of the files
that Millrace has made. A file without a line in this list is never replaced or removed.

The parts in `millrace.swarm.assembly` own the state. This module connects them.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Generator
from pathlib import Path

from millrace.errors import ConfigurationError, ConflictError
from millrace.swarm.assembly.arrivals import Arrivals, ArrivingFile
from millrace.swarm.assembly.finishing import FileFinisher
from millrace.swarm.assembly.hashing import FileHashes, hash_arriving
from millrace.swarm.assembly.leftovers import Leftovers
from millrace.swarm.assembly.partial_files import PartialFiles
from millrace.swarm.assembly.root_lock import RootLock
from millrace.swarm.cache_index import CacheCheck
from millrace.swarm.catalogue import RECORDS_FOLDER, Catalogue
from millrace.swarm.journal import Journal
from millrace.swarm.targets import Targets


class Assembler:
    """Writes the pieces of a catalogue into files below a root.

    Args:
        root: Folder that no file is written outside of.
        catalogue: Files to assemble.
        check: Check of the files of earlier runs.
        on_finished: Called with the numbers of files that have received their final names.
        on_dropped: Called with a piece that was to be dropped, and with the files that lack a
            segment since. No call of `on_finished` with these files follows until they are complete
            again.
        on_mismatch: Called with the number of a file whose bytes do not have its digest, and with
            the combined digest of its segments (`combine_segment_blocks`).
        on_fault: Called with an error after which the node cannot continue.
    """

    def __init__(
        self,
        root: Path,
        catalogue: Catalogue,
        *,
        check: CacheCheck = CacheCheck.SAMPLED,
        on_finished: Callable[[list[int]], None],
        on_dropped: Callable[[int, list[int]], None],
        on_mismatch: Callable[[int, str], None],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        root = root.resolve()
        self._catalogue, self._on_finished, self._on_fault = catalogue, on_finished, on_fault
        self._on_dropped = on_dropped
        self._records = records = root / RECORDS_FOLDER
        index = records / "files.jsonl"
        self._lock = RootLock(root, records / "lock")
        self._targets = Targets(root, catalogue)
        self._arrivals = Arrivals(catalogue, self._targets.by_file)
        self._journal = Journal(root, records / "partial.jsonl")
        self._partials = PartialFiles(root, self._targets, self._journal)
        self._leftovers = Leftovers(
            root,
            catalogue,
            check,
            arrivals=self._arrivals,
            targets=self._targets,
            journal=self._journal,
            partials=self._partials,
            index=index,
        )
        hashes = FileHashes(self._arrivals, catalogue.piece_size)
        self._finisher = finisher = FileFinisher(
            self._arrivals,
            hashes,
            self._targets,
            index=index,
            piece_size=catalogue.piece_size,
            on_finished=on_finished,
            on_mismatch=on_mismatch,
        )

        def hash_all() -> None:
            hash_arriving(self._arrivals, hashes, lambda number: finisher.submit([number]))

        self._threads = [
            threading.Thread(target=self._run_guarded, args=(work,), name=name, daemon=True)
            for work, name in ((finisher.run, "finish"), (hash_all, "hash"))
        ]

    def open(self) -> list[tuple[int, str]]:
        """Find the files and pieces of earlier runs, and allocate disk space for the others.

        Returns:
            The pieces that the node has, with their digests.

        Raises:
            ConflictError: Another agent uses this root.
            ConfigurationError: A file that Millrace did not make is at a destination.
            NoSpaceError: The missing files do not fit on the disk.
            StoppedError: `interrupt` was called.
        """
        arrivals, targets = self._arrivals, self._targets
        self._records.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()
        self._on_finished(self._leftovers.find_final())
        self._leftovers.find_partial()
        arrivals.note_pieces()
        self._leftovers.begin_journal()
        targets.check_space(state.target for state in arrivals.iterate_coming())
        for number, state in enumerate(arrivals.states):
            if not state.final and state.file.size >= self._catalogue.piece_size:
                targets.preallocate(state.target)
            if not state.final and state.missing == 0:
                self._finisher.submit([number])
        for thread in self._threads:
            thread.start()
        return arrivals.list_pieces()

    def interrupt(self) -> None:
        """End the check of files of earlier runs before the next file, from another thread."""
        self._arrivals.stop()

    def stop(self) -> None:
        """Give no further final names, and end the waits for bytes."""
        self._arrivals.stop()
        self._finisher.stop()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def close(self) -> None:
        """Release the root. Partial files stay for the next run. No thread may write after this."""
        self.stop()
        partial = any(True for _ in self._arrivals.iterate_coming())
        self._journal.close(keep=partial or self._leftovers.has_others)
        self._lock.release()

    def __len__(self) -> int:
        """Return the number of pieces."""
        return len(self._catalogue.pieces)

    def has(self, number: int) -> bool:
        """Tell whether the node has a piece."""
        return self._arrivals.has(number)

    def write(self, number: int, data: memoryview, block_digests: list[bytes]) -> bool:
        """Write a piece; return False if it is written already, or by another thread just now.

        Args:
            number: Piece.
            data: Bytes of the piece.
            block_digests: Block digests of each of its segments.
        """
        arrivals = self._arrivals
        if not arrivals.begin_write(number):
            return False
        piece = [(arrivals.states[s.file], s.start, s.size) for s in self._catalogue.pieces[number]]
        try:
            self._partials.write(piece, data)
        except BaseException:
            arrivals.cancel_write(number)
            raise
        with arrivals.changed:
            complete = arrivals.end_write(number, block_digests)
            self._partials.note_segments(
                [
                    (state, (start, size), digests)
                    for (state, start, size), digests in zip(piece, block_digests, strict=True)
                ]
            )
        if complete:
            self._finisher.submit(complete)
        return True

    def drop(self, number: int) -> None:
        """Forget a piece, whose bytes were wrong."""
        arrivals = self._arrivals
        reopened: list[int] = []
        with arrivals.changed:
            if not arrivals.has(number):
                self._on_dropped(number, reopened)
                return
            arrivals.piece_digests[number] = ""
            piece = [(arrivals.states[s.file], s) for s in self._catalogue.pieces[number]]
            verified = [state for state, _ in piece if state.is_verified]
            if len(verified) == len(piece):
                self._on_fault(
                    ConflictError(
                        f"{verified[0].file.path} has its digest, and the driver has read other "
                        "bytes from the store. The file was not changed. Run it again."
                    )
                )
            for state, segment in piece:
                if state.is_verified:  # the wrong bytes are in another file of this piece
                    continue
                self._partials.forget_segment(state, (segment.start, segment.size))
                if state.final:  # a file without a digest, which could not be verified
                    try:
                        self._partials.reopen(state)
                    except ConfigurationError as error:
                        self._on_fault(error)
                        return
                state.drop_segment(arrivals.get_index(segment))
                reopened.append(segment.file)
            self._on_dropped(number, reopened)
            arrivals.changed.notify_all()

    def void_digest(self, number: int) -> None:
        """Ignore the digest of a file, which is not a digest of the bytes in the store."""
        with self._arrivals.changed:
            state = self._arrivals.states[number]
            state.void = True
            complete = state.missing == 0 and not state.final
        if complete:
            self._finisher.submit([number])

    @contextlib.contextmanager
    def open_piece(self, number: int) -> Generator[list[tuple[int, int, int]]]:
        """Open the files of a piece, for ``sendfile``.

        Yields:
            Descriptor, offset and number of bytes of each segment.

        Raises:
            KeyError: The node does not have the piece.
        """
        if not self.has(number):
            raise KeyError(number)
        opened: list[tuple[int, int, int]] = []
        try:
            opened.extend(
                (self._arrivals.open_current(segment.file), segment.start, segment.size)
                for segment in self._catalogue.pieces[number]
                if segment.size
            )
            yield opened
        finally:
            for descriptor, _, _ in opened:
                os.close(descriptor)

    def open_sequential(self, number: int) -> ArrivingFile:
        """Return a reader of a file from its beginning. The reader waits for bytes to arrive."""
        return ArrivingFile(self._arrivals, number)

    def wait_final(self, number: int) -> None:
        """Wait until a file has its final name.

        Raises:
            StoppedError: The run ended before.
        """
        self._arrivals.wait_final(number)

    def count_drops(self, number: int) -> int:
        """Return how many segments of a file were dropped, over the whole run."""
        return self._arrivals.states[number].drops

    def check_open(self, number: int) -> None:
        """Check that the run has not ended while a file is read.

        Raises:
            StoppedError: The run has ended.
        """
        self._arrivals.check_open(number)

    def is_verified(self, number: int) -> bool:
        """Tell whether a file has its final name, and a digest. Then no segment can be dropped."""
        return self._arrivals.states[number].is_verified

    def call_unless_dropped(self, number: int, drops: int, call: Callable[[], None]) -> bool:
        """Call a function that reports a file, and return True, unless its `drops` have increased.

        The lock is held, as it is for each call of `on_dropped`.
        """
        return self._arrivals.call_unless_dropped(number, drops, call)

    def count_unallocated(self) -> int:
        """Return the bytes of incomplete files that have no allocated disk space."""
        return self._arrivals.count_unallocated()

    def note_folder(self, folder: Path) -> None:
        """Note a folder that the next run removes, if this run is killed."""
        self._partials.note_folder(folder)

    def _run_guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the driver is told
            self._on_fault(error)
