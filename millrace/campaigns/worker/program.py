"""Program of a campaign's workers: settings file, environment and storage grants."""

from collections.abc import Sequence
from typing import Any

import yaml

from millrace.campaigns.worker.settings import NODE_PORT, SharedWorkerSettings
from millrace.keys.campaigns import CampaignKeys
from millrace.rentals import (
    CodeRepository,
    Program,
    StorageGrant,
    describe_granted,
    make_access_variables,
    make_location_settings,
    make_store_settings,
)
from millrace.rentals.messages import SLOT_VARIABLE
from millrace.settings import escape_variables
from millrace.storage import Right, StoreSpec

_SETTINGS_FILE = "millrace-worker.yaml"


def render_worker_settings(
    shared: SharedWorkerSettings,
    read_spec: StoreSpec,
    write_spec: StoreSpec,
    number: int | str,
    mirrors: Sequence[StoreSpec] = (),
) -> str:
    """Return the settings of a worker, as YAML; its credentials are in its environment.

    Args:
        shared: Settings that all workers of the campaign share.
        read_spec: Store of the campaign, with read credentials.
        write_spec: Store of the campaign, with write credentials.
        number: Number of the worker, or a variable that the worker's environment has.
        mirrors: Mirrors of the store, with read credentials.
    """
    settings: dict[str, Any] = escape_variables(shared.model_dump(mode="json"))
    training = settings["training"]
    training["command"] = [word.replace("{slot}", str(number)) for word in training["command"]]
    settings |= {
        "uid": CampaignKeys(shared.campaign).make_uid(number),
        "number": number,
        "read_store": make_store_settings(read_spec, Right.READ),
        "write_store": make_store_settings(write_spec, Right.WRITE),
        "mirrors": [
            make_location_settings(spec, prefix) for prefix, spec in _name_mirrors(mirrors)
        ],
    }
    return yaml.safe_dump(settings, sort_keys=False)


def make_worker_environment(
    read_spec: StoreSpec, write_spec: StoreSpec, mirrors: Sequence[StoreSpec] = ()
) -> dict[str, str]:
    """Return the variables that `render_worker_settings` refers to, for a local worker."""
    variables = {"MILLRACE_STORE": write_spec.url}
    named = [("MILLRACE_READ", read_spec), ("MILLRACE_WRITE", write_spec), *_name_mirrors(mirrors)]
    for prefix, spec in named:
        variables |= make_access_variables(spec, prefix)
    return variables


def _name_mirrors(mirrors: Sequence[StoreSpec]) -> list[tuple[str, StoreSpec]]:
    """Return mirrors with the prefix of the variables of each."""
    return [(f"MILLRACE_MIRROR_{number}", spec) for number, spec in enumerate(mirrors)]


def make_training_program(
    shared: SharedWorkerSettings, store: StoreSpec, repository: CodeRepository
) -> tuple[Program, tuple[StorageGrant, ...]]:
    """Return the program of a campaign's machines, and its storage grants.

    Each machine writes its gradients, votes and checkpoint files below its own prefixes only.
    """
    keys = CampaignKeys(shared.campaign)
    granted, slot = describe_granted(store), f"${{{SLOT_VARIABLE}}}"
    program = repository.make_program(
        ("millrace", "campaign", "worker", _SETTINGS_FILE),
        {_SETTINGS_FILE: render_worker_settings(shared, granted, granted, slot)},
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
