"""A worker of a campaign: what its training script is told, and how it is kept running."""

from typing import TYPE_CHECKING, Any

from millrace.campaigns.worker.command import check_here, check_repository, worker_path
from millrace.campaigns.worker.launch import launch
from millrace.campaigns.worker.plan import (
    training_program,
    worker_environment,
    worker_file,
)
from millrace.campaigns.worker.reports import joined, measured
from millrace.campaigns.worker.settings import TrainingPlan, WorkerSettings
from millrace.extras import import_module_of

if TYPE_CHECKING:
    from millrace.campaigns.worker.worker import Worker

__all__ = [
    "TrainingPlan",
    "Worker",
    "WorkerSettings",
    "check_here",
    "check_repository",
    "joined",
    "launch",
    "measured",
    "training_program",
    "worker_environment",
    "worker_file",
    "worker_path",
]


def __getattr__(name: str) -> Any:
    # Imported on first use: what plans a campaign does not need torch.
    if name == "Worker":
        return import_module_of("millrace.campaigns.worker.worker", "gradients").Worker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
