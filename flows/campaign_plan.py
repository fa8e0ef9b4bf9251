"""Plan of a campaign: one model, from a form, a file or Python."""

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from blocks import VastCredentials
from millrace import datasets
from millrace.campaigns import (
    Campaign,
    LocalWorkerOptions,
    RentedWorkerOptions,
    Training,
    TrainingOptions,
)
from millrace.checkpoints import HubSpec
from millrace.cleanup import CleanupKind, Rule
from millrace.datasets import ShardingSettings
from millrace.keys.campaigns import CampaignKeys
from millrace.keys.rentals import check_rental_name
from millrace.rented_sharding import make_rental_name
from millrace.schemas.rental import MoneyLimits
from millrace.storage import Right, StoreSpec
from tasks.checkpointing import check_checkpoint_destination
from tasks.initial_weights import InitialWeightsInput
from tasks.locations import (
    BucketLocation,
    HubRepository,
    SourceInput,
    check_right,
    make_mirror_specs,
    make_store_spec,
    refuse_temporary,
    require_location,
)
from tasks.renting import RentalReference, make_release_hook
from tasks.run_names import make_field_name
from tasks.sharding import ShardingMachinesInput

_OTHER_KINDS = {CleanupKind.DATASETS, CleanupKind.DATASET_ORPHANS, CleanupKind.TEMPORARY}
"""Kinds of which neither the run nor the checkpoints of a campaign have objects."""


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
    machines: ShardingMachinesInput | None = Field(
        default=None,
        description="Shard on machines that the campaign rents of Vast.ai. It releases them before "
        "the training begins. By default the machine of the campaign shards.",
    )

    @model_validator(mode="after")
    def _check_machines(self) -> Self:
        if self.machines is not None and self.source is None:
            raise ValueError(
                "`machines` shard a source, and there is none: name the `source`, or remove "
                "`machines`"
            )
        return self


class RentedWorkerSettings(RentedWorkerOptions):
    """Each worker on a rented machine of its own."""

    vast: VastCredentials | str = Field(
        default="vast", description="The Vast.ai Credentials block that pays, or its name."
    )


class TrainingSettings(TrainingOptions, frozen=True):
    """Workers that train together, in windows and epochs."""

    initial_weights: InitialWeightsInput = Field(description="Weights that the run begins with.")
    machines: RentedWorkerSettings | LocalWorkerOptions = Field(
        default=LocalWorkerOptions(), description="Machines on which the workers run."
    )

    def make_options(self) -> TrainingOptions:
        """Return the training as the engine takes it."""
        return self.model_copy(update={"initial_weights": self.initial_weights.make_weights()})


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

    def make_spec(self) -> StoreSpec | HubSpec:
        """Return the destination, with the credentials to write there."""
        if self.hub is not None:
            return self.hub.make_spec()
        assert self.bucket is not None
        return make_store_spec(self.bucket, Right.WRITE)

    def check_destination(self) -> None:
        """Refuse a destination that the weights cannot be saved to, before anything is made."""
        if self.hub is not None:
            check_checkpoint_destination(self.hub.make_spec(), self.job)
        elif self.bucket is not None:
            check_right(self.bucket, Right.WRITE, self.job)


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
        description="Rules for the cleaning at the end, which asks no question. By default the "
        "gradients of this campaign, which are merged by then, are deleted. An empty list deletes "
        "nothing. A rule with neither `name` nor `prefix` is for the run and the epochs' "
        "checkpoints of this campaign only.",
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
        for rental in (self.rental, self.sharding_rental):
            if rental is not None:
                check_rental_name(rental.name)
        for number, rule in enumerate(self.cleaning_rules or (), start=1):
            names_others = {*rule.kinds} & _OTHER_KINDS or rule.match[:1] not in {"", "*"}
            if names_others and not (rule.name or rule.prefix):
                raise ValueError(
                    f"rule {number} of `cleaning_rules` is for objects that no campaign has: give "
                    "it the `name` or the `prefix` of those objects"
                )
        return self

    @property
    def rental(self) -> RentalReference | None:
        """Rental of the campaign; None if the campaign rents nothing."""
        machines = self.training.machines if self.training else None
        if not isinstance(machines, RentedWorkerSettings):
            return None
        return RentalReference(self.name, self.bucket, machines.vast)

    @property
    def sharding_rental(self) -> RentalReference | None:
        """Rental of the machines that shard the dataset; None if there are none."""
        if self.data is None or self.data.machines is None:
            return None
        name = make_rental_name(self.data.dataset)
        return RentalReference(name, self.bucket, self.data.machines.vast)

    def resolve_bucket(self) -> Self:
        """Return the plan with the block of its bucket.

        Raises:
            ConfigurationError: There is no such block, or the workers' folder is temporary.
        """
        machines = self.training.machines if self.training else None
        if isinstance(machines, LocalWorkerOptions):
            refuse_temporary(Path(machines.folder))
        return self.model_copy(update={"bucket": require_location(self.bucket)})

    def make_campaign(self) -> Campaign:
        """Return the campaign as the engine takes it.

        Raises:
            ConfigurationError: A bucket has no credentials to read, or the campaign's has none to
                write.
        """
        read_store = make_store_spec(self.bucket, Right.READ)
        write_store = make_store_spec(self.bucket, Right.WRITE)
        dataset = self.data.dataset if self.data else None
        training = None
        if self.training is not None and dataset is not None:
            training = Training(
                self.name, dataset, self.training.make_options(), read_store, write_store,
                initial_weights_store=self.training.initial_weights.make_spec(),
                mirrors=tuple(make_mirror_specs(self.bucket)),
            )  # fmt: skip
        rentals: dict[str, MoneyLimits] = {}
        if self.training is not None and isinstance(self.training.machines, RentedWorkerSettings):
            request = self.training.machines.request
            rentals[self.name] = request.make_limits(self.training.workers)
        if self.data is not None and (machines := self.data.machines) is not None:
            name = make_rental_name(self.data.dataset)
            rentals[name] = machines.request.make_limits(machines.machines)
        return Campaign(
            self.name, read_store, write_store, dataset, training, self.cleaning_rules,
            rentals,
        )  # fmt: skip


def find_campaign_rental(parameters: dict[str, Any]) -> RentalReference | None:
    """Return the rental of a run with these parameters; None if the run rents nothing."""
    plan: CampaignPlan = parameters["plan"]
    return plan.rental


def find_campaign_sharding_rental(parameters: dict[str, Any]) -> RentalReference | None:
    """Return the rental that shards the dataset of a run with these parameters, if there is one."""
    plan: CampaignPlan = parameters["plan"]
    return plan.sharding_rental


hooks = [
    make_release_hook(find_campaign_rental),
    make_release_hook(find_campaign_sharding_rental),
]

make_run_name = make_field_name("campaign", "plan", "name", "plan")
