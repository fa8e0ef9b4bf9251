"""Check the rights of credentials before anything depends on them."""

import secrets
from enum import StrEnum

from millrace import errors
from millrace.keys.probes import make_write_probe_key
from millrace.storage.list import list_objects
from millrace.storage.open import Store
from millrace.storage.read import head
from millrace.storage.scoped import Right
from millrace.storage.write import create, delete

_THROTTLED = {429, 503}


class RequestOutcome(StrEnum):
    """Outcome of a request to a store."""

    ALLOWED = "allowed"
    DENIED = "denied"  # the credentials are unknown, or have too few rights
    NOT_FOUND = "not found"  # no such bucket, or object
    THROTTLED = "throttled"  # the store asks clients to wait
    UNREACHABLE = "unreachable"  # the store does not answer, or is broken
    WRONG = "wrong"  # the store returned other bytes than were written
    UNKNOWN = "unknown"  # any other error


def classify_error(error: errors.MillraceError) -> RequestOutcome:
    """Return the outcome that an error of a storage function means."""
    match error:
        case errors.DeniedError():
            return RequestOutcome.DENIED
        case errors.NotFoundError():
            return RequestOutcome.NOT_FOUND
        case errors.UnavailableError(status=status):
            return RequestOutcome.THROTTLED if status in _THROTTLED else RequestOutcome.UNREACHABLE
        case errors.CorruptError():
            return RequestOutcome.WRONG
        case _:
            return RequestOutcome.UNKNOWN


def check_access(store: Store, right: Right, scope: str = "") -> None:
    """Check that credentials have a right, and leave no object.

    For reading, one page is listed. For writing, an empty object is also created under a unique
    name, described and deleted.

    Args:
        store: Store, opened with the credentials.
        right: Right that the credentials must have.
        scope: Prefix for which the credentials need the right, such as a dataset's name.

    Raises:
        DeniedError: The credentials lack the right. The message names the refused request.
        NotFoundError: There is no such bucket.
        UnavailableError: The store does not answer.
    """
    prefix = f"{scope}/" if scope else ""
    try:
        next(list_objects(store, prefix), None)
    except errors.NotFoundError:
        raise errors.NotFoundError(
            f"{store.url}: there is no such bucket. Create it, or correct the URL."
        ) from None
    except errors.DeniedError as error:
        raise _make_denied_error(store, scope, "list objects", error.reason) from error
    if right is Right.WRITE:
        _check_write(store, scope)


def _check_write(store: Store, scope: str) -> None:
    probe = make_write_probe_key(scope, secrets.token_hex(8))
    try:
        create(store, probe, b"")
    except errors.DeniedError as error:
        raise _make_denied_error(store, scope, "create objects", error.reason) from error
    try:
        head(store, probe)
    except errors.DeniedError as error:
        raise _make_denied_error(store, scope, "read objects", error.reason) from error
    finally:
        failures = delete(store, [probe])
    if failures:
        raise _make_denied_error(
            store, scope, f"delete objects ({store.make_url(probe)} stays behind)"
        )


def _make_denied_error(
    store: Store, scope: str, action: str, reason: str = ""
) -> errors.DeniedError:
    where = store.make_url(scope) if scope else store.url
    sentence = f"{where}: the store does not let these credentials {action}. {reason}"
    return errors.DeniedError(sentence.rstrip())
