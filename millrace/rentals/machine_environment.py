"""Environment and files of a machine, with its credentials."""

import base64
import hmac
from datetime import timedelta
from importlib.resources import files
from typing import Any

from pydantic import SecretStr

from millrace import errors
from millrace.keys.rentals import MachineKeys, RentalKeys
from millrace.rentals.ledger import Attempt
from millrace.rentals.messages import CONFIG_VARIABLE, MAX_FILES_BYTES, GuestConfig, GuestFiles
from millrace.rentals.settings import RentalSettings, VastAccount
from millrace.storage import (
    Backend,
    Right,
    Store,
    StoreSpec,
    open_scoped_store,
    open_store,
    put,
    sign_url,
)

_MAX_ENVIRONMENT_LENGTH = 32_768  # characters of all variables; limit of the API
_MIN_STS_LIFETIME = timedelta(minutes=15)  # shortest lifetime of credentials from STS


def read_onstart_script() -> str:
    """Return the script that the provider runs when a machine starts. It downloads nothing."""
    return _read_guest_file("onstart.sh")


def make_environment(
    store: Store, settings: RentalSettings, attempt: Attempt, *, vast_url: str
) -> dict[str, str]:
    """Return the variables of a machine.

    Args:
        store: Store of the ledger.
        settings: Settings of the rental.
        attempt: Attempt to rent the machine.
        vast_url: URL of the provider's API.

    Raises:
        ConfigurationError: The store cannot grant a machine access, or the variables are too large.
    """
    rental, program, intent = RentalKeys(settings.name), settings.program, attempt.intent
    machine, slot = rental.make_machine_prefix(attempt.number), intent.slot
    lifetime = intent.deadline - intent.started_at
    credential_lifetime = max(lifetime, _MIN_STS_LIFETIME)
    config = GuestConfig(
        store=_scope_store(store, [machine], credential_lifetime, Right.WRITE, settings.role_arn),
        prefix=machine,
        command=tuple(_expand_slot(word, slot, settings.machines) for word in program.command),
        environment=program.environment,
        heartbeat_interval=min(10.0, settings.timeouts.heartbeat_timeout.total_seconds() / 4),
        read_store=_grant_storage(store, settings, slot, Right.READ, credential_lifetime),
        write_store=_grant_storage(store, settings, slot, Right.WRITE, credential_lifetime),
        source=_grant_source(settings, credential_lifetime),
        node_key=derive_node_key(settings.account, settings.name, attempt.number)
        if program.ports
        else None,
    )
    variables = {
        "MILLRACE_WATCHDOG": _encode_base64(_read_guest_file("watchdog.py")),
        "MILLRACE_TRAFFIC": _encode_base64(_read_guest_file("traffic.py")),
        "MILLRACE_INSTALL": _encode_base64(_read_guest_file("install.py")),
        "MILLRACE_DEADLINE": f"{intent.deadline.timestamp():.0f}",
        "MILLRACE_LIFETIME": f"{lifetime.total_seconds():.0f}",
        "MILLRACE_HEARTBEAT_TIMEOUT": f"{settings.timeouts.heartbeat_timeout.total_seconds():.0f}",
        "MILLRACE_OWNER_URL": _sign_url(store, rental.owner, credential_lifetime, Right.READ),
        "MILLRACE_VAST_URL": vast_url,
        "MILLRACE_REPO_URL": program.repo_url,
        "MILLRACE_REPO_REF": program.repo_ref,
        "MILLRACE_EXTRAS": ",".join(program.extras),
        **({"MILLRACE_WORKDIR": program.workdir} if program.workdir else {}),
        "MILLRACE_REPORT_URL": _sign_url(
            store, MachineKeys(machine).setup, credential_lifetime, Right.WRITE
        ),
        CONFIG_VARIABLE: config.encode(),
    }
    if sum(len(name) + len(value) for name, value in variables.items()) > _MAX_ENVIRONMENT_LENGTH:
        raise errors.ConfigurationError(
            "The program's variables are too large for a machine's environment (32 KiB in all): "
            "write them into files instead."
        )
    return variables


