"""Leftovers of earlier runs: final files of ours, and partial files that the journal names.

This module owns which partial files of other requests are kept.
"""

import os
from pathlib import Path

from millrace.swarm.assembly.arrivals import Arrivals, FileState
from millrace.swarm.assembly.partial_files import PartialFiles
from millrace.swarm.cache_index import (
    CacheCheck,
    CacheEntry,
    append_entries,
    append_identities,
    identity_of,
    read_index,
    recognise_file,
)
from millrace.swarm.journal import Journal, partial_stem, verify_ranges
from millrace.swarm.pieces import Catalogue
from millrace.swarm.targets import Targets


class Leftovers:
    """Files that earlier runs have left below a root.

    Args:
        root: Folder that files go below; resolved.
        catalogue: Files of this run.
        check: How final files are recognised.
        arrivals: Files of this run, which what is found is noted in.
        places: Paths of these files.
        journal: Journal of earlier runs and of this one.
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
        places: Targets,
        journal: Journal,
        partials: PartialFiles,
        index: Path,
    ) -> None:
        self._root, self._catalogue, self._check = root, catalogue, check
        self._arrivals, self._places = arrivals, places
        self._journal, self._partials, self._index = journal, partials, index
        self._others: dict[str, str] = {}  # partial files of other requests, by their objects

    @property
    def has_others(self) -> bool:
        """True if partial files of other requests are kept."""
        return bool(self._others)

    def find_final(self) -> list[int]:
        """Take over final files that are as an earlier run made them; return their numbers."""
        made = read_index(self._index)
        whole: list[int] = []
        again: list[CacheEntry] = []  # recorded again, as all of their bytes were read
        seen: dict[str, tuple[int, ...]] = {}
        for number, state in enumerate(self._arrivals.states):
            path = state.place.final
            if not os.path.lexists(path):
                continue
            known = recognise_file(
                path, state.file, made.get(state.file.path, []), self._catalogue, self._check
            )
            if known is None:
                continue
            state.digests = known.digests
            state.missing = sum(digest is None for digest in known.digests)
            state.final = not state.missing
            if state.missing:  # ours, and damaged: what is good of it is kept
                self._places.make_partial(state.place)
                continue
            self._places.link(state.place)
            whole.append(number)
            identity = identity_of(path)
            if known.made is not None and (known.hashed or known.made.seen != identity):
                seen[state.file.path] = identity
                again += [state.make_entry(self._catalogue.piece_size)] if known.hashed else []
        if seen:
            append_entries(self._index, again)
            append_identities(self._index, seen)
        return whole

    def find_partial(self) -> None:
        """Take over what was written of files that are not whole, where its bytes are as noted."""
        self._journal.read()
        for state in self._arrivals.iterate_coming():
            ranges = self._journal.pieces.get(state.place.object)
            if ranges is None:
                continue
            path = state.place.partial
            if not path.exists():
                path = self._root / self._journal.partials.get(state.place.object, "")
            if not path.is_file() or path.is_symlink():
                continue
            self._places.adopt(state.place, path)
            spans = self._arrivals.list_spans(state)
            for index, digest in verify_ranges(state.place.partial, ranges, spans).items():
                if state.digests[index] is None:
                    state.note_segment(index, digest)

    def begin_journal(self) -> None:
        """Begin the journal with the files that are to come, and with those of other requests."""
        partials, states = self._partials, self._arrivals.states
        coming = [
            state
            for state in self._arrivals.iterate_coming()
            if state.file.size >= self._catalogue.piece_size or state.place.partial.exists()
        ]
        for state in coming:
            partials.mark_noted(state)
        self._others = self._journal.select_other_partials(
            {state.place.object for state in states},
            {partial_stem(partials.make_relative(state.place.partial)) for state in states},
            self._places.measure_spare_room(
                state.place for state in self._arrivals.iterate_coming()
            ),
        )
        files = {
            state.place.object: partials.make_relative(state.place.partial) for state in coming
        }
        pieces = [row for state in coming for row in self._list_rows(state)]
        for name in self._others:
            noted = self._journal.pieces.get(name, {})
            pieces += [(name, span, digest) for span, digest in noted.items()]
        self._journal.begin(files | self._others, pieces)

    def _list_rows(self, state: FileState) -> list[tuple[str, tuple[int, int], str]]:
        """Return the object, range and SHA-256 of each segment of a file that is here."""
        return [
            (state.place.object, span, digest.hex())
            for span, digest in zip(self._arrivals.list_spans(state), state.digests, strict=True)
            if digest is not None
        ]
