"""The rig's store answers as S3 does, counts what it sends, and does the faults it is asked for."""

import hashlib
import http.client
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore
import pytest
from botocore.exceptions import ClientError
from obstore.exceptions import GenericError, PermissionDeniedError, PreconditionError
from obstore.store import S3Store

from benchmarks.rig.store import FaultKind, ObjectCounts, RigFault, RigStore
from millrace.testing.key import Key, connect

MIB = 1 << 20
SIZE = 3 * MIB + 5


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[RigStore]:
    folder: Path = tmp_path_factory.mktemp("store")
    (folder / "there").mkdir()
    (folder / "there" / "already é+").write_bytes(b"0123456789")
    with RigStore.start(folder) as store:
        yield store


@pytest.fixture
def store(running: RigStore) -> RigStore:
    running.generate("a", SIZE)
    running.reset()
    return running


@pytest.fixture
def client(store: RigStore) -> S3Store:
    return patient(store, 0)


@pytest.fixture
def whole(client: S3Store, store: RigStore) -> bytes:
    body = bytes(obstore.get(client, "a").bytes())
    store.reset()
    return body


def patient(store: RigStore, retries: int) -> S3Store:
    return store.make_client(
        retry_config={"max_retries": retries, "backoff": {"init_backoff": timedelta(seconds=0.01)}}
    )


