"""Parts of the assembler, each alone, in a folder."""

import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from blake3 import blake3

from millrace import errors
from millrace.digest import hash_blocks
from millrace.swarm.assembly.arrivals import Arrivals, ArrivingFile
from millrace.swarm.assembly.finishing import FileFinisher
from millrace.swarm.assembly.hashing import FileHashes, hash_arriving
from millrace.swarm.assembly.leftovers import Leftovers
from millrace.swarm.assembly.partial_files import PartialFiles
from millrace.swarm.assembly.root_lock import RootLock
from millrace.swarm.cache_index import (
    CacheCheck,
    append_entries,
    append_identities,
    hash_file,
    read_identity,
    read_index,
)
from millrace.swarm.catalogue import File, build_catalogue
from millrace.swarm.journal import Journal, verify_ranges
from millrace.swarm.targets import Targets
from tests.oracle import compute_blake3

SIZE = 1 << 10
LARGE = hashlib.shake_256(b"large").digest(3 * SIZE)
SMALL = b"small"


MIB = 1 << 20
ALIGNED = hashlib.shake_256(b"aligned").digest(3 * MIB)


def hash_one_block(data: bytes) -> bytes:
    return blake3(data).digest()


def sha256_digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Parts:
    """Parts of an assembler for a file of three pieces and two small ones that share a piece."""

    def __init__(
        self,
        root: Path,
        *,
        large: str = "",
        body: bytes = LARGE,
        etag: str = "etag",
        check: CacheCheck = CacheCheck.FULL,
    ) -> None:
        self.body, self.size = body, len(body) // 3
        files = [
            File("large", len(body), etag, "s3://bucket/large", large),
            File("s0", len(SMALL), "etag", "s3://bucket/s0"),
            File("s1", len(SMALL), "etag", "s3://bucket/s1"),
        ]
        self.catalogue = build_catalogue(files, self.size)
        records = root / ".millrace"
        records.mkdir(exist_ok=True)
        self.targets = Targets(root, self.catalogue)
        self.arrivals = Arrivals(self.catalogue, self.targets.by_file)
        self.journal = Journal(root, records / "partial.jsonl")
        self.partials = PartialFiles(root, self.targets, self.journal)
        self.leftovers = Leftovers(
            root,
            self.catalogue,
            check,
            arrivals=self.arrivals,
            targets=self.targets,
            journal=self.journal,
            partials=self.partials,
            index=records / "files.jsonl",
        )
        self.hashes = FileHashes(self.arrivals, self.size)
        self.finished: list[list[int]] = []
        self.mismatches: list[int] = []
        self.finisher = FileFinisher(
            self.arrivals,
            self.hashes,
            self.targets,
            index=records / "files.jsonl",
            piece_size=SIZE,
            on_finished=self.finished.append,
            on_mismatch=lambda number, _: self.mismatches.append(number),
        )

    def begin(self) -> list[int]:
        """Look for leftovers, and begin the journal."""
        final = self.leftovers.find_final()
        self.leftovers.find_partial()
        self.arrivals.note_pieces()
        self.leftovers.begin_journal()
        return final

    def write(self, number: int, data: bytes) -> list[int]:
        """Write a piece, and return the files that are complete then."""
        assert self.arrivals.begin_write(number)
        states = self.arrivals.states
        piece = [(states[s.file], s.start, s.size) for s in self.catalogue.pieces[number]]
        self.partials.write(piece, memoryview(data))
        parts: list[bytes] = []
        for _, _, size in piece:
            parts.append(hash_one_block(data[:size]))
            data = data[size:]
        with self.arrivals.changed:
            complete = self.arrivals.end_write(number, parts)
            self.partials.note_segments(
                [(s, (at, n), part) for (s, at, n), part in zip(piece, parts, strict=True)]
            )
        return complete

    def write_large(self, *pieces: int) -> list[list[int]]:
        size = self.size
        return [self.write(number, self.body[number * size :][:size]) for number in pieces]


