"""Find out what credentials may do before anything depends on it."""

import secrets
from enum import StrEnum

from millrace import errors
from millrace.keys import write_probe_key
from millrace.storage.list import list_objects
from millrace.storage.open import Store
from millrace.storage.read import head
from millrace.storage.scoped import Right
from millrace.storage.write import create, delete

_THROTTLED = {429, 503}


class Answer(StrEnum):
    """Answer of a store to a request. Only the first is a yes."""

    ALLOWED = "allowed"
    DENIED = "denied"  # the credentials are unknown there, or may not
    NOT_FOUND = "not found"  # no such bucket, or object
    THROTTLED = "throttled"  # it asks to come later
    UNREACHABLE = "unreachable"  # it does not answer, or is broken
    WRONG = "wrong"  # it does not do what it says
    UNKNOWN = "unknown"  # something else, which is no yes


def answer_of(error: errors.MillraceError) -> Answer:
    """Return the answer that an error of a verb stands for."""
    match error:
        case errors.DeniedError():
            return Answer.DENIED
        case errors.NotFoundError():
            return Answer.NOT_FOUND
        case errors.UnavailableError(status=status):
            return Answer.THROTTLED if status in _THROTTLED else Answer.UNREACHABLE
        case errors.CorruptError():
            return Answer.WRONG
        case _:
            return Answer.UNKNOWN


def check(store: Store, right: Right, scope: str = "") -> None:
    """Do once what a right is for, and leave nothing behind.

    Reading: one page of a listing. Writing, besides that: an empty object is created under a
    name of its own, described and removed.

    Args:
        store: Opened with the credentials in question.
        right: What they must allow.
        scope: The prefix that they must allow it under, such as a dataset's name.

    Raises:
        DeniedError: They do not; the message says what was refused.
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
        raise _refused(store, scope, "list objects", error.why) from error
    if right is Right.WRITE:
        _check_write(store, scope)


def _check_write(store: Store, scope: str) -> None:
    probe = write_probe_key(scope, secrets.token_hex(8))
    try:
        create(store, probe, b"")
    except errors.DeniedError as error:
        raise _refused(store, scope, "create objects", error.why) from error
    try:
        head(store, probe)
    except errors.DeniedError as error:
        raise _refused(store, scope, "read objects", error.why) from error
    finally:
        failures = delete(store, [probe])
    if failures:
        raise _refused(store, scope, f"delete objects ({store.url_of(probe)} stays behind)")


def _refused(store: Store, scope: str, what: str, why: str = "") -> errors.DeniedError:
    where = store.url_of(scope) if scope else store.url
    sentence = f"{where}: the store does not let these credentials {what}. {why}"
    return errors.DeniedError(sentence.rstrip())
