"""Registrations in the workers' bucket: a worker writes its own, and the aggregator reads all."""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from millrace import errors
from millrace.gradients.merging.links import find_newest_window, read_link
from millrace.gradients.progress_events import RosterChanged, WorkersAwaited
from millrace.gradients.settings import RegistrationSettings, RunSettings
from millrace.gradients.sync.roster import update_roster
from millrace.gradients.sync.worker_key import WorkerKey, is_signed
from millrace.keys.gradients import ChainKeys, GradientKeys
from millrace.keys.names import is_valid_name
from millrace.progress import Progress
from millrace.records import commit_once, fetch
from millrace.schemas.chain import ChainLink, ChainStart
from millrace.schemas.registration import (
    LARGEST_NUMBER,
    Registration,
    RosterEntry,
    RosterStatus,
)
from millrace.schemas.window import WindowOpening
from millrace.storage import Store, list_folders, list_objects

log = logging.getLogger(__name__)

_CONCURRENCY = 16  # workers whose registrations are read at once
_MOST_LISTED = 1000  # registrations of a worker since the last one that was read


class Registrar:
    """Roster of each window of a run, from the registrations of its workers.

    Args:
        settings: Settings of the run. Without settings of a registration, rosters are empty.
        chain_store: Bucket of the aggregator, which has the rosters.
        gradients_store: Bucket that the workers share.
        fixed: Names of the workers that need no registration, and that nobody else may have.
        progress: Receives `WorkersAwaited` and `RosterChanged`.
    """

    def __init__(
        self,
        settings: RunSettings,
        chain_store: Store,
        gradients_store: Store,
        fixed: Collection[str],
        progress: Progress,
    ) -> None:
        self._settings = settings
        self._chain_store, self._gradients_store = chain_store, gradients_store
        self._fixed, self._progress = frozenset(fixed), progress
        self._warned = set[str]()

    def await_roster(self, window: int, link: ChainStart | ChainLink) -> dict[str, RosterEntry]:
        """Return the roster of a window. A window that is open already keeps its roster.

        While there are fewer workers than the quorum, wait for more, at most for the length of a
        window.

        Args:
            window: Number of the window.
            link: Link of the window before.
        """
        settings = self._settings
        if settings.registration is None:
            return {}
        keys = settings.chain_keys
        opened = read_roster(self._chain_store, keys, window)
        if opened is not None:
            return opened
        before = read_roster(self._chain_store, keys, window - 1) or {}
        fixed = len(self._fixed)
        quorum = max(settings.gather.quorum, 1)
        waits_until = time.monotonic() + settings.window_length.total_seconds()
        is_reported = False
        while True:
            found = read_registrations(
                self._gradients_store,
                settings.gradient_keys,
                before,
                settings.registration,
                exclude=self._fixed,
                warn=self._warn_once,
            )
            roster = update_roster(
                before, link, found, settings.registration, window,
                quorum=quorum - fixed, wanted=settings.gather.wanted,
            )  # fmt: skip
            self._explain_ignored(found, roster, settings.registration)
            active = fixed + sum(entry.is_active for entry in roster.values())
            if active >= quorum or time.monotonic() >= waits_until:
                self._report_changes(window, before, roster)
                return roster
            if not is_reported:
                self._progress(
                    WorkersAwaited(run=settings.name, window=window, found=active, quorum=quorum)
                )
                is_reported = True
            time.sleep(settings.gather.poll_interval.total_seconds())

    def _explain_ignored(
        self,
        found: Mapping[str, Registration],
        roster: Mapping[str, RosterEntry],
        settings: RegistrationSettings,
    ) -> None:
        """Log why registrations have changed nothing."""
        for uid, registration in found.items():
            entry = roster.get(uid)
            if entry is not None and entry.number >= registration.number:
                continue
            if settings.admitted is not None and settings.admitted.get(uid) != registration.key:
                reason = f"`admitted` has another key for it than {registration.key}"
            elif entry is not None and entry.key != registration.key:
                reason = "the name belongs to another key"
            elif registration.leaves_after is not None:
                continue
            else:
                reason = f"the run has its largest number of workers, {settings.most}"
            self._warn_once(
                f"The registration {registration.number} of {uid} is ignored, since {reason}."
            )

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text)

    def _report_changes(
        self, window: int, before: Mapping[str, RosterEntry], roster: Mapping[str, RosterEntry]
    ) -> None:
        changed: dict[RosterStatus, list[str]] = {status: [] for status in RosterStatus}
        joined = list[str]()
        for uid, entry in roster.items():
            if entry.since == window:
                joined.append(uid)
            elif uid not in before or before[uid].status is not entry.status:
                changed[entry.status].append(uid)
        if joined or any(changed.values()):
            self._progress(
                RosterChanged(
                    run=self._settings.name,
                    window=window,
                    active=sum(entry.is_active for entry in roster.values()),
                    joined=tuple(joined),
                    counting=tuple(changed[RosterStatus.ESTABLISHED]),
                    left=tuple(changed[RosterStatus.LEFT]),
                    removed=tuple(changed[RosterStatus.REMOVED]),
                )
            )


