"""Registration of one worker, which is renewed while the worker trains."""

import logging

from millrace import errors
from millrace.gradients.settings import RunSettings
from millrace.gradients.sync.registrations import read_roster, register
from millrace.gradients.sync.worker_key import WorkerKey
from millrace.schemas.registration import RosterEntry
from millrace.storage import Store

log = logging.getLogger(__name__)


class WorkerRegistration:
    """Registration of one worker of a run.

    Args:
        settings: Settings of the run.
        uid: Name of the worker.
        store: Bucket that the worker writes to.
        chain_store: Bucket of the aggregator.
        key: Key of the worker; by default that in `DEFAULT_KEY_FILE`.
    """

    def __init__(
        self,
        settings: RunSettings,
        uid: str,
        store: Store,
        chain_store: Store,
        key: WorkerKey | None = None,
    ) -> None:
        self._settings, self._uid = settings, uid
        self._store, self._chain_store = store, chain_store
        self._key = key or WorkerKey.load()
        self._first: int | None = None  # window that the worker trained in first
        self._has_left = False
        self._warned = ""

    def join(self) -> None:
        """Register the worker: it is in the next window that is opened.

        Raises:
            ConfigurationError: The name is registered by another key, or is not admitted.
            DeniedError: The credentials may not list, read or write below the worker's prefix.
        """
        register(self._settings, self._uid, self._store, self._chain_store, self._key)

    def leave(self, last_window: int) -> None:
        """Register that the worker leaves after a window."""
        register(
            self._settings, self._uid, self._store, self._chain_store, self._key,
            leaves_after=last_window,
        )  # fmt: skip
        self._has_left = True

    def renew(self, window: int) -> None:
        """Register again if the aggregator has removed the worker, and log why it is not read.

        An error is logged, since the worker can train on.

        Args:
            window: Number of the window that the worker has trained in.
        """
        if self._has_left:
            return
        self._first = window if self._first is None else self._first
        try:
            roster = read_roster(self._chain_store, self._settings.chain_keys, window)
            if roster is None:
                return  # the aggregator has not opened the window
            entry = roster.get(self._uid)
            if entry is not None and entry.is_active:
                return
            newest = register(self._settings, self._uid, self._store, self._chain_store, self._key)
        except errors.MillraceError as error:
            self._warn(f"The registration of {self._uid} cannot be renewed: {error}")
            return
        if entry is not None and entry.number < newest.number:
            self._warn(
                f"{self._uid} is not in window {window} of {self._settings.name} any more: it was "
                f"{entry.status}. It has registered again, and warms up again."
            )
        elif window > self._first + 1:  # the first two may have been open before it registered
            self._warn(self._explain_absence(roster, window))

    def _explain_absence(self, roster: dict[str, RosterEntry], window: int) -> str:
        most = self._settings.registration.most if self._settings.registration else 0
        if sum(entry.is_active for entry in roster.values()) >= most:
            return (
                f"{self._settings.name} has its largest number of workers, {most}: {self._uid} "
                "waits until another one leaves."
            )
        return (
            f"Window {window} of {self._settings.name} was opened without {self._uid}, so its "
            "gradients are not read. See the log of the aggregator, and compare `registration` in "
            "its settings."
        )

    def _warn(self, text: str) -> None:
        if text != self._warned:
            self._warned = text
            log.warning("%s", text)
