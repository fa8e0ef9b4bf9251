"""Assembly of pieces into files: preallocated partial files, the journal, the final names.

Every byte is written once, at its place in the final file. A file gets its final name when all
of it is there, is what its digest says, and is on the disk. What a killed agent leaves is found
again by the next: the journal says which pieces were written, and hashing says whether they are.

Below the root, ``.millrace/`` holds the journal and ``files.jsonl``: what we made, with digests.
Nothing that is not in it is ever replaced or removed.
"""

import contextlib
import fcntl
import os
import queue
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.errors import ChangedError, ConflictError
from millrace.swarm.cache_index import (
    CacheCheck,
    CacheEntry,
    append_entries,
    append_identities,
    hash_file,
    identity_of,
    read_index,
    recognise_file,
)
from millrace.swarm.journal import Journal, Range, partial_stem, verify_ranges
from millrace.swarm.pieces import RECORDS_FOLDER, Catalogue, File, Segment, digest_of
from millrace.swarm.targets import Target, Targets, sync

_BLOCK = 1 << 20
_FLUSH_SIZE = 64 << 20  # bytes after which writing to the disk is begun


@dataclass(slots=True)
class _FileState:
    """One file on its way."""

    place: Target
    digests: list[bytes | None]
    missing: int
    hash: Any
    """Of what `hashed` counts."""
    final: bool = False
    fresh: bool = True
    """No byte of it was replaced after it had been hashed."""
    hashed: int = 0
    drops: int = 0
    """How often a segment of it was dropped."""
    void: bool = False
    """The digest that it was said to have is none of its bytes."""
    unflushed: int = 0
    noted: bool = False
    """Whether the journal has the partial file."""

    @property
    def file(self) -> File:
        return self.place.file

    @property
    def wanted(self) -> str:
        """The digest that it must have; empty if nothing says one."""
        return "" if self.void else self.file.digest

    @property
    def is_verified(self) -> bool:
        """True if all of the file is here, and is what its digest says."""
        return self.final and bool(self.wanted)


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
        self._root, self._catalogue, self._check = root.resolve(), catalogue, check
        self._finished, self._mismatch, self._fault = finished, mismatch, fault
        self._ours = self._root / RECORDS_FOLDER
        self._digests: list[str] = [""] * len(catalogue.pieces)  # of what is here
        self._being_written: set[int] = set()  # pieces
        self._places = Targets(self._root, catalogue)
        self._states = [
            _FileState(place, [None] * n, n, place.file.make_hasher())
            for place, n in zip(self._places.of, _count_segments(catalogue), strict=True)
        ]
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        # Pieces of many files are written one after another: their many short system calls would
        # hand the interpreter's lock to and fro between the threads.
        self._writing = threading.Lock()
        self._closing = False
        self._complete: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run_guarded, args=(work,), name=name, daemon=True)
            for work, name in ((self._finish_all, "finish"), (self._hash_all, "hash"))
        ]
        self._lockfile: int | None = None
        self._journal = Journal(self._root, self._ours / "partial.jsonl")
        self._others: dict[str, str] = {}  # partial files of other requests, by their objects

    # -- before and after

    def open(self) -> list[tuple[int, str]]:
        """Find what is here already, and make room for the rest.

        Returns:
            The pieces that are here, with their digests.

        Raises:
            ConflictError: Another agent uses this root.
            ConfigurationError: A destination is taken by something that we did not make.
            NoSpaceError: The rest does not fit on the disk.
        """
        self._ours.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        self._find_finished()
        self._find_partial()
        self._begin_journal()
        self._places.check_space(state.place for state in self._states if not state.final)
        for number, state in enumerate(self._states):
            if not state.final and state.file.size >= self._catalogue.piece_size:
                self._places.preallocate(state.place)
            if not state.final and state.missing == 0:
                self._complete.put([number])
        for thread in self._threads:
            thread.start()
        return [(number, digest) for number, digest in enumerate(self._digests) if digest]

    def stop(self) -> None:
        """Give nothing a final name any more, and wake whoever waits for bytes."""
        with self._lock:
            self._closing = True
            self._arrived.notify_all()
        self._complete.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def close(self) -> None:
        """Let go of the root, when nobody writes any more. What is partial stays, for later."""
        self.stop()
        whole = all(state.final for state in self._states)
        self._journal.close(keep=not whole or bool(self._others))
        if self._lockfile is not None:
            os.close(self._lockfile)
            self._lockfile = None

    def _take_lock(self) -> None:
        descriptor = os.open(self._ours / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ConflictError(
                f"Another agent is putting files into {self._root}: wait for it, or end it."
            ) from None
        self._lockfile = descriptor

    def __len__(self) -> int:
        """Return the number of pieces."""
        return len(self._digests)

    # -- what a fetch does

    def has(self, number: int) -> bool:
        """Tell whether a piece is here."""
        return bool(self._digests[number])

    def write(self, number: int, data: memoryview, parts: list[bytes]) -> bool:
        """Write a piece to its place; False if it is here already, or is being written.

        Args:
            number: Which.
            data: Its bytes.
            parts: SHA-256 of each of its segments.
        """
        with self._lock:
            if self._digests[number] or number in self._being_written:
                return False
            self._being_written.add(number)
        try:
            at = 0
            with self._writing if len(parts) > 1 else contextlib.nullcontext():
                for segment in self._catalogue.pieces[number]:
                    self._note_file(self._states[segment.file])
                    self._write_segment(segment, data[at : at + segment.size])
                    at += segment.size
        except BaseException:
            with self._lock:
                self._being_written.discard(number)
            raise
        with self._lock:
            self._being_written.discard(number)
            self._digests[number] = digest_of(parts)
            segments = zip(self._catalogue.pieces[number], parts, strict=True)
            self._journal.note_pieces(
                (self._states[s.file].place.object, (s.start, s.size), part.hex())
                for s, part in segments
            )
            complete = [
                segment.file
                for segment, part in zip(self._catalogue.pieces[number], parts, strict=True)
                if self._note_segment(segment, part)
            ]
            self._arrived.notify_all()
        if complete:
            self._complete.put(complete)
        return True

    def drop(self, number: int) -> None:
        """Forget a piece: its bytes were wrong."""
        with self._lock:
            if not self._digests[number]:
                return
            self._digests[number] = ""
            piece = self._catalogue.pieces[number]
            verified = [s for s in (self._states[each.file] for each in piece) if s.is_verified]
            if len(verified) == len(piece):
                self._fault(
                    ConflictError(
                        f"{verified[0].file.path} is what its digest says, and the driver has "
                        "read other bytes from the store: it was left as it is. Run it again."
                    )
                )
            for segment in piece:
                state = self._states[segment.file]
                if state.is_verified:  # another file of this piece is wrong
                    continue
                if state.final:  # taken for whole, as nothing said what it should be
                    self._note_file(state)
                    self._places.make_partial(state.place)
                    state.final = False
                index = self._index_of(segment)
                if state.digests[index] is not None:
                    state.digests[index] = None
                    state.missing += 1
                state.fresh = False
                state.drops += 1

    def void_digest(self, number: int) -> None:
        """Take a file without the digest that it was said to have: the store means another."""
        with self._lock:
            state = self._states[number]
            state.void = True
            complete = state.missing == 0 and not state.final
        if complete:
            self._complete.put([number])

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
                (self.open_current(segment.file), segment.start, segment.size)
                for segment in self._catalogue.pieces[number]
                if segment.size
            )
            yield opened
        finally:
            for descriptor, _, _ in opened:
                os.close(descriptor)

    def open_sequential(self, number: int) -> "ArrivingFile":
        """Return a reader of a file from its beginning, while it is still arriving."""
        return ArrivingFile(self, number)

    def wait_for_byte(self, number: int, at: int) -> int:
        """Wait until a file's byte is here; returns how many bytes follow it, 0 at its end.

        Raises:
            ChangedError: The run has ended before.
        """
        state, size = self._states[number], self._catalogue.piece_size
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
        state = self._states[number]
        self._wait_until(state, lambda: state.final)

    def count_unallocated(self) -> int:
        """Return the bytes that are still to come and for which no room was made on the disk."""
        small = self._catalogue.piece_size
        return sum(s.file.size for s in self._states if not s.final and s.file.size < small)

    def get_current_path(self, number: int) -> Path:
        """Return the path at which a file's bytes are at the moment."""
        return self._path_of(self._states[number])

    # -- inside

    def _path_of(self, state: _FileState) -> Path:
        return state.place.final if state.final else state.place.partial

    @property
    def _index_path(self) -> Path:
        return self._ours / "files.jsonl"

    def _wait_until(self, state: _FileState, there: Callable[[], bool]) -> None:
        with self._lock:
            while not there():
                if self._closing:
                    raise ChangedError(f"The run ended before {state.file.path} was complete.")
                self._arrived.wait()

    def _note_segment(self, segment: Segment, part: bytes) -> bool:
        """Note a segment; whether its file is complete now."""
        state, index = self._states[segment.file], self._index_of(segment)
        if state.final:
            return False
        if state.digests[index] is None:
            state.missing -= 1
        state.digests[index] = part
        return state.missing == 0

    def _index_of(self, segment: Segment) -> int:
        return segment.start // self._catalogue.piece_size

    def _write_segment(self, segment: Segment, data: memoryview) -> None:
        state = self._states[segment.file]
        if state.final:
            return
        descriptor = self._places.create(state.place)
        try:
            at = 0
            while at < len(data):
                at += os.pwrite(descriptor, data[at:], segment.start + at)
            state.unflushed += len(data)
            if state.unflushed >= _FLUSH_SIZE:  # so that the last fsync has little left to do
                state.unflushed = 0
                os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def open_current(self, number: int) -> int:
        """Open a file, under whichever name it has at the moment."""
        try:
            return os.open(self.get_current_path(number), os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:  # it got its final name meanwhile
            return os.open(self.get_current_path(number), os.O_RDONLY | os.O_NOFOLLOW)

    def note_folder(self, folder: Path) -> None:
        """Note a folder for the next run to remove, should this one be killed."""
        self._journal.note_folder(self._make_relative(folder))

    def _note_file(self, state: _FileState) -> None:
        if not state.noted and not state.final:
            state.noted = True
            self._journal.note_file(state.place.object, self._make_relative(state.place.partial))

    def _make_relative(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()

    # -- what an earlier run has left

    def _find_finished(self) -> None:
        made = read_index(self._index_path)
        whole: list[int] = []
        again: list[CacheEntry] = []  # recorded again, as all of their bytes were read
        seen: dict[str, tuple[int, ...]] = {}
        for number, state in enumerate(self._states):
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
                again += [self._make_entry(state)] if known.hashed else []
        if seen:
            append_entries(self._index_path, again)
            append_identities(self._index_path, seen)
        self._finished(whole)
        self._note_pieces()

    def _find_partial(self) -> None:
        """Take over what was written of files that are not whole, where its bytes are as noted."""
        self._journal.read()
        for state in self._states:
            ranges = self._journal.pieces.get(state.place.object)
            if state.final or ranges is None:
                continue
            path = state.place.partial
            if not path.exists():
                path = self._root / self._journal.partials.get(state.place.object, "")
            if not path.is_file() or path.is_symlink():
                continue
            self._places.adopt(state.place, path)
            found = verify_ranges(state.place.partial, ranges, self._list_spans(state))
            for index, digest in found.items():
                if state.digests[index] is None:
                    state.digests[index] = digest
                    state.missing -= 1
        self._note_pieces()

    def _begin_journal(self) -> None:
        """Begin the journal with the files that are to come, and with those of other requests."""
        coming = [
            state
            for state in self._states
            if not state.final
            and (state.file.size >= self._catalogue.piece_size or state.place.partial.exists())
        ]
        for state in coming:
            state.noted = True
        self._others = self._journal.select_other_partials(
            {state.place.object for state in self._states},
            {partial_stem(self._make_relative(state.place.partial)) for state in self._states},
            self._places.measure_spare_room(
                state.place for state in self._states if not state.final
            ),
        )
        files = {state.place.object: self._make_relative(state.place.partial) for state in coming}
        pieces = [
            (state.place.object, span, digest.hex())
            for state in coming
            for span, digest in zip(self._list_spans(state), state.digests, strict=True)
            if digest is not None
        ]
        for name in self._others:
            noted = self._journal.pieces.get(name, {})
            pieces += [(name, span, digest) for span, digest in noted.items()]
        self._journal.begin(files | self._others, pieces)

    def _list_spans(self, state: _FileState) -> list[Range]:
        """Return the first byte and size of each segment of a file."""
        size, step = state.file.size, self._catalogue.piece_size
        return [(at, min(step, size - at)) for at in range(0, max(size, 1), step)]

    def _note_pieces(self) -> None:
        """Note the pieces that are here: those whose segments all are."""
        for number, piece in enumerate(self._catalogue.pieces):
            parts = [self._states[s.file].digests[self._index_of(s)] for s in piece]
            known = [part for part in parts if part is not None]
            if len(known) == len(parts):
                self._digests[number] = digest_of(known)

    # -- threads

    def _run_guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - told to the run, which ends
            self._fault(error)

    def _hash_all(self) -> None:
        """Hash files while they arrive, where it is known what they should be."""
        known = [
            number
            for number, state in enumerate(self._states)
            if state.wanted and not state.final and len(state.digests) > 1
        ]
        buffer = memoryview(bytearray(_BLOCK))
        for number in known:
            state = self._states[number]
            while state.hashed < state.file.size and state.fresh:
                try:
                    ready = self.wait_for_byte(number, state.hashed)
                except ChangedError:
                    return
                if state.final:
                    break
                self._hash_more(number, state, ready, buffer)
            if state.missing == 0 and not state.final:
                self._complete.put([number])

    def _hash_more(self, number: int, state: _FileState, size: int, buffer: memoryview) -> None:
        descriptor = self.open_current(number)
        try:
            while size:
                got = os.preadv(descriptor, [buffer[: min(size, _BLOCK)]], state.hashed)
                state.hash.update(buffer[:got])
                state.hashed += got
                size -= got
        finally:
            os.close(descriptor)

    def _finish_all(self) -> None:
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
            self._finish(list(dict.fromkeys(batch)))

    def _finish(self, numbers: list[int]) -> None:
        """Give complete files their final names: checked, on the disk, all of a batch at once."""
        ready: list[tuple[int, _FileState]] = []
        for number in numbers:
            state = self._states[number]
            if state.final or state.missing or not self._is_whole(number, state):
                continue
            ready.append((number, state))
        if not ready:
            return
        self._places.sync_partials([state.place for _, state in ready])
        # Before the names are there: a file of which no line says that it is ours is never touched.
        append_entries(self._index_path, [self._make_entry(state) for _, state in ready])
        for _, state in ready:
            self._rename(state)
        append_identities(
            self._index_path,
            {state.file.path: identity_of(state.place.final) for _, state in ready},
        )
        for folder in {state.place.folder for _, state in ready}:
            sync(folder)
        self._finished([number for number, _ in ready])

    def _is_whole(self, number: int, state: _FileState) -> bool:
        """Tell whether a file is what its digest says; False also while that is being found out."""
        file, drops = state.file, state.drops
        if not state.wanted:
            return True
        if len(state.digests) == 1 and file.sha256:
            part = state.digests[0]
            found = part.hex() if part else ""
        elif len(state.digests) == 1 or not state.fresh:
            found, _ = hash_file(self.get_current_path(number), file, self._catalogue.piece_size)
        elif state.hashed < file.size:
            return False  # the thread that hashes comes back with it
        else:
            found = state.hash.hexdigest()
        if found == file.digest:
            return True
        with self._lock:
            state.fresh = False
            parts = [part for part in state.digests if part is not None]
            if state.void or (state.drops != drops and not state.missing):
                self._complete.put([number])  # what was hashed is no longer what is here
                return False
        if state.drops == drops:
            self._mismatch(number, digest_of(parts))
        return False

    def _make_entry(self, state: _FileState) -> CacheEntry:
        file = state.file
        return CacheEntry(
            path=file.path,
            size=file.size,
            mtime_ns=self._path_of(state).stat().st_mtime_ns,
            etag=file.etag,
            origin=file.origin,
            sha256=file.sha256,
            piece_size=self._catalogue.piece_size,
            digests=[part.hex() for part in state.digests if part is not None],
            md5=file.md5,
        )

    def _rename(self, state: _FileState) -> None:
        with self._lock:  # whoever opens it looks for it under one name or the other
            state.place.partial.rename(state.place.final)
            state.final = True
            self._arrived.notify_all()
        self._places.link(state.place)


class ArrivingFile:
    """A file read from its beginning while it arrives: what unpacks an archive reads this."""

    def __init__(self, landing: Assembler, number: int) -> None:
        self._landing, self._number, self._at = landing, number, 0

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, at most so many; waits for them. Empty at the end."""
        ready = self._landing.wait_for_byte(self._number, self._at)
        size = ready if size < 0 else min(size, ready)
        if size == 0:
            return b""
        descriptor = self._landing.open_current(self._number)
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
