"""Query the permissions of credentials on a bucket of Google Cloud Storage.

Source: "Buckets: testIamPermissions" of Cloud Storage's JSON API. "IAM permissions for XML
requests" lists the permissions that each request needs. Needs the extra ``millrace[gcs]``.
"""

import json
from collections.abc import Iterable
from typing import Any, cast
from urllib.parse import quote

import urllib3
from google.auth.transport.urllib3 import AuthorizedHttp

from millrace import errors
from millrace.storage import Backend, Store
from millrace.storage.google_credentials import load_google_credentials, translate_google_errors

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
    with translate_google_errors(store):
        credentials, api_url = load_google_credentials(store)
        client = cast("Any", AuthorizedHttp(credentials, http=urllib3.PoolManager(retries=False)))
        answer = client.request(
            "GET",
            f"{api_url}/storage/v1/b/{bucket}/iam/testPermissions?{query}",
            timeout=store.spec.retry_timeout.total_seconds(),
        )
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
