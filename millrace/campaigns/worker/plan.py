"""Settings and environment of a campaign's workers, on rented machines and as local processes."""

from typing import Any

import yaml

from millrace.campaigns.worker.settings import NODE_PORT, TrainingPlan
from millrace.keys.campaigns import CampaignKeys
from millrace.remote import make_store_settings
from millrace.rentals import CodeRepository, Program, StorageGrant
from millrace.rentals.messages import make_credential_variables
from millrace.storage import Right, StoreSpec

_SETTINGS_FILE = "millrace-worker.yaml"


def render_worker_settings(plan: TrainingPlan, store: StoreSpec, number: int | str) -> str:
    """Return the settings of a worker, as YAML; its credentials are in its environment.

    Args:
        plan: Training plan of all workers.
        store: Store of the campaign.
        number: Number of the worker; ``{slot}`` is filled in on a rented machine.
    """
    plan_fields = {
        **plan.model_dump(mode="json"),
        "uid": CampaignKeys(plan.campaign).make_uid(number),
    }
    settings: dict[str, Any] = _escape_settings(plan_fields, number)
    settings |= {"number": number}
    settings |= {
        "read_store": make_store_settings(store, Right.READ),
        "write_store": make_store_settings(store, Right.WRITE),
    }
    return yaml.safe_dump(settings, sort_keys=False)


def _escape_settings(value: Any, number: int | str) -> Any:
    """Escape variables in settings, and fill in the worker's number."""
    match value:
        case str():
            return value.replace("${", "$${").replace("{slot}", str(number))
        case dict():
            return {name: _escape_settings(each, number) for name, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
        case list():
            return [_escape_settings(each, number) for each in value]  # pyright: ignore[reportUnknownVariableType]
        case _:
            return value


def make_worker_environment(read_spec: StoreSpec, write_spec: StoreSpec) -> dict[str, str]:
    """Return the variables that `render_worker_settings` refers to, for a local worker."""
    variables = {"MILLRACE_STORE": write_spec.url}
    for right, spec in ((Right.READ, read_spec), (Right.WRITE, write_spec)):
        if spec.credentials is not None:
            variables |= make_credential_variables(f"MILLRACE_{right.upper()}", spec.credentials)
    return variables


def make_training_program(
    plan: TrainingPlan, store: StoreSpec, repository: CodeRepository
) -> tuple[Program, tuple[StorageGrant, ...]]:
    """Return the program of a campaign's machines, and its storage grants.

    Each machine writes its gradients, votes and checkpoint files below its own prefixes only.
    """
    keys = CampaignKeys(plan.campaign)
    program = Program(
        repo_url=repository.repo_url,
        repo_ref=repository.repo_ref,
        extras=repository.extras,
        image=repository.image,
        command=("millrace", "campaign", "worker", _SETTINGS_FILE),
        files={_SETTINGS_FILE: render_worker_settings(plan, store, "{slot}")},
        ports=(NODE_PORT,) if plan.prewarm_timeout else (),
    )
    read_prefixes = keys.list_read_prefixes()
    if plan.dataset is not None:
        read_prefixes.append(f"{plan.dataset}/")
    write_prefixes = keys.list_write_prefixes("{slot}")
    return program, (
        *(StorageGrant(prefix=prefix) for prefix in read_prefixes),
        *(StorageGrant(prefix=prefix, access=Right.WRITE) for prefix in write_prefixes),
    )
