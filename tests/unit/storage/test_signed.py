"""The signatures are those of botocore."""

from datetime import datetime

import botocore.auth
import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from millrace.storage import put
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
