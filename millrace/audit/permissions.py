"""Permissions that Google says credentials have on a bucket, by name.

Source: "Buckets: testIamPermissions" of Cloud Storage's JSON API, and "IAM permissions for XML
requests" for which of them a request needs. With the extra ``millrace[gcs]``.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import google.auth
import urllib3
from google.auth import exceptions as failures
from google.auth.credentials import AnonymousCredentials
from google.auth.transport.urllib3 import AuthorizedHttp
from google.oauth2.service_account import Credentials

from millrace import errors
from millrace.storage import Backend, Store

WRITE_PERMISSIONS = frozenset(
    {
        "storage.objects.create",
        "storage.objects.delete",  # overwriting needs it too
        "storage.objects.get",
        "storage.objects.list",
        "storage.multipartUploads.create",
        "storage.multipartUploads.abort",
    }
)
"""What everything needs that writes objects, large ones too."""
_API_URL = "https://storage.googleapis.com"
_SCOPES = ["https://www.googleapis.com/auth/devstorage.read_write"]


def query_permissions(
    store: Store, permissions: Iterable[str] = WRITE_PERMISSIONS
) -> frozenset[str]:
    """Return which of these permissions the store's credentials have on its bucket.

    A grant under a condition, such as on a prefix, is left out by Google when it is asked about the
    bucket: what is not among them may be allowed all the same.

    Args:
        store: One of ``gs://``.
        permissions: Their names, as in ``storage.objects.create``.

    Raises:
        ConfigurationError: The store is none of Google's, or its credentials are not to be found
            or not to be read.
        DeniedError: The credentials are not taken.
        NotFoundError: There is no such bucket.
        UnavailableError: There is no answer, or none that can be used.
    """
    if store.location.backend is not Backend.GS:
        raise errors.ConfigurationError(f"{store.url} has no permissions of Google's to ask for.")
    query = "&".join(f"permissions={quote(name)}" for name in sorted(permissions))
    bucket = quote(store.location.bucket, safe="")
    try:
        credentials, api_url = _load_credentials(store)
        client = cast("Any", AuthorizedHttp(credentials, http=urllib3.PoolManager(retries=False)))
        answer = client.request(
            "GET",
            f"{api_url}/storage/v1/b/{bucket}/iam/testPermissions?{query}",
            timeout=store.spec.retry_timeout.total_seconds(),
        )
    except (failures.DefaultCredentialsError, ValueError, OSError) as error:
        raise errors.ConfigurationError(f"{store.url}: Google's credentials: {error}") from error
    except failures.RefreshError as error:
        raise errors.DeniedError(f"{store.url}: Google refuses the credentials: {error}") from error
    except (failures.TransportError, urllib3.exceptions.HTTPError) as error:
        raise errors.UnavailableError(
            f"{store.url}: Google's IAM is out of reach: {error}"
        ) from error
    if answer.status in (401, 403):
        raise errors.DeniedError(f"{store.url}: Google refuses to say what is allowed there.")
    if answer.status == 404:
        raise errors.NotFoundError(f"{store.url}: there is no such bucket.")
    try:
        if answer.status == 200:
            return frozenset(json.loads(answer.data).get("permissions", []))
    except (ValueError, AttributeError, TypeError):
        pass  # something else answers in its place
    unavailable = errors.UnavailableError(f"{store.url}: Google's IAM answers {answer.status}.")
    unavailable.status = answer.status
    raise unavailable


def _load_credentials(store: Store) -> tuple[Any, str]:
    """Return the credentials that obstore would use, and where Google's API is served."""
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
    of_google: Any = google.auth  # it has no types
    if text is not None:
        key: dict[str, Any] = json.loads(text)
        api_url = key.get("gcs_base_url", api_url)
        if key.get("disable_oauth"):
            return AnonymousCredentials(), api_url
        by_key: Any = Credentials
        return by_key.from_service_account_info(key, scopes=_SCOPES), api_url
    path = options.get("application_credentials")
    if path is not None:
        return of_google.load_credentials_from_file(path, scopes=_SCOPES)[0], api_url
    return of_google.default(scopes=_SCOPES)[0], api_url
