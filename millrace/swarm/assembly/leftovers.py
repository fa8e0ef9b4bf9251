"""Leftovers of earlier runs: final files of Millrace, and partial files from the journal.

This module owns the list of the partial files of other requests that are kept.
"""

import os
from dataclasses import replace
from pathlib import Path

from millrace.swarm.assembly.arrivals import Arrivals, FileState
from millrace.swarm.assembly.partial_files import PartialFiles
from millrace.swarm.cache_index import (
    CacheCheck,
    CachedFile,
    CacheEntry,
    append_entries,
    append_identities,
    read_identity,
    read_index,
    recognise_file,
    trim_index,
)
from millrace.swarm.catalogue import Catalogue
from millrace.swarm.journal import Journal, cut_partial_stem, verify_ranges
from millrace.swarm.targets import Targets


class Leftovers:
    """Files that earlier runs have left below a root.

    Args:
        root: Folder that all destinations are below; resolved.
        catalogue: Files of this run.
        check: Check of final files.
        arrivals: State of the files of this run, which receives the found segments.
        targets: Paths of these files.
        journal: Journal of earlier runs and of this run.
        partials: Partial files of this run.
        index: Path of the cache index.
    """

    def __init__(
        self,
        root: Path,
        catalogue: Catalogue,
        check: CacheCheck,
        *,
        arrivals: Arrivals,
        targets: Targets,
        journal: Journal,
        partials: PartialFiles,
        index: Path,
    ) -> None:
        self._root, self._catalogue, self._check = root, catalogue, check
        self._arrivals, self._targets = arrivals, targets
        self._journal, self._partials, self._index = journal, partials, index
        self._others: dict[str, str] = {}  # object → path of a partial file of another request

    @property
    def has_others(self) -> bool:
        """True if partial files of other requests are kept."""
        return bool(self._others)

    def find_final(self) -> list[int]:
        """Take over final files of earlier runs that pass the check; return their numbers.

        The files at all destinations are checked before the first one is renamed.
        """
        index = trim_index(self._index, read_index(self._index), self._root)
        found = self._recognise_files(index)
        whole: list[int] = []
        again: list[CacheEntry] = []  # recorded again: an identity belongs to the last entry
        for number, known in found.items():
            state = self._arrivals.states[number]
            if state.missing:  # a damaged file: its correct segments are kept
                self._partials.reopen(state)
                continue
            whole.append(number)
            own, *links = state.make_entries(self._catalogue.piece_size)
            if known.entry is not None:
                recognised = own if known.hashed else replace(known.entry, seen=())
                again += [] if _is_last_entry(index, recognised) else [recognised]
            again += [link for link in links if not _has_entry(index, link)]
        if again:
            append_entries(self._index, again)  # before the names of links
        recorded = {entry.path for entry in again}
        seen: dict[str, tuple[int, ...]] = {}
        for number in whole:
            state = self._arrivals.states[number]
            self._targets.link(state.target, state.existing_links, state.links)
            for name, path in self._targets.iterate_paths(state.target):
                if name == state.file.path and found[number].entry is None:
                    continue  # a file of the user, whose bytes are those of no entry
                identity = read_identity(path)
                if name in recorded or index[name][-1].seen != identity:
                    seen[name] = identity
        if seen:
            append_identities(self._index, seen)
        return whole

    def _recognise_files(self, index: dict[str, list[CacheEntry]]) -> dict[int, CachedFile]:
        """Check the files at the destinations, and note the segments that they have.

        Returns:
            Files that are complete or damaged, by their numbers. A file with another content of
            Millrace has no entry.

        Raises:
            ConfigurationError: A file that Millrace did not make is at a destination, or a folder
                is outside of the root.
            StoppedError: The run has ended.
        """
        found: dict[int, CachedFile] = {}
        for number, state in enumerate(self._arrivals.states):
            self._arrivals.check_open(number)
            path = state.target.final
            if not os.path.lexists(path):
                continue
            state.existing = read_identity(path)
            known = recognise_file(
                path, state.file, index.get(state.file.path, []), self._catalogue, self._check
            )
            if known is None:
                continue
            found[number] = known
            state.segment_blocks = known.digests
            state.missing = sum(digest is None for digest in known.digests)
            state.final = not state.missing
        for number, state in enumerate(self._arrivals.states):
            self._arrivals.check_open(number)
            self._recognise_links(state, index)
        self._targets.check_folders(state.target for state in self._arrivals.iterate_coming())
        return found

    def _recognise_links(self, state: FileState, index: dict[str, list[CacheEntry]]) -> None:
        """Check the files at the further destinations of a file.

        Raises:
            ConfigurationError: A file that Millrace did not make is at one of them.
        """
        final = state.target.final
        for name, path in self._targets.iterate_paths(state.target):
            if path == final or not os.path.lexists(path):
                continue
            state.existing_links[name] = read_identity(path)
            if state.existing is not None and path.samefile(final):
                continue  # a hard link to the file at the first destination
            known = recognise_file(
                path,
                replace(state.file, path=name),
                index.get(name, []),
                self._catalogue,
                self._check,
            )
            if known is not None and None not in known.digests:
                state.existing_links[name] = None

    def find_partial(self) -> None:
        """Take over the segments of partial files whose bytes have the digests in the journal."""
        self._journal.read()
        for number, state in enumerate(self._arrivals.states):
            self._arrivals.check_open(number)
            if state.final:
                continue
            ranges = self._journal.ranges.get(state.target.object)
            if ranges is None:
                continue
            path = state.target.partial
            if not path.exists():
                path = self._root / self._journal.partials.get(state.target.object, "")
            if not path.is_file() or path.is_symlink():
                continue
            self._targets.adopt(state.target, path)
            spans = self._arrivals.list_spans(state)
            for index, blocks in verify_ranges(state.target.partial, ranges, spans).items():
                if state.segment_blocks[index] is None:
                    state.note_segment(index, blocks)

    def begin_journal(self) -> None:
        """Begin a new journal with incomplete files, and with kept files of other requests."""
        partials, states = self._partials, self._arrivals.states
        coming = [
            state
            for state in self._arrivals.iterate_coming()
            if state.file.size >= self._catalogue.piece_size or state.target.partial.exists()
        ]
        for state in coming:
            partials.mark_noted(state)
        self._others = self._journal.select_other_partials(
            {state.target.object for state in states},
            {cut_partial_stem(partials.make_relative(state.target.partial)) for state in states},
            self._targets.measure_spare_room(
                state.target for state in self._arrivals.iterate_coming()
            ),
        )
        files = {
            state.target.object: partials.make_relative(state.target.partial) for state in coming
        }
        pieces = [row for state in coming for row in self._list_rows(state)]
        for name in self._others:
            noted = self._journal.ranges.get(name, {})
            pieces += [(name, span, digest) for span, digest in noted.items()]
        self._journal.begin(files | self._others, pieces)

    def _list_rows(self, state: FileState) -> list[tuple[str, tuple[int, int], str]]:
        """Return the object, range and block digests of each segment that has arrived."""
        return [
            (state.target.object, span, blocks.hex())
            for span, blocks in zip(
                self._arrivals.list_spans(state), state.segment_blocks, strict=True
            )
            if blocks is not None
        ]


def _is_last_entry(index: dict[str, list[CacheEntry]], wanted: CacheEntry) -> bool:
    """Tell whether the last entry of a file is the wanted one, with the same digests."""
    entries = index.get(wanted.path, [])
    return bool(entries) and replace(entries[-1], seen=()) == wanted


def _has_entry(index: dict[str, list[CacheEntry]], wanted: CacheEntry) -> bool:
    """Tell whether the last entry of a file is the wanted one, whatever its pieces were.

    It may have a digest that the wanted one does not name.
    """
    entries = index.get(wanted.path, [])
    content = wanted.origin, wanted.etag, wanted.size, wanted.mtime_ns
    return (
        bool(entries)
        and content
        == (entries[-1].origin, entries[-1].etag, entries[-1].size, entries[-1].mtime_ns)
        and wanted.digest in {"", entries[-1].digest}
    )
