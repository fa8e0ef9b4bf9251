"""A worker of a campaign: what its training script is told, and how it is kept running."""

from millrace.training.launch import launch
from millrace.training.measured import measured
from millrace.training.plan import (
    training_program,
    worker_environment,
    worker_file,
)
from millrace.training.settings import TrainingPlan, WorkerSettings
from millrace.training.worker import Worker

__all__ = [
    "TrainingPlan",
    "Worker",
    "WorkerSettings",
    "launch",
    "measured",
    "training_program",
    "worker_environment",
    "worker_file",
]
