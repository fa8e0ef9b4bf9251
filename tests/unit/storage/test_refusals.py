"""Each refusal of a store is tried again, or is named at once with what to do."""

from collections.abc import Iterator
from datetime import timedelta

import pytest

from millrace.storage import create, delete_one, put
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
