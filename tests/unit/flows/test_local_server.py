"""The Prefect server that a command starts for itself."""

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import local_server
from flows.local_server import start_local_server
from millrace.errors import UnavailableError


def test_a_server_that_ends_at_its_start_is_an_error_with_its_last_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_server, "_SERVER_SCRIPT", "raise SystemExit('no room for it')")
    with (
        temporary_settings({PREFECT_API_URL: None}),
        pytest.raises(UnavailableError, match="does not start: no room for it Start one with"),
        start_local_server(),
    ):
        raise AssertionError


def test_a_server_that_does_not_answer_in_time_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_server, "_SERVER_SCRIPT", "import sys; sys.stdin.read()")
    monkeypatch.setattr(local_server, "_START_TIMEOUT", 0.0)
    with (
        temporary_settings({PREFECT_API_URL: None}),
        pytest.raises(UnavailableError, match="does not start"),
        start_local_server(),
    ):
        raise AssertionError


def test_a_server_that_starts_slowly_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers 503, then nothing, before it is ready."""
    answers = iter([False] * 5 + [True])
    monkeypatch.setattr(local_server, "_SERVER_SCRIPT", "import sys; sys.stdin.read()")
    monkeypatch.setattr(local_server, "_is_ready", lambda _: next(answers))
    monkeypatch.setattr(local_server, "_POLL_INTERVAL", 0.0)
    with temporary_settings({PREFECT_API_URL: None}), start_local_server():
        assert PREFECT_API_URL.value().startswith("http://127.0.0.1:")
    assert next(answers, None) is None
