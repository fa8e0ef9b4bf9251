"""Settings of a campaign's worker, which the campaign writes into a file on its machine."""

from datetime import timedelta
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from millrace.checkpoints.settings import CooldownSettings
from millrace.gradients.settings import RunSettings
from millrace.rentals.vast.instances import IDENTITY_PORT
from millrace.settings import Duration
from millrace.storage import StoreSpec

SETTINGS_VARIABLE = "MILLRACE_WORKER"
"""Variable that holds the path of the settings file, for training scripts."""
NODE_PORT = IDENTITY_PORT
"""Port that a rented machine opens for its swarm agent."""


class WorkerOptions(BaseModel, frozen=True, extra="forbid"):
    """Options of a training that its plan and its workers have."""

    command: tuple[str, ...] = Field(
        min_length=1,
        description="Training command, one word per item, such as "
        '`["python", "-m", "examples.tiny_lm.train"]`. The script calls '
        "`millrace.campaigns.worker.Worker.from_environment()`. `{slot}` stands for the number of "
        "the worker.",
    )
    restarts: int = Field(
        default=3,
        ge=0,
        description="Number of restarts in a row of a training script that fails, on the same "
        "machine. A script that has run for ten minutes begins the count anew.",
    )
    workers: int = Field(default=1, ge=1, le=256, description="Number of workers.")
    windows_per_epoch: int = Field(default=10, ge=1, description="Number of windows of each epoch.")
    cooldown: CooldownSettings = Field(
        default=CooldownSettings(), description="Settings of the end of an epoch."
    )


class SharedWorkerSettings(BaseModel):
    """Settings that all workers of a campaign share, on any machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    campaign: str = Field(description="Name of the campaign: a prefix below the store's URL.")
    run: RunSettings = Field(description="Settings of the run, equal for all workers.")
    training: WorkerOptions = Field(description="Options of the training.")
    restart_delay: Duration = Field(
        default=timedelta(seconds=10),
        description="Delay of the first restart. The delay doubles with each restart.",
    )
    dataset: str | None = Field(default=None, description="Path of the dataset below the store.")
    data_folder: Path = Field(
        default=Path("data"), description="Folder for the files of the dataset and the weights."
    )
    prewarm_timeout: Duration | None = Field(
        default=None,
        description="Longest wait for the prewarm of the files after the campaign has last renewed "
        "its marker.",
    )


class WorkerSettings(SharedWorkerSettings):
    """Settings of one worker of a campaign, with its stores."""

    uid: str = Field(description="Unique name of the worker.")
    number: int = Field(default=0, ge=0, description="Number of this worker, from 0 on.")
    read_store: StoreSpec = Field(description="Campaign's store, with credentials to read.")
    mirrors: tuple[StoreSpec, ...] = Field(
        default=(),
        description="Mirrors of the campaign's store, with credentials to read. `load_batches` "
        "reads them, too.",
    )
    write_store: StoreSpec = Field(
        description="Campaign's store, with credentials to write the worker's own prefixes."
    )
