"""Roster of a window: its registered workers, as a pure function of the window before.

The opening of a window has its roster. So all aggregators of a run have the same one, and anybody
can compute it again from the chain and the registrations.
"""

from collections.abc import Mapping

from millrace.gradients.settings import RegistrationSettings
from millrace.schemas.chain import ChainLink, ChainStart
from millrace.schemas.gradient import ABSENT_WINDOWS
from millrace.schemas.registration import Registration, RosterEntry, RosterStatus

MAX_GONE = 1000
"""Number of workers that a roster remembers after they left or were removed: the last ones.

The registration of one that was forgotten is read again. So the worker may warm up once more."""


def update_roster(
    before: Mapping[str, RosterEntry],
    link: ChainStart | ChainLink,
    registrations: Mapping[str, Registration],
    settings: RegistrationSettings,
    window: int,
    *,
    quorum: int,
    wanted: int | None = None,
) -> dict[str, RosterEntry]:
    """Return the roster of a window. A worker without a place in a full roster is left out.

    Args:
        before: Roster of the window before; empty before the first.
        link: Link of the window before.
        registrations: Newest registrations by the workers' names, with verified signatures.
        settings: Settings of the registration.
        window: Number of the window.
        quorum: Number of registered workers that the window needs. If fewer are established, those
            that warm up count, too.
        wanted: Number of merged gradients with which a window ends before its deadline, if it is
            not that of all workers that count.
    """
    is_readable = any(_has_valid_gradient(uid, link) for uid in before)
    roster = {
        uid: _note_window(entry, uid, link, settings, wanted, is_readable=is_readable)
        for uid, entry in before.items()
    }
    for uid, registration in sorted(registrations.items()):
        if not _is_admitted(uid, registration.key, settings):
            continue
        active = sum(entry.is_active for entry in roster.values())
        known = roster.get(uid)
        if known is not None and not _is_admitted(uid, known.key, settings):
            known = None  # the settings now admit the name with another key
        entry = _register(known, registration, settings, window, has_room=active < settings.most)
        if entry is not None:
            roster[uid] = entry
    roster = {uid: _end_membership(entry, uid, settings, window) for uid, entry in roster.items()}
    established = sum(entry.status is RosterStatus.ESTABLISHED for entry in roster.values())
    counting = {RosterStatus.ESTABLISHED}
    if established < quorum:
        counting.add(RosterStatus.WARMING_UP)
    roster = {uid: _note_end(entry, window) for uid, entry in roster.items()}
    gone = sorted((entry.ended or 0, uid) for uid, entry in roster.items() if not entry.is_active)
    forgotten = {uid for _, uid in gone[: max(0, len(gone) - MAX_GONE)]}
    return {
        uid: entry.model_copy(update={"counts": entry.status in counting})
        for uid, entry in sorted(roster.items())
        if uid not in forgotten
    }


def _note_window(
    entry: RosterEntry,
    uid: str,
    link: ChainStart | ChainLink,
    settings: RegistrationSettings,
    wanted: int | None,
    *,
    is_readable: bool,
) -> RosterEntry:
    """Return the entry of a worker after a window.

    A gradient that was not needed is not missed, nor one that the aggregator could not read, unless
    it read those of other registered workers. One that the window did not wait for counts as the
    tenth part of a missed one.
    """
    if not entry.is_active or not isinstance(link, ChainLink):
        return entry
    if _has_valid_gradient(uid, link):
        valid = entry.valid + 1
        status = RosterStatus.ESTABLISHED if valid >= settings.warm_up else entry.status
        return entry.model_copy(update={"valid": valid, "missed": 0, "absent": 0, "status": status})
    if uid not in link.excluded:
        return entry.model_copy(update={"absent": 0})
    reason = link.excluded[uid].reason
    if not reason.is_missed(is_awaited=True, is_readable=is_readable):
        return entry
    is_awaited = not entry.counts or wanted is None or len(link.taken) < wanted
    if not reason.is_missed(is_awaited=is_awaited, is_readable=is_readable):
        entry = entry.model_copy(update={"absent": entry.absent + 1})
        if entry.absent % ABSENT_WINDOWS:
            return entry
    missed = entry.missed + 1
    status = RosterStatus.REMOVED if missed >= settings.missed else entry.status
    return entry.model_copy(update={"valid": 0, "missed": missed, "status": status})


def _has_valid_gradient(uid: str, link: ChainStart | ChainLink) -> bool:
    """Decide whether a worker's gradient passed all checks in a window."""
    if not isinstance(link, ChainLink):
        return False
    excluded = link.excluded.get(uid)
    return uid in link.taken or (excluded is not None and excluded.reason.is_of_valid_gradient)


def _register(
    entry: RosterEntry | None,
    registration: Registration,
    settings: RegistrationSettings,
    window: int,
    *,
    has_room: bool,
) -> RosterEntry | None:
    """Return the entry of a worker after its newest registration; None if it has no place."""
    number, leaves_after = registration.number, registration.leaves_after
    if entry is not None and (registration.key != entry.key or number <= entry.number):
        return entry
    if entry is not None and entry.is_active:
        return entry.model_copy(update={"number": number, "leaves_after": leaves_after})
    if leaves_after is not None or not has_room:
        return entry
    status = RosterStatus.WARMING_UP if settings.warm_up else RosterStatus.ESTABLISHED
    return RosterEntry(key=registration.key, number=number, since=window, status=status)


def _end_membership(
    entry: RosterEntry, uid: str, settings: RegistrationSettings, window: int
) -> RosterEntry:
    """Return the entry of a worker that may have left, or may not be admitted any more."""
    status = entry.status
    if entry.leaves_after is not None and entry.leaves_after < window:
        status = RosterStatus.LEFT
    elif not _is_admitted(uid, entry.key, settings):
        status = RosterStatus.REMOVED
    return entry.model_copy(update={"status": status}) if entry.is_active else entry


def _note_end(entry: RosterEntry, window: int) -> RosterEntry:
    if entry.is_active or entry.ended is not None:
        return entry
    return entry.model_copy(update={"ended": window})


def _is_admitted(uid: str, key: str, settings: RegistrationSettings) -> bool:
    return settings.admitted is None or settings.admitted.get(uid) == key
