"""What the workers of a campaign are sent, on rented machines and as processes of ours."""

from datetime import timedelta

import yaml
from pydantic import BaseModel, ConfigDict, Field

from millrace.checkpoints.settings import CooldownSettings
from millrace.gradients.running import RunSettings
from millrace.keys import CampaignKeys
from millrace.remote import Repository, place_of
from millrace.storage import Right, StoreSpec
from millrace.training.settings import PORT
from millrace.vast import Program, Reach
from millrace.vast.wire import named

_WORKER = "millrace-worker.yaml"


class TrainingPlan(BaseModel):
    """What the workers of a campaign do, wherever they are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    campaign: str
    workers: int = Field(default=1, ge=1, description="How many.")
    run: RunSettings
    command: tuple[str, ...] = Field(
        min_length=1,
        description="The training script, such as `python -m examples.tiny_lm.train`: it finds "
        "what it needs by `millrace.training.Worker.here()`.",
    )
    epoch: int = Field(default=10, ge=1, description="Windows of an epoch.")
    cooldown: CooldownSettings = CooldownSettings()
    dataset: str | None = None
    root: str = Field(default="data", description="The folder that files are put into.")
    warm: timedelta | None = None


def worker_file(plan: TrainingPlan, store: StoreSpec, number: int | str) -> str:
    """The settings of a worker, as YAML; what it may reach it finds in its environment.

    Args:
        plan: What all do.
        store: The campaign's.
        number: The worker's; ``{slot}`` is filled in on a rented machine.
    """
    sent = plan.model_dump(mode="json", exclude_none=True)
    sent |= {"uid": CampaignKeys(plan.campaign).uid(number), "number": number}
    sent |= {"reads": place_of(store, Right.READ), "writes": place_of(store, Right.WRITE)}
    return yaml.safe_dump(sent, sort_keys=False)


def worker_environment(reads: StoreSpec, writes: StoreSpec) -> dict[str, str]:
    """What `worker_file` refers to, for a worker that is a process of ours."""
    found = {"MILLRACE_STORE": writes.url}
    for right, spec in ((Right.READ, reads), (Right.WRITE, writes)):
        if spec.credentials is not None:
            found |= named(f"MILLRACE_{right.upper()}", spec.credentials)
    return found


def training_program(
    plan: TrainingPlan, store: StoreSpec, repository: Repository
) -> tuple[Program, tuple[Reach, ...]]:
    """What runs on the rented machines of a campaign, and the parts of the store that they reach.

    Each writes its own gradients, and the checkpoints that epochs end with; none the chain.
    """
    keys = CampaignKeys(plan.campaign)
    program = Program(
        repo_url=repository.repo_url,
        repo_ref=repository.repo_ref,
        extras=repository.extras,
        image=repository.image,
        command=("millrace", "work", _WORKER),
        files={_WORKER: worker_file(plan, store, "{slot}")},
        ports=(PORT,) if plan.warm else (),
    )
    reads = [f"{plan.run.chain.job}/", keys.notes, f"{keys.job}/"]
    if plan.dataset is not None:
        reads.append(f"{plan.dataset}/")
    own = plan.run.gradients.worker(keys.uid(0)).replace(keys.uid(0), keys.uid("{slot}"))
    writes = [own, f"{keys.job}/"]
    return program, (
        *(Reach(prefix=prefix) for prefix in reads),
        *(Reach(prefix=prefix, right=Right.WRITE) for prefix in writes),
    )
