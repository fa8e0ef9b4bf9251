"""Check of files of earlier runs, whose pieces may have had another size."""

import errno
import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.errors import ConfigurationError
from millrace.swarm import cache_index
from millrace.swarm.cache_index import (
    CacheCheck,
    CacheEntry,
    append_entries,
    append_identities,
    hash_file,
    hash_file_segments,
    read_identity,
    read_index,
    recognise_file,
    trim_index,
)
from millrace.swarm.catalogue import File, build_catalogue
from tests.oracle import compute_blake3

MIB = 1 << 20
BODY = hashlib.shake_256(b"body").digest(9 * MIB + 17)


def list_kept(path: Path, body: bytes, *, digest: str, before: int, now: int) -> list[bool]:
    """Tell for each piece of a run whether the piece is kept of a file of an earlier run."""
    file = File("file", len(BODY), "etag", "s3://bucket/file", digest)
    path.write_bytes(BODY)
    _, digests = hash_file(path, file, before)
    entry = CacheEntry(
        "file", file.size, path.stat().st_mtime_ns, file.etag, file.origin, digest, before,
        [each.hex() for each in digests],
    )  # fmt: skip
    path.write_bytes(body)
    os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns))
    found = recognise_file(path, file, [entry], build_catalogue([file], now), CacheCheck.FULL)
    assert found is not None
    right = hash_file_segments(path, file, now, range(len(found.digests)))
    assert all(each in {None, one} for each, one in zip(found.digests, right, strict=True))
    return [each is not None for each in found.digests]


