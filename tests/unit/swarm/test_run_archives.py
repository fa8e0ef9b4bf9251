"""Archives of a run on one node: an unpacked folder always has the members of the final archive."""

import hashlib
import threading
from pathlib import Path

import pytest

from millrace.errors import ArchiveError, ChangedError
from millrace.swarm.archives.run_archives import ArchiveUnpacker
from millrace.swarm.assembler import Assembler
from millrace.swarm.catalogue import File, build_catalogue
from millrace.swarm.transfer import hash_segments
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

    def __init__(self, root: Path, data: bytes, method: str, *, digest: str = "") -> None:
        file = File(
            "d.archive", len(data), "etag", "s3://b/d.archive", digest, unpack=method, into="d"
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
        limits = {"bytes": 1 << 40, "members": 1000}
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
    assert node.assembler.wait_dropped(0, 0)
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
    with pytest.raises(ChangedError):
        node.unpacker.unpack(0)  # the right piece has not arrived
    node.assembler.close()
    node = Node(tmp_path, data, "tar")
    node.assembler.drop(1)
    node.write(1)
    node.unpacker.unpack(0)
    node.assembler.close()
    assert (tmp_path / "d/weights.bin").read_bytes() == BODY


@pytest.mark.parametrize("method", METHODS)
def test_a_complete_archive_is_not_unpacked_after_the_end_of_the_run(tmp_path, method):
    members = {f"{number}.bin": BODY[:MIB] for number in range(3)}
    data = zipped(members) if method == "zip" else tarred(members, MODES[method])
    node = Node(tmp_path, data, method)
    node.write_all()
    node.assembler.wait_final(0)
    node.assembler.stop()
    with pytest.raises(ChangedError):
        node.unpacker.unpack(0)
    node.assembler.close()
    assert not (tmp_path / "d").exists()


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
