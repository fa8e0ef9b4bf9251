"""Finishing of files: a file gets its final name when it is complete, verified and synced.

This module owns the queue of complete files.
"""

import queue
from collections.abc import Callable
from pathlib import Path

from millrace.errors import ConfigurationError
from millrace.swarm.assembly.arrivals import Arrivals, FileState
from millrace.swarm.assembly.hashing import FileHashes
from millrace.swarm.cache_index import append_entries, append_identities, read_identity
from millrace.swarm.catalogue import combine_segment_blocks
from millrace.swarm.targets import Targets, sync


class FileFinisher:
    """Gives complete files their final names.

    Args:
        arrivals: Files that arrive.
        hashes: Hashes of these files.
        targets: Paths of the files.
        index: Path of the cache index.
        piece_size: Bytes of a piece at most.
        on_finished: Called with the numbers of files that have received their final names, while
            the lock of the arrivals is held.
        on_mismatch: Called with the number of a file whose bytes do not have its digest, and with
            the combined digest of its segments (`combine_segment_blocks`).
    """

    def __init__(
        self,
        arrivals: Arrivals,
        hashes: FileHashes,
        targets: Targets,
        *,
        index: Path,
        piece_size: int,
        on_finished: Callable[[list[int]], None],
        on_mismatch: Callable[[int, str], None],
    ) -> None:
        self._arrivals, self._hashes, self._targets = arrivals, hashes, targets
        self._index, self._piece_size = index, piece_size
        self._on_finished, self._on_mismatch = on_finished, on_mismatch
        self._complete: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()

    def submit(self, numbers: list[int]) -> None:
        """Add complete files to the queue of `run`."""
        self._complete.put(numbers)

    def stop(self) -> None:
        """End `run` after the files in the queue."""
        self._complete.put(None)

    def run(self) -> None:
        """Finish files until `stop`. Files that are complete at the same time form one batch."""
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
        """Verify complete files, sync them to the disk, and give them their final names.

        Raises:
            ConfigurationError: A file that Millrace did not make is at a destination.
        """
        complete: list[tuple[int, FileState, int]] = []
        for number in numbers:
            state = self._arrivals.states[number]
            drops = state.drops  # read first: a later drop is seen by `rename`
            if state.final or state.missing or not self._is_verified(number, state):
                continue
            complete.append((number, state, drops))
        if not complete:
            return
        self._targets.sync_partials([state.target for _, state, _ in complete])
        # The line comes before the name: a file without a line is never replaced or removed.
        append_entries(
            self._index,
            [one for _, state, _ in complete for one in state.make_entries(self._piece_size)],
        )
        ready: list[tuple[int, FileState, int]] = []
        faults: list[ConfigurationError] = []
        for number, state, drops in complete:
            try:
                if self._arrivals.rename(state, drops, self._targets):
                    self._link(state, drops)
                    ready.append((number, state, drops))
            except ConfigurationError as error:  # the other files become ready nonetheless
                faults.append(error)
        if ready:
            self._note_ready(ready)
        if faults:
            raise faults[0]

    def _link(self, state: FileState, drops: int) -> None:
        """Create the further destinations of a file, unless a segment was dropped meanwhile.

        The lock is not held: copies, where links are impossible, take long.

        Raises:
            ConfigurationError: A file that Millrace did not make is at a destination.
        """
        links: dict[str, tuple[int, ...]] = {}
        try:
            self._targets.link(state.target, state.existing_links, links)
        except FileNotFoundError:  # the drop has taken the final name away
            with self._arrivals.changed:
                if state.drops == drops:
                    raise
        finally:
            with self._arrivals.changed:
                if state.drops == drops:
                    state.links = links
                else:
                    self._targets.unlink(state.target, links)

    def _note_ready(self, ready: list[tuple[int, FileState, int]]) -> None:
        """Note the identities of files with final names, sync the names, and report the files.

        Args:
            ready: Number and state of each file, and its dropped segments before its rename.
        """
        with self._arrivals.changed:  # a drop takes the final name away again
            seen = {
                name: read_identity(path)
                for _, state, drops in ready
                if state.drops == drops
                for name, path in self._targets.iterate_paths(state.target)
            }
        append_identities(self._index, seen)
        for folder in {
            path.parent
            for _, state, _ in ready
            for _, path in self._targets.iterate_paths(state.target)
        }:
            sync(folder.resolve())  # a link within the root
        with self._arrivals.changed:
            kept = [number for number, state, drops in ready if state.drops == drops]
            if kept:
                self._on_finished(kept)

    def _is_verified(self, number: int, state: FileState) -> bool:
        """Tell whether the bytes of a file have its digest.

        Returns:
            False also while the file is still being hashed.
        """
        drops = state.drops
        if not state.wanted:
            return True
        found = self._hashes.compute_digest(number)
        if found is None:
            return False  # the hashing thread submits the file again
        if found == state.file.digest:
            return True
        with self._arrivals.changed:
            state.fresh = False
            block_digests = state.list_segment_blocks()
            if state.void or (state.drops != drops and not state.missing):
                self.submit([number])  # the file has changed since it was hashed
                return False
        if state.drops == drops:
            self._on_mismatch(number, combine_segment_blocks(block_digests))
        return False
