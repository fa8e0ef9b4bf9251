"""A check of credentials survives a lost answer, leaves no object, and refuses unsafe stores."""

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from pydantic import SecretStr

from millrace import errors
from millrace.audit import (
    AuditedRole,
    AuditSettings,
    Operation,
    RequestOutcome,
    audit,
    check_access,
)
from millrace.checkpoints.destinations.bucket import StoreDestination
from millrace.storage import Credentials, Right, Store, StoreSpec
from tests.support.s3 import Refusal, Request, S3Endpoint, serve_s3


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


def test_a_lost_answer_to_a_create_is_no_refusal(endpoint: S3Endpoint) -> None:
    endpoint.lost = 1
    check_access(endpoint.open(), Right.WRITE, "ds")
    assert endpoint.lost == 0
    assert endpoint.objects == {}


def test_a_lost_answer_to_a_trial_save_is_no_refusal(endpoint: S3Endpoint) -> None:
    endpoint.lost = 1
    assert StoreDestination(endpoint.open()).try_save("job", timeout=timedelta(minutes=1)) > 0
    assert endpoint.lost == 0
    assert endpoint.objects == {}


def check(store: Store) -> None:
    check_access(store, Right.WRITE, "ds")


def try_save(store: Store) -> None:
    StoreDestination(store).try_save("job", timeout=store.spec.retry_timeout)


@pytest.mark.parametrize("write", [check, try_save])
def test_no_object_remains_if_the_store_stops_answering(
    endpoint: S3Endpoint, write: Callable[[Store], None]
) -> None:
    endpoint.lost, endpoint.refusals = 1, [Refusal("PUT", 500, "InternalError", times=1000)]
    with pytest.raises(errors.UnavailableError):
        write(endpoint.open(retry_timeout=timedelta(seconds=1)))
    assert endpoint.lost == 0
    assert endpoint.objects == {}


@pytest.mark.parametrize("write", [check, try_save])
def test_credentials_that_may_not_delete_are_refused_with_the_reason(
    endpoint: S3Endpoint, write: Callable[[Store], None]
) -> None:
    endpoint.refusals = [
        Refusal(method, 403, "AccessDenied", times=1000) for method in ("POST", "DELETE")
    ]
    with pytest.raises(
        errors.ReadOnlyError, match=r"_probe-.* could not be deleted .*may list this bucket"
    ):
        write(endpoint.open())
    assert len(endpoint.objects) == 1  # as the message says


def test_a_lost_answer_to_a_create_is_no_finding_of_an_audit(endpoint: S3Endpoint) -> None:
    answer, lost = endpoint.answer, set[str]()

    def lose_first_create(request: Request) -> tuple[int, bytes] | None:
        if "-new" in request.path and request.method == "PUT" and request.path not in lost:
            lost.add(request.path)
            endpoint.lost = 1
        return (501, b"") if "?uploads" in request.path else answer(request)

    endpoint.answer = lose_first_create
    credentials = Credentials(access_key_id="a", secret_access_key=SecretStr("b"))
    store = StoreSpec(url="s3://bucket", endpoint=endpoint.url)
    role = AuditedRole(store=store, read_credentials=credentials, write_credentials=credentials)
    report = audit(AuditSettings(roles={"dataset": role}))
    assert len(lost) == 2
    creates = [one.actual for one in report.findings if one.operation is Operation.CREATE]
    assert creates == [RequestOutcome.ALLOWED] * 2


def test_a_key_id_of_another_length_is_a_refusal_of_all_operations(endpoint: S3Endpoint) -> None:
    message = "Credential access key has length 20, should be 32"
    endpoint.refusals = [Refusal("", 400, "InvalidArgument", message, times=1000)]
    credentials = Credentials(access_key_id="a" * 20, secret_access_key=SecretStr("b"))
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
