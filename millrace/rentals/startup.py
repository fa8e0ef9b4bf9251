"""Start of a machine: its environment and files, made anew for each."""

import base64
import hmac
from datetime import timedelta
from importlib.resources import files

from pydantic import SecretStr

from millrace import errors
from millrace.keys import MachineKeys, RentalKeys
from millrace.rentals.messages import FILES_BYTES, ORDER, GuestFiles, GuestOrder
from millrace.rentals.settings import Account, RentSettings
from millrace.storage import Backend, Right, Store, StoreSpec, put, scoped, signed_url

_LONGEST_ENVIRONMENT = 32_768  # characters in all, by the API
_LEAST = timedelta(minutes=15)  # that STS gives credentials for


def onstart() -> str:
    """Return the script that the provider runs when the machine starts.

    It fetches nothing by itself.
    """
    return _text("onstart.sh")


def environment(
    store: Store, settings: RentSettings, number: int, slot: int, until: float, *,
    lifetime: timedelta, url: str,
) -> dict[str, str]:  # fmt: skip
    """Return the variables of a machine: all that it has of ours.

    Args:
        store: Where rentals are written down.
        settings: What is rented.
        number: Of the attempt.
        slot: Which of the rental's machines it is.
        until: When it has to be gone, in seconds since 1970.
        lifetime: How long it has.
        url: Of the provider's API.

    Raises:
        ConfigurationError: The store has no credentials for a part of it, or they are too large.
    """
    rental, program = RentalKeys(settings.name), settings.program
    machine = rental.machine(number)
    lasting = max(lifetime, _LEAST)
    order = GuestOrder(
        store=_part(store, [machine], lasting, Right.WRITE, settings.role_arn),
        prefix=machine,
        command=tuple(_filled(word, slot, settings.count) for word in program.command),
        environment=program.environment,
        beat=min(10.0, settings.silence.total_seconds() / 4),
        read=_reach(store, settings, slot, Right.READ, lasting),
        write=_reach(store, settings, slot, Right.WRITE, lasting),
        node_key=node_key(settings.account, settings.name, number) if program.ports else None,
    )
    found = {
        "MILLRACE_WATCHDOG": _encoded(_text("watchdog.py")),
        "MILLRACE_TRAFFIC": _encoded(_text("traffic.py")),
        "MILLRACE_SETUP": _encoded(_text("install.py")),
        "MILLRACE_UNTIL": f"{until:.0f}",
        "MILLRACE_LIFETIME": f"{lifetime.total_seconds():.0f}",
        "MILLRACE_SILENCE": f"{settings.silence.total_seconds():.0f}",
        "MILLRACE_OWNER_URL": _url(store, rental.owner, lasting, Right.READ),
        "MILLRACE_VAST_URL": url,
        "MILLRACE_REPO_URL": program.repo_url,
        "MILLRACE_REPO_REF": program.repo_ref,
        "MILLRACE_EXTRAS": ",".join(program.extras),
        "MILLRACE_SETUP_URL": _url(store, MachineKeys(machine).setup, lasting, Right.WRITE),
        ORDER: order.encode(),
    }
    if sum(len(name) + len(value) for name, value in found.items()) > _LONGEST_ENVIRONMENT:
        raise errors.ConfigurationError(
            "The program's variables are too large for a machine's environment (32 KiB in all): "
            "write them into files instead."
        )
    return found


def send_files(store: Store, settings: RentSettings, number: int, slot: int) -> None:
    """Leave what is written beside the program where the machine finds it.

    Args:
        store: Where rentals are written down.
        settings: What is rented.
        number: Of the attempt.
        slot: Which of the rental's machines it is.

    Raises:
        ConfigurationError: The files are too large to be read there.
    """
    texts = settings.program.files.items()
    files = GuestFiles(texts={name: _filled(text, slot, settings.count) for name, text in texts})
    keys = MachineKeys(RentalKeys(settings.name).machine(number))
    body = files.model_dump_json().encode()
    if len(body) > FILES_BYTES:
        raise errors.ConfigurationError(
            f"The files of the program take {len(body):,} bytes, and may take {FILES_BYTES:,}: let "
            "the program read large files from the bucket."
        )
    put(store, keys.files, body)


def node_key(account: Account, rental: str, attempt: int) -> SecretStr:
    """Return the key of the swarm's agent on a rented machine; each machine has another.

    Whoever has the account finds it again, and nobody finds the account's key by it.

    Args:
        account: Who pays.
        rental: Its name.
        attempt: Which of its machines.
    """
    key = account.api_key.get_secret_value().encode()
    return SecretStr(hmac.digest(key, f"node {attempt} of {rental}".encode(), "sha256").hex())


def _reach(
    store: Store, settings: RentSettings, slot: int, right: Right, ttl: timedelta
) -> StoreSpec | None:
    prefixes = [
        _filled(reach.prefix, slot, settings.count)
        for reach in settings.reach
        if reach.right is right
    ]
    return _part(store, prefixes, ttl, right, settings.role_arn) if prefixes else None


def _part(
    store: Store, prefixes: list[str], ttl: timedelta, right: Right, role_arn: str | None
) -> StoreSpec:
    """Return the part of the store that a machine may use, with credentials for its prefixes."""
    if store.location.backend is Backend.FILE:
        return StoreSpec(url=store.url)
    spec = store.spec
    if spec.options or spec.ca_file:
        raise errors.ConfigurationError(
            f"{store.url} is opened with options or a ca_file: a rented machine is given neither. "
            "Rent with a store that needs none."
        )
    given = scoped(store, prefixes, ttl, right=right, role_arn=role_arn).spec.credentials
    return StoreSpec(
        url=spec.url, endpoint=spec.endpoint, region=spec.region, account_id=spec.account_id,
        credentials=given,
    )  # fmt: skip


def _url(store: Store, key: str, ttl: timedelta, right: Right) -> str:
    if store.location.backend is Backend.FILE:
        return store.url_of(key)
    return signed_url(store, key, ttl, right=right)


def _filled(text: str, slot: int, slots: int) -> str:
    return text.replace("{slot}", str(slot)).replace("{slots}", str(slots))


def _text(name: str) -> str:
    return files("millrace.rentals.guest").joinpath(name).read_text(encoding="utf-8")


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