def read_registrations(
    store: Store,
    keys: GradientKeys,
    known: Mapping[str, RosterEntry],
    settings: RegistrationSettings,
    *,
    exclude: Collection[str] = (),
    warn: Callable[[str], None] = log.warning,
) -> dict[str, Registration]:
    """Return the newest registrations of workers, without those that were read before.

    A registration that cannot be read, or that the worker has not signed, harms only its worker.

    Args:
        store: Bucket that the workers share.
        keys: Keys of the run's gradients.
        known: Roster of the window before.
        settings: Settings of the registration. If they name the admitted workers, only these are
            looked for.
        exclude: Names that no registered worker may have.
        warn: Called with a sentence about what cannot be read.
    """
    names = settings.admitted
    try:
        found = sorted(list_folders(store, f"{keys.run}/") if names is None else names)
    except errors.UnavailableError as error:
        warn(f"No worker can join or leave in this window: {error}")
        return {}
    uids = [
        uid for uid in found if uid not in exclude and is_valid_name(keys.make_worker_prefix, uid)
    ]

    def read_newest(uid: str) -> Registration | None:
        entry = known.get(uid)
        try:
            newest = find_registration(store, keys, uid, after=entry.number if entry else 0)
            if newest is None or _is_consistent(newest, keys, uid):
                return newest
            warn(f"The registration {newest.number} of {uid} is not signed by it.")
        except errors.MillraceError as error:
            warn(f"The registration of {uid} cannot be read: {error}")
        except Exception as error:  # noqa: BLE001 - bytes that cause an error harm only their worker
            warn(f"The registration of {uid} cannot be read ({type(error).__name__}).")
        return None

    with ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="registrations") as pool:
        newest = dict(zip(uids, pool.map(read_newest, uids), strict=True))
    return {uid: registration for uid, registration in newest.items() if registration is not None}


def find_registration(
    store: Store, keys: GradientKeys, uid: str, *, after: int = 0
) -> Registration | None:
    """Return the newest registration of a worker with a number above a given one, if any.

    Raises:
        CorruptError: The object is no registration, or that of another number.
    """
    begin = keys.make_registration_key(uid, after) if after else ""
    stats = list_objects(store, keys.make_registration_prefix(uid), after=begin, exact=True)
    parsed = (keys.parse_registration(stat.key) for stat in islice(stats, _MOST_LISTED))
    numbers = [number for found in parsed if found is not None and (number := found[1]) > after]
    if not numbers:
        return None
    key = keys.make_registration_key(uid, max(numbers))
    registration = fetch(store, key, Registration)
    if registration.number != max(numbers):
        raise errors.CorruptError(
            f"{store.make_url(key)} has the number {registration.number}: write it again."
        )
    return registration


def _is_consistent(registration: Registration, keys: GradientKeys, uid: str) -> bool:
    """Decide whether a registration is of a worker and a run, and signed by its key."""
    said = registration.run, registration.version, registration.uid
    return said == (keys.run, keys.version, uid) and is_signed(registration)


