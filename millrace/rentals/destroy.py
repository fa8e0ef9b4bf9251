"""Give machines back, and see that they are gone."""

from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timedelta

from millrace import errors
from millrace.keys import RentalKeys
from millrace.records import commit_once
from millrace.rentals.ledger import Attempt
from millrace.rentals.vast.api import Vast
from millrace.rentals.vast.instances import Instance
from millrace.schemas.rental import ReturnReason, ReturnRecord
from millrace.storage import Store

SETTLING = 180.0
"""Seconds after a create without an answer in which the listing may not yet show its machine."""
_GIVING_BACK = timedelta(minutes=15)  # that it is tried for


def write_off(
    store: Store,
    rental: str,
    attempt: Attempt,
    why: ReturnReason,
    said: str,
    cost: float,
    now: datetime,
) -> None:
    """Write down that nothing is left of an attempt. Whoever was first has said why."""
    returned = ReturnRecord(why=why, said=said[:1000], cost=cost, ended=now)
    commit_once(store, RentalKeys(rental).returned(attempt.number), returned)


def give_back(
    vast: Vast,
    machines: Mapping[str, int | None],
    gone: Callable[[str], None],
    *,
    settled: Collection[str] = (),
) -> None:
    """Destroy machines until a listing shows none of their numbers, nor of their labels.

    All are asked for once in each round: one that cannot be destroyed does not delay the others.

    Args:
        vast: The account.
        machines: What is to be gone: labels, each with its machine's number where it is known;
            then the label may be any name for it.
        gone: Told each label once nothing is left of it.
        settled: The labels whose create was sent `SETTLING` seconds ago or earlier. A machine with
            no known number counts as gone once a listing lacks its label; the others wait.

    Raises:
        UnavailableError: That could not be seen in 15 minutes: some may still be there.
        MillraceError: Of ``gone``, after all are gone.
    """
    clock = vast.clock
    begun = clock.elapsed()
    left, accepted, fault = dict(machines), set[str](), ""
    late: errors.MillraceError | None = None
    while left:
        for label, number in left.items():
            if number is not None and label not in accepted:
                said = _destroyed(vast, number)
                fault = said or fault
                accepted |= set() if said else {label}
        seen: dict[str, int] | None = None
        try:
            seen = {_label(one, left): one.id for one in vast.instances()}
        except errors.MillraceError as error:
            fault = errors.one_line(error)
        waited = clock.elapsed() - begun >= SETTLING
        for label in _unseen(vast, left, accepted, seen, left if waited else settled):
            del left[label]
            try:
                gone(label)
            except errors.MillraceError as error:
                late = error
        if left and clock.elapsed() - begun >= _GIVING_BACK.total_seconds():
            raise errors.UnavailableError(
                f"Whether {', '.join(sorted(left))} is given back is not known"
                f"{f' ({fault})' if fault else ''}: look at the provider's page of instances, and "
                "run `millrace reap`."
            )
        if left:
            clock.sleep(3.0)
    if late is not None:
        raise late


def _unseen(
    vast: Vast,
    left: Mapping[str, int | None],
    accepted: set[str],
    seen: Mapping[str, int] | None,
    settled: Collection[str],
) -> list[str]:
    """Return the labels of which nothing is left.

    Machines that are still there are destroyed once more.
    """
    if seen is None:
        return []
    for label in seen.keys() & left.keys():
        _destroyed(vast, seen[label])
    return [
        label
        for label, number in left.items()
        if label not in seen and label in (settled if number is None else accepted)
    ]


def _label(instance: Instance, left: Mapping[str, int | None]) -> str:
    """Return which of some machines one is: by its number, or by its label if that is not known.

    Of a machine whose number is known, another that bears its label is none of them.
    """
    by_number = next((one for one, number in left.items() if number == instance.id), "")
    return by_number or (instance.label if left.get(instance.label, 0) is None else "")


def _destroyed(vast: Vast, number: int) -> str:
    """Destroy a machine; how that failed, if it did."""
    try:
        vast.destroy(number)
    except errors.MillraceError as error:
        return errors.one_line(error)
    return ""
