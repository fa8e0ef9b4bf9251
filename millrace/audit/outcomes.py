"""Outcomes of requests that prove the rights of credentials."""

from enum import StrEnum

from millrace import errors

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
    """Return the outcome of a request from the error of a storage function."""
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