def read_newest_roster(store: Store, keys: ChainKeys) -> tuple[int, dict[str, RosterEntry]]:
    """Return the number and the roster of the newest window that was opened.

    The number is 0, and the roster is empty, before the first window.

    Args:
        store: Bucket of the aggregator.
        keys: Keys of the run's chain.

    Raises:
        NotFoundError: The run has not begun.
    """
    merged = find_newest_window(store, keys)
    if merged < 0:
        read_link(store, keys, 0)
    for window in (merged + 1, merged):
        if (roster := read_roster(store, keys, window)) is not None:
            return window, roster
    return 0, {}


def read_roster(store: Store, keys: ChainKeys, window: int) -> dict[str, RosterEntry] | None:
    """Return the roster that a window was opened with; None if it was not opened."""
    try:
        return fetch(store, keys.make_opening_key(window), WindowOpening).roster
    except errors.NotFoundError:
        return None


def register(
    settings: RunSettings,
    uid: str,
    store: Store,
    chain_store: Store,
    key: WorkerKey | None = None,
    *,
    leaves_after: int | None = None,
) -> Registration:
    """Register a worker, unless its newest registration already says so.

    Args:
        settings: Settings of the run.
        uid: Name of the worker.
        store: Bucket that the worker writes to, and in which it can list and read its prefix.
        chain_store: Bucket of the aggregator.
        key: Key of the worker; by default that in `DEFAULT_KEY_FILE`.
        leaves_after: Last window of the worker; None to join.

    Returns:
        Newest registration of the worker.

    Raises:
        ConfigurationError: The name is registered by another key, or the settings do not admit it
            with this key.
        DeniedError: The credentials may not list, read or write below the worker's prefix.
    """
    keys, key = settings.gradient_keys, key or WorkerKey.load()
    is_admitted = _check_admitted(settings, uid, key)
    entry = read_newest_roster(chain_store, settings.chain_keys)[1].get(uid)
    newest = find_registration(store, keys, uid)
    owner = entry or newest  # the roster knows who was first
    if owner is not None and owner.key != key.public and not is_admitted:
        raise errors.ConfigurationError(
            f"The name {uid} of {keys.run} is registered by another key: join with the file of "
            "that key, or with another name."
        )
    number = max((one.number for one in (entry, newest) if one is not None), default=0)
    is_gone = entry is not None and entry.number == number and not entry.is_active
    if (
        newest is not None
        and (newest.number, newest.leaves_after) == (number, leaves_after)
        and newest.key == key.public
        and not is_gone
    ):
        return newest
    if number >= LARGEST_NUMBER:
        raise errors.ConfigurationError(
            f"The registrations of {uid} in {keys.run} have the largest number: join with another "
            "name."
        )
    wanted = Registration(
        run=keys.run,
        version=keys.version,
        uid=uid,
        number=number + 1,
        leaves_after=leaves_after,
        key=key.public,
    )
    commit = commit_once(store, keys.make_registration_key(uid, number + 1), key.sign(wanted))
    if commit.record.key != key.public or commit.record.leaves_after != leaves_after:
        raise errors.ConflictError(
            f"Another process has registered {uid} of {keys.run} meanwhile: run each worker once."
        )
    return commit.record


def _check_admitted(settings: RunSettings, uid: str, key: WorkerKey) -> bool:
    """Decide whether the settings give a name to a key, whoever has registered it before.

    Raises:
        ConfigurationError: The settings admit only others.
    """
    admitted = settings.registration.admitted if settings.registration else None
    if admitted is None:
        return False
    if uid not in admitted:
        raise errors.ConfigurationError(
            f"The settings of {settings.name} do not admit the worker {uid}: add its key to "
            f"`admitted`, {uid}: {key.public}."
        )
    if admitted[uid] != key.public:
        raise errors.ConfigurationError(
            f"The settings of {settings.name} admit {uid} with the key {admitted[uid]}, and this "
            f"one is {key.public}: join with the file of that key, or correct `admitted`."
        )
    return True
