"""Delete objects of Google Cloud Storage whose keys obstore changes, such as ``folder/``.

Needs the extra ``millrace[gcs]``. Sources: "Delete object" of the XML API, and "Request endpoints"
(encoding of the parts of a path) of the Cloud Storage documentation.
"""

from typing import Any, cast
from urllib.parse import quote

import urllib3
from google.auth.transport.urllib3 import AuthorizedHttp
from obstore.exceptions import GenericError

from millrace.storage.clients import make_full_key
from millrace.storage.google_credentials import load_google_credentials, translate_google_errors
from millrace.storage.obstore_clients import CONNECT_TIMEOUT, READ_TIMEOUT
from millrace.storage.open import Store
from millrace.storage.retry import call_with_retries

_TIMEOUT = urllib3.Timeout(
    connect=CONNECT_TIMEOUT.total_seconds(), read=READ_TIMEOUT.total_seconds()
)


def delete_exact_key(store: Store, key: str) -> None:
    """Delete an object under exactly its key. One request, and one for a token.

    Args:
        store: Store with a ``gs://`` URL.
        key: Key of the object.

    Raises:
        NotFoundError: There is no such object.
        ConfigurationError: Google's credentials cannot be read.
        DeniedError: The credentials may not delete the object.
        UnavailableError: Google did not answer within the store's time budget.
    """
    bucket, whole = (
        quote(part, safe="") for part in (store.location.bucket, make_full_key(store, key))
    )
    with translate_google_errors(store):
        credentials, api_url = load_google_credentials(store)
        client = cast("Any", AuthorizedHttp(credentials, http=urllib3.PoolManager(retries=False)))

    def send() -> None:
        with translate_google_errors(store):
            answer = client.request("DELETE", f"{api_url}/{bucket}/{whole}", timeout=_TIMEOUT)
        if answer.status >= 300:
            raise GenericError(
                f"Error performing DELETE - Server returned non-2xx status code: {answer.status}: "
                f"{answer.data[:1000].decode('utf-8', 'replace')}"
            )

    call_with_retries(store, key, send, is_fork_safe=True)
