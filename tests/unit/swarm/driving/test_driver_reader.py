"""Reads of the driver: one wrong read alone decides nothing."""

import itertools
import queue
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace import errors
from millrace.digest import make_local_etag
from millrace.swarm.catalogue import File, build_catalogue, combine_segment_blocks
from millrace.swarm.driving.driver_reader import DriverReader, FileDigests
from millrace.swarm.piece_readers import FetchError, StoreReader, hash_segments
from tests.oracle import compute_blake3

MIB = 1 << 20
BODY = bytes(MIB)


class Requester:
    """Owner of the requests, which notes the results.

    Attributes:
        expected: Digests of pieces that nodes have reported.
        results: Digests of pieces, digests of files, and errors.
    """

    def __init__(self, *expected: str) -> None:
        self.expected = expected
        self.results: queue.SimpleQueue[str | FileDigests | BaseException] = queue.SimpleQueue()

    def is_useful(self, number: int) -> bool:
        return True

    def is_expected(self, number: int, digest: str) -> bool:
        return digest in self.expected

    def handle_digest(self, number: int, digest: str) -> None:
        self.results.put(digest)

    def handle_failure(self, number: int, error: FetchError) -> None:
        self.results.put(error)

    def is_doubted(self, number: int) -> bool:
        return True

    def handle_digests(self, found: FileDigests) -> None:
        self.results.put(found)


class Reads:
    """Reads of a file of one piece, of which some are wrong.

    Attributes:
        digest: Digest of the piece.
        flips: Value that each read changes the first byte by; 0 for a right read.
        count: Number of reads.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._path = folder / "object"
        self._path.write_bytes(BODY)
        etag, origin = make_local_etag(self._path.stat()), self._path.as_uri()
        file = File("object", MIB, etag, origin, compute_blake3(BODY))
        self._catalogue = build_catalogue([file], MIB)
        pieces = hash_segments(self._catalogue.pieces[0], memoryview(BODY))
        self.digest = combine_segment_blocks(pieces)
        self.flips: Iterator[int] = itertools.repeat(0)
        self.count, read = 0, StoreReader.read_piece

        def flip(reader: StoreReader, number: int, into: memoryview) -> None:
            read(reader, number, into)
            into[0] ^= next(self.flips)
            self.count += 1

        monkeypatch.setattr(StoreReader, "read_piece", flip)

    def request(self, owner: Requester, kind: str = "piece") -> str | FileDigests | BaseException:
        """Let the driver read, and return the result."""
        reader = DriverReader(
            self._catalogue,
            [str(self._path)],
            None,
            pieces=owner,
            files=owner,
            on_fault=owner.results.put,
            mirrors={},
        )
        (reader.request_piece if kind == "piece" else reader.request_file)(0)
        result = owner.results.get(timeout=60)
        reader.close()
        return result


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(tmp_path, monkeypatch)


def test_a_piece_that_a_node_has_alike_is_read_once(reads):
    assert reads.request(Requester("other", reads.digest)) == reads.digest
    assert reads.count == 1


@pytest.mark.parametrize(
    ("flips", "expected"), [([0, 0], 2), ([1, 0, 0], 3), ([0, 1, 0], 3), ([1, 2, 0, 0], 4)]
)
def test_a_piece_that_no_node_has_alike_is_read_until_two_reads_agree(reads, flips, expected):
    reads.flips = iter(flips)
    assert reads.request(Requester("other")) == reads.digest
    assert reads.count == expected


def test_a_wrong_read_of_what_nodes_have_right_is_ignored(reads):
    reads.flips = iter([1, 0])
    assert reads.request(Requester(reads.digest)) == reads.digest
    assert reads.count == 2


@pytest.mark.parametrize("kind", ["piece", "file"])
def test_an_object_that_differs_in_each_read_ends_the_run(reads, kind):
    reads.flips = itertools.count(1)
    error = reads.request(Requester(), kind)
    assert isinstance(error, errors.CorruptError)
    assert "has had other bytes in each of 5 reads" in str(error)


def test_a_file_with_its_digest_is_read_once_and_another_one_until_two_reads_agree(reads):
    found = reads.request(Requester(), "file")
    assert isinstance(found, FileDigests)
    assert found.pieces == {0: reads.digest}
    assert reads.count == 1
    reads.flips = iter([1, 2, 1])
    wrong = reads.request(Requester(), "file")
    assert isinstance(wrong, FileDigests)
    assert wrong.digest != found.digest
    assert reads.count == 4
