"""A check of credentials survives a lost answer, leaves no object, and refuses unsafe stores."""

from collections.abc import Iterator

import pytest

from millrace import errors
from millrace.audit import AuditedRole, AuditSettings, audit, check_access
from millrace.storage import Credentials, Right, StoreSpec
from tests.support.s3 import Refusal, S3Endpoint, serve_s3


@pytest.fixture
def endpoint() -> Iterator[S3Endpoint]:
    with serve_s3() as endpoint:
        yield endpoint


def test_a_right_is_checked(endpoint: S3Endpoint) -> None:
    check_access(endpoint.open(), Right.WRITE, "ds")
    assert endpoint.objects == {}
    methods = [request.method for request in endpoint.requests]
    assert methods == ["GET", "PUT", "HEAD", "PUT", "POST"]


def test_a_store_that_ignores_create_if_absent_is_refused(endpoint: S3Endpoint) -> None:
    endpoint.has_create = False
    with pytest.raises(errors.ConfigurationError, match="ignores create-if-absent"):
        check_access(endpoint.open(), Right.WRITE, "ds")
    assert endpoint.objects == {}


def test_a_key_id_of_another_length_is_a_refusal_of_all_operations(endpoint: S3Endpoint) -> None:
    message = "Credential access key has length 20, should be 32"
    endpoint.refusals = [Refusal("", 400, "InvalidArgument", message, times=1000)]
    credentials = Credentials(access_key_id="a" * 20, secret_access_key="b")
    report = audit(
        AuditSettings(
            roles={
                "dataset": AuditedRole(
                    store=StoreSpec(url="s3://bucket", endpoint=endpoint.url),
                    read_credentials=credentials,
                    write_credentials=credentials,
                )
            }
        )
    )
    assert report.exit_code == 22