def upload_files(store: Store, settings: RentalSettings, attempt: Attempt) -> None:
    """Upload the program's files for a machine.

    Args:
        store: Store of the ledger.
        settings: Settings of the rental.
        attempt: Attempt to rent the machine.

    Raises:
        ConfigurationError: The files are too large.
    """
    slot, count = attempt.intent.slot, settings.machines
    texts = settings.program.files.items()
    files = GuestFiles(texts={name: _expand_slot(text, slot, count) for name, text in texts})
    keys = MachineKeys(RentalKeys(settings.name).make_machine_prefix(attempt.number))
    body = files.model_dump_json().encode()
    if len(body) > MAX_FILES_BYTES:
        raise errors.ConfigurationError(
            f"The files of the program take {len(body):,} bytes, and may take {MAX_FILES_BYTES:,}: "
            "let the program read large files from the bucket."
        )
    put(store, keys.files, body)


def derive_node_key(account: VastAccount, rental: str, attempt: int) -> SecretStr:
    """Return the key of the swarm's agent on a rented machine. Each machine has its own.

    The key is derived from the account's API key. The API key cannot be computed from it.

    Args:
        account: Account that pays.
        rental: Name of the rental.
        attempt: Number of the attempt.
    """
    key = account.api_key.get_secret_value().encode()
    return SecretStr(hmac.digest(key, f"node {attempt} of {rental}".encode(), "sha256").hex())


def _grant_storage(
    store: Store, settings: RentalSettings, slot: int, access: Right, ttl: timedelta
) -> StoreSpec | None:
    prefixes = [
        _expand_slot(grant.prefix, slot, settings.machines)
        for grant in settings.storage_grants
        if grant.access is access
    ]
    return _scope_store(store, prefixes, ttl, access, settings.role_arn) if prefixes else None


def _grant_source(settings: RentalSettings, ttl: timedelta) -> StoreSpec | None:
    """Return the source of the rental, with temporary credentials if it is in a bucket."""
    source = settings.source
    if source is None or source.credentials is None:
        return source
    store = open_store(source, make_folder=False)
    root = source.model_copy(update={"url": store.url.removesuffix(f"/{store.location.prefix}")})
    prefixes = [f"{store.location.prefix}/"] if store.location.prefix else []
    if not prefixes:
        raise errors.ConfigurationError(
            f"The source {store.url} is a whole bucket, and rented machines get credentials for a "
            "prefix only: move the files below a prefix."
        )
    parent = open_store(root, make_folder=False)
    return _scope_store(parent, prefixes, ttl, Right.READ, settings.role_arn)


def _scope_store(
    store: Store, prefixes: list[str], ttl: timedelta, access: Right, role_arn: str | None
) -> StoreSpec:
    """Return the store with credentials for some prefixes."""
    if store.location.backend is Backend.FILE:
        return StoreSpec(url=store.url)
    spec = store.spec
    if spec.options or spec.ca_file:
        raise errors.ConfigurationError(
            f"{store.url} is opened with options or a ca_file, which rented machines do not "
            "receive: use a store that needs neither."
        )
    credentials = open_scoped_store(
        store, prefixes, ttl, access=access, role_arn=role_arn
    ).spec.credentials
    return StoreSpec(
        url=spec.url, endpoint=spec.endpoint, region=spec.region, account_id=spec.account_id,
        credentials=credentials,
    )  # fmt: skip


def _sign_url(store: Store, key: str, ttl: timedelta, access: Right) -> str:
    if store.location.backend is Backend.FILE:
        return store.make_url(key)
    return sign_url(store, key, ttl, access=access)


def _expand_slot(text: str, slot: int, slots: int) -> str:
    return text.replace("{slot}", str(slot)).replace("{slots}", str(slots))


def _read_guest_file(name: str) -> str:
    return files("millrace.rentals.guest").joinpath(name).read_text(encoding="utf-8")


def _encode_base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


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
        settings["credentials"] = make_credential_settings(f"MILLRACE_{access.upper()}")
    return {"url": url, **settings}


def make_credential_settings(prefix: str) -> dict[str, str]:
    """Return credentials for a file on a machine, as variables whose names have a prefix."""
    return {
        "access_key_id": f"${{{prefix}_ACCESS_KEY_ID}}",
        "secret_access_key": f"${{{prefix}_SECRET_ACCESS_KEY}}",
        "session_token": f"${{{prefix}_SESSION_TOKEN:-}}",  # empty where there is none
    }
