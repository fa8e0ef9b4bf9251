"""Variables that hold the credentials of a store, and settings that refer to these variables.

A settings file for another process contains no secret. The environment of the process has them.
"""

from typing import Any

from pydantic import SecretStr

from millrace.settings import escape_variables
from millrace.storage import Right, StoreSpec
from millrace.storage.google_tokens import TokenSource

_NO_TOKEN = TokenSource(url=SecretStr(""), key=SecretStr(""))


def describe_granted(store: StoreSpec) -> StoreSpec:
    """Return a store as a rented machine gets it: with a token of Google instead of a key."""
    if not store.url.startswith("gs://"):
        return store
    return store.model_copy(update={"options": {}, "google_token": _NO_TOKEN})


def make_store_settings(store: StoreSpec, access: Right, path: str = "") -> dict[str, Any]:
    """Return a store's settings for the file of a process, with variables for its secrets.

    Args:
        store: Store; for a rented machine as `describe_granted` returns it.
        access: Kind of the credentials, which the environment of the process contains.
        path: Path below the store's URL; by default the whole store.
    """
    url = "${MILLRACE_STORE}" + (f"/{escape_variables(path)}" if path else "")
    settings: dict[str, Any] = escape_variables(
        store.model_dump(mode="json", include={"endpoint", "region"}, exclude_none=True)
    )
    return {"url": url, **settings, **make_access_settings(store, f"MILLRACE_{access.upper()}")}


def make_location_settings(store: StoreSpec, prefix: str) -> dict[str, Any]:
    """Return the settings of another store for the file of a process.

    Args:
        store: Store; for a rented machine as `describe_granted` returns it.
        prefix: Prefix of the variables with its secrets.
    """
    fields = {"url", "endpoint", "region", "account_id"}
    settings: dict[str, Any] = escape_variables(
        store.model_dump(mode="json", include=fields, exclude_none=True)
    )
    return settings | make_access_settings(store, prefix)


def make_access_settings(store: StoreSpec, prefix: str) -> dict[str, Any]:
    """Return the secret fields of a store, as variables whose names have a prefix."""
    settings: dict[str, Any] = {}
    if store.credentials is not None:
        settings["credentials"] = {
            "access_key_id": f"${{{prefix}_ACCESS_KEY_ID}}",
            "secret_access_key": f"${{{prefix}_SECRET_ACCESS_KEY}}",
            "session_token": f"${{{prefix}_SESSION_TOKEN:-}}",  # empty where there is none
        }
    if store.google_token is not None:
        settings["google_token"] = {
            "url": f"${{{prefix}_TOKEN_URL}}",
            "key": f"${{{prefix}_TOKEN_KEY}}",
        }
    if store.options:
        settings["options"] = {
            name: f"${{{prefix}_OPTION_{number}}}"
            for number, name in enumerate(sorted(store.options))
        }
    return settings


def make_access_variables(store: StoreSpec, prefix: str) -> dict[str, str]:
    """Return the variables that `make_access_settings` refers to."""
    variables: dict[str, str] = {}
    if (credentials := store.credentials) is not None:
        token = credentials.session_token
        variables |= {
            f"{prefix}_ACCESS_KEY_ID": credentials.access_key_id,
            f"{prefix}_SECRET_ACCESS_KEY": credentials.secret_access_key.get_secret_value(),
            f"{prefix}_SESSION_TOKEN": token.get_secret_value() if token else "",
        }
    if (source := store.google_token) is not None:
        variables |= {
            f"{prefix}_TOKEN_URL": source.url.get_secret_value(),
            f"{prefix}_TOKEN_KEY": source.key.get_secret_value(),
        }
    for number, (_, value) in enumerate(sorted(store.options.items())):
        variables[f"{prefix}_OPTION_{number}"] = value.get_secret_value()
    return variables
