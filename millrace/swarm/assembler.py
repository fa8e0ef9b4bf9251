"""Assembly of pieces into files: preallocated partial files, the journal, the final names.

Every byte is written once, at its place in the final file. A file gets its final name when all
of it is there, is what its digest says, and is on the disk. What a killed agent leaves is found
again by the next: the journal says which pieces were written, and hashing says whether they are.

Below the root, ``.millrace/`` holds the journal and ``files.jsonl``: what we made, with digests.
Nothing that is not in it is ever replaced or removed.

The state lies in the parts of `millrace.swarm.assembly`. This module connects them.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Generator
from pathlib import Path

from millrace.errors import ConflictError
from millrace.swarm.assembly.arrivals import Arrivals, ArrivingFile
from millrace.swarm.assembly.finishing import FileFinisher
from millrace.swarm.assembly.hashing import FileHashes, hash_arriving
from millrace.swarm.assembly.leftovers import Leftovers
from millrace.swarm.assembly.partial_files import PartialFiles
from millrace.swarm.assembly.root_lock import RootLock
from millrace.swarm.cache_index import CacheCheck
from millrace.swarm.journal import Journal
from millrace.swarm.pieces import RECORDS_FOLDER, Catalogue
from millrace.swarm.targets import Targets


class Assembler:
    """The files of a catalogue below a root.

    Args:
        root: The folder that no file is written outside of.
        catalogue: What lands.
        check: How an earlier run's files are recognised.
        finished: Told the numbers of files that have got their final names.
        mismatch: Told the number of a file whose bytes are not those of its digest, and
            `digest_of` its segments' digests.
        fault: Told why nothing more can be written here.
    """

    def __init__(
        self,
        root: Path,
        catalogue: Catalogue,
        *,
        check: CacheCheck = CacheCheck.SAMPLED,
        finished: Callable[[list[int]], None],
        mismatch: Callable[[int, str], None],
        fault: Callable[[BaseException], None],
    ) -> None:
        root = root.resolve()
        self._catalogue, self._finished, self._fault = catalogue, finished, fault
        self._records = records = root / RECORDS_FOLDER
        index = records / "files.jsonl"
        self._lock = RootLock(root, records / "lock")
        self._places = Targets(root, catalogue)
        self._arrivals = Arrivals(catalogue, self._places.of)
        self._journal = Journal(root, records / "partial.jsonl")
        self._partials = PartialFiles(root, self._places, self._journal)
        self._leftovers = Leftovers(
            root,
            catalogue,
            check,
            arrivals=self._arrivals,
            places=self._places,
            journal=self._journal,
            partials=self._partials,
            index=index,
        )
        hashes = FileHashes(self._arrivals, catalogue.piece_size)
        self._finisher = finisher = FileFinisher(
            self._arrivals,
            hashes,
            self._places,
            index=index,
            piece_size=catalogue.piece_size,
            finished=finished,
            mismatch=mismatch,
        )

        def hash_all() -> None:
            hash_arriving(self._arrivals, hashes, lambda number: finisher.submit([number]))

        self._threads = [
            threading.Thread(target=self._run_guarded, args=(work,), name=name, daemon=True)
            for work, name in ((finisher.run, "finish"), (hash_all, "hash"))
        ]

    def open(self) -> list[tuple[int, str]]:
        """Find what is here already, and make room for the rest.

        Returns:
            The pieces that are here, with their digests.

        Raises:
            ConflictError: Another agent uses this root.
            ConfigurationError: A destination is taken by something that we did not make.
            NoSpaceError: The rest does not fit on the disk.
        """
        arrivals, places = self._arrivals, self._places
        self._records.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()
        self._finished(self._leftovers.find_final())
        self._leftovers.find_partial()
        arrivals.note_pieces()
        self._leftovers.begin_journal()
        places.check_space(state.place for state in arrivals.iterate_coming())
        for number, state in enumerate(arrivals.states):
            if not state.final and state.file.size >= self._catalogue.piece_size:
                places.preallocate(state.place)
            if not state.final and state.missing == 0:
                self._finisher.submit([number])
        for thread in self._threads:
            thread.start()
        return arrivals.list_pieces()

    def stop(self) -> None:
        """Give nothing a final name any more, and wake whoever waits for bytes."""
        self._arrivals.stop()
        self._finisher.stop()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def close(self) -> None:
        """Let go of the root, when nobody writes any more. What is partial stays, for later."""
        self.stop()
        partial = any(True for _ in self._arrivals.iterate_coming())
        self._journal.close(keep=partial or self._leftovers.has_others)
        self._lock.release()

    def __len__(self) -> int:
        """Return the number of pieces."""
        return len(self._catalogue.pieces)

    def has(self, number: int) -> bool:
        """Tell whether a piece is here."""
        return self._arrivals.has(number)

    def write(self, number: int, data: memoryview, parts: list[bytes]) -> bool:
        """Write a piece to its place; False if it is here already, or is being written.

        Args:
            number: Which.
            data: Its bytes.
            parts: SHA-256 of each of its segments.
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
            complete = arrivals.end_write(number, parts)
            self._partials.note_segments(
                [
                    (state, (start, size), part)
                    for (state, start, size), part in zip(piece, parts, strict=True)
                ]
            )
        if complete:
            self._finisher.submit(complete)
        return True

    def drop(self, number: int) -> None:
        """Forget a piece: its bytes were wrong."""
        arrivals = self._arrivals
        with arrivals.changed:
            if not arrivals.has(number):
                return
            arrivals.digests[number] = ""
            piece = [(arrivals.states[s.file], s) for s in self._catalogue.pieces[number]]
            verified = [state for state, _ in piece if state.is_verified]
            if len(verified) == len(piece):
                self._fault(
                    ConflictError(
                        f"{verified[0].file.path} is what its digest says, and the driver has "
                        "read other bytes from the store: it was left as it is. Run it again."
                    )
                )
            for state, segment in piece:
                if state.is_verified:  # another file of this piece is wrong
                    continue
                if state.final:  # taken for whole, as nothing said what it should be
                    self._partials.reopen(state)
                state.drop_segment(arrivals.get_index(segment))

    def void_digest(self, number: int) -> None:
        """Take a file without the digest that it was said to have: the store means another."""
        with self._arrivals.changed:
            state = self._arrivals.states[number]
            state.void = True
            complete = state.missing == 0 and not state.final
        if complete:
            self._finisher.submit([number])

    @contextlib.contextmanager
    def open_piece(self, number: int) -> Generator[list[tuple[int, int, int]]]:
        """Yield a piece as open files: descriptor, offset, bytes of each segment, for ``sendfile``.

        Raises:
            KeyError: It is not here.
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
        """Return a reader of a file from its beginning, while it is still arriving."""
        return ArrivingFile(self._arrivals, number)

    def wait_final(self, number: int) -> None:
        """Wait until a file has its final name.

        Raises:
            ChangedError: The run has ended before.
        """
        self._arrivals.wait_final(number)

    def count_unallocated(self) -> int:
        """Return the bytes that are still to come and for which no room was made on the disk."""
        return self._arrivals.count_unallocated()

    def note_folder(self, folder: Path) -> None:
        """Note a folder for the next run to remove, should this one be killed."""
        self._partials.note_folder(folder)

    def _run_guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - told to the run, which ends
            self._fault(error)
