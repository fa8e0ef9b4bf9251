"""Sharding on rented machines: program, settings and storage grants of each machine."""

import logging
import os
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from millrace import errors
from millrace.datasets import (
    PipelineSettings,
    Preflight,
    ShardReport,
    preflight_dataset,
    shard_dataset,
)
from millrace.datasets.ledger_follower import LedgerFollower
from millrace.datasets.sources import is_store_url
from millrace.datasets.transforms import bundle_files, store_large_files
from millrace.formatting import format_count
from millrace.keys.datasets import DatasetKeys
from millrace.keys.rentals import check_rental_name
from millrace.progress import Progress, ignore_event
from millrace.rentals import (
    CodeRepository,
    OfferRequest,
    RentalSettings,
    RentalSupervisor,
    RentalTimeouts,
    StorageGrant,
    VastAccount,
    check_offer_id,
    describe_granted,
    make_location_settings,
    make_store_settings,
)
from millrace.settings import escape_variables, fill_variables, load_settings, validate_settings
from millrace.storage import Right, StoreSpec, open_store
from millrace.storage.overlap import locate_prefix

logger = logging.getLogger(__name__)

_SETTINGS_FILE = "millrace-run.yaml"
_CA_FILE = "source-ca.pem"
_MAX_CA_BYTES = 1 << 20
_EXIT_TIMEOUT = timedelta(minutes=5)  # time of the programs to end after the dataset is complete
_ENDS = (errors.BudgetError, errors.HeldError, errors.MachineError, errors.NotFoundError)
"""Errors of a rental that leave this process no machine."""


class ShardingMachineSettings(CodeRepository):
    """Rented machines that shard a dataset."""

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
    timeouts: RentalTimeouts = Field(
        default=RentalTimeouts(), description="Time limits and retries."
    )

    @field_validator("machines")
    @classmethod
    def _check_offer(cls, machines: int, info: ValidationInfo) -> int:
        check_offer_id(info.data.get("request"), machines)
        return machines


class VastSettings(ShardingMachineSettings):
    """Rented machines that shard a dataset, and the account that pays, with its key."""

    account: VastAccount = Field(description="Account that pays for the machines.")


