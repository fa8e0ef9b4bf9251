"""Each refusal of a store is tried again, or is named at once with what to do."""

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from millrace import errors
from millrace.storage import Store, call_boto3, create, delete_one, list_objects, put, read
from tests.support.kms import KmsEndpoint
from tests.support.s3 import Refusal, S3Endpoint, serve_s3

LARGE = bytes(300 * 1024)  # which this package sends itself
BUDGET = timedelta(milliseconds=500)


@pytest.fixture
def endpoint() -> Iterator[S3Endpoint]:
    with serve_s3() as endpoint:
        yield endpoint


@pytest.mark.parametrize("body", [b"small", LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "RequestTimeout"),
        (400, "RequestTimeoutException"),
        (400, "PriorRequestNotComplete"),
        (400, "IncompleteBody"),
        (409, "OperationAborted"),
    ],
)
def test_a_refusal_that_passes_is_tried_again(
    endpoint: S3Endpoint, status: int, code: str, body: bytes
) -> None:
    endpoint.refusals = [Refusal("PUT", status, code)]
    put(endpoint.open(), "a", body)
    assert endpoint.objects == {"a": body}
    assert len(endpoint.requests) == 2
    endpoint.refusals = [Refusal("PUT", status, code)]
    create(endpoint.open(), "b", body)
    assert endpoint.objects["b"] == body
    endpoint.refusals = [Refusal("DELETE", status, code)]
    delete_one(endpoint.open(), "a")
    assert list(endpoint.objects) == ["b"]
    assert not any(refusal.times for refusal in endpoint.refusals)


VERBS: dict[str, Callable[[Store], object]] = {
    "list": lambda store: list(list_objects(store)),
    "list exactly": lambda store: list(list_objects(store, exact=True)),
    "read": lambda store: read(store, "a"),
    "put": lambda store: put(store, "a", b"small"),
    "put a large body": lambda store: put(store, "a", LARGE),
    "create": lambda store: create(store, "a", b"small"),
    "delete": lambda store: delete_one(store, "a"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_key_id_of_another_length_is_named(endpoint: S3Endpoint, verb: str) -> None:
    message = "Credential access key has length 20, should be 32"
    endpoint.refusals = [Refusal("", 400, "InvalidArgument", message, times=100)]
    with pytest.raises(errors.DeniedError, match="has 20 characters, and must have 32") as refused:
        VERBS[verb](endpoint.open())
    assert "swapped" in refused.value.reason
    assert len(endpoint.requests) == 1


def test_an_object_that_cannot_be_read_is_still_named(endpoint: S3Endpoint) -> None:
    endpoint.refusals = [Refusal("GET", 403, "InvalidObjectState")]
    with pytest.raises(errors.CorruptError, match="archived"):
        read(endpoint.open(), "a")
    endpoint.refusals = [Refusal("GET", 400, "InvalidArgument")]
    with pytest.raises(errors.MillraceError, match="refused the request") as refused:
        list(list_objects(endpoint.open()))
    assert not isinstance(refused.value, errors.CorruptError)


@pytest.mark.parametrize("body", [b"small", LARGE], ids=["small", "large"])
def test_a_store_without_create_if_absent_is_named_at_once(
    endpoint: S3Endpoint, body: bytes
) -> None:
    endpoint.refusals = [Refusal("PUT", 501, "NotImplemented", times=100)]
    with pytest.raises(errors.ConfigurationError, match="create-if-absent"):
        create(endpoint.open(retry_timeout=BUDGET), "a", body)
    assert len(endpoint.requests) == 1
    with pytest.raises(errors.MillraceError, match="refused the request"):
        put(endpoint.open(retry_timeout=BUDGET), "a", body)
    assert len(endpoint.requests) == 2


@pytest.mark.parametrize("verb", ["list", "read", "put", "put a large body", "create"])
def test_a_wrong_region_is_named_at_once(endpoint: S3Endpoint, verb: str) -> None:
    endpoint.refusals = [Refusal("", 301, "PermanentRedirect", times=100)]
    with pytest.raises(errors.ConfigurationError, match="another region than us-east-1"):
        VERBS[verb](endpoint.open(retry_timeout=BUDGET))
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"<html><body>Log in.</body></html>",
        b"<Error><Code>SlowDown</Code></Error>",
        b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",  # without a token
    ],
)
def test_an_answer_that_is_no_page_of_a_listing_is_requested_again(
    endpoint: S3Endpoint, body: bytes
) -> None:
    endpoint.refusals = [Refusal("GET", 200, "", body=body)]
    assert list(list_objects(endpoint.open(), exact=True)) == []
    assert len(endpoint.requests) == 2


def test_metadata_that_clients_refuse_is_named_at_once() -> None:
    with serve_s3(KmsEndpoint) as endpoint:
        endpoint.objects["a"] = b"body"
        endpoint.metadata["a"] = {"x-amz-meta-name": "ü".encode().decode("latin-1")}  # raw UTF-8
        store = endpoint.open()
        with pytest.raises(errors.MillraceError, match="/a: x-amz-meta-name of its metadata"):
            read(store, "a")
        assert len(endpoint.requests) == 1
        for arguments, fault in (
            ({"Metadata": {"name": "ü"}}, "name of its metadata has other characters than ASCII"),
            ({"ContentType": 1}, "Invalid type for parameter ContentType"),
        ):
            with pytest.raises(errors.MillraceError, match=fault):
                call_boto3(
                    store,
                    "a",
                    lambda s3, arguments=arguments: s3.create_multipart_upload(
                        Bucket="bucket", Key="a", **arguments
                    ),
                )
        assert len(endpoint.requests) == 1
