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
from millrace.datasets import CutSettings
from millrace.gradients import FollowRules, RunRules, WeightsSource
from millrace.keys import CampaignKeys
from millrace.remote import CodeRepository
from millrace.rentals import OfferRequest, Patience
from millrace.settings import Duration
from tasks.places import BucketLocation, SourceInput


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Data(_Part):
    """The dataset that is trained on."""

    dataset: str = Field(description="Its name: a prefix below the bucket's URL.")
    source: SourceInput | None = Field(
        default=None, description="Source to shard. Left out, the dataset is there and complete."
    )
    cut: CutSettings = Field(default=CutSettings(), description="Settings of the shards.")
    run: datasets.ExecutionSettings = Field(
        default=datasets.ExecutionSettings(), description="Settings of the execution."
    )


class RentedWorkers(CodeRepository, Patience):
    """Each worker on a rented machine of its own."""

    kind: Literal["rented"] = "rented"
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
        description="Try a worker that fails again and again on another machine.",
    )
    warm: bool = Field(
        default=True,
        description="Bring the dataset to all machines, each byte out of the store once.",
    )


class LocalWorkers(_Part):
    """The workers as processes of the machine that this runs on."""

    kind: Literal["local"] = "local"
    folder: str = Field(default=".", description="Folder in which the workers run.")
    root: Path = Field(
        default=Path(".millrace/data"), description="Folder in which the workers keep the dataset."
    )


class FirstWeights(WeightsSource):
    """The checkpoint whose weights the run begins with."""

    bucket: BucketLocation | None = Field(
        default=None, description="Store of the checkpoint; left out, the campaign's bucket."
    )


class Training(_Part):
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
    first: FirstWeights = Field(description="With which weights it begins.")
    workers: int = Field(default=1, ge=1, le=256, description="Number of workers.")
    machines: RentedWorkers | LocalWorkers = Field(
        default=LocalWorkers(), description="Machines on which the workers run."
    )
    arrival: Duration = Field(
        default=timedelta(hours=1),
        gt=timedelta(0),
        description="Longest wait for workers before the first window opens: it opens when "
        "as many have joined as the quorum says, or when this is over and at least one has.",
    )
    epochs: int = Field(
        default=1, ge=1, description="Number of epochs; each ends with a checkpoint."
    )
    windows: int = Field(default=10, ge=1, description="Number of windows of each epoch.")
    rules: RunRules = Field(default=RunRules(), description="Settings that all workers have alike.")
    cooldown: CooldownSettings = Field(
        default=CooldownSettings(), description="Settings of the end of an epoch."
    )
    follow: FollowRules = Field(
        default=FollowRules(),
        description="Settings of the aggregator: how it follows windows, and which checkpoints "
        "it keeps.",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        gather = self.rules.gather
        if max(gather.quorum, gather.wanted or 0) > self.workers:
            raise ValueError(
                f"rules.gather wants more gradients than there are workers ({self.workers}): lower "
                "`quorum` or `wanted`, or raise `workers`"
            )
        self.rules.check_workers(self.workers)
        return self


class HandOver(_Part):
    """Destination of the final weights."""

    job: str = Field(description="Job of the checkpoint.")
    bucket: BucketLocation | None = Field(
        default=None,
        description="A Millrace Bucket block, its name, or a URL; left out with `hub`.",
    )
    hub: HubRepository | None = Field(
        default=None, description="Or a repository of the Hugging Face Hub."
    )


class Campaign(_Part):
    """A dataset, workers that train on it together, and what becomes of their weights.

    A part that is left out is not done.
    """

    name: str = Field(description="Its name: a prefix below the bucket's URL, and its rental's.")
    bucket: BucketLocation = Field(
        description="A Millrace Bucket block with credentials to read and to write, its name, or "
        "a URL."
    )
    data: Data | None = Field(default=None, description="Dataset to train on.")
    training: Training | None = Field(
        default=None, description="Workers and settings of the training."
    )
    hand_over: HandOver | None = Field(
        default=None, description="Destination of the final weights."
    )
    clean: list[Rule] | None = Field(
        default=None,
        description="Rules for what is deleted in the end; left out, the gradients of this "
        "campaign, which are "
        "merged. An empty list deletes nothing.",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        CampaignKeys(self.name)
        if self.hand_over is not None:
            if self.training is None:
                raise ValueError("there are weights to hand over where there is a training only")
            if (self.hand_over.bucket is None) == (self.hand_over.hub is None):
                raise ValueError("the weights are handed over to a bucket or to a hub: name one")
        if self.data is None and self.training is not None:
            raise ValueError("name the dataset that is trained on")
        return self
