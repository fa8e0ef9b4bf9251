"""Order of a campaign's steps."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flows import campaign
from millrace.campaigns import Training, TrainingOptions, TrainingProgress
from millrace.storage import StoreSpec
from tasks import campaign_tasks
from tests.support.campaigns.training import FakeWorkers


def test_a_campaign_that_is_started_again_waits_for_workers_before_it_merges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise it would merge windows without a gradient while the workers start."""
    place = StoreSpec(url="file:///unused")
    rules = TrainingOptions.model_validate(
        {
            "command": ("true",), "initial_weights": {"job": "first"}, "workers": 2, "epochs": 2,
            "windows_per_epoch": 3,
        }
    )  # fmt: skip
    steps: list[str] = []
    monkeypatch.setattr(campaign_tasks, "commit_training", lambda *_: None)
    progress = TrainingProgress(1, frozenset())
    monkeypatch.setattr(campaign_tasks, "read_training_progress", lambda _: progress)
    monkeypatch.setattr(campaign_tasks, "run_local_workers", lambda _: nullcontext(FakeWorkers()))
    monkeypatch.setattr(campaign_tasks, "await_workers", lambda *_: steps.append("await workers"))
    monkeypatch.setattr(campaign, "run_epoch", lambda *some: steps.append(f"epoch {some[2]}"))
    plan = cast("Any", SimpleNamespace(rental=None))
    campaign.train(plan, Training("small", "text", rules, place, place))
    assert steps == ["await workers", "epoch 0", "epoch 1"]
