"""Program of a campaign's workers: settings file, environment and storage grants."""

from typing import Any

import yaml

from millrace.campaigns.worker.settings import NODE_PORT, SharedWorkerSettings
from millrace.keys.campaigns import CampaignKeys
from millrace.rentals import CodeRepository, Program, StorageGrant, make_store_settings
from millrace.rentals.messages import make_credential_variables
from millrace.storage import Right, StoreSpec

_SETTINGS_FILE = "millrace-worker.yaml"


def render_worker_settings(
    shared: SharedWorkerSettings, store: StoreSpec, number: int | str
) -> str:
    """Return the settings of a worker, as YAML; its credentials are in its environment.

    Args:
        shared: Settings that all workers of the campaign share.
        store: Store of the campaign.
        number: Number of the worker; ``{slot}`` is filled in on a rented machine.
    """
    shared_fields = {
        **shared.model_dump(mode="json"),
        "uid": CampaignKeys(shared.campaign).make_uid(number),
    }
    settings: dict[str, Any] = _escape_settings(shared_fields, number)
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
    shared: SharedWorkerSettings, store: StoreSpec, repository: CodeRepository
) -> tuple[Program, tuple[StorageGrant, ...]]:
    """Return the program of a campaign's machines, and its storage grants.

    Each machine writes its gradients, votes and checkpoint files below its own prefixes only.
    """
    keys = CampaignKeys(shared.campaign)
    program = Program(
        repo_url=repository.repo_url,
        repo_ref=repository.repo_ref,
        extras=repository.extras,
        image=repository.image,
        workdir=repository.workdir,
        command=("millrace", "campaign", "worker", _SETTINGS_FILE),
        files={_SETTINGS_FILE: render_worker_settings(shared, store, "{slot}")},
        ports=(NODE_PORT,) if shared.prewarm_timeout else (),
    )
    read_prefixes = keys.list_read_prefixes()
    if shared.dataset is not None:
        read_prefixes.append(f"{shared.dataset}/")
    write_prefixes = keys.list_write_prefixes("{slot}")
    return program, (
        *(StorageGrant(prefix=prefix) for prefix in read_prefixes),
        *(StorageGrant(prefix=prefix, access=Right.WRITE) for prefix in write_prefixes),
    )
