"""Reads of a folder that serves as the store."""

import os

import pytest

from millrace.digest import make_local_etag
from millrace.swarm.catalogue import File, build_catalogue
from millrace.swarm.piece_readers import FetchError, StoreReader
from millrace.swarm.protocol import ConnectionPool

SIZE = 1 << 10
MIB = 1 << 20
URLS = ["https://store/m", "https://mirror/m"]


class Connections(ConnectionPool):
    """Connections that note the URLs that are read, and fail for some."""

    def __init__(self, *failing: str) -> None:
        super().__init__(5.0)
        self.urls: list[str] = []
        self._failing = failing

    def read_into(self, endpoint, target, headers, into, is_over=None):
        url = f"https://{endpoint.host}{target}"
        self.urls.append(url)
        if url in self._failing:
            raise OSError("broken")
        return {}


def make_mirrored_reader(connections: ConnectionPool) -> StoreReader:
    catalogue = build_catalogue([File("m", 8 * MIB, "e", "s3://b/m")], MIB)
    return StoreReader(
        catalogue, URLS[:1], connections, on_retry=lambda _: None, mirrors={0: URLS[1:]}
    )


@pytest.mark.parametrize("piece", range(8))
def test_reads_in_turn_begin_at_another_location_each(piece):
    connections = Connections()
    reader = make_mirrored_reader(connections)
    for turn in (0, 1):
        reader.read_piece(piece, memoryview(bytearray(MIB)), turn)
    reader.close()
    assert sorted(connections.urls) == sorted(URLS)


def test_a_read_without_a_turn_asks_a_mirror_only_if_the_store_fails():
    for failing, expected in ((), [URLS[0]] * 8), ((URLS[0],), URLS * 8):
        connections = Connections(*failing)
        reader = make_mirrored_reader(connections)
        for piece in range(8):
            reader.read_piece(piece, memoryview(bytearray(MIB)))
        reader.close()
        assert connections.urls == expected


def test_a_mirror_whose_piece_was_wrong_is_left_out_for_its_file(caplog):
    connections = Connections()
    reader = make_mirrored_reader(connections)
    for turn in (0, 1):
        reader.read_piece(0, memoryview(bytearray(MIB)), turn)
        assert reader.leave_out_mirrors(0) == (connections.urls[-1] == URLS[1])
    assert "The mirror at mirror is no longer read for s3://b/m" in caplog.text
    connections.urls.clear()
    for turn in range(4):
        reader.read_piece(1, memoryview(bytearray(MIB)), turn)
    reader.close()
    assert connections.urls == [URLS[0]] * 4


def test_an_object_of_a_folder_that_is_written_during_a_read_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "object"
    path.write_bytes(b"a" * SIZE)
    file = File("object", SIZE, make_local_etag(path.stat()), path.as_uri())
    reader = StoreReader(
        build_catalogue([file], SIZE), [str(path)], ConnectionPool(5.0), on_retry=pytest.fail
    )
    into = memoryview(bytearray(SIZE))
    reader.read_piece(0, into)
    assert bytes(into) == b"a" * SIZE
    preadv = os.preadv

    def write_and_read(descriptor: int, buffers: list[memoryview], at: int) -> int:
        path.write_bytes(b"b" * SIZE)
        os.utime(path, ns=(1, 1))  # another time, even if the clock has not moved on
        return preadv(descriptor, buffers, at)

    monkeypatch.setattr(os, "preadv", write_and_read)
    with pytest.raises(FetchError, match="the object was replaced"):
        reader.read_piece(0, into)
    reader.close()
