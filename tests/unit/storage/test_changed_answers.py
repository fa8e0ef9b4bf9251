"""Bytes of another object are not taken, also where a store or a proxy ignores `If-Match`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from millrace import errors
from millrace.storage import Store, read, read_range
from millrace.storage.after_fork import read_after_fork
from millrace.storage.mirrored import MirroredReader
from millrace.storage.mirrored_objects import MirroredObject
from tests.support.s3 import S3Endpoint, serve_s3

READS: dict[str, Callable[[Store, str], bytes]] = {
    "read": lambda store, etag: read(store, "a", etag=etag),
    "read a little": lambda store, etag: read(store, "a", etag=etag, max_size=99),
    "range": lambda store, etag: read_range(store, "a", 0, 5, etag=etag),
    "foreign range": lambda store, etag: read_range(
        replace(store, is_foreign=True), "a", 0, 5, etag=etag
    ),
    "after a fork": lambda store, etag: read_after_fork(store, "a", etag=etag),
    "range after a fork": lambda store, etag: read_after_fork(
        store, "a", start=0, end=5, etag=etag
    ),
}
SIZED_READS: dict[str, Callable[[Store, int], bytes]] = {
    "range": lambda store, size: read_range(store, "a", 0, 5, size=size),
    "foreign range": lambda store, size: read_range(
        replace(store, is_foreign=True), "a", 0, 5, size=size
    ),
    "range after a fork": lambda store, size: read_after_fork(
        store, "a", start=0, end=5, size=size
    ),
}


@pytest.fixture
def endpoints() -> Iterator[list[S3Endpoint]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serve_s3()) for _ in range(2)]


@pytest.mark.parametrize("verb", READS)
def test_an_answer_with_another_etag_is_refused(endpoints: list[S3Endpoint], verb: str) -> None:
    endpoint = endpoints[0]
    endpoint.objects["a"] = b"other bytes"
    with pytest.raises(errors.ChangedError, match="its ETag is no longer the one"):
        READS[verb](endpoint.open(), '"2"')
    assert len(endpoint.requests) == 1
    for etag in ('"1"', "1", 'W/"1"'):
        assert READS[verb](endpoint.open(), etag).startswith(b"other")
    endpoint.etag = ""
    assert READS[verb](endpoint.open(), '"2"').startswith(b"other")


@pytest.mark.parametrize("verb", SIZED_READS)
def test_a_range_of_an_object_of_another_size_is_refused(
    endpoints: list[S3Endpoint], verb: str
) -> None:
    endpoint = endpoints[0]
    endpoint.objects["a"] = b"other bytes"
    assert SIZED_READS[verb](endpoint.open(), 11) == b"other"
    with pytest.raises(errors.ChangedError, match="has 11 bytes, not 12"):
        SIZED_READS[verb](endpoint.open(), 12)


@pytest.mark.parametrize(("body", "etag"), [(b"other bytes", '"2"'), (b"longer than that", '"1"')])
def test_a_mirror_is_not_proven_by_an_etag_that_its_answer_lacks_or_by_another_size(
    endpoints: list[S3Endpoint], body: bytes, etag: str
) -> None:
    listed, mirror = endpoints
    listed.objects["a"], mirror.objects["a"], mirror.etag = b"right bytes", body, etag
    reader = MirroredReader([listed.open(), mirror.open()])
    item = MirroredObject("a", 11, '"1"', 0)
    for _ in range(6):
        assert reader.read_range(item, 0, 11) == b"right bytes"
    assert mirror.requests  # it was tried
