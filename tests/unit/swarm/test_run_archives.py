"""Archives of a run on one node: an unpacked folder always has the members of the final archive."""

import errno
import gzip
import hashlib
import re
import shlex
import subprocess
import threading
from pathlib import Path

import pytest

from millrace.errors import ArchiveError, ConfigurationError, StoppedError
from millrace.swarm.archives import run_archives
from millrace.swarm.archives.limits import UnpackLimits
from millrace.swarm.archives.run_archives import ArchiveUnpacker
from millrace.swarm.assembler import Assembler
from millrace.swarm.catalogue import File, build_catalogue
from millrace.swarm.piece_readers import hash_segments
from millrace.testing.process import REPOSITORY
from tests.support.swarm.prewarms import MIB, tarred, zipped

BODY = hashlib.shake_256(b"weights").digest(3 * MIB)
METHODS = ["tar", "tar.gz", "zip"]
MODES = {"tar": "w", "tar.gz": "w:gz"}


class Node:
    """An archive on a node, with the unpacker of the node.

    Attributes:
        assembler: Assembler of the archive.
        unpacker: Unpacker of the archive.
        mismatched: Set when the bytes do not have the digest of the archive.
    """

    def __init__(
        self,
        root: Path,
        data: bytes,
        method: str,
        *,
        digest: str = "",
        etag: str = "1",
        into: str = "d",
    ) -> None:
        file = File(
            "d.archive", len(data), etag, "s3://b/d.archive", digest, unpack=method, into=into
        )
        self._data = data
        self.catalogue = build_catalogue([file], MIB)
        self.mismatched = threading.Event()
        self.faults: list[BaseException] = []
        self.assembler = Assembler(
            root,
            self.catalogue,
            on_finished=lambda _: None,
            on_dropped=lambda *_: None,
            on_mismatch=lambda *_: self.mismatched.set(),
            on_fault=self.faults.append,
        )
        limits = UnpackLimits(bytes=1 << 40, members=1000)
        self.unpacker = ArchiveUnpacker(root, self.catalogue, self.assembler, limits)
        self.assembler.open()

    def write(self, number: int, *, flip: bool = False) -> None:
        """Write a piece of the archive, with a wrong bit if so asked."""
        (segment,) = self.catalogue.pieces[number]
        data = bytearray(self._data[segment.start : segment.start + segment.size])
        if flip:
            data[len(data) // 2] ^= 1
        view = memoryview(data)
        self.assembler.write(number, view, hash_segments(self.catalogue.pieces[number], view))

    def write_all(self, *, flipped: int = -1) -> None:
        for number in range(len(self.catalogue.pieces)):
            self.write(number, flip=number == flipped)


def sha256_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@pytest.mark.parametrize("method", MODES)
def test_an_archive_whose_bytes_were_replaced_is_unpacked_again(tmp_path, monkeypatch, method):
    data = tarred({"weights.bin": BODY}, MODES[method])
    node = Node(tmp_path, data, method, digest=sha256_of(data))
    node.write_all(flipped=1)
    assert node.mismatched.wait(30)
    wait_final = node.assembler.wait_final

    def correct_and_wait(number: int) -> None:
        """Replace the wrong piece after the archive was read, as the driver orders."""
        if node.mismatched.is_set():
            node.mismatched.clear()
            node.assembler.drop(1)
            node.write(1)
        wait_final(number)

    monkeypatch.setattr(node.assembler, "wait_final", correct_and_wait)
    node.unpacker.unpack(0)
    node.assembler.close()
    assert (tmp_path / "d.archive").read_bytes() == data
    assert (tmp_path / "d/weights.bin").read_bytes() == BODY
    assert not list(tmp_path.glob(".*.unpacking"))


def test_a_folder_of_an_earlier_run_is_unpacked_again_if_its_archive_was_wrong(tmp_path):
    data = tarred({"weights.bin": BODY}, "w")
    node = Node(tmp_path, data, "tar")
    node.write_all(flipped=1)
    assert node.unpacker.unpack(0) == 0
    node.assembler.close()
    assert (tmp_path / "d/weights.bin").read_bytes() != BODY
    node = Node(tmp_path, data, "tar")
    assert node.unpacker.unpack(0) == 0
    node.assembler.drop(1)
    assert node.assembler.count_drops(0) == 1
    node.write(1)
    assert node.unpacker.unpack(0) == 1
    assert (tmp_path / "d/weights.bin").read_bytes() == BODY
    node.assembler.close()
    node = Node(tmp_path, data, "tar")
    assert node.unpacker.unpack(0) == 0  # known again
    node.assembler.close()


def test_a_folder_whose_archive_was_wrong_is_not_taken_over_after_a_kill(tmp_path):
    data = tarred({"weights.bin": BODY}, "w")
    node = Node(tmp_path, data, "tar")
    node.write_all(flipped=1)
    node.unpacker.unpack(0)
    node.assembler.drop(1)
    node.assembler.stop()
    with pytest.raises(StoppedError):
        node.unpacker.unpack(0)  # the right piece has not arrived
    node.assembler.close()
    node = Node(tmp_path, data, "tar")
    node.assembler.drop(1)
    node.write(1)
    node.unpacker.unpack(0)
    node.assembler.close()
    assert (tmp_path / "d/weights.bin").read_bytes() == BODY


@pytest.mark.parametrize("methods", [("gz", "tar.gz"), ("tar.gz", "gz")], ids=" then ".join)
def test_a_request_with_another_method_unpacks_the_archive_again(tmp_path, methods):
    data = tarred({"weights.bin": BODY}, "w:gz")
    for method in methods:
        node = Node(tmp_path, data, method)
        node.write_all()
        node.unpacker.unpack(0)
        node.assembler.close()
    if method == "gz":
        assert (tmp_path / "d").read_bytes() == gzip.decompress(data)
    else:
        assert (tmp_path / "d/weights.bin").read_bytes() == BODY
    before = (tmp_path / "d").stat().st_ino
    node = Node(tmp_path, data, methods[-1])
    node.unpacker.unpack(0)
    node.assembler.close()
    assert (tmp_path / "d").stat().st_ino == before  # the same method: not again


@pytest.mark.parametrize("method", METHODS)
def test_a_complete_archive_is_not_unpacked_after_the_end_of_the_run(tmp_path, method):
    members = {f"{number}.bin": BODY[:MIB] for number in range(3)}
    data = zipped(members) if method == "zip" else tarred(members, MODES[method])
    node = Node(tmp_path, data, method)
    node.write_all()
    node.assembler.wait_final(0)
    node.assembler.stop()
    with pytest.raises(StoppedError):
        node.unpacker.unpack(0)
    node.assembler.close()
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("method", METHODS)
def test_each_written_byte_and_member_of_an_archive_is_counted(tmp_path, method):
    members = {"empty": b"", "weights.bin": BODY}
    node = Node(
        tmp_path, zipped(members) if method == "zip" else tarred(members, MODES[method]), method
    )
    node.write_all()
    node.unpacker.unpack(0)
    node.assembler.close()
    assert node.unpacker.written == len(BODY) + len(members)


def test_an_archive_that_is_damaged_in_the_store_is_unpacked_once(tmp_path):
    data = bytearray(tarred({"weights.bin": BODY}))
    data[len(data) // 2] ^= 1
    node = Node(tmp_path, bytes(data), "tar.gz", digest=sha256_of(data))
    node.write_all()
    with pytest.raises(ArchiveError):
        node.unpacker.unpack(0)
    node.assembler.close()
    assert not (tmp_path / "d").exists()
    assert not list(tmp_path.glob(".*.unpacking"))


def test_no_folder_is_made_where_a_link_leads_out_of_the_root(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root, outside):
        folder.mkdir()
    (root / "link").symlink_to(outside)
    node = Node(root, tarred({"x": b"x"}, "w"), "tar", into="link/a/b")
    node.write_all()
    with pytest.raises(ConfigurationError, match=r"leads out of .* Nothing was written there"):
        node.unpacker.unpack(0)
    node.assembler.close()
    assert list(outside.iterdir()) == []


def make_replaced(root: Path) -> Node:
    """Unpack an archive, and return a node that replaces it by another one."""
    for etag, body in (("1", b"old"), ("2", b"new")):
        node = Node(root, tarred({"x": body * 999}, "w"), "tar", etag=etag)
        node.write_all()
        if etag == "1":
            node.unpacker.unpack(0)
            node.assembler.close()
    return node


def check_old_folder(node: Node, root: Path, *, other: str = "") -> None:
    """Check that the earlier folder is there, and that a later run replaces it."""
    assert (root / "d/x").read_bytes() == b"old" * 999
    assert [path.name for path in root.glob(".*") if path.name != ".millrace"] == []
    if other:
        (root / "d" / other).unlink()
    node.unpacker.unpack(0)
    assert (root / "d/x").read_bytes() == b"new" * 999
    assert len(list((root / ".millrace/unpacked").iterdir())) == 1
    node.assembler.close()


@pytest.mark.parametrize("method", ["tar", "gz"])
def test_an_unpacked_folder_is_synced_before_it_gets_its_name(tmp_path, monkeypatch, method):
    """Its record has sizes and times only, which a disk may keep of a file whose bytes it lost."""
    data = tarred({"weights.bin": BODY}, "w")
    node = Node(tmp_path, gzip.compress(data) if method == "gz" else data, method)
    node.write_all()
    node.assembler.wait_final(0)
    records = tmp_path / ".millrace" / "unpacked"
    synced: list[tuple[Path, bool, bool]] = []

    def note(folder: Path) -> None:
        synced.append((folder, any(records.glob("*")), (tmp_path / "d").exists()))

    for name in ("sync", "sync_file_system"):
        monkeypatch.setattr(run_archives, name, note)
    node.unpacker.unpack(0)
    node.assembler.close()
    (half,) = [folder for folder, *_ in synced if folder.name.endswith(".unpacking")]
    assert synced == [(half, False, False), (records, True, False), (tmp_path, True, True)]


def test_a_full_disk_keeps_the_folder_that_was_to_be_replaced(tmp_path, monkeypatch):
    node = make_replaced(tmp_path)

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        node.assembler.wait_final(0)
        patch.setattr("millrace.swarm.archives.run_archives.os.fsync", fail)
        with pytest.raises(OSError, match="No space left"):
            node.unpacker.unpack(0)
    check_old_folder(node, tmp_path)


def test_a_name_that_cannot_be_given_keeps_the_folder_that_was_to_be_replaced(
    tmp_path, monkeypatch
):
    node, rename = make_replaced(tmp_path), Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name.endswith(".unpacking"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    with monkeypatch.context() as patch:
        node.assembler.wait_final(0)
        patch.setattr(Path, "rename", fail)
        with pytest.raises(OSError, match="Input/output error"):
            node.unpacker.unpack(0)
    check_old_folder(node, tmp_path)


def test_a_file_that_is_added_while_the_folder_is_checked_is_kept(tmp_path, monkeypatch):
    node, rename = make_replaced(tmp_path), Path.rename

    def add_and_rename(path: Path, target: Path) -> Path:
        if path == tmp_path / "d":
            (path / "results.csv").write_text("mine")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", add_and_rename)
        with pytest.raises(ConfigurationError, match=r"did not unpack .*/d/results\.csv"):
            node.unpacker.unpack(0)
    assert (tmp_path / "d/results.csv").read_text() == "mine"
    check_old_folder(node, tmp_path, other="results.csv")


def test_the_command_of_the_guide_finds_the_leftovers_of_a_kill(tmp_path, monkeypatch):
    data = tarred({"weights.bin": BODY}, "w")
    node = Node(tmp_path, data, "tar")
    node.write(0)
    kept: list[Path] = []
    monkeypatch.setattr(node.assembler, "note_folder", kept.append)
    node.assembler.stop()
    with pytest.raises(StoppedError):
        node.unpacker.unpack(0)
    node.assembler.close()
    left = {folder.name for folder in kept} | {path.name for path in tmp_path.glob(".*.part")}
    for folder in kept:
        folder.mkdir()
    guide = (REPOSITORY / "docs/guides/swarm.md").read_text()
    command = re.search(r"^\$ (find .* -print)$", guide, re.MULTILINE)
    assert command is not None
    arguments = shlex.split(command[1])
    found = subprocess.run(arguments, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert {Path(line).name for line in found.stdout.splitlines()} == left
    assert len(left) == 3