class VastFileSettings(BaseModel):
    """Section `vast` of a settings file. Other sections are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    vast: VastSettings


def run_pipeline(
    settings: PipelineSettings | str | Path,
    *,
    dataset: str | None = None,
    use_vast: bool = False,
    progress: Progress = ignore_event,
) -> ShardReport:
    """Shard a dataset on this machine or on rented machines, as `millrace run` does.

    Args:
        settings: Settings of the dataset, or the path of their YAML or TOML file.
        dataset: Name of the dataset, instead of the name in the settings.
        use_vast: Whether to rent machines, by the section `vast` of the settings, without asking.
        progress: Callback, as for `shard_dataset` and `shard_on_machines`.

    Raises:
        ConfigurationError: The settings are invalid, or have no section `vast`.
        MillraceError: The run failed, with the errors of `shard_dataset` or `shard_on_machines`.
    """
    if isinstance(settings, PipelineSettings):
        config, origin = settings, "The settings"
    else:
        config, origin = (
            load_settings(Path(settings), PipelineSettings, template="millrace init"),
            str(settings),
        )
    if dataset is not None:
        config = config.model_copy(update={"dataset": dataset})
    if not use_vast:
        return shard_dataset(config, progress=progress)
    return shard_on_machines(config, read_vast_settings(config, origin), progress=progress)


def read_vast_settings(
    config: PipelineSettings,
    origin: str,
    *,
    offer_id: int | None = None,
    disk: int | None = None,
    workdir: str | None = None,
) -> VastSettings:
    """Return the section `vast` of the settings of a dataset, with its variables filled in.

    Args:
        config: Settings of the dataset.
        origin: Origin of the settings, for error messages.
        offer_id: Number of the offer to rent, instead of the section's.
        disk: Size of the disk in bytes, instead of the section's.
        workdir: Folder of the program on a machine, instead of the section's.

    Raises:
        ConfigurationError: There is no section `vast`, it is invalid, or variables are not set.
    """
    given = {} if config.vast is None else {"vast": config.vast}
    data, missing = fill_variables(given, os.environ)
    if missing:
        raise errors.ConfigurationError(
            f"Unset or empty in the environment: {', '.join(missing)} ({origin}, vast). Export it, "
            "or write ${NAME:-default}."
        )
    vast = validate_settings(VastFileSettings, data, source=origin).vast
    options = {"offer_id": offer_id, "disk": disk}
    request = vast.request.model_dump() | {
        name: value for name, value in options.items() if value is not None
    }
    changed = dict(vast) | {"request": request, "workdir": workdir or vast.workdir}
    return validate_settings(VastFileSettings, {"vast": changed}, source=origin).vast


def shard_on_machines(
    config: PipelineSettings,
    vast: VastSettings,
    *,
    found: Preflight | None = None,
    progress: Progress = ignore_event,
) -> ShardReport:
    """Shard a dataset on rented machines, and release the machines, whatever happens.

    At most one machine is rented for each open partition. A machine for which no partition is left
    ends, except the first one, which continues the partitions of a machine that is lost.
    If the process is killed, the machines of its rental are released after half a minute, or
    taken over by a next run. A complete dataset needs no machine: then `shard_dataset` is called.
    A program that has not ended five minutes after the dataset is complete ends with its machine.
    If the machines fail and the dataset is complete, a warning of the report has their error.

    Args:
        config: Settings of the dataset.
        vast: Settings of the machines.
        found: Result of `preflight_dataset`; by default the function is called.
        progress: Receives the events of the dataset in this thread, and those of the machines in
            another thread.

    Raises:
        BudgetError: The money or the time is spent. All machines were released.
        ConfigurationError: The machines cannot read the source, or would refuse the settings.
            Nothing was rented.
        DeniedError: Vast.ai does not know the API key.
        HeldError: Another process shards this dataset on rented machines.
        MachineError: Too many machines did not start, or a program failed. The next run continues.
        NotFoundError: No offer fits.
    """
    began = time.monotonic()
    rental = make_sharding_rental(config, vast)
    store = open_store(config.store)
    follower = LedgerFollower(store, config.dataset, progress)
    if follower.is_complete:
        return shard_dataset(config, progress=progress)
    if found is None:
        _, found = preflight_dataset(config)
    if found.refusals:
        raise errors.ConfigurationError(found.refusals[0])
    rental, note = limit_machines(rental, found)
    if note:
        logger.warning("%s", note)
    store_large_files(
        store,
        DatasetKeys(config.dataset),
        config.sharding.transforms,
        allow_private=config.source.allow_private,
    )
    follower.poll()
    warnings: tuple[str, ...] = ()
    supervisor = RentalSupervisor(rental, repeat=True, progress=nullcontext(progress))
    with supervisor:
        is_over = is_complete = False
        while not (is_over or is_complete):
            supervisor.wait_until_done(vast.timeouts.poll_interval)
            is_over = supervisor.is_over  # before the poll, so that the last poll reads all
            with suppress(errors.MillraceError):  # the next poll reads the rest
                is_complete = follower.is_complete
                follower.poll()
        supervisor.wait_until_done(_EXIT_TIMEOUT)
        try:
            supervisor.raise_failure()
        except _ENDS as error:
            with suppress(errors.MillraceError):
                is_complete = is_complete or follower.is_complete
            if not is_complete:
                raise
            message = errors.format_error(error)
            warnings = (f"No other run is needed, though the machines ended so: {message}",)
    if not follower.is_complete:
        raise errors.MachineError(
            f"The programs of {rental.name} ended with exit code 0, and {found.url} is not "
            "complete: check `repo_url` and `repo_ref`, and start again."
        )
    report = follower.make_report(config, time.monotonic() - began, supervisor.cost)
    return replace(report, warnings=warnings + report.warnings)


def limit_machines(rental: RentalSettings, found: Preflight) -> tuple[RentalSettings, str]:
    """Limit the machines of a rental to one for each open partition. Others would have no work.

    Args:
        rental: Rental of `make_sharding_rental`.
        found: Result of the checks of the dataset.

    Returns:
        The rental, and a sentence if it has fewer machines now; else an empty one.
    """
    needed = max(1, found.open_partitions)
    if rental.machines <= needed:
        return rental, ""
    return rental.model_copy(update={"machines": needed}), (
        f"{rental.name} rents {format_count(needed, 'machine')}, not {rental.machines}: a machine "
        f"works on whole partitions, and {format_count(found.open_partitions, 'partition')} of "
        f"{found.url} {'is' if found.open_partitions == 1 else 'are'} open."
    )


def needs_machines(config: PipelineSettings) -> bool:
    """Decide whether `shard_on_machines` rents machines: not for a complete dataset."""
    return not LedgerFollower(open_store(config.store), config.dataset, ignore_event).is_complete


def make_rental_name(dataset: str) -> str:
    """Return the name of the rental whose machines shard a dataset."""
    return f"shard/{dataset}"


def make_sharding_rental(config: PipelineSettings, vast: VastSettings) -> RentalSettings:
    """Return the rental of machines that shard a dataset.

    The machines share the partitions. If a machine is lost, others continue its partitions. They
    get the files of transforms and the `ca_file` of the source with their settings, except for
    large files, which `shard_on_machines` stores in the dataset.

    Args:
        config: Settings of the dataset.
        vast: Settings of the machines.

    Raises:
        ConfigurationError: The machines cannot read the source, or would get a secret of it that
            the settings do not allow to send; or no rental may have the name of the dataset.
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
    settings: dict[str, Any] = escape_variables(
        config.model_copy(update={"sharding": sharding}).model_dump(
            mode="json", exclude={"store": True, "source": set(StoreSpec.model_fields)}
        )
    )
    granted = describe_granted(config.store)
    settings["store"] = make_store_settings(granted, Right.WRITE)
    storage_grants = [StorageGrant(prefix=f"{config.dataset}/", access=Right.WRITE)]
    path, source = _find_path_below(config.store, config.source.store), None
    if path is not None:
        storage_grants.append(_make_read_grant(path, config.source.store.url))
        settings["source"] |= make_store_settings(granted, Right.READ, path)
    else:
        source = _check_source(config.source.store, vast)
        settings["source"] |= make_location_settings(describe_granted(source), "MILLRACE_SOURCE")
        if source.ca_file is not None:
            files[_CA_FILE] = _read_ca_file(source.ca_file)
            settings["source"]["ca_file"] = _CA_FILE
            source = source.model_copy(update={"ca_file": None})  # a path of this machine
    settings["source"]["mirrors"] = [
        _make_mirror_settings(config.store, mirror, storage_grants)
        for mirror in config.source.mirrors
    ]
    return RentalSettings(
        name=check_rental_name(make_rental_name(config.dataset)),
        store=config.store,
        account=vast.account,
        request=vast.request,
        program=vast.make_program(
            ("millrace", "run", "--slot", "{slot}", _SETTINGS_FILE),
            {_SETTINGS_FILE: yaml.safe_dump(settings), **files},
        ),
        machines=vast.machines,
        storage_grants=tuple(storage_grants),
        role_arn=vast.role_arn,
        source=source,
        timeouts=vast.timeouts,
    )


