"""Query the permissions of credentials on a bucket of Google Cloud Storage.

Source: "Buckets: testIamPermissions" of Cloud Storage's JSON API. "IAM permissions for XML
requests" lists the permissions that each request needs. Needs the extra ``millrace[gcs]``.
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
        "storage.objects.delete",  # also needed to overwrite
        "storage.objects.get",
        "storage.objects.list",
        "storage.multipartUploads.create",
        "storage.multipartUploads.abort",
    }
)
"""Permissions that writers of objects need, multipart uploads included."""
_API_URL = "https://storage.googleapis.com"
_SCOPES = ["https://www.googleapis.com/auth/devstorage.read_write"]


def query_permissions(
    store: Store, permissions: Iterable[str] = WRITE_PERMISSIONS
) -> frozenset[str]:
    """Return those of some permissions that the store's credentials have on the bucket.

    Google leaves out a grant with a condition, such as a prefix, since the query is about the
    bucket. Therefore a permission that is not returned may still be granted for some objects.

    Args:
        store: Store with a ``gs://`` URL.
        permissions: Names of permissions, such as ``storage.objects.create``.

    Raises:
        ConfigurationError: The store is not Google's, or its credentials cannot be read.
        DeniedError: Google refuses the credentials.
        NotFoundError: There is no such bucket.
        UnavailableError: Google does not answer, or its answer is unusable.
    """
    if store.location.backend is not Backend.GS:
        raise errors.ConfigurationError(
            f"{store.url} is not in Google Cloud Storage: permissions need a gs:// URL."
        )
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
        raise errors.ConfigurationError(
            f"{store.url}: Google's credentials cannot be read ({error}). Set "
            "GOOGLE_APPLICATION_CREDENTIALS, or options: {service_account: FILE}."
        ) from error
    except failures.RefreshError as error:
        raise errors.DeniedError(f"{store.url}: Google refuses the credentials: {error}") from error
    except (failures.TransportError, urllib3.exceptions.HTTPError) as error:
        raise errors.UnavailableError(
            f"{store.url}: Google's IAM cannot be reached ({error}). Try again later."
        ) from error
    if answer.status in (401, 403):
        raise errors.DeniedError(
            f"{store.url}: Google does not let these credentials read their permissions. Check "
            "that they are for this bucket."
        )
    if answer.status == 404:
        raise errors.NotFoundError(
            f"{store.url}: there is no such bucket. Create it, or correct the URL."
        )
    try:
        if answer.status == 200:
            return frozenset(json.loads(answer.data).get("permissions", []))
    except (ValueError, AttributeError, TypeError):
        pass  # another server has answered
    unavailable = errors.UnavailableError(
        f"{store.url}: Google's IAM answered with status {answer.status}. Try again later."
    )
    unavailable.status = answer.status
    raise unavailable


def _load_credentials(store: Store) -> tuple[Any, str]:
    """Return the credentials that obstore would use, and the URL of Google's API."""
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
        return by_key.from_service_account_info(key, scopes=_SCOPES), api_url
    path = options.get("application_credentials")
    if path is not None:
        return of_google.load_credentials_from_file(path, scopes=_SCOPES)[0], api_url
    return of_google.default(scopes=_SCOPES)[0], api_url
