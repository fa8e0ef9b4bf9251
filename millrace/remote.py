"""Sharding on rented machines: program, settings and storage grants of each machine."""

from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from millrace import errors
from millrace.datasets import PipelineSettings
from millrace.datasets.sources import is_store_url
from millrace.datasets.transforms import bundle_files
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
_CA_FILE = "source-ca.pem"
_MAX_CA_BYTES = 1 << 20


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
    share_source_options: bool = Field(
        default=False,
        description="Send the machines the `options` of the source, such as a token of the Hub or "
        "a header of a web server. Whoever owns a machine can read them: name a token that can "
        "read this source only.",
    )


class VastFileSettings(BaseModel):
    """Section `vast` of a settings file. Other sections are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    vast: VastSettings


def make_sharding_rental(config: PipelineSettings, vast: VastSettings) -> RentalSettings:
    """Return the rental of machines that shard a dataset.

    The machines share the partitions. If a machine is lost, others continue its partitions. They
    get the files of transforms and the `ca_file` of the source with their settings.

    Args:
        config: Settings of the dataset.
        vast: Settings of the machines.

    Raises:
        ConfigurationError: The machines cannot read the source, or would get a secret of it that
            the settings do not allow to send.
        NotFoundError: The file of a transform is not there.
    """
    if config.execution.ray:
        raise errors.ConfigurationError(
            "Rented machines are no nodes of a Ray cluster: remove `ray` from `execution`, or run "
            "without --use-vast."
        )
    transforms, files = bundle_files(
        config.sharding.transforms, allow_private=config.source.allow_private
    )
    sharding = config.sharding.model_copy(update={"transforms": transforms})
    settings = config.model_copy(update={"sharding": sharding}).model_dump(
        mode="json", exclude={"store": True, "source": set(StoreSpec.model_fields)}
    )
    settings["store"] = make_store_settings(config.store, Right.WRITE)
    storage_grants = [StorageGrant(prefix=f"{config.dataset}/", access=Right.WRITE)]
    path, source = _find_path_below(config.store, config.source.store), None
    if path is not None:
        storage_grants.append(StorageGrant(prefix=f"{path}/"))
        settings["source"] |= make_store_settings(config.store, Right.READ, path)
    else:
        source = _check_source(config.source.store, vast)
        settings["source"] |= _make_source_settings(source)
        if source.ca_file is not None:
            files[_CA_FILE] = _read_ca_file(source.ca_file)
            settings["source"]["ca_file"] = _CA_FILE
            source = source.model_copy(update={"ca_file": None})  # a path of this machine
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
            files={_SETTINGS_FILE: yaml.safe_dump(settings), **files},
        ),
        machines=vast.machines,
        storage_grants=tuple(storage_grants),
        role_arn=vast.role_arn,
        source=source,
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
        settings["credentials"] = _make_credential_settings(f"MILLRACE_{access.upper()}")
    return {"url": url, **settings}


def _make_source_settings(source: StoreSpec) -> dict[str, Any]:
    """Return the settings of a source for a file on a machine, with variables for its secrets."""
    settings: dict[str, Any] = source.model_dump(
        mode="json", include={"url", "endpoint", "region", "account_id"}, exclude_none=True
    )
    if source.credentials is not None:
        settings["credentials"] = _make_credential_settings("MILLRACE_SOURCE")
    if source.options:
        settings["options"] = {
            name: f"${{MILLRACE_SOURCE_OPTION_{number}}}"
            for number, name in enumerate(sorted(source.options))
        }
    return settings


def _read_ca_file(path: Path) -> str:
    """Read the certificate authorities of a source for another machine.

    Raises:
        ConfigurationError: The file cannot be read, is too large, is no text, or has a private key.
    """
    try:
        with path.expanduser().open("rb") as file:
            text = file.read(_MAX_CA_BYTES + 1).decode()
    except OSError as error:
        raise errors.ConfigurationError(
            f"ca_file {path} cannot be read: {error.strerror}."
        ) from None
    except UnicodeDecodeError:
        text = ""
    if "-----BEGIN CERTIFICATE-----" not in text or len(text) > _MAX_CA_BYTES:
        raise errors.ConfigurationError(
            f"ca_file {path} has no certificates in PEM, or is larger than 1 MiB: name a file with "
            "the certificates of the source's authorities only."
        )
    if "PRIVATE KEY-----" in text:
        raise errors.ConfigurationError(
            f"ca_file {path} has a private key, which whoever owns a rented machine could read: "
            "name a file with certificates only."
        )
    return text


def _make_credential_settings(prefix: str) -> dict[str, str]:
    return {
        "access_key_id": f"${{{prefix}_ACCESS_KEY_ID}}",
        "secret_access_key": f"${{{prefix}_SECRET_ACCESS_KEY}}",
        "session_token": f"${{{prefix}_SESSION_TOKEN:-}}",  # empty where there is none
    }


def _find_path_below(store: StoreSpec, source: StoreSpec) -> str | None:
    """Return the source's path below the store; None if it lies elsewhere."""
    if not is_store_url(source.url):
        return None
    target, origin = open_store(store, make_folder=False), open_store(source, make_folder=False)
    if origin.url.startswith(f"{target.url}/") and target.endpoint == origin.endpoint:
        return str(PurePosixPath(origin.url.removeprefix(f"{target.url}/")))
    return None


def _check_source(source: StoreSpec, vast: VastSettings) -> StoreSpec:
    """Return a source that does not lie below the store, as the machines get it.

    Raises:
        ConfigurationError: The machines cannot read the source, or it has options that may not be
            sent.
    """
    if source.options and not vast.share_source_options:
        raise errors.ConfigurationError(
            f"The source {source.url} has options, such as a token, which whoever owns a rented "
            "machine could read: name a token that can read this source only, and set "
            "`share_source_options: true` in the section `vast`."
        )
    if not is_store_url(source.url):
        return source
    origin = open_store(source, make_folder=False)
    if not origin.is_s3_compatible or origin.spec.ca_file:
        raise errors.ConfigurationError(
            f"Rented machines cannot read the source {origin.url}: copy it into a bucket of S3 or "
            "R2 or below the store of the shards, or shard it without --use-vast."
        )
    if source.credentials is None:
        raise errors.ConfigurationError(
            f"Rented machines have no credentials of this machine's environment for {origin.url}: "
            "write those of the source into its settings. The machines get temporary ones."
        )
    return origin.spec.model_copy(update={"url": origin.url})