def _make_mirror_settings(
    store: StoreSpec, mirror: StoreSpec, storage_grants: list[StorageGrant]
) -> dict[str, Any]:
    """Return the settings of a mirror for a file on a machine, and add a grant if it needs one.

    Raises:
        ConfigurationError: The machines cannot read the mirror.
    """
    path = None
    with suppress(errors.NotFoundError):  # a folder of this machine
        path = _find_path_below(store, mirror)
    if path is not None:
        storage_grants.append(_make_read_grant(path, mirror.url))
        return make_store_settings(describe_granted(store), Right.READ, path)
    if is_store_url(mirror.url) or mirror.options or mirror.ca_file:
        raise errors.ConfigurationError(
            f"Rented machines cannot read the mirror {mirror.url}: they get credentials of one "
            "source only. Remove it from `mirrors`, or name a location below the store of the "
            "shards, or a public web server or dataset of the Hub."
        )
    return make_location_settings(mirror, "MILLRACE_SOURCE")


def _make_read_grant(path: str, url: str) -> StorageGrant:
    """Return the grant to read a folder of the store.

    Raises:
        ConfigurationError: Machines get no access to this folder.
    """
    try:
        return StorageGrant(prefix=f"{path}/")
    except ValidationError:
        raise errors.ConfigurationError(
            f"Rented machines get no access to {url}: its folder in the store of the shards begins "
            "with `_`, as those of Millrace's own records. Move the files to another folder."
        ) from None


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


def _find_path_below(store: StoreSpec, source: StoreSpec) -> str | None:
    """Return the source's path below the store; None if it lies elsewhere."""
    if not is_store_url(source.url):
        return None
    target, origin = open_store(store, make_folder=False), open_store(source, make_folder=False)
    (bucket, above), (other_bucket, path) = map(locate_prefix, (target, origin))
    if bucket == other_bucket and path.startswith(above) and path != above:
        return path.removeprefix(above).rstrip("/")
    return None


def _check_source(source: StoreSpec, vast: VastSettings) -> StoreSpec:
    """Return a source that does not lie below the store, as the machines get it.

    Raises:
        ConfigurationError: The machines cannot read the source, or it has options that may not be
            sent.
    """
    is_google = source.url.startswith("gs://")  # the machines get tokens, and no options
    if source.options and not vast.share_source_options and not is_google:
        raise errors.ConfigurationError(
            f"The source {source.url} has options, such as a token, which whoever owns a rented "
            "machine could read: name a token that can read this source only, and set "
            "`share_source_options: true` in the section `vast`."
        )
    if not is_store_url(source.url):
        return source
    origin = open_store(source, make_folder=False)
    if not (origin.is_s3_compatible or is_google) or origin.spec.ca_file:
        raise errors.ConfigurationError(
            f"Rented machines cannot read the source {origin.url}: copy it into a bucket of S3, R2 "
            "or Google, or below the store of the shards, or shard it without --use-vast."
        )
    if source.credentials is None and not is_google:
        raise errors.ConfigurationError(
            f"Rented machines have no credentials of this machine's environment for {origin.url}: "
            "write those of the source into its settings. The machines get temporary ones."
        )
    return origin.spec.model_copy(update={"url": origin.url})
