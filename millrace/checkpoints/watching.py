"""Watch the end of an epoch from outside: who took part, and what it came to for each."""

import time
from dataclasses import dataclass, field
from datetime import timedelta

from millrace import errors
from millrace.checkpoints.find import checkpoint_of
from millrace.checkpoints.members import Statements, census_of, moved_on
from millrace.keys import CheckpointKeys, CooldownKeys
from millrace.lease import StoreClock
from millrace.models.checkpoint import Checkpoint, Ended, Epoch, Roster
from millrace.progress import Event, Progress, silent
from millrace.records import commit_once, fetch
from millrace.storage import Store, list_objects

_LOOK = 1.0  # seconds


@dataclass(frozen=True, slots=True)
class Seen:
    """The end of an epoch, as it is seen from outside.

    Attributes:
        epoch: What moved it on; None if nothing did.
        checkpoint: What it ended with, if it did with one.
        members: Who took part; empty before the first was there.
        living: Those of them that live, and are not through.
        ended: What it came to for those that are.
        seconds: How long it was watched.
    """

    epoch: Epoch | None
    checkpoint: Checkpoint | None
    members: tuple[str, ...]
    living: frozenset[str]
    ended: dict[str, Ended] = field(default_factory=dict[str, Ended])
    seconds: float = 0.0


def watch(
    store: Store,
    job: str,
    epoch: int,
    *,
    patience: timedelta,
    clock: StoreClock | None = None,
    progress: Progress = silent,
) -> Seen:
    """Wait until an epoch has ended, and its members are through.

    If all of them died after the checkpoint was committed and before the epoch was, this commits
    it: the content is the one that most of them claimed.

    Args:
        store: Where the members meet.
        job: Which job.
        epoch: Which epoch.
        patience: For how long.
        clock: The store's, by which the living are told from the dead; by default this machine's.
        progress: Told ``cooldown.progress`` with ``bytes`` that are there ``of`` all, and
            ``members`` that are through.

    Raises:
        UnavailableError: The store does not answer.
    """
    began = time.monotonic()
    watched = _Watched(store, job, epoch, clock or StoreClock.own())
    while True:
        seen = watched.look(time.monotonic() - began)
        there, of = watched.sizes()
        figures = {"bytes": there, "of": of, "members": len(seen.ended)}
        progress(Event("cooldown.progress", job, figures))
        over = seen.epoch is not None and not seen.living
        if over or time.monotonic() - began > patience.total_seconds():
            return seen
        time.sleep(_LOOK)


class _Watched:
    def __init__(self, store: Store, job: str, epoch: int, clock: StoreClock) -> None:
        self._store, self._keys = store, CheckpointKeys(job)
        self._cooldown = CooldownKeys(job, epoch)
        self._census = census_of(store, job, clock)
        self._heard = Statements(store, self._cooldown)

    def look(self, seconds: float) -> Seen:
        members = self._members()
        self._heard.hear(members)
        living = frozenset(self._census.held()) & frozenset(members)
        epoch = moved_on(self._store, self._keys.job, self._cooldown.epoch)
        epoch = epoch or (None if living else self._finished(members))
        checkpoint = None
        if epoch is not None and epoch.root is not None:
            checkpoint = checkpoint_of(self._store, self._keys.job, epoch.step)
        going = living - self._heard.ended.keys()
        return Seen(epoch, checkpoint, members, going, dict(self._heard.ended), round(seconds, 1))

    def sizes(self) -> tuple[int, int]:
        """Bytes of the files that are there, and of all."""
        claim, _ = self._heard.favourite()
        if claim is None:
            return 0, 0
        stats = list_objects(self._store, self._keys.parts(claim.step))
        return min(claim.size, sum(stat.size for stat in stats)), claim.size

    def _members(self) -> tuple[str, ...]:
        try:
            return fetch(self._store, self._cooldown.roster, Roster).members
        except errors.NotFoundError:
            return ()

    def _finished(self, members: tuple[str, ...]) -> Epoch | None:
        """End the epoch for its dead members, if they have committed the checkpoint."""
        favourite, count = self._heard.favourite()
        if favourite is None or 2 * count <= len(members):
            return None
        step, root, rest = favourite.said
        try:
            if checkpoint_of(self._store, self._keys.job, step).root != root:
                return None
        except errors.NotFoundError:
            return None
        number = self._cooldown.epoch
        record = Epoch(job=self._keys.job, epoch=number, step=step, root=root, rest=rest)
        return commit_once(self._store, self._keys.epoch(number), record).record
