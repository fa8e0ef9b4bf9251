"""Settings of a campaign's training, except where its checkpoints, accounts and data are.

An epoch is a number of windows (`TrainingOptions.windows_per_epoch`), and no pass over the data.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from millrace.campaigns.worker import WorkerOptions
from millrace.gradients import AggregationSettings, InitialWeights, RunOptions
from millrace.rentals import CodeRepository, OfferRequest, RentalTimeouts, check_offer_id
from millrace.settings import Duration


class WorkerTimeouts(RentalTimeouts):
    """Time limits and retries of the rental of the workers' machines."""

    retry_failed: bool = Field(
        default=True,
        description="Run a worker that fails again and again on another machine.",
    )


class RentedWorkerOptions(CodeRepository):
    """Each worker on a rented machine of its own."""

    kind: Literal["rented"] = Field(default="rented", description="Kind of the machines.")
    request: OfferRequest = Field(
        description="Requirements of each machine, and its highest price."
    )
    vast: Any = Field(  # the flow, which loads blocks, gives it a type
        default="vast", description="Name of the account that pays."
    )
    role_arn: str | None = Field(
        default=None, description="ARN of the role whose credentials machines get (S3 only)."
    )
    timeouts: WorkerTimeouts = Field(
        default=WorkerTimeouts(), description="Time limits and retries."
    )
    prewarm: bool = Field(
        default=True,
        description="Copy the dataset and the weights to all machines, reading each byte from the "
        "store once.",
    )


class LocalWorkerOptions(BaseModel):
    """The workers as processes of the machine that runs the campaign."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["local"] = Field(default="local", description="Kind of the machines.")
    folder: str = Field(default=".", description="Folder in which the workers run.")
    data_folder: Path = Field(
        default=Path(".millrace/data"), description="Folder in which the workers keep the dataset."
    )


class TrainingOptions(WorkerOptions, frozen=True):
    """Workers that train together, in windows and epochs."""

    initial_weights: InitialWeights = Field(description="Weights that the run begins with.")
    machines: RentedWorkerOptions | LocalWorkerOptions = Field(
        default=LocalWorkerOptions(), description="Machines on which the workers run."
    )
    join_timeout: Duration = Field(
        default=timedelta(hours=1),
        gt=timedelta(0),
        description="Longest wait for workers before the first window opens. The window opens when "
        "the quorum has joined, or after this time when at least one worker has joined.",
    )
    epochs: int = Field(
        default=1, ge=1, description="Number of epochs. Each epoch ends with a checkpoint."
    )
    run: RunOptions = Field(default=RunOptions(), description="Settings that all workers share.")
    aggregation: AggregationSettings = Field(
        default=AggregationSettings(),
        description="Settings of the aggregator: when the campaign ends without gradients, and "
        "which checkpoints the aggregator keeps.",
    )

    @field_validator("machines")
    @classmethod
    def _check_offer(
        cls, machines: RentedWorkerOptions | LocalWorkerOptions, info: ValidationInfo
    ) -> RentedWorkerOptions | LocalWorkerOptions:
        if isinstance(machines, RentedWorkerOptions):
            check_offer_id(
                machines.request,
                info.data.get("workers", 1),
                count_name="workers",
                request_name="machines.request",
            )
        return machines

    @model_validator(mode="after")
    def _check_gather(self) -> Self:
        gather = self.run.gather
        if max(gather.quorum, gather.wanted or 0) > self.workers:
            raise ValueError(
                f"run.gather wants more gradients than there are workers ({self.workers}): lower "
                "`quorum` or `wanted`, or raise `workers`"
            )
        self.run.check_workers(self.workers)
        return self
