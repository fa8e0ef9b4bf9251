"""Settings of a worker that the leader of a campaign writes into a file on its machine."""

from datetime import timedelta
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from millrace.checkpoints.settings import CooldownSettings
from millrace.gradients.settings import RunSettings
from millrace.rentals.vast.instances import IDENTITY
from millrace.settings import Duration
from millrace.storage import StoreSpec

FILE = "MILLRACE_WORKER"
"""The variable that names the settings file to a training script."""
PORT = IDENTITY
"""The port that a rented machine is asked for, for others to bring files."""


class TrainingPlan(BaseModel):
    """Plan of the training that all workers of a campaign follow, wherever they are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    campaign: str = Field(description="Its name: a prefix below the store's URL.")
    workers: int = Field(default=1, ge=1, description="Number of workers.")
    run: RunSettings = Field(description="Settings that all workers have alike.")
    command: tuple[str, ...] = Field(
        min_length=1,
        description="The training script, such as `python -m examples.tiny_lm.train`: it finds "
        "what it needs by `millrace.campaigns.worker.Worker.here()`. `{slot}`: its number.",
    )
    restarts: int = Field(
        default=3,
        ge=0,
        description="Number of times that the training script is started again on the same "
        "machine, if it "
        "fails before it has run for ten minutes.",
    )
    pause: Duration = Field(
        default=timedelta(seconds=10), description="Before the first of them; twice, the next time."
    )
    epoch: int = Field(default=10, ge=1, description="Windows of an epoch.")
    cooldown: CooldownSettings = Field(
        default=CooldownSettings(),
        description="Settings of the end of an epoch, with a checkpoint.",
    )
    dataset: str | None = Field(default=None, description="Dataset to train on, below the store.")
    root: Path = Field(default=Path("data"), description="The folder that files are put into.")
    warm: Duration | None = Field(
        default=None, description="Longest wait for files that other machines bring."
    )


class WorkerSettings(TrainingPlan):
    """A worker of a campaign, and what it may reach."""

    uid: str = Field(description="Its name: no other has it.")
    number: int = Field(default=0, ge=0, description="Number of this worker, from 0 on.")
    reads: StoreSpec = Field(description="The campaign's store, with what may read it.")
    writes: StoreSpec = Field(
        description="The same, with what may write the worker's own prefixes."
    )
