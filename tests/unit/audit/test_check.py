"""A check of credentials survives a lost answer, leaves no object, and refuses unsafe stores."""

from collections.abc import Iterator

import pytest

from millrace.audit import AuditedRole, AuditSettings, audit
from millrace.storage import Credentials, StoreSpec
from tests.support.s3 import Refusal, S3Endpoint, serve_s3


@pytest.fixture
def endpoint() -> Iterator[S3Endpoint]:
    with serve_s3() as endpoint:
        yield endpoint


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
