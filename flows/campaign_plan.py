"""Plan of a campaign: one model, from a form, a file or Python."""

from datetime import timedelta
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from blocks import VastCredentials
from flows.save_checkpoint import HubRepository
from millrace import datasets
from millrace.campaigns.worker import TrainingPlan
from millrace.checkpoints import CooldownSettings
from millrace.cleanup import Rule
from millrace.datasets import ShardingSettings
from millrace.gradients import FollowRules, RunRules, WeightsSource
from millrace.keys.campaigns import CampaignKeys
from millrace.remote import CodeRepository
from millrace.rentals import OfferRequest, RentalTimeouts
from millrace.settings import Duration
from tasks.locations import BucketLocation, SourceInput


class _PlanModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DataSettings(_PlanModel):
    """Dataset of the training."""

    dataset: str = Field(description="Name of the dataset: a prefix below the bucket's URL.")
    source: SourceInput | None = Field(
        default=None, description="Source to shard. Without a source, the dataset must be complete."
    )
    sharding: ShardingSettings = Field(
        default=ShardingSettings(), description="Settings of the shards."
    )
    execution: datasets.ExecutionSettings = Field(
        default=datasets.ExecutionSettings(), description="Settings of the execution."
    )


class RentedWorkers(CodeRepository, RentalTimeouts):
    """Each worker on a rented machine of its own."""

    kind: Literal["rented"] = Field(default="rented", description="Kind of the machines.")
    request: OfferRequest = Field(
        description="Requirements of each machine, and its highest price."
    )
    vast: VastCredentials | str = Field(
        default="vast", description="The Vast.ai Credentials block that pays, or its name."
    )
    role_arn: str | None = Field(
        default=None, description="ARN of the role whose credentials machines get (S3 only)."
    )
    retry_failed: bool = Field(
        default=True,
        description="Run a worker that fails again and again on another machine.",
    )
    prewarm: bool = Field(
        default=True,
        description="Copy the dataset to all machines, reading each byte from the store once.",
    )


class LocalWorkers(_PlanModel):
    """The workers as processes of the machine that runs the campaign."""

    kind: Literal["local"] = Field(default="local", description="Kind of the machines.")
    folder: str = Field(default=".", description="Folder in which the workers run.")
    data_folder: Path = Field(
        default=Path(".millrace/data"), description="Folder in which the workers keep the dataset."
    )


class InitialWeightsSettings(WeightsSource):
    """Checkpoint with the weights that the run begins with."""

    bucket: BucketLocation | None = Field(
        default=None, description="Store of the checkpoint; by default the campaign's bucket."
    )


class TrainingSettings(_PlanModel):
    """Workers that train together, in windows and epochs."""

    command: tuple[str, ...] = Field(
        min_length=1,
        description=TrainingPlan.model_fields["command"].description,
    )
    restarts: int = Field(
        default=TrainingPlan.model_fields["restarts"].default,
        ge=0,
        description=TrainingPlan.model_fields["restarts"].description,
    )
    initial_weights: InitialWeightsSettings = Field(description="Weights that the run begins with.")
    workers: int = Field(default=1, ge=1, le=256, description="Number of workers.")
    machines: RentedWorkers | LocalWorkers = Field(
        default=LocalWorkers(), description="Machines on which the workers run."
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
    windows_per_epoch: int = Field(default=10, ge=1, description="Number of windows of each epoch.")
    run: RunRules = Field(default=RunRules(), description="Settings that all workers share.")
    cooldown: CooldownSettings = Field(
        default=CooldownSettings(), description="Settings of the end of an epoch."
    )
    aggregation: FollowRules = Field(
        default=FollowRules(),
        description="Settings of the aggregator: how it follows windows, and which checkpoints "
        "the aggregator keeps.",
    )

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


class PublishSettings(_PlanModel):
    """Destination of the final weights."""

    job: str = Field(description="Job of the checkpoint.")
    bucket: BucketLocation | None = Field(
        default=None,
        description="A Millrace Bucket block with write credentials, its name, or a URL; empty "
        "with `hub`.",
    )
    hub: HubRepository | None = Field(
        default=None, description="Or a repository of the Hugging Face Hub."
    )


class CampaignPlan(_PlanModel):
    """A dataset, its training, the destination of the weights, and the cleaning.

    A stage that is left out is skipped.
    """

    name: str = Field(
        description="Name of the campaign: a prefix below the bucket's URL, and its rental's name."
    )
    bucket: BucketLocation = Field(
        description="A Millrace Bucket block with credentials to read and to write, its name, or "
        "a URL."
    )
    data: DataSettings | None = Field(default=None, description="Dataset to train on.")
    training: TrainingSettings | None = Field(
        default=None, description="Workers and settings of the training."
    )
    publish: PublishSettings | None = Field(
        default=None, description="Destination of the final weights."
    )
    cleaning_rules: list[Rule] | None = Field(
        default=None,
        description="Rules for the cleaning at the end. By default the gradients of this campaign, "
        "which are merged by then, are deleted. An empty list deletes nothing.",
    )

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        CampaignKeys(self.name)
        if self.publish is not None:
            if self.training is None:
                raise ValueError("`publish` requires `training`")
            if (self.publish.bucket is None) == (self.publish.hub is None):
                raise ValueError("`publish` takes either `bucket` or `hub`: name one")
        if self.data is None and self.training is not None:
            raise ValueError("name the dataset that is trained on")
        return self
