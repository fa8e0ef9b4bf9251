"""Credentials of Google for requests that obstore does not make, and tokens with fewer rights.

Needs the extra ``millrace[gcs]``. Sources: "Downscope with Credential Access Boundaries" of Google
Cloud's documentation, and RFC 8693 for the exchange.
"""

import contextlib
import json
import os
from collections.abc import Generator, Sequence
from datetime import UTC
from pathlib import Path
from typing import Any, cast

import google.auth
import urllib3
from google.auth import downscoped
from google.auth import exceptions as failures
from google.auth.credentials import AnonymousCredentials
from google.auth.transport.urllib3 import Request
from google.oauth2 import sts
from google.oauth2.service_account import Credentials
from pydantic import SecretStr

from millrace import errors
from millrace.storage.google_tokens import AccessToken
from millrace.storage.open import Store
from millrace.storage.scoped import Right

MAX_PREFIXES = 10
"""Largest number of prefixes of one token: Google takes as many rules."""
_API_URL = "https://storage.googleapis.com"
_STS_URL = "https://sts.googleapis.com/v1/token"
_STORAGE_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_EXCHANGE_SCOPE = "https://www.googleapis.com/auth/cloud-platform"  # tokens that are exchanged
_ROLES = {
    Right.READ: "inRole:roles/storage.objectViewer",
    Right.WRITE: "inRole:roles/storage.objectUser",
}
_TOKEN_EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"  # noqa: S105 - a name of RFC 8693
_ACCESS_TOKEN = "urn:ietf:params:oauth:token-type:access_token"  # noqa: S105 - another one


def load_google_credentials(store: Store, scope: str = _STORAGE_SCOPE) -> tuple[Any, str]:
    """Return the credentials that obstore would use for a store, and the URL of Google's API.

    Args:
        store: Store with a ``gs://`` URL.
        scope: OAuth scope of the credentials.

    Raises:
        DefaultCredentialsError, ValueError, OSError: There are none, or they cannot be read;
            `translate_google_errors` translates these.
    """
    options = {
        name.lower().removeprefix("google_"): value.get_secret_value()
        for name, value in store.spec.options.items()
    }

    def find_option(*names: str) -> str | None:
        given = (options.get(name) or os.environ.get(f"GOOGLE_{name.upper()}") for name in names)
        return next(filter(None, given), None)

    api_url = store.spec.endpoint or _API_URL
    text = find_option("service_account_key")
    path = find_option("service_account", "service_account_path")
    if text is None and path is not None:
        text = Path(path).read_text(encoding="utf-8")
    of_google: Any = google.auth  # google.auth has no types
    if text is not None:
        key: dict[str, Any] = json.loads(text)
        api_url = key.get("gcs_base_url", api_url)
        if key.get("disable_oauth"):
            return AnonymousCredentials(), api_url
        by_key: Any = Credentials
        return by_key.from_service_account_info(key, scopes=[scope]), api_url
    path = options.get("application_credentials")
    if path is not None:
        return of_google.load_credentials_from_file(path, scopes=[scope])[0], api_url
    return of_google.default(scopes=[scope])[0], api_url


@contextlib.contextmanager
def translate_google_errors(store: Store) -> Generator[None]:
    """Raise the errors of Google's libraries as those of Millrace.

    Raises:
        ConfigurationError: The credentials cannot be read.
        DeniedError: Google refuses the credentials.
        UnavailableError: Google cannot be reached.
    """
    try:
        yield
    except (failures.DefaultCredentialsError, ValueError, OSError) as error:
        raise errors.ConfigurationError(
            f"{store.url}: Google's credentials cannot be read ({error}). Set "
            "GOOGLE_APPLICATION_CREDENTIALS, or options: {service_account: FILE}."
        ) from error
    except (failures.RefreshError, failures.OAuthError) as error:
        raise errors.DeniedError(f"{store.url}: Google refuses the credentials: {error}") from error
    except (failures.TransportError, urllib3.exceptions.HTTPError) as error:
        raise errors.UnavailableError(
            f"{store.url}: Google's IAM cannot be reached ({error}). Try again later."
        ) from error


def make_scoped_token(
    store: Store, prefixes: Sequence[str], *, access: Right = Right.READ
) -> AccessToken:
    """Return an access token of Google for some prefixes of a bucket. It ends within an hour.

    The bucket needs uniform bucket-level access. Two requests.

    Args:
        store: Store with a ``gs://`` URL, and credentials with the right for all of the prefixes.
        prefixes: Prefixes below the store's URL. The token allows no other keys.
        access: Right of the token. The right to write includes the right to read.

    Raises:
        ConfigurationError: There are too many prefixes, or the credentials cannot be read.
        DeniedError: Google refuses the credentials.
        UnavailableError: Google cannot be reached.
    """
    if not 0 < len(prefixes) <= MAX_PREFIXES:
        raise errors.ConfigurationError(
            f"{store.url}: a token of Google takes 1 to {MAX_PREFIXES} prefixes, and not "
            f"{len(prefixes)}."
        )
    above = f"{store.location.prefix}/" if store.location.prefix else ""
    library: Any = downscoped  # google.auth has no types
    bucket = store.location.bucket
    boundary = library.CredentialAccessBoundary(
        [
            library.AccessBoundaryRule(
                f"//storage.googleapis.com/projects/_/buckets/{bucket}",
                [_ROLES[access]],
                library.AvailabilityCondition(_make_condition(bucket, f"{above}{prefix}")),
            )
            for prefix in prefixes
        ]
    )
    request = cast("Any", Request)(urllib3.PoolManager(retries=False))
    with translate_google_errors(store):
        credentials, api_url = load_google_credentials(store, _EXCHANGE_SCOPE)
        if isinstance(credentials, AnonymousCredentials):
            raise errors.ConfigurationError(
                f"{store.url} is opened without Google's credentials, so no token can be made."
            )
        credentials.refresh(request)
        url = _STS_URL if api_url == _API_URL else f"{api_url}/v1/token"
        answer = cast("Any", sts.Client)(url).exchange_token(
            request,
            grant_type=_TOKEN_EXCHANGE,
            subject_token=credentials.token,
            subject_token_type=_ACCESS_TOKEN,
            requested_token_type=_ACCESS_TOKEN,
            additional_options=boundary.to_json(),
        )
    # A token with fewer rights ends with the token that it was made from.
    return AccessToken(SecretStr(answer["access_token"]), credentials.expiry.replace(tzinfo=UTC))


def _make_condition(bucket: str, prefix: str) -> str:
    """Return the condition that an object, or the prefix of a listing, starts with a prefix."""
    text = prefix.replace("\\", "\\\\").replace("'", "\\'")
    return (
        f"resource.name.startsWith('projects/_/buckets/{bucket}/objects/{text}') || "
        "api.getAttribute('storage.googleapis.com/objectListPrefix', '')"
        f".startsWith('{text}')"
    )
