"""Errors and retries of the Hub's client, without a Hub."""

import errno

import hf_xet
import pytest

from millrace import errors
from millrace.checkpoints.destinations import HubSpec
from millrace.checkpoints.destinations.hub_client import HubClient


@pytest.fixture
def client() -> HubClient:
    return HubClient(HubSpec(repo="person/repo", endpoint="http://127.0.0.1:1"))


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "translated"),
    [
        (hf_xet.XetAuthenticationError("Authentication error: expired"), errors.DeniedError),
        (hf_xet.XetObjectNotFoundError("Not found: File"), errors.NotFoundError),
        (ConnectionError("Network error: no route"), errors.UnavailableError),
        (TimeoutError("Timeout: no answer"), errors.UnavailableError),
        (RuntimeError("Operation cancelled: the task ended"), errors.UnavailableError),
        (ValueError("Configuration error: no endpoint"), errors.MillraceError),
        (OSError("I/O error: no space"), errors.MillraceError),
        (PermissionError(errno.EACCES, "Permission denied"), errors.MillraceError),
        (FileNotFoundError(errno.ENOENT, "No such file"), errors.MillraceError),
    ],
)
def test_an_error_of_the_transfer_is_translated(
    client: HubClient, error: Exception, translated: type[errors.MillraceError]
) -> None:
    with pytest.raises(errors.MillraceError) as found:
        client._call_once("model.bin", lambda: _raise(error))
    assert type(found.value) is translated
    assert "hf://person/repo@main/model.bin" in str(found.value)
    assert found.value.__cause__ is error


@pytest.mark.parametrize(
    ("error", "answer", "translated"),
    [
        (ConnectionError, "client error (401 Unauthorized)", errors.DeniedError),
        (RuntimeError, "client error (403 Forbidden)", errors.DeniedError),
        (RuntimeError, "client error (404 Not Found)", errors.NotFoundError),
        (ConnectionError, "client error (429 Too Many Requests)", errors.UnavailableError),
        (RuntimeError, "server error (503 Service Unavailable)", errors.UnavailableError),
        (ConnectionError, "client error (400 Bad Request)", errors.MillraceError),
    ],
)
def test_the_status_in_a_message_of_a_transfer_is_translated(
    client: HubClient,
    error: type[Exception],
    answer: str,
    translated: type[errors.MillraceError],
) -> None:
    raised = error(
        f"Task error: Request error: HTTP status {answer}, domain: http://127.0.0.1/v1/x"
    )
    with pytest.raises(errors.MillraceError) as found:
        client._call_once("model.bin", lambda: _raise(raised))
    assert type(found.value) is translated
    if isinstance(found.value, errors.UnavailableError):
        assert str(found.value.status) in answer


def test_a_hub_without_xet_names_the_variable(client: HubClient) -> None:
    route = "http://127.0.0.1/api/models/person/repo/xet-write-token/main"
    raised = ConnectionError(f"HTTP status client error (404 Not Found), domain: {route}")
    with pytest.raises(errors.NotFoundError, match="Set HF_HUB_DISABLE_XET=1"):
        client._call_once("model.bin", lambda: _raise(raised))
