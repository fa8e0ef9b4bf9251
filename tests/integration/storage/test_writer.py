"""Writers of objects in parts, whose uploads end otherwise than by their own first request."""

import secrets
from collections.abc import Iterator
from datetime import timedelta

import pytest

from millrace import errors
from millrace.storage import (
    Store,
    abort_upload,
    exists,
    head,
    list_uploads,
    open_store,
    open_writer,
    put,
    read,
)
from millrace.testing.faults import Fault
from millrace.testing.r2 import R2Proxy
from tests.stores import make_spec
from tests.support.kms import KmsEndpoint, Upload
from tests.support.s3 import Request, serve_s3

MIB = 1 << 20


class LosingEndpoint(KmsEndpoint):
    """Endpoint that completes uploads, and loses the first answer about each one."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.modified = "Thu, 01 Jan 2099 00:00:00 GMT"

    def answer(self, request: Request) -> tuple[int, bytes] | None:
        """Return the answer to a request; None for the completion of an upload that is there."""
        found = super().answer(request)
        is_completion = request.method == "POST" and "uploadId" in request.path
        return None if is_completion and found and found[0] == 200 else found


@pytest.fixture
def store(r2: R2Proxy, request: pytest.FixtureRequest) -> Store:
    return open_store(make_spec("r2", request))


@pytest.fixture
def losing() -> Iterator[LosingEndpoint]:
    with serve_s3(LosingEndpoint) as endpoint:
        yield endpoint


def write(store: Store, data: bytes) -> None:
    with open_writer(store, "a", part_size=5 * MIB) as writer:
        writer.write(data)


def test_an_object_whose_last_answer_was_lost_is_there(store, r2) -> None:
    data = secrets.token_bytes(12 * MIB)
    r2.fail_next(Fault.LOST, operation="CompleteMultipartUpload")
    write(store, data)
    assert r2.count_fired()[Fault.LOST] == 1
    assert read(store, "a") == data
    assert list(list_uploads(store)) == []


@pytest.mark.parametrize("number", [0, 1])
def test_a_writer_whose_upload_was_aborted_does_not_say_that_there_is_no_object(
    store: Store, number: int
) -> None:
    """The upload is aborted before its second part, or before it is completed."""
    put(store, "a", b"old")

    def write_and_abort() -> None:
        with open_writer(store, "a", part_size=5 * MIB, concurrency=1) as writer:
            for _ in range(2 + number):
                writer.write(bytes(4 * MIB))
            (upload,) = list_uploads(store)
            abort_upload(store, upload)
            if not number:
                writer.write(bytes(20 * MIB))

    with pytest.raises(errors.UploadGoneError, match="Look at the object"):
        write_and_abort()
    assert read(store, "a") == b"old"


def test_without_md5s_size_and_time_show_that_a_lost_answer_was_a_success(
    losing: LosingEndpoint,
) -> None:
    data = secrets.token_bytes(12 * MIB)
    write(losing.open(), data)
    assert losing.objects == {"a": data}
    assert head(losing.open(), "a").size == len(data)


@pytest.mark.parametrize("change", ["size", "parts", "time", "tells"])
def test_another_object_than_the_written_one_is_no_success(
    losing: LosingEndpoint, change: str
) -> None:
    """The upload was aborted, and there is an older object, or one of another writer."""
    original = losing._complete

    def complete_otherwise(upload: Upload) -> None:
        original(upload)
        match change:
            case "size":
                losing.objects["a"] += b"1"
            case "parts":
                losing.parts["a"].append(0)
            case "time":
                losing.modified = "Mon, 01 Jan 2024 00:00:00 GMT"
            case _:  # without a word about encryption, the ETag is that of other bytes
                losing.tells = False

    losing._complete = complete_otherwise
    with pytest.raises(errors.UploadGoneError):
        write(losing.open(), bytes(12 * MIB))


def test_a_failed_write_that_is_caught_publishes_no_part_of_the_object(
    store: Store, r2: R2Proxy
) -> None:
    hurried = store.with_retry_timeout(timedelta(seconds=0))

    def write_and_catch() -> None:
        with open_writer(hurried, "a", part_size=5 * MIB) as writer:
            r2.fail_next(Fault.ERROR500, operation="CreateMultipartUpload")
            with pytest.raises(errors.UnavailableError):
                writer.write(bytes(12 * MIB))

    with pytest.raises(errors.StoppedError, match="a write has failed"):
        write_and_catch()
    assert not exists(store, "a")
    assert list(list_uploads(store)) == []
