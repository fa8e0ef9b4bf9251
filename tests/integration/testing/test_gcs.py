"""obstore's GCSStore against the stand-in of Cloud Storage."""

from pathlib import Path
from typing import TYPE_CHECKING

import obstore
import pytest
from obstore.exceptions import (
    AlreadyExistsError,
    NotFoundError,
    NotModifiedError,
    PreconditionError,
)
from obstore.store import GCSStore

from millrace.testing.gcs import GCSServer

if TYPE_CHECKING:
    from obstore import UpdateVersion

MIB = 1 << 20


@pytest.fixture
def store(gcs: GCSServer, request: pytest.FixtureRequest) -> GCSStore:
    bucket = gcs.create_bucket(request.node.name.replace("_", "-")[:60])
    return GCSStore(bucket, **gcs.make_store_config())


def listed(store: GCSStore, prefix: str | None = None, offset: str | None = None) -> list[str]:
    return [entry["path"] for page in obstore.list(store, prefix, offset=offset) for entry in page]


def test_an_object_comes_back_whole_and_by_range(store):
    name = "a/b c+é%.bin"
    obstore.put(store, name, b"0123456789")
    assert bytes(obstore.get(store, name).bytes()) == b"0123456789"
    assert bytes(obstore.get_range(store, name, start=2, end=5)) == b"234"
    assert bytes(obstore.get(store, name, options={"range": {"suffix": 3}}).bytes()) == b"789"
    assert obstore.head(store, name)["size"] == 10


def test_create_if_absent_is_refused_the_second_time(store):
    obstore.put(store, "once", b"first", mode="create")
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "once", b"second", mode="create")
    assert bytes(obstore.get(store, "once").bytes()) == b"first"


def test_an_update_needs_the_generation_that_is_there(store):
    first = obstore.put(store, "key", b"1")
    here: UpdateVersion = {"e_tag": first["e_tag"], "version": first["version"]}
    obstore.put(store, "key", b"2", mode=here)
    with pytest.raises(PreconditionError):
        obstore.put(store, "key", b"3", mode=here)


def test_reads_can_be_conditional_on_the_etag(store):
    etag = obstore.put(store, "key", b"1")["e_tag"]
    assert etag is not None
    assert bytes(obstore.get(store, "key", options={"if_match": etag}).bytes()) == b"1"
    with pytest.raises(PreconditionError):
        obstore.get(store, "key", options={"if_match": '"another"'})
    with pytest.raises(NotModifiedError):
        obstore.get(store, "key", options={"if_none_match": etag})


def test_listings_come_in_pages_and_in_order(tmp_path: Path):
    with GCSServer.start(tmp_path, page=3) as server:
        store = GCSStore("bucket", **server.make_store_config())
        names = [f"l/{number}/x" for number in range(8)]
        for name in reversed(names):
            obstore.put(store, name, b"")
        assert listed(store, "l") == names
        assert listed(store, offset="l/4/x") == names[5:]
        folders = obstore.list_with_delimiter(store, "l")["common_prefixes"]
        assert list(folders) == [f"l/{number}" for number in range(8)]


def test_a_multipart_upload_arrives_as_one_object(gcs, store):
    data = bytes(range(256)) * (11 * MIB // 256)
    obstore.put(store, "large", data, use_multipart=True, chunk_size=5 * MIB)
    assert bytes(obstore.get(store, "large").bytes()) == data
    assert any("partNumber=3" in seen["path"] for seen in gcs.list_requests())


def test_a_part_that_is_too_small_is_refused(store):
    with pytest.raises(Exception, match="EntityTooSmall"):
        obstore.put(store, "large", b"x" * MIB, use_multipart=True, chunk_size=MIB // 2)


def test_copies_can_be_made_only_where_nothing_is(store):
    obstore.put(store, "from", b"1")
    obstore.copy(store, "from", "to", overwrite=False)
    assert bytes(obstore.get(store, "to").bytes()) == b"1"
    with pytest.raises(AlreadyExistsError):
        obstore.copy(store, "from", "to", overwrite=False)


def test_what_was_deleted_is_gone_and_what_was_never_there_is_not_found(store):
    obstore.put(store, "key", b"1")
    obstore.delete(store, "key")
    assert listed(store) == []
    for missing in (obstore.get, obstore.head, obstore.delete):
        with pytest.raises((NotFoundError, FileNotFoundError)):
            missing(store, "key")


def test_a_bucket_that_nobody_made_is_not_found(gcs):
    with pytest.raises(FileNotFoundError, match="NoSuchBucket"):
        obstore.get(GCSStore("nowhere", **gcs.make_store_config()), "key")


def test_each_request_is_remembered_with_its_bytes(gcs, store):
    before = len(gcs.list_requests())
    obstore.put(store, "key", b"123")
    obstore.get(store, "key").bytes()
    seen = gcs.list_requests()[before:]
    assert [(one["method"], one["status"], one["received"], one["sent"]) for one in seen] == [
        ("PUT", 200, 3, 0),
        ("GET", 200, 0, 3),
    ]


def test_nothing_went_wrong_inside(gcs):
    assert gcs.log.read_text() == ""