@pytest.mark.parametrize("digest", [compute_blake3(BODY), ""], ids=["known", "unknown"])
@pytest.mark.parametrize(("before", "now"), [(1, 4), (4, 1), (2, 4), (4, 4), (1, 16), (16, 2)])
def test_only_damaged_pieces_are_fetched_again_whatever_the_pieces_were(
    tmp_path, digest, before, now
):
    sizes = {"digest": digest, "before": before * MIB, "now": now * MIB}
    assert all(list_kept(tmp_path / "file", BODY, **sizes))
    damaged = bytearray(BODY)
    damaged[5 * MIB + 100] ^= 1
    kept = list_kept(tmp_path / "file", damaged, **sizes)
    assert [number for number, is_kept in enumerate(kept) if not is_kept] == [5 // now]


@pytest.mark.parametrize(("own", "reads"), [("", True), ("full", True), ("stat", False)])
def test_a_request_may_have_its_files_recognised_by_size_times_and_inode(tmp_path, own, reads):
    path, file = tmp_path / "file", File("file", len(BODY), "etag", "s3://bucket/file", check=own)
    damaged = bytes(len(BODY))
    path.write_bytes(BODY)
    _, digests = hash_file(path, file, MIB)
    path.write_bytes(damaged)
    entry = CacheEntry(
        "file", file.size, path.stat().st_mtime_ns, file.etag, file.origin, "", MIB,
        [each.hex() for each in digests], read_identity(path),
    )  # fmt: skip
    found = recognise_file(path, file, [entry], build_catalogue([file], MIB), CacheCheck.FULL)
    assert found is not None
    assert found.hashed == reads
    assert found.digests == ([None] * len(digests) if reads else list(digests))
    path.touch()  # another time, as after a restored backup
    with pytest.raises(ConfigurationError, match="changed since"):
        recognise_file(path, file, [entry], build_catalogue([file], MIB), CacheCheck.STAT)


@pytest.mark.parametrize("check", [CacheCheck.STAT, CacheCheck.SAMPLED])
@pytest.mark.parametrize("size", [len(BODY), 3 * MIB, 5])
@pytest.mark.parametrize(("before", "now"), [(1, 4), (4, 1), (2, 2), (16, 2)])
def test_an_untouched_file_is_not_read_wholly_whatever_its_pieces_were(
    tmp_path, check, size, before, now
):
    path, file = tmp_path / "file", File("file", size, "etag", "s3://bucket/file")
    path.write_bytes(BODY[:size])
    _, digests = hash_file(path, file, before * MIB)
    entry = CacheEntry(
        "file", size, path.stat().st_mtime_ns, file.etag, file.origin, "", before * MIB,
        [each.hex() for each in digests], read_identity(path),
    )  # fmt: skip
    found = recognise_file(path, file, [entry], build_catalogue([file], now * MIB), check)
    assert found is not None
    assert not found.hashed
    assert found.digests == hash_file(path, file, now * MIB)[1]


def test_a_sample_finds_a_damaged_piece_of_another_size(tmp_path):
    path, file = tmp_path / "file", File("file", 3 * MIB, "etag", "s3://bucket/file")
    path.write_bytes(bytes(3 * MIB))
    entry = CacheEntry(
        "file", file.size, path.stat().st_mtime_ns, file.etag, file.origin, "", MIB,
        [each.hex() for each in hash_file(path, file, MIB)[1]], read_identity(path),
    )  # fmt: skip
    with path.open("r+b") as opened:  # as a disk that loses a bit: the times stay
        opened.write(b"x")
    entry = replace(entry, mtime_ns=path.stat().st_mtime_ns, seen=read_identity(path))
    catalogue = build_catalogue([file], 2 * MIB)
    found = recognise_file(path, file, [entry], catalogue, CacheCheck.SAMPLED)
    assert found is not None
    assert found.hashed
    assert found.digests[0] is None
    assert found.digests[1] is not None


@pytest.mark.parametrize(("before", "now"), [(MIB, MIB + 1), (MIB + 1, MIB), (100_000, 4 * MIB)])
def test_pieces_that_do_not_begin_with_a_block_are_all_fetched_again(tmp_path, before, now):
    damaged = bytearray(BODY)
    damaged[5] ^= 1
    kept = list_kept(tmp_path / "file", damaged, digest="", before=before, now=now)
    assert not any(kept)


def test_a_record_that_does_not_fit_the_digest_keeps_nothing(tmp_path):
    other = compute_blake3(b"other")
    assert not any(list_kept(tmp_path / "file", BODY, digest=other, before=MIB, now=4 * MIB))


def test_a_damaged_line_of_the_index_affects_no_other_line(tmp_path):
    path = tmp_path / "files.jsonl"
    entry = CacheEntry("file", 1, 2, "etag", "s3://bucket/file", "", MIB, [])
    append_entries(path, [entry])
    with path.open("ab") as opened:
        opened.write(b"\xff\xfe torn\n")
    append_entries(path, [entry])
    assert read_index(path) == {"file": [entry, entry]}


def make_entry(path: str, etag: str, mtime_ns: int = 0) -> CacheEntry:
    return CacheEntry(path, 1, mtime_ns, etag, "s3://bucket/file", "", MIB, ["ab" * 32], (1, 2))


def test_a_trimmed_index_has_each_entry_that_recognises_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_index, "_MIN_TRIMMED_SIZE", 0)
    path, file = tmp_path / "files.jsonl", tmp_path / "file"
    file.write_bytes(b"x")
    now = file.stat().st_mtime_ns
    own, repeated = make_entry("file", "1", now), make_entry("file", "2", now)
    of_killed_run = make_entry("file", "3")
    gone = [make_entry(f"gone/{number}", "1") for number in range(9)]
    append_entries(path, [repeated, own, make_entry("file", "2"), repeated, of_killed_run, *gone])
    append_identities(path, {"file": (7, 8)})
    expected = [repeated, own, replace(of_killed_run, seen=(7, 8))]
    assert trim_index(path, read_index(path), tmp_path) == {"file": expected}
    assert read_index(path) == {"file": expected}
    before = path.stat()
    assert trim_index(path, read_index(path), tmp_path) == {"file": expected}
    assert path.stat() == before


def test_an_index_that_cannot_be_written_anew_stays(tmp_path, monkeypatch):
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache_index, "_MIN_TRIMMED_SIZE", 0)
    path = tmp_path / "files.jsonl"
    append_entries(path, [make_entry("gone", "1")])
    index, before = read_index(path), path.read_bytes()
    monkeypatch.setattr(cache_index.os, "fsync", fail)
    assert trim_index(path, index, tmp_path) == index
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
