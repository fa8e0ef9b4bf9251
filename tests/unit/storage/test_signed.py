"""The signatures are those of botocore."""

from dataclasses import replace
from datetime import datetime

import botocore.auth
import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from obstore.exceptions import GenericError

from millrace.storage import Backend, put
from millrace.storage.signed import copy_with_signature, shows_md5
from tests.support.s3 import serve_s3


@pytest.mark.parametrize("path", ["", "/storage/v1/s3", "/storage/v1/s3/"])
def test_a_signature_covers_the_path_of_the_endpoint(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = bytes(300 * 1024)
    with serve_s3() as endpoint:
        put(endpoint.open(path=path), "a b/é+", body)
        (request,) = endpoint.requests
        assert endpoint.objects == {"a b/é+": body}
    assert request.path == f"{path.rstrip('/')}/bucket/a%20b/%C3%A9%2B"
    signature = request.headers["authorization"]
    signed = signature.partition("SignedHeaders=")[2].partition(",")[0].split(";")
    signed_at = datetime.fromisoformat(request.headers["x-amz-date"])
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *_, **__: signed_at)
    expected = AWSRequest(
        method="PUT",
        url=endpoint.url + request.path,
        headers={name: request.headers[name] for name in signed if name != "x-amz-date"},
        data=body,
    )
    S3SigV4Auth(Credentials("id", "secret"), "s3", "us-east-1").add_auth(expected)
    assert signature == expected.headers["Authorization"]


@pytest.mark.parametrize(
    ("backend", "overwrite", "header"),
    [
        (Backend.R2, False, "cf-copy-destination-if-none-match"),
        (Backend.R2, True, ""),
        (Backend.S3, False, ""),  # of an endpoint that is not Amazon's
    ],
)
def test_only_stores_with_a_condition_for_copies_are_asked_to_replace_nothing(
    backend: Backend, overwrite: bool, header: str
) -> None:
    with serve_s3() as endpoint:
        store = endpoint.open()
        store = replace(store, location=replace(store.location, backend=backend))
        with pytest.raises(GenericError):  # the endpoint makes no copies
            copy_with_signature(store, "to", store, "from", '"etag"', overwrite=overwrite)
        (request,) = endpoint.requests
    found = {name for name in request.headers if "none-match" in name}
    assert found == ({header} if header else set())
    if header:
        assert request.headers[header] == "*"
        assert header in request.headers["authorization"]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, True),
        ({"x-amz-server-side-encryption": "AES256"}, True),
        ({"x-amz-server-side-encryption": "aws:kms"}, False),
        ({"x-amz-server-side-encryption": "aws:kms:dsse"}, False),
        ({"x-amz-server-side-encryption-customer-algorithm": "AES256"}, False),
    ],
)
def test_only_keys_of_a_service_or_of_the_caller_change_an_etag(headers, expected):
    assert shows_md5(headers) is expected
