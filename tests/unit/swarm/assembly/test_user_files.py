"""Files of a user at destinations of a run: none is changed, renamed or replaced."""

import ctypes
import errno
import hashlib
import os
import shutil
from pathlib import Path

import pytest

from millrace import errors
from millrace.swarm import cache_index, targets
from millrace.swarm.assembler import Assembler
from millrace.swarm.catalogue import File, build_catalogue
from millrace.swarm.piece_readers import hash_segments
from tests.oracle import compute_blake3

MIB = 1 << 20
OLD = hashlib.shake_256(b"old").digest(2 * MIB)
NEW = hashlib.shake_256(b"new").digest(2 * MIB)
USERS = hashlib.shake_256(b"of the user").digest(2 * MIB)


def make_file(body: bytes = OLD, *, path: str = "model/m", digest: str = "", **values) -> File:
    return File(path, len(body), compute_blake3(body), "s3://bucket/m", digest, **values)


class Run:
    """A run of the assembler, without a network.

    Args:
        root: Root of the node.
        bodies: Bytes of each file.
    """

    def __init__(self, root: Path, bodies: dict[File, bytes]) -> None:
        self.bodies = list(bodies.values())
        self.catalogue = build_catalogue(list(bodies), MIB)
        self.finished: list[int] = []
        self.faults: list[BaseException] = []
        self.assembler = Assembler(
            root,
            self.catalogue,
            on_finished=self.finished.extend,
            on_mismatch=lambda number, _: pytest.fail(f"file {number} has another digest"),
            on_dropped=lambda *_: None,
            on_fault=self.faults.append,
        )

    def write(self, *pieces: int) -> None:
        for number in pieces:
            piece = self.catalogue.pieces[number]
            parts = [self.bodies[s.file][s.start : s.start + s.size] for s in piece]
            data = memoryview(b"".join(parts))
            self.assembler.write(number, data, hash_segments(piece, data))

    def write_all(self) -> None:
        self.write(*range(len(self.catalogue.pieces)))


def prewarm(root: Path, file: File, body: bytes = OLD) -> Run:
    """Put a file below a root, in a run of its own."""
    run = Run(root, {file: body})
    try:
        run.assembler.open()
        run.write_all()
    finally:
        run.assembler.close()
    return run


@pytest.mark.parametrize("digest", ["", compute_blake3(OLD)], ids=["unknown", "known"])
def test_a_file_of_the_same_size_that_a_user_saved_is_refused(tmp_path, digest):
    prewarm(tmp_path, make_file(digest=digest))
    path = tmp_path / "model" / "m"
    (tmp_path / "saved").write_bytes(USERS)
    (tmp_path / "saved").rename(path)
    with pytest.raises(errors.ConfigurationError, match="or it was changed since"):
        prewarm(tmp_path, make_file(digest=digest))
    assert path.read_bytes() == USERS


@pytest.mark.parametrize("digest", ["", compute_blake3(OLD)], ids=["unknown", "known"])
def test_a_file_with_another_time_is_used_if_its_bytes_are_the_recorded_ones(tmp_path, digest):
    prewarm(tmp_path, make_file(digest=digest))
    os.utime(tmp_path / "model" / "m", ns=(1, 1))
    assert prewarm(tmp_path, make_file(digest=digest)).finished == [0]


def test_the_index_does_not_grow_with_files_that_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_index, "_MIN_TRIMMED_SIZE", 1000)
    prewarm(tmp_path, make_file(path="kept"))
    for number in range(50):
        prewarm(tmp_path, make_file(path=f"{number}/m"))
        shutil.rmtree(tmp_path / f"{number}")
        assert (tmp_path / ".millrace" / "files.jsonl").stat().st_size < 4000
    kept = Run(tmp_path, {make_file(path="kept"): OLD})
    assert [number for number, _ in kept.assembler.open()] == [0, 1]
    kept.assembler.close()
    assert kept.finished == [0]


