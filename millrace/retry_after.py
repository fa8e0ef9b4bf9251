"""Read the pause that a server asks its clients to make."""

import time
from datetime import UTC
from email.utils import parsedate_to_datetime

_LONGEST = 3600.0  # seconds: a longer pause would stop a store for the life of the process


def parse_retry_after(retry_after: str) -> float:
    """Return the seconds of a ``Retry-After`` header: a number or a date (RFC 9110).

    A pause of more than an hour counts as one of an hour.
    """
    try:
        return min(_LONGEST, max(0.0, float(retry_after)))
    except ValueError:
        pass
    try:
        date = parsedate_to_datetime(retry_after)
        if date.tzinfo is None:  # the form of `asctime`, which names no zone, is in UTC
            date = date.replace(tzinfo=UTC)
        return min(_LONGEST, max(0.0, date.timestamp() - time.time()))
    except (OverflowError, TypeError, ValueError):
        return 0.0
