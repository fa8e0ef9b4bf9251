"""Errors and retries of the Hub's client, without a Hub."""

import errno
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import hf_xet
import httpx2
import pytest
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import hf_raise_for_status

from millrace import errors
from millrace.hub import HubSpec
from millrace.hub import client as hub_client
from millrace.hub.client import HubClient


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


def _answer(status: int) -> None:
    url = "https://bucket.example/lfs/part?X-Amz-Expires=900&X-Amz-Signature=5ec2e7"
    hf_raise_for_status(httpx2.Response(status, request=httpx2.Request("PUT", url)))


def _fail_to_send() -> None:
    try:
        _answer(503)
    except HfHubHTTPError as error:
        url = "https://bucket.example/lfs/part?X-Amz-Signature=5ec2e7"
        raise RuntimeError(f"Error while uploading (url ({url}), part 2)") from error


@pytest.mark.parametrize(
    "call", [partial(_answer, status) for status in (503, 410, 404, 403, 400)] + [_fail_to_send]
)
def test_an_error_shows_no_signed_url(client: HubClient, call: Callable[[], None]) -> None:
    with pytest.raises(errors.MillraceError) as found:
        client._call_once("model.bin", call)
    shown = "".join(traceback.format_exception(found.value))
    assert "5ec2e7" not in str(found.value)
    assert "5ec2e7" not in shown
    assert "https://bucket.example/lfs/part?…" in shown


def test_a_hub_without_xet_names_the_variable(client: HubClient) -> None:
    route = "http://127.0.0.1/api/models/person/repo/xet-write-token/main"
    raised = ConnectionError(f"HTTP status client error (404 Not Found), domain: {route}")
    with pytest.raises(errors.NotFoundError, match="Set HF_HUB_DISABLE_XET=1"):
        client._call_once("model.bin", lambda: _raise(raised))


def test_the_pauses_of_transfers_are_shortened_unless_the_environment_sets_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pause, connect = "HF_XET_CLIENT_RETRY_MAX_DURATION", "HF_XET_CLIENT_CONNECT_TIMEOUT"
    monkeypatch.setenv(connect, "7s")
    monkeypatch.setenv(pause, "")  # counts as unset
    HubClient(HubSpec(repo="person/repo"))
    limits = hf_xet.XetConfig()  # as the library's own: of the environment
    assert limits.get("client.retry_max_duration") == timedelta(seconds=5)
    assert limits.get("client.connect_timeout") == timedelta(seconds=7)
    monkeypatch.delenv(connect)
    HubClient(HubSpec(repo="person/repo"))
    assert hf_xet.XetConfig().get("client.connect_timeout") == timedelta(seconds=10)
    monkeypatch.delenv(connect)


@pytest.mark.parametrize("failures", [1, 3, 100])
def test_a_long_transfer_that_fails_is_repeated(
    client: HubClient, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def transfer() -> str:
        nonlocal now
        begun.append(now)
        now += 600
        if len(begun) <= failures:
            raise ConnectionError("Network error: the connection broke")
        return "done"

    begun: list[float] = []
    monkeypatch.setattr(hub_client, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    if failures > 6:
        with pytest.raises(errors.UnavailableError):
            client._call_with_retries("model.bin", transfer)
        assert len(begun) == 6
    else:
        assert client._call_with_retries("model.bin", transfer) == "done"
        assert len(begun) == failures + 1


def test_a_request_is_repeated_for_no_longer_than_its_time(
    client: HubClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def fail() -> None:
        raise TimeoutError("Timeout: no answer")

    monkeypatch.setattr(hub_client, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    with pytest.raises(errors.UnavailableError):
        client._call_with_retries("model.bin", fail)
    assert 100 < now <= client.spec.retry_timeout.total_seconds()


@pytest.mark.parametrize(("asked", "waited"), [("7", 7.0), ("86400", 60.0)])
def test_the_pause_that_the_hub_asks_for_is_kept_up_to_a_minute(
    client: HubClient, monkeypatch: pytest.MonkeyPatch, asked: str, waited: float
) -> None:
    pauses: list[float] = []
    answers = [429, 200]

    def request() -> str:
        if (status := answers.pop(0)) == 200:
            return "done"
        url = httpx2.Request("GET", "http://127.0.0.1:1/api")
        answer = httpx2.Response(status, headers={"Retry-After": asked}, request=url)
        raise HfHubHTTPError("Too many requests", response=answer)

    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=pauses.append)
    monkeypatch.setattr(hub_client, "time", clock)
    assert client._call_with_retries("", request) == "done"
    assert pauses == [waited]
