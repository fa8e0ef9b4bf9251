"""Object that is written and deleted to test credentials."""

import secrets
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import timedelta

from millrace import errors
from millrace.keys.probes import make_write_probe_key
from millrace.storage import Store, create, delete

_CLEANUP_TIMEOUT = timedelta(seconds=10)  # for the deletion after an error


@contextmanager
def open_write_probe(store: Store, scope: str) -> Generator[str]:
    """Yield the key of an object to write under a scope, and delete the object at the end.

    Args:
        store: Store, opened with the credentials.
        scope: Prefix of the object.

    Raises:
        ReadOnlyError: The object cannot be deleted.
    """
    key = make_write_probe_key(scope, secrets.token_hex(8))
    try:
        yield key
    except BaseException:
        # A create without an answer may have stored the object.
        with suppress(errors.MillraceError):
            delete(store.with_retry_timeout(_CLEANUP_TIMEOUT), [key])
        raise
    for failure in delete(store, [key]):
        raise errors.ReadOnlyError(
            f"{store.make_url(key)} could not be deleted ({failure.reason}): allow deletion, which "
            "Millrace needs. Delete this object by hand."
        )


def create_write_probe(store: Store, key: str, body: bytes) -> None:
    """Create the object of `open_write_probe`, also if the answer to an earlier try was lost."""
    with suppress(errors.ExistsError):
        create(store, key, body)
