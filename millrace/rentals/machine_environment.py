"""Environment and files of a machine, with its credentials."""

import base64
import hmac
from datetime import timedelta
from importlib.resources import files

from pydantic import SecretStr

from millrace import errors
from millrace.keys.rentals import MachineKeys, RentalKeys
from millrace.rentals.grants import GrantKind, expand_slot, scope_grants, sign_object_url
from millrace.rentals.ledger import Attempt
from millrace.rentals.messages import (
    CONFIG_VARIABLE,
    MAX_FILES_BYTES,
    SLOT_VARIABLE,
    GuestConfig,
    GuestFiles,
)
from millrace.rentals.settings import RentalSettings, VastAccount
from millrace.storage import Right, Store, put

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
    scoped = scope_grants(store, settings, attempt, credential_lifetime)
    config = GuestConfig(
        store=scoped[GrantKind.REPORTS],
        prefix=machine,
        command=tuple(expand_slot(word, slot, settings.machines) for word in program.command),
        environment={**program.environment, SLOT_VARIABLE: str(slot)},
        heartbeat_interval=min(10.0, settings.timeouts.heartbeat_timeout.total_seconds() / 4),
        read_store=scoped.get(GrantKind.READ),
        write_store=scoped.get(GrantKind.WRITE),
        source=scoped.get(GrantKind.SOURCE, settings.source),
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
        "MILLRACE_OWNER_URL": sign_object_url(store, rental.owner, credential_lifetime, Right.READ),
        "MILLRACE_VAST_URL": vast_url,
        "MILLRACE_REPO_URL": program.repo_url,
        "MILLRACE_REPO_REF": program.repo_ref,
        "MILLRACE_EXTRAS": ",".join(program.extras),
        **({"MILLRACE_WORKDIR": program.workdir} if program.workdir else {}),
        "MILLRACE_REPORT_URL": sign_object_url(
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
    keys = MachineKeys(RentalKeys(settings.name).make_machine_prefix(attempt.number))
    body = GuestFiles(texts=settings.program.files).model_dump_json().encode()
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


def _read_guest_file(name: str) -> str:
    return files("millrace.rentals.guest").joinpath(name).read_text(encoding="utf-8")


def _encode_base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
