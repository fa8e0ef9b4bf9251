"""Destroy machines, and wait until a listing shows none of them."""

import math
from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timedelta

from millrace import errors
from millrace.keys.rentals import RentalKeys
from millrace.records import commit_once
from millrace.rentals.ledger import Attempt
from millrace.rentals.vast.api import VastClient
from millrace.rentals.vast.instances import Instance
from millrace.schemas.rental import ReleaseReason, ReleaseRecord
from millrace.storage import Store

LISTING_LAG = 180.0
"""Seconds in which a listing may lack a machine, from its create request or its takeover on.

The owner measures them by its own clock.
"""
LEDGER_LISTING_LAG = timedelta(minutes=10)
"""Listing lag of an attempt of another process, from the time of its intent.

The intent was written before the request, by another clock. So this lag is longer than
`LISTING_LAG`.
"""
DESTROY_TIMEOUT = timedelta(minutes=15)
"""Time in which machines are destroyed again and again, after the first request for each."""


def record_release(
    store: Store,
    rental: str,
    attempt: Attempt,
    reason: ReleaseReason,
    message: str,
    cost: float,
    now: datetime,
) -> None:
    """Record the release of an attempt's machine. If a record exists, it stays unchanged."""
    released = ReleaseRecord(reason=reason, message=message[:1000], cost=cost, released_at=now)
    commit_once(store, RentalKeys(rental).make_released_key(attempt.number), released)


def _ignore_listed(_: str, __: Instance) -> None:
    pass


def destroy_machines(
    vast: VastClient,
    machines: Mapping[str, int | None],
    on_destroyed: Callable[[str], None],
    on_listed: Callable[[str, Instance], None] = _ignore_listed,
    *,
    past_listing_lag: Collection[str] = (),
    timeout: timedelta = DESTROY_TIMEOUT,
) -> None:
    """Destroy machines until a listing shows none of their numbers, nor of their labels.

    Each round sends one request for each machine, so that one failure does not delay the others.

    Args:
        vast: Client of the account.
        machines: Labels of the machines, each with the number of the machine; None if the number is
            unknown. With a number, the label may be any unique name.
        on_destroyed: Called with each label once its machine is gone.
        on_listed: Called with each label whose machine a listing shows, and its description.
        past_listing_lag: Labels whose create request is older than `LISTING_LAG`. A machine with
            one of these labels and without a number is gone once a listing lacks the label. With
            other labels, the function waits for the lag first.
        timeout: Time from the end of the first round, after which no other round begins. The first
            round takes as long as one request for each machine.

    Raises:
        UnavailableError: Some machines may still exist after the timeout.
        Exception: An error of ``on_destroyed``, after all machines are gone.
    """
    clock = vast.clock
    started = clock.monotonic()
    give_up_at = math.inf  # until the first round ends
    remaining, accepted, last_error = dict(machines), set[str](), ""
    callback_error: Exception | None = None
    while remaining:
        for label, number in remaining.items():
            if number is not None and label not in accepted:
                error_text = _try_destroy(vast, number)
                last_error = error_text or last_error
                accepted |= set() if error_text else {label}
        destroyed: list[str] = []
        try:
            listed = {_match_label(one, remaining): one for one in vast.list_instances()}
        except errors.MillraceError as error:
            last_error = errors.format_error(error)
        else:
            for label in listed.keys() & remaining.keys():
                on_listed(label, listed[label])
                _try_destroy(vast, listed[label].id)
            is_past_lag = clock.monotonic() - started >= LISTING_LAG
            destroyed = _find_destroyed(
                remaining, accepted, listed, remaining if is_past_lag else past_listing_lag
            )
        for label in destroyed:
            del remaining[label]
            try:
                on_destroyed(label)
            except Exception as error:  # noqa: BLE001 - raised at the end
                callback_error = error
        give_up_at = min(give_up_at, clock.monotonic() + timeout.total_seconds())
        if remaining and clock.monotonic() >= give_up_at:
            raise errors.UnavailableError(
                f"The release of {', '.join(sorted(remaining))} is not confirmed"
                f"{f' ({last_error})' if last_error else ''}: look at the provider's page of "
                "instances, and run `millrace machine reap`."
            )
        if remaining:
            clock.sleep(3.0)
    if callback_error is not None:
        raise callback_error


def _find_destroyed(
    remaining: Mapping[str, int | None],
    accepted: set[str],
    listed: Collection[str],
    past_listing_lag: Collection[str],
) -> list[str]:
    """Return the labels whose machines are gone, by a listing."""
    return [
        label
        for label, number in remaining.items()
        if label not in listed and label in (past_listing_lag if number is None else accepted)
    ]


def _match_label(instance: Instance, remaining: Mapping[str, int | None]) -> str:
    """Return the label of a listed machine: by its number, or by its label if no number is known.

    The result is empty for a machine that has the label of a machine with another number.
    """
    by_number = next((one for one, number in remaining.items() if number == instance.id), "")
    return by_number or (instance.label if remaining.get(instance.label, 0) is None else "")


def _try_destroy(vast: VastClient, number: int) -> str:
    """Send a destroy request; return the text of its error, empty if there is none."""
    try:
        vast.destroy_instance(number)
    except errors.MillraceError as error:
        return errors.format_error(error)
    return ""