def raw(url: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    """Return the answer to a URL, from a client without any retries or redirects."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=10)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, f"{parts.path}?{parts.query}", headers=named)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


# What it answers


def test_ranges_are_what_lies_there(client, whole):
    assert len(whole) == SIZE
    assert bytes(obstore.get_range(client, "a", start=5, end=MIB)) == whole[5:MIB]
    assert bytes(obstore.get_range(client, "a", start=SIZE - 3, end=SIZE)) == whole[-3:]
    ranges = obstore.get_ranges(client, "a", starts=[0, 2 * MIB], ends=[1, 2 * MIB + 1])
    assert [bytes(part) for part in ranges] == [whole[:1], whole[2 * MIB :][:1]]
    assert bytes(obstore.get(client, "a", options={"range": {"suffix": 7}}).bytes()) == whole[-7:]
    assert bytes(obstore.get(client, "a", options={"range": {"offset": 9}}).bytes()) == whole[9:]


def test_a_range_of_all_is_a_range_too(client):
    url = obstore.sign(client, "GET", "a", timedelta(minutes=1))
    assert raw(url, Range=f"bytes=0-{SIZE - 1}")[0] == 206
    assert raw(url)[0] == 200


def test_a_range_behind_the_end_is_refused(client, store):
    url = obstore.sign(client, "GET", "a", timedelta(minutes=1))
    status, body = raw(url, Range=f"bytes={SIZE}-")
    assert (status, b"InvalidRange" in body) == (416, True)


def test_head_tells_the_size_and_the_etag_and_sends_no_body(client, store, whole):
    found = obstore.head(client, "a")
    assert found["size"] == SIZE
    assert found["e_tag"] == f'"{hashlib.md5(whole).hexdigest()}"'
    assert store.read_counts().requests == {"HeadObject": 1}
    assert store.read_counts().bytes == 0


def test_a_read_of_what_was_replaced_is_refused(client, store):
    etag = obstore.head(client, "a")["e_tag"]
    assert obstore.get(client, "a", options={"if_match": etag}).bytes()
    replaced = obstore.put(client, "a", b"other")
    assert replaced["e_tag"] != etag
    with pytest.raises(PreconditionError):
        obstore.get(client, "a", options={"if_match": etag})
    assert bytes(obstore.get(client, "a").bytes()) == b"other"


def test_what_is_being_sent_when_it_is_replaced_is_sent_to_its_end(client, store, whole):
    store.inject_fault(RigFault(FaultKind.STALL, seconds=0.5))
    arriving = obstore.get(client, "a")
    store.put("a", bytes(SIZE))
    assert bytes(arriving.bytes()) == whole
    assert store.read_counts().fired == {"stall": 1}


def test_what_is_not_there_is_not_found(client, store):
    with pytest.raises(FileNotFoundError):
        obstore.get(client, "nothing")
    assert store.read_counts().objects == {"nothing": ObjectCounts(gets=1, bytes=0)}


def test_listings_come_in_pages_with_prefixes_and_odd_names(client, store):
    names = [f"pages/{group}/{number:04d}" for group in ("x", "y z&+") for number in range(700)]
    for name in names:
        store.put(name, b"1")
    listed = [item["path"] for page in obstore.list(client, "pages") for item in page]
    assert listed == names
    assert store.read_counts().requests == {"ListObjectsV2": 2}
    found = obstore.list_with_delimiter(client, "pages/")
    assert found["common_prefixes"] == ["pages/x", "pages/y z&+"]
    assert [item["path"] for item in obstore.list_with_delimiter(client, "there")["objects"]] == [
        "there/already é+"
    ]
    behind = obstore.list(client, "pages", offset=names[-2])
    assert [item["path"] for page in behind for item in page] == names[-1:]
    boto = connect(store.endpoint, store.key)
    pages = boto.get_paginator("list_objects_v2").paginate(
        Bucket=store.bucket, Delimiter="/", PaginationConfig={"PageSize": 1}
    )
    assert [p["Prefix"] for page in pages for p in page.get("CommonPrefixes", [])] == [
        "pages/",
        "there/",
    ]


def test_presigned_urls_read_until_they_expire(client, store, whole):
    url = obstore.sign(client, "GET", "a", timedelta(minutes=5))
    assert raw(url, Range="bytes=1-3") == (206, whole[1:4])
    etag = f'"{hashlib.md5(whole).hexdigest()}"'
    assert raw(url, If_Match=etag)[0] == 200
    assert raw(url, If_Match='"other"')[0] == 412
    assert raw(url, "HEAD")[0] == 403  # it was signed for GET
    assert raw(url.replace("/a?", "/b?"))[0] == 403
    expired = obstore.sign(client, "GET", "a", timedelta(0))  # from the second that has begun
    status, body = raw(expired)
    assert (status, b"Request has expired" in body) == (403, True)
    odd = obstore.sign(client, "GET", "there/already é+", timedelta(minutes=5))
    assert raw(odd) == (200, b"0123456789")


def test_only_the_key_opens_it(store):
    assert raw(f"{store.endpoint}/{store.bucket}/a")[0] == 403
    for key in (Key(store.key.access_key_id, "wrong"), Key("wrong", store.key.secret_access_key)):
        with pytest.raises(ClientError, match=r"403|SignatureDoesNotMatch|InvalidAccessKeyId"):
            connect(store.endpoint, key).get_object(Bucket=store.bucket, Key="a")
    assert store.read_counts().bytes == 0


def test_create_if_absent_creates_once(client):
    obstore.put(client, "once", b"1", mode="create", use_multipart=False)
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        obstore.put(client, "once", b"2", mode="create", use_multipart=False)


def test_what_is_deleted_is_gone(store):
    boto: Any = connect(store.endpoint, store.key)
    boto.put_object(Bucket=store.bucket, Key="d", Body=b"d")
    boto.delete_object(Bucket=store.bucket, Key="d")
    boto.delete_object(Bucket=store.bucket, Key="d")
    with pytest.raises(ClientError, match="404"):
        boto.head_object(Bucket=store.bucket, Key="d")


def test_a_body_that_is_not_what_was_signed_is_refused(store):
    boto: Any = connect(store.endpoint, store.key)
    boto.put_object(Bucket=store.bucket, Key="b", Body=b"b")
    assert boto.get_object(Bucket=store.bucket, Key="b")["Body"].read() == b"b"
    with pytest.raises(ClientError, match="NotImplemented"):
        boto.get_object_acl(Bucket=store.bucket, Key="b")


# What it counts


def test_bytes_and_requests_are_counted_by_object_and_forgotten_on_reset(client, store):
    store.generate("b", 1000)
    obstore.get_range(client, "a", start=0, length=MIB)
    obstore.get_range(client, "a", start=MIB, length=10)
    obstore.get(client, "b").bytes()
    counts = store.read_counts()
    assert counts.requests == {"GetObject": 3}
    assert counts.bytes == MIB + 1010
    assert counts.objects == {"a": ObjectCounts(2, MIB + 10), "b": ObjectCounts(1, 1000)}
    store.reset()
    assert store.read_counts().objects == {}


# Its faults


def test_one_bit_is_flipped_in_the_next_bodies_that_cover_the_offset(client, store, whole):
    place = MIB + 7
    store.inject_fault(RigFault(FaultKind.FLIP, key="a", offset=place, times=2))
    store.put("b", bytes(2 * MIB))
    assert bytes(obstore.get(client, "b").bytes()) == bytes(2 * MIB)
    assert bytes(obstore.get_range(client, "a", start=0, end=place)) == whole[:place]
    assert store.read_counts().pending == 2
    flipped = bytes([whole[place] ^ 1])
    assert bytes(obstore.get_range(client, "a", start=place, length=2)) == (
        flipped + whole[place + 1 :][:1]
    )
    found = bytes(obstore.get(client, "a").bytes())
    assert found == whole[:place] + flipped + whole[place + 1 :]
    assert store.read_counts().fired == {"flip": 2}
    assert store.read_counts().pending == 0
    assert bytes(obstore.get(client, "a").bytes()) == whole


def test_a_body_is_cut_off_and_no_more_of_it_is_counted(client, store, whole):
    store.inject_fault(RigFault(FaultKind.TRUNCATE, offset=1000))
    url = obstore.sign(client, "GET", "a", timedelta(minutes=5))
    with pytest.raises(http.client.IncompleteRead) as cut:
        raw(url)
    assert cut.value.partial == whole[:1000]
    assert store.read_counts().bytes == 1000
    assert store.read_counts().fired == {"truncate": 1}
    store.inject_fault(RigFault(FaultKind.TRUNCATE, times=2))
    assert bytes(obstore.get(patient(store, 3), "a").bytes()) == whole
    assert store.read_counts().fired == {"truncate": 3}


def test_a_range_is_denied_as_often_as_asked(client, store):
    store.inject_fault(RigFault(FaultKind.DENY, key="a", offset=MIB, times=2))
    obstore.get_range(client, "a", start=0, length=10)
    for _ in range(2):
        with pytest.raises(PermissionDeniedError):
            obstore.get_range(client, "a", start=MIB, length=10)
    obstore.get_range(client, "a", start=MIB, length=10)
    assert store.read_counts().fired == {"deny": 2}


def test_a_seeded_share_of_requests_fails(client, store):
    def outcomes() -> list[bool]:
        store.reset()
        store.inject_fault(RigFault(FaultKind.ERROR, operation="", times=None, share=0.3, seed=7))
        seen: list[bool] = []
        for _ in range(100):
            try:
                obstore.head(client, "a")
            except GenericError:
                seen.append(False)
            else:
                seen.append(True)
        assert store.read_counts().fired == {"error": seen.count(False)}
        return seen

    first = outcomes()
    assert 15 < first.count(False) < 45
    assert outcomes() == first


def test_a_stalled_body_is_silent_for_its_time_then_goes_on(client, store, whole):
    store.inject_fault(RigFault(FaultKind.STALL, seconds=0.7))
    began = time.monotonic()
    assert bytes(obstore.get(client, "a").bytes()) == whole
    assert time.monotonic() - began > 0.7
    assert store.read_counts().fired == {"stall": 1}


def test_a_reset_ends_faults_that_wait(client, store, whole):
    store.inject_fault(RigFault(FaultKind.DENY, times=None))
    store.reset()
    assert bytes(obstore.get(client, "a").bytes()) == whole


def test_a_fault_that_could_befall_nothing_is_refused():
    with pytest.raises(ValueError, match="body"):
        RigFault(FaultKind.FLIP, operation="PutObject")
