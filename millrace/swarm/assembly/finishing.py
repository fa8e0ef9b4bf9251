"""Finishing of files: each gets its final name when it is whole, right, and on the disk.

This module owns the queue of complete files.
"""

import queue
from collections.abc import Callable
from pathlib import Path

from millrace.swarm.assembly.arrivals import Arrivals, FileState
from millrace.swarm.assembly.hashing import FileHashes
from millrace.swarm.cache_index import append_entries, append_identities, identity_of
from millrace.swarm.pieces import digest_of
from millrace.swarm.targets import Targets, sync


class FileFinisher:
    """Gives complete files their final names.

    Args:
        arrivals: Files that arrive.
        hashes: Hashes of these files.
        places: Paths of the files.
        index: Path of the cache index.
        piece_size: Bytes of a piece at most.
        finished: Told the numbers of files that have got their final names.
        mismatch: Told the number of a file whose bytes are not those of its digest, and
            `digest_of` its segments' digests.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        hashes: FileHashes,
        places: Targets,
        *,
        index: Path,
        piece_size: int,
        finished: Callable[[list[int]], None],
        mismatch: Callable[[int, str], None],
    ) -> None:
        self._arrivals, self._hashes, self._places = arrivals, hashes, places
        self._index, self._piece_size = index, piece_size
        self._finished, self._mismatch = finished, mismatch
        self._complete: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()

    def submit(self, numbers: list[int]) -> None:
        """Add complete files, which are looked at in the thread of `run`."""
        self._complete.put(numbers)

    def stop(self) -> None:
        """End `run` after the files that were added before."""
        self._complete.put(None)

    def run(self) -> None:
        """Finish files, all that are complete at once, until `stop`."""
        while True:
            numbers = self._complete.get()
            if numbers is None:
                return
            batch = list(numbers)
            while not self._complete.empty():
                more = self._complete.get()
                if more is None:
                    self._complete.put(None)
                    break
                batch += more
            self.finish(list(dict.fromkeys(batch)))

    def finish(self, numbers: list[int]) -> None:
        """Give complete files their final names: checked, on the disk, all of a batch at once."""
        ready: list[tuple[int, FileState]] = []
        for number in numbers:
            state = self._arrivals.states[number]
            if state.final or state.missing or not self._is_whole(number, state):
                continue
            ready.append((number, state))
        if not ready:
            return
        self._places.sync_partials([state.place for _, state in ready])
        # Before the names are there: a file of which no line says that it is ours is never touched.
        append_entries(self._index, [state.make_entry(self._piece_size) for _, state in ready])
        for _, state in ready:
            self._arrivals.rename(state)
            self._places.link(state.place)
        append_identities(
            self._index,
            {state.file.path: identity_of(state.place.final) for _, state in ready},
        )
        for folder in {state.place.folder for _, state in ready}:
            sync(folder)
        self._finished([number for number, _ in ready])

    def _is_whole(self, number: int, state: FileState) -> bool:
        """Tell whether a file is what its digest says; False also while that is being found out."""
        drops = state.drops
        if not state.wanted:
            return True
        found = self._hashes.compute_digest(number)
        if found is None:
            return False  # the thread that hashes comes back with it
        if found == state.file.digest:
            return True
        with self._arrivals.changed:
            state.fresh = False
            parts = state.list_digests()
            if state.void or (state.drops != drops and not state.missing):
                self.submit([number])  # what was hashed is no longer what is here
                return False
        if state.drops == drops:
            self._mismatch(number, digest_of(parts))
        return False
