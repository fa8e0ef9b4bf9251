"""The signatures are those of botocore."""

import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import botocore.auth
import obstore
import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from obstore.exceptions import GenericError

from millrace.storage import Backend, create, put
from millrace.storage.signed import _VARIABLES, can_sign, copy_with_signature, shows_md5
from tests.support.s3 import serve_s3

READ_BY_ALL = {
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_TOKEN",
    "AWS_ENDPOINT",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
}
"""Variables of keys, endpoints and regions, which the settings of a store replace."""
OF_CREDENTIALS = {
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_IMDSV1_FALLBACK",
    "AWS_METADATA_ENDPOINT",
    "AWS_ROLE_ARN",
    "AWS_ROLE_SESSION_NAME",
    "AWS_STS_ENDPOINT",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
}
"""Variables with which obstore fetches keys. It fetches none if a store has a key pair."""
WITHOUT_EFFECT = {
    "AWS_BUCKET",
    "AWS_BUCKET_NAME",
    "AWS_CHECKSUM_ALGORITHM",
    "AWS_CONDITIONAL_PUT",
    "AWS_COPY_IF_NOT_EXISTS",
    "AWS_DISABLE_BULK_DELETE",
    "AWS_DISABLE_TAGGING",
    "AWS_UNSIGNED_PAYLOAD",
}
"""Variables that Millrace overrides, or that change no object and no answer."""


def test_encryption_of_the_environment_applies_to_objects_of_any_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "aws:kms")
    monkeypatch.setenv("AWS_SSE_KMS_KEY_ID", "key")
    with serve_s3() as endpoint:
        store = endpoint.open()
        for size in (10, 300 * 1024):
            put(store, f"put{size}", bytes(size))
            create(store, f"create{size}", bytes(size), is_stopped=lambda: False)
        encrypted = [
            request.headers.get("x-amz-server-side-encryption-aws-kms-key-id")
            for request in endpoint.requests
        ]
    assert encrypted == ["key"] * 4


@pytest.mark.parametrize("name", sorted(_VARIABLES))
def test_a_variable_that_only_obstore_supports_leaves_all_requests_to_obstore(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_s3() as endpoint:
        store = endpoint.open()
        assert can_sign(store)
        monkeypatch.setenv(name, "true")
        assert not can_sign(store)


def test_each_variable_that_obstore_reads_is_known() -> None:
    types = Path(obstore.__file__).with_name("_store") / "_aws.pyi"
    read = set(re.findall(r"`(AWS_[A-Z0-9_]+)`", types.read_text()))
    assert len(read) > 30
    assert read == READ_BY_ALL | OF_CREDENTIALS | WITHOUT_EFFECT | _VARIABLES


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
