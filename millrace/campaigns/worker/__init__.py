"""Workers of a campaign: settings, launch, reports, and the API of training scripts."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from millrace.campaigns.worker.launch import launch_worker
from millrace.campaigns.worker.program import (
    make_training_program,
    make_worker_environment,
    render_worker_settings,
)
from millrace.campaigns.worker.reports import find_joined_workers, read_median_metric
from millrace.campaigns.worker.settings import (
    SharedWorkerSettings,
    WorkerOptions,
    WorkerSettings,
)
from millrace.campaigns.worker.training_command import (
    check_local_command,
    check_repository_command,
    make_worker_path,
)
from millrace.extras import import_extra_module

if TYPE_CHECKING:
    from millrace.campaigns.worker.window_batches import WindowBatches, WindowLoader
    from millrace.campaigns.worker.worker import Worker

__all__ = [
    "SharedWorkerSettings",
    "WindowBatches",
    "WindowLoader",
    "Worker",
    "WorkerOptions",
    "WorkerSettings",
    "check_local_command",
    "check_repository_command",
    "find_joined_workers",
    "launch_worker",
    "make_training_program",
    "make_worker_environment",
    "make_worker_path",
    "read_median_metric",
    "render_worker_settings",
]


def __getattr__(name: str) -> Any:
    # Imported on first use: planning a campaign needs neither torch nor the loader.
    if name == "Worker":
        return import_extra_module("millrace.campaigns.worker.worker", "gradients").Worker
    if name in {"WindowBatches", "WindowLoader"}:
        return getattr(import_module("millrace.campaigns.worker.window_batches"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
