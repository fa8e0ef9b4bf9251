"""Sharding on rented machines: program, settings and storage grants of each machine."""

from pathlib import PurePosixPath
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from millrace import errors
from millrace.datasets import PipelineSettings
from millrace.rentals import (
    CodeRepository,
    OfferRequest,
    Program,
    RentalSettings,
    StorageGrant,
    VastAccount,
)
from millrace.storage import Right, StoreSpec, open_store

_SETTINGS_FILE = "millrace-run.yaml"


class VastSettings(CodeRepository):
    """Rented machines of `millrace run --use-vast`."""

    account: VastAccount = Field(description="Account that pays for the machines.")
    request: OfferRequest = Field(
        description="Requirements of each machine, and its highest price."
    )
    machines: int = Field(
        default=1, ge=1, le=256, description="Number of machines, which share the work."
    )
    role_arn: str | None = Field(
        default=None, description="ARN of the role whose credentials machines get (S3 only)."
    )


class VastFileSettings(BaseModel):
    """Section `vast` of a settings file. Other sections are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    vast: VastSettings


def make_sharding_rental(config: PipelineSettings, vast: VastSettings) -> RentalSettings:
    """Return the rental of machines that shard a dataset.

    The machines share the partitions. If a machine is lost, others continue its partitions.

    Args:
        config: Settings of the dataset. The source must be below the store of the shards, because
            the credentials of a machine are limited to that store.
        vast: Settings of the machines.

    Raises:
        ConfigurationError: The source is not below the store of the shards.
    """
    source = _find_source_path(config.store, config.source.store)
    storage_grants = (
        StorageGrant(prefix=f"{source}/"),
        StorageGrant(prefix=f"{config.dataset}/", access=Right.WRITE),
    )
    settings = config.model_dump(
        mode="json", exclude={"store": True, "source": set(StoreSpec.model_fields)}
    )
    settings["store"] = make_store_settings(config.store, Right.WRITE)
    settings["source"] |= make_store_settings(config.store, Right.READ, source)
    return RentalSettings(
        name=f"shard/{config.dataset}",
        store=config.store,
        account=vast.account,
        request=vast.request,
        program=Program(
            repo_url=vast.repo_url,
            repo_ref=vast.repo_ref,
            extras=vast.extras,
            image=vast.image,
            command=("millrace", "run", _SETTINGS_FILE),
            files={_SETTINGS_FILE: yaml.safe_dump(settings)},
        ),
        machines=vast.machines,
        storage_grants=storage_grants,
        role_arn=vast.role_arn,
    )


def make_store_settings(store: StoreSpec, access: Right, path: str = "") -> dict[str, Any]:
    """Return a store's settings for a file on a machine, with variables for its secrets.

    Args:
        store: Store.
        access: Kind of the credentials, which the machine's environment contains.
        path: Path below the store's URL; by default the whole store.
    """
    url = "${MILLRACE_STORE}" + (f"/{path}" if path else "")
    settings: dict[str, Any] = store.model_dump(
        mode="json", include={"endpoint", "region"}, exclude_none=True
    )
    if store.credentials is not None:
        prefix = f"MILLRACE_{access.upper()}"
        settings["credentials"] = {
            "access_key_id": f"${{{prefix}_ACCESS_KEY_ID}}",
            "secret_access_key": f"${{{prefix}_SECRET_ACCESS_KEY}}",
            "session_token": f"${{{prefix}_SESSION_TOKEN:-}}",  # empty where there is none
        }
    return {"url": url, **settings}


def _find_source_path(store: StoreSpec, source: StoreSpec) -> str:
    """Return the source's path below the store."""
    target, origin = open_store(store, make_folder=False), open_store(source, make_folder=False)
    if origin.url.startswith(f"{target.url}/") and target.endpoint == origin.endpoint:
        return str(PurePosixPath(origin.url.removeprefix(f"{target.url}/")))
    raise errors.ConfigurationError(
        f"The source {origin.url} does not lie below {target.url}, and rented machines get "
        "credentials for that store only. Copy the source there, or shard it without --use-vast."
    )