def test_a_piece_is_written_once_and_completes_its_files(tmp_path):
    parts = Parts(tmp_path)
    parts.begin()
    assert parts.write_large(0, 2) == [[], []]
    assert not parts.arrivals.begin_write(0)
    assert parts.arrivals.begin_write(1)
    assert not parts.arrivals.begin_write(1)  # another thread writes it
    parts.arrivals.cancel_write(1)
    assert parts.write_large(1) == [[0]]
    assert parts.write(3, SMALL * 2) == [1, 2]
    assert [number for number, _ in parts.arrivals.list_pieces()] == [0, 1, 2, 3]
    assert parts.arrivals.count_unallocated() == 2 * len(SMALL)
    parts.finisher.finish([0, 1, 2])
    assert parts.finished == [[0, 1, 2]]
    assert (tmp_path / "large").read_bytes() == LARGE
    assert (tmp_path / "s1").read_bytes() == SMALL
    assert parts.arrivals.count_unallocated() == 0


def test_a_full_check_of_unchanged_files_adds_nothing_to_the_index(tmp_path):
    """Each run reads the whole index, so it must not grow with each run."""
    parts = Parts(tmp_path)
    parts.begin()
    parts.write_large(0, 1, 2)
    parts.write(3, SMALL * 2)
    parts.finisher.finish([0, 1, 2])
    index = tmp_path / ".millrace" / "files.jsonl"
    before = index.read_bytes()
    for _ in range(2):
        assert Parts(tmp_path, check=CacheCheck.FULL).begin() == [0, 1, 2]
        assert index.read_bytes() == before


NEWER = hashlib.shake_256(b"newer").digest(3 * SIZE)


def test_a_file_of_the_user_gives_no_entry_its_identity(tmp_path):
    """A later request for the content of that entry would take the user's bytes for it."""
    first = Parts(tmp_path, check=CacheCheck.STAT)
    first.begin()
    first.write_large(0, 1, 2)
    first.finisher.finish([0])
    index = tmp_path / ".millrace" / "files.jsonl"
    before = index.read_bytes()
    (tmp_path / "large").unlink()
    (tmp_path / "large").write_bytes(NEWER)
    newer = Parts(
        tmp_path, large=compute_blake3(NEWER), body=NEWER, etag="newer", check=CacheCheck.STAT
    )
    assert newer.begin() == [0]
    assert index.read_bytes() == before
    with pytest.raises(errors.ConfigurationError, match="Millrace did not make it"):
        Parts(tmp_path, check=CacheCheck.STAT).begin()
    assert (tmp_path / "large").read_bytes() == NEWER


