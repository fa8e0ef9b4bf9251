"""Reads of a folder that serves as the store."""

import os

import pytest

from millrace.digest import make_local_etag
from millrace.swarm.catalogue import File, build_catalogue
from millrace.swarm.piece_readers import FetchError, StoreReader
from millrace.swarm.protocol import ConnectionPool

SIZE = 1 << 10


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
