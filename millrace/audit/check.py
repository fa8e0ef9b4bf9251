"""Check that credentials have a right, before a run depends on the right."""

from millrace import errors
from millrace.audit.write_probe import create_write_probe, open_write_probe
from millrace.storage import Right, Store, create, head, list_objects


def check_access(store: Store, right: Right, scope: str = "") -> None:
    """Check that credentials have a right, and leave no object.

    For reading, one page is listed. For writing, an empty object is also created under a unique
    name, described, created again (which the store must refuse) and deleted.

    Args:
        store: Store, opened with the credentials.
        right: Right that the credentials must have.
        scope: Prefix for which the credentials need the right, such as a dataset's name.

    Raises:
        DeniedError: The credentials lack the right. The message names the refused request.
        ConfigurationError: The store does not support create-if-absent.
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
        with open_write_probe(store, scope) as probe:
            _check_write(store, scope, probe)


def _check_write(store: Store, scope: str, probe: str) -> None:
    try:
        create_write_probe(store, probe, b"")
    except errors.DeniedError as error:
        raise _make_denied_error(store, scope, "create objects", error.reason) from error
    try:
        head(store, probe)
    except errors.DeniedError as error:
        raise _make_denied_error(store, scope, "read objects", error.reason) from error
    _check_create_once(store, probe)


def _check_create_once(store: Store, key: str) -> None:
    """Check that the store refuses to create an object that exists."""
    try:
        create(store, key, b"")
    except errors.ExistsError:
        return
    raise errors.ConfigurationError(
        f"{store.url}: the store ignores create-if-absent (PUT with If-None-Match), which Millrace "
        "needs: two machines could replace each other's objects. Use another store."
    )


def _make_denied_error(
    store: Store, scope: str, action: str, reason: str = ""
) -> errors.DeniedError:
    where = store.make_url(scope) if scope else store.url
    reason = reason or "Give them this right, or use other credentials."
    return errors.DeniedError(
        f"{where}: the store does not let these credentials {action}. {reason}"
    )
