"""A worker's wait for the prewarm of its machine, with a clock of the test."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from millrace.campaigns.worker import launch
from millrace.keys.campaigns import CampaignKeys
from millrace.storage import Store, delete, put
from tests.support.campaigns.workers import Make

MARKER = CampaignKeys("small").prewarm_marker


def wait_for_prewarm(
    monkeypatch: pytest.MonkeyPatch, make: Make, folder: Path, act: Callable[[float], None]
) -> float:
    """Run a worker that waits an hour for its prewarm; return the seconds that it has waited.

    Args:
        monkeypatch: Fixture of the test.
        make: Function that makes the worker's settings.
        folder: Folder of the settings file.
        act: Called for every 10 minutes of the wait, with the seconds so far.
    """
    now = 0.0

    def sleep(_: float) -> None:
        nonlocal now
        now += 600.0
        act(now)

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr(launch, "time", clock)
    settings = make(prewarm_timeout="PT1H", command=("true",))
    path = folder / "worker.yaml"
    path.write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    assert launch.launch_worker(path, {}) == 0
    return now


def test_a_worker_waits_for_a_prewarm_as_long_as_its_marker_is_renewed(
    monkeypatch: pytest.MonkeyPatch, make: Make, store: Store, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def renew(now: float) -> None:
        if now >= 5 * 3600:
            delete(store, [MARKER])
        else:
            put(store, MARKER, f"{now}".encode())

    put(store, MARKER, b"{}")
    with caplog.at_level(logging.WARNING):
        assert wait_for_prewarm(monkeypatch, make, tmp_path, renew) == 5 * 3600
    assert not caplog.records


def test_a_worker_begins_if_nobody_renews_the_marker_of_its_prewarm(
    monkeypatch: pytest.MonkeyPatch, make: Make, store: Store, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    put(store, MARKER, b"{}")
    with caplog.at_level(logging.WARNING):
        waited = wait_for_prewarm(monkeypatch, make, tmp_path, lambda _: None)
    assert waited == 3600
    assert "has not renewed its prewarm for 1:00:00" in caplog.text
