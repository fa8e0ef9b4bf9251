"""A worker of a campaign: what its training script is told, and how it is kept running."""

from typing import TYPE_CHECKING, Any

from millrace.extras import import_module_of
from millrace.training.command import check_here, check_repository, worker_path
from millrace.training.launch import launch
from millrace.training.measured import joined, measured
from millrace.training.plan import (
    training_program,
    worker_environment,
    worker_file,
)
from millrace.training.settings import TrainingPlan, WorkerSettings

if TYPE_CHECKING:
    from millrace.training.worker import Worker

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
        return import_module_of("millrace.training.worker", "gradients").Worker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