def test_an_entry_of_a_killed_run_gets_no_identity_of_an_earlier_content(tmp_path):
    first = Parts(tmp_path, check=CacheCheck.STAT)
    first.begin()
    first.write_large(0, 1, 2)
    first.finisher.finish([0])
    stat = (tmp_path / "large").stat()
    newer = Parts(tmp_path, body=NEWER, etag="newer", check=CacheCheck.STAT)
    newer.begin()
    newer.write_large(0, 1, 2)
    # Both contents have the same time, as on a file system with coarse times.
    os.utime(newer.targets.by_file[0].partial, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    index = tmp_path / ".millrace" / "files.jsonl"
    append_entries(index, newer.arrivals.states[0].make_entries(SIZE))  # killed before the rename
    newer.journal.close(keep=False)
    newer.targets.by_file[0].partial.unlink()
    assert Parts(tmp_path, check=CacheCheck.STAT).begin() == [0]
    first_entry, newer_entry, last = read_index(index)["large"]
    assert last == first_entry
    assert newer_entry.seen == ()
    again = Parts(tmp_path, body=NEWER, etag="newer", check=CacheCheck.STAT)
    assert again.begin() == []
    assert again.write_large(0, 1, 2)[2] == [0]
    again.finisher.finish([0])
    assert (tmp_path / "large").read_bytes() == NEWER


def test_an_identity_at_the_entry_of_another_content_is_not_trusted(tmp_path):
    """Earlier versions wrote such identities."""
    first = Parts(tmp_path, check=CacheCheck.STAT)
    first.begin()
    first.write_large(0, 1, 2)
    first.finisher.finish([0])
    (tmp_path / "large").write_bytes(NEWER)
    index = tmp_path / ".millrace" / "files.jsonl"
    append_identities(index, {"large": read_identity(tmp_path / "large")})
    with pytest.raises(errors.ConfigurationError, match="Millrace did not make it"):
        Parts(tmp_path, check=CacheCheck.STAT).begin()


def test_a_piece_that_is_dropped_while_its_file_is_synced_is_written_again(tmp_path, monkeypatch):
    parts = Parts(tmp_path)
    parts.begin()
    parts.write(0, bytes(SIZE))
    parts.write_large(1, 2)

    def drop(_: object) -> None:
        monkeypatch.undo()
        parts.arrivals.piece_digests[0] = ""
        parts.arrivals.states[0].drop_segment(0)

    monkeypatch.setattr(parts.targets, "sync_partials", drop)
    parts.finisher.finish([0])
    assert parts.finished == []
    assert parts.write_large(0) == [[0]]
    parts.finisher.finish([0])
    assert parts.finished == [[0]]
    assert (tmp_path / "large").read_bytes() == LARGE


class NotedCondition(threading.Condition):
    """A condition that notes when a thread asks for its lock."""

    def __init__(self) -> None:
        super().__init__(threading.Lock())
        self.asked = threading.Event()

    def __enter__(self) -> bool:
        self.asked.set()
        return super().__enter__()


def test_a_file_is_opened_while_it_receives_its_final_name(tmp_path):
    parts = Parts(tmp_path)
    parts.begin()
    parts.write(3, SMALL + SMALL)
    arrivals, state = parts.arrivals, parts.arrivals.states[1]
    arrivals.changed = changed = NotedCondition()
    with ThreadPoolExecutor(1) as pool:
        with changed:
            state.target.partial.rename(state.target.final)
            changed.asked.clear()
            opening = pool.submit(arrivals.open_current, 1)
            opening.add_done_callback(lambda _: changed.asked.set())
            assert changed.asked.wait(30.0)
            state.final = True
        os.close(opening.result())


def test_a_file_is_read_while_it_arrives_and_a_run_that_ends_wakes_the_reader(tmp_path):
    parts = Parts(tmp_path)
    parts.begin()
    arriving = ArrivingFile(parts.arrivals, 0)
    parts.write_large(0)
    assert arriving.read(10) == LARGE[:10]
    assert arriving.read() == LARGE[10:SIZE]
    thread = threading.Thread(target=parts.write_large, args=(1,))
    thread.start()
    assert arriving.read() == LARGE[SIZE : 2 * SIZE]
    thread.join()
    parts.arrivals.stop()
    with pytest.raises(errors.StoppedError):
        arriving.read()


@pytest.mark.parametrize("digest", [compute_blake3(b"other"), sha256_digest(b"other")])
def test_a_file_that_is_not_what_its_digest_says_gets_no_final_name(tmp_path, digest):
    parts = Parts(tmp_path, large=digest)
    parts.begin()
    parts.write_large(0, 1, 2)
    parts.finisher.finish([0])
    assert (parts.finished, parts.mismatches) == ([], [])  # it is not hashed yet
    hash_arriving(parts.arrivals, parts.hashes, lambda number: parts.finisher.finish([number]))
    assert (parts.finished, parts.mismatches) == ([], [0])
    assert not (tmp_path / "large").exists()
    parts.arrivals.states[0].void = True  # nothing says what it is
    parts.finisher.finish([0])
    assert parts.finished == [[0]]


@pytest.mark.parametrize("digest", [compute_blake3(LARGE), sha256_digest(LARGE)])
def test_a_file_of_which_a_segment_was_replaced_is_hashed_again(tmp_path, digest):
    parts = Parts(tmp_path, large=digest)
    parts.begin()
    parts.write(0, bytes(SIZE))
    parts.hashes.update(0, SIZE)
    assert parts.hashes.get_position(0) == SIZE
    parts.arrivals.piece_digests[0] = ""
    parts.arrivals.states[0].drop_segment(0)
    assert parts.arrivals.states[0].missing == 3
    parts.write_large(0, 1, 2)
    assert parts.hashes.compute_digest(0) == digest
    parts.finisher.finish([0])
    assert parts.finished == [[0]]


def test_a_file_that_another_program_cuts_is_not_hashed_for_ever(tmp_path):
    parts = Parts(tmp_path, large=sha256_digest(LARGE))
    parts.begin()
    parts.write_large(0)
    os.truncate(parts.targets.by_file[0].partial, 10)
    with pytest.raises(errors.CorruptError, match="was cut"):
        parts.hashes.update(0, SIZE)


@pytest.mark.parametrize("right", [True, False])
def test_the_digest_of_a_file_of_whole_blocks_follows_from_its_segments(tmp_path, right):
    digest = compute_blake3(ALIGNED if right else b"other")
    parts = Parts(tmp_path, large=digest, body=ALIGNED)
    parts.begin()
    parts.write_large(2, 0)
    parts.write(1, bytes(MIB))
    parts.finisher.finish([0])
    assert (parts.finished, parts.mismatches) == ([], [0])
    parts.arrivals.piece_digests[1] = ""
    parts.arrivals.states[0].drop_segment(1)
    parts.write_large(1)
    assert parts.hashes.compute_digest(0) == compute_blake3(ALIGNED)
    assert parts.hashes.get_position(0) == 0  # no byte was read again
    parts.finisher.finish([0])
    assert (parts.finished, parts.mismatches) == (([[0]], [0]) if right else ([], [0, 0]))


def test_an_empty_file_and_one_of_a_single_segment_have_the_digests_of_their_bytes(tmp_path):
    files = [
        File("empty", 0, "etag", "s3://bucket/empty", compute_blake3(b"")),
        File("small", len(SMALL), "etag", "s3://bucket/small", sha256_digest(SMALL)),
        File("odd", 3 * SIZE, "etag", "s3://bucket/odd", compute_blake3(LARGE)),
    ]
    for file, body in zip(files, (b"", SMALL, LARGE), strict=True):
        (tmp_path / file.path).write_bytes(body)
        assert hash_file(tmp_path / file.path, file, 2 * SIZE)[0] == file.digest
        assert hash_file(tmp_path / file.path, file, 4 * SIZE) == (
            file.digest,
            [hash_one_block(body)],
        )


@pytest.mark.parametrize("step", [MIB, 2 * MIB, MIB // 2 + 3])
def test_ranges_of_a_journal_serve_a_run_of_another_piece_size(tmp_path, step):
    """Blocks are counted from the first byte of a range, wherever the range begins."""
    path, size = tmp_path / "partial", len(ALIGNED)
    path.write_bytes(ALIGNED)
    noted = {
        (at, min(step, size - at)): hash_blocks(ALIGNED[at : at + step]).hex()
        for at in range(0, size, step)
    }
    wanted = [(0, 4 * SIZE), (MIB + 5, MIB), (size - 1, 1)]
    found = verify_ranges(path, noted, wanted)
    assert found == {i: hash_blocks(ALIGNED[at : at + n]) for i, (at, n) in enumerate(wanted)}
    with path.open("r+b") as opened:  # damaged since
        opened.seek(size - 1)
        opened.write(bytes([ALIGNED[-1] ^ 1]))
    assert 2 not in verify_ranges(path, noted, wanted)


def test_the_next_run_finds_what_was_finished_and_what_was_written(tmp_path):
    parts = Parts(tmp_path)
    parts.begin()
    parts.write_large(0, 2)
    parts.write(3, SMALL * 2)
    parts.finisher.finish([1, 2])
    parts.journal.close(keep=True)
    partial = parts.targets.by_file[0].partial
    with partial.open("r+b") as opened:  # damaged since
        opened.seek(2 * SIZE)
        opened.write(b"x")
    again = Parts(tmp_path)
    assert again.begin() == [1, 2]
    assert [number for number, _ in again.arrivals.list_pieces()] == [0, 3]
    assert again.arrivals.states[0].missing == 2
    assert not again.leftovers.has_others


def test_a_root_is_used_by_one_run_at_a_time(tmp_path):
    first, second = (RootLock(tmp_path, tmp_path / "lock") for _ in range(2))
    first.acquire()
    with pytest.raises(errors.ConflictError, match="Another agent"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()
    second.release()


def test_a_finisher_takes_all_that_is_complete_at_once(tmp_path):
    parts = Parts(tmp_path)
    parts.begin()
    parts.write(3, SMALL * 2)
    for numbers in ([1], [2, 1]):
        parts.finisher.submit(numbers)
    parts.finisher.stop()
    parts.finisher.run()
    assert parts.finished == [[1, 2]]