def damage(path: Path) -> bytes:
    """Change a byte of a file, but not its times; return the bytes."""
    stat = path.stat()
    with path.open("r+b") as opened:
        opened.write(bytes([OLD[0] ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return path.read_bytes()


def test_no_file_is_renamed_if_another_destination_is_refused(tmp_path):
    prewarm(tmp_path, make_file())
    path = tmp_path / "model" / "m"
    damaged = damage(path)
    (tmp_path / "z").write_bytes(b"of the user")
    run = Run(tmp_path, {make_file(): OLD, make_file(b"z", path="z"): b"z"})
    with pytest.raises(errors.ConfigurationError, match="z exists"):
        run.assembler.open()
    run.assembler.close()
    assert path.read_bytes() == damaged
    (tmp_path / "z").unlink()
    prewarm(tmp_path, make_file())
    assert path.read_bytes() == OLD


@pytest.mark.parametrize("where", ["file", "other"])
def test_no_file_is_renamed_if_a_folder_leads_out_of_the_root(tmp_path, where):
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    prewarm(root, make_file())
    path = root / "model" / "m"
    damaged = damage(path)
    if where == "file":
        shutil.move(root / "model", outside)
        (root / "model").symlink_to(outside)
    else:
        outside.mkdir()
        (root / "link").symlink_to(outside)
    run = Run(root, {make_file(): OLD, make_file(NEW, path="link/n/m"): NEW})
    with pytest.raises(errors.ConfigurationError, match="Nothing was written there"):
        run.assembler.open()
    run.assembler.close()
    assert path.read_bytes() == damaged
    assert [each.name for each in outside.rglob("*")] == (["m"] if where == "file" else [])


def test_a_folder_may_be_a_link_to_another_one_below_the_root(tmp_path):
    (tmp_path / "disk/models").mkdir(parents=True)
    (tmp_path / "model").symlink_to("disk/models")
    run = prewarm(tmp_path, make_file())
    assert (run.faults, run.finished) == ([], [0])
    assert (tmp_path / "disk/models/m").read_bytes() == OLD


class OldFileSystem:
    """System calls of a file system that cannot refuse to replace a file."""

    @staticmethod
    def renameat2(*_: object) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1


@pytest.mark.parametrize("can_refuse", [True, False])
@pytest.mark.parametrize("before", [None, OLD], ids=["nothing", "old"])
def test_a_file_that_a_user_saves_during_the_run_is_not_replaced(
    tmp_path, monkeypatch, before, can_refuse
):
    if not can_refuse:
        monkeypatch.setattr(targets, "_LIBC", OldFileSystem)
    if before is not None:
        assert prewarm(tmp_path, make_file(before), before).finished == [0]
    small = NEW[:1000]  # in one piece with the other file, so that both are complete at once
    run = Run(tmp_path, {make_file(small): small, make_file(b"z", path="z"): b"z"})
    run.assembler.open()
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "saved").write_bytes(USERS)
    (tmp_path / "saved").rename(tmp_path / "model" / "m")
    run.write_all()
    run.assembler.close()
    assert (tmp_path / "model" / "m").read_bytes() == USERS
    assert [str(each) for each in run.faults if "during the run" in str(each)]
    assert run.finished == [1]  # the fault of one file delays no other one


def test_a_file_that_is_replaced_while_the_files_are_checked_is_not_renamed(tmp_path, monkeypatch):
    prewarm(tmp_path, make_file())
    path = tmp_path / "model" / "m"
    damage(path)

    def save(*_: object) -> None:
        (tmp_path / "saved").write_bytes(USERS)
        (tmp_path / "saved").rename(path)

    monkeypatch.setattr(targets.Targets, "check_folders", save)
    with pytest.raises(errors.ConfigurationError, match="during the run"):
        prewarm(tmp_path, make_file())
    assert path.read_bytes() == USERS


@pytest.mark.parametrize("saved", [True, False])
def test_a_dropped_piece_of_a_final_file_changes_no_file_of_a_user(tmp_path, saved):
    path = tmp_path / "model" / "m"
    prewarm(tmp_path, make_file())
    run = Run(tmp_path, {make_file(): OLD})
    run.assembler.open()
    if saved:
        (tmp_path / "saved").write_bytes(USERS)
        (tmp_path / "saved").rename(path)
    run.assembler.drop(0)
    run.write_all()
    run.assembler.close()
    assert path.read_bytes() == (USERS if saved else OLD)
    assert ["during the run" in str(each) for each in run.faults] == [True] * saved
