"""A training of a campaign, and workers that say what they are told to."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from millrace.campaigns import Training, TrainingOptions
from millrace.storage import StoreSpec

MakeTraining = Callable[..., Training]
RENTED = {
    "kind": "rented",
    "request": {"max_hourly": 2.0, "max_total": 5.0},
    "repo_url": "https://example.org/x",
}


@pytest.fixture
def make_training(place: StoreSpec) -> MakeTraining:
    """A training of two workers, in two epochs of three windows."""

    def made(**more: Any) -> Training:
        rules = {
            "command": ("true",), "initial_weights": {"job": "first"}, "workers": 2, "epochs": 2,
            "windows_per_epoch": 3,
        } | more  # fmt: skip
        return Training("small", "text", TrainingOptions.model_validate(rules), place, place)

    return made


@dataclass
class FakeWorkers:
    """Workers that run until they are told to end.

    Attributes:
        is_over: Whether they have ended.
        failure: Exception that `raise_failure` raises.
        checks: Calls so far.
    """

    is_over: bool = False
    failure: Exception | None = None
    checks: list[str] = field(default_factory=list)

    def raise_failure(self) -> None:
        self.checks.append("failure")
        if self.failure is not None:
            raise self.failure

    def describe_end(self) -> str:
        return "worker-0 ended with 0."

    def wait_until_done(self, timeout: timedelta) -> None:
        self.checks.append(f"done in {timeout}")
