"""Settings and environment of a campaign's workers, on rented machines and as local processes."""

from typing import Any

import yaml

from millrace.campaigns.worker.settings import PORT, TrainingPlan
from millrace.keys import CampaignKeys
from millrace.remote import CodeRepository, place_of
from millrace.rentals import Program, Reach
from millrace.rentals.messages import named
from millrace.storage import Right, StoreSpec

_WORKER = "millrace-worker.yaml"


def worker_file(plan: TrainingPlan, store: StoreSpec, number: int | str) -> str:
    """Return the settings of a worker, as YAML; its credentials are in its environment.

    Args:
        plan: What all do.
        store: The campaign's.
        number: The worker's; ``{slot}`` is filled in on a rented machine.
    """
    told = {**plan.model_dump(mode="json"), "uid": CampaignKeys(plan.campaign).uid(number)}
    sent: dict[str, Any] = _literal(told, number)
    sent |= {"number": number}
    sent |= {"reads": place_of(store, Right.READ), "writes": place_of(store, Right.WRITE)}
    return yaml.safe_dump(sent, sort_keys=False)


def _literal(value: Any, number: int | str) -> Any:
    """Return a person's settings, into which nothing but the worker's number is filled."""
    match value:
        case str():
            return value.replace("${", "$${").replace("{slot}", str(number))
        case dict():
            return {name: _literal(each, number) for name, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
        case list():
            return [_literal(each, number) for each in value]  # pyright: ignore[reportUnknownVariableType]
        case _:
            return value


def worker_environment(reads: StoreSpec, writes: StoreSpec) -> dict[str, str]:
    """Return the environment that `worker_file` refers to, for a worker that is a local process."""
    found = {"MILLRACE_STORE": writes.url}
    for right, spec in ((Right.READ, reads), (Right.WRITE, writes)):
        if spec.credentials is not None:
            found |= named(f"MILLRACE_{right.upper()}", spec.credentials)
    return found


def training_program(
    plan: TrainingPlan, store: StoreSpec, repository: CodeRepository
) -> tuple[Program, tuple[Reach, ...]]:
    """Return the program of a campaign's machines, and the parts of the store it may use.

    Each writes its own gradients, votes and files of checkpoints, below its own prefixes only.
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
    reads = keys.list_read_prefixes()
    if plan.dataset is not None:
        reads.append(f"{plan.dataset}/")
    writes = keys.list_write_prefixes("{slot}")
    return program, (
        *(Reach(prefix=prefix) for prefix in reads),
        *(Reach(prefix=prefix, right=Right.WRITE) for prefix in writes),
    )
