"""Observation of an epoch's end: its members and their results."""

import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

from millrace import errors
from millrace.checkpoints.cooldown.collector import Collector
from millrace.checkpoints.cooldown.epoch_records import (
    CommittedCheckpoint,
    commit_epoch,
    find_epoch_end,
)
from millrace.checkpoints.cooldown.membership import make_census
from millrace.checkpoints.cooldown.rosters import read_roster
from millrace.checkpoints.cooldown.votes import VoteTally
from millrace.checkpoints.find import read_checkpoint
from millrace.checkpoints.progress_events import CooldownProgressed
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.cooldowns import CooldownKeys
from millrace.lease import StoreClock
from millrace.progress import Progress, ignore_event
from millrace.schemas.checkpoint import Checkpoint, CooldownRecord, EpochRecord, Roster
from millrace.storage import Store, list_objects

_POLL_INTERVAL = 1.0  # seconds
_RESULT_WAIT = 30.0  # seconds for the results of living members after a checkpoint is committed


@dataclass(frozen=True, slots=True)
class EpochStatus:
    """Status of an epoch's end.

    Attributes:
        epoch: Record that ended the epoch; None if it has not ended.
        checkpoint: Checkpoint that the epoch ended with; None if there is none.
        members: Members of the roster; empty without a roster.
        living: Members that live and have no result yet.
        ended: Results of the other members.
        seconds: Duration of the observation.
    """

    epoch: EpochRecord | None
    checkpoint: Checkpoint | None
    members: tuple[str, ...]
    living: frozenset[str]
    ended: dict[str, CooldownRecord] = field(default_factory=dict[str, CooldownRecord])
    seconds: float = 0.0


def watch_epoch_end(
    store: Store,
    job: str,
    epoch: int,
    *,
    timeout: timedelta,
    members: Collection[str] = (),
    clock: StoreClock | None = None,
    progress: Progress = ignore_event,
) -> EpochStatus:
    """Wait until an epoch has ended and its members have results.

    If the epoch has a checkpoint, living members have half a minute for their results: a member
    that never writes one holds up nobody for longer.

    If all members died between the commits of the checkpoint and of the epoch, this function
    commits the epoch, with the content that most members voted for.

    With ``members``, the caller is the owner of a job with confined members. The function then
    commits the roster, copies and verifies uploads, and commits the checkpoint and the epoch. After
    ``timeout`` it ends the epoch without a checkpoint.

    Args:
        store: Store that all members share.
        job: Name of the job.
        epoch: Number of the epoch.
        timeout: Longest wait.
        members: Names of the confined members. Those that live take part.
        clock: Clock of the store, which decides whether a member lives; by default that of this
            machine.
        progress: Receives `CooldownProgressed` after each poll.

    Raises:
        UnavailableError: The store does not answer.
    """
    began, ended = time.monotonic(), None
    watched = _EpochWatcher(store, job, epoch, clock or StoreClock.read_machine_clock(), members)
    while True:
        spent = time.monotonic() - began
        seen = watched.poll(spent, last=spent > timeout.total_seconds())
        there, of = watched.measure_progress()
        progress(CooldownProgressed(job=job, stored=there, size=of, members=len(seen.ended)))
        if ended is None and seen.epoch is not None and seen.epoch.root is not None:
            ended = spent
        over = seen.epoch is not None and not seen.living
        over = over or (ended is not None and spent - ended >= _RESULT_WAIT)
        if over or spent > timeout.total_seconds():
            watched.delete_uploads()
            return seen
        time.sleep(_POLL_INTERVAL)


class _EpochWatcher:
    def __init__(
        self, store: Store, job: str, epoch: int, clock: StoreClock, members: Collection[str]
    ) -> None:
        self._store, self._keys = store, CheckpointKeys(job)
        self._cooldown = CooldownKeys(job, epoch)
        self._census = make_census(store, job, clock)
        self._tally = VoteTally(store, self._cooldown)
        self._committed = CommittedCheckpoint(store, job)
        self._collector = Collector(store, job, epoch, members) if members else None
        self._roster: Roster | None = None

    def poll(self, seconds: float, *, last: bool = False) -> EpochStatus:
        """Read the state of the epoch once, and commit as much as is possible.

        Args:
            seconds: Seconds since the first poll.
            last: Whether this is the last poll.
        """
        held = frozenset(self._census.find_holders())
        members = self._list_members(held)
        self._tally.read_new(members, late=self._collector is not None)
        living = held & frozenset(members)
        job, number = self._keys.job, self._cooldown.epoch
        epoch = find_epoch_end(self._store, job, number)
        if self._collector is not None:
            epoch = self._collect(self._collector, living, epoch, last=last)
        else:
            working = living - self._tally.ended.keys()
            epoch = epoch or (None if working else self._end_for_dead_members(members))
        checkpoint = None
        if epoch is not None and epoch.root is not None:
            with suppress(errors.NotFoundError, errors.CorruptError):
                checkpoint = read_checkpoint(self._store, self._keys.job, epoch.step)
        going = living - self._tally.ended.keys()
        return EpochStatus(
            epoch, checkpoint, members, going, dict(self._tally.ended), round(seconds, 1)
        )

    def measure_progress(self) -> tuple[int, int]:
        """Return the bytes of the uploaded files, and those of all files."""
        vote, _ = self._tally.find_favourite()
        if vote is None:
            return 0, 0
        stats = list_objects(self._store, self._keys.make_parts_prefix(vote.step))
        return min(vote.size, sum(stat.size for stat in stats)), vote.size

    def delete_uploads(self) -> None:
        """Delete the uploads of confined members."""
        if self._collector is not None and self._roster is not None:
            self._collector.delete_uploads(self._roster)

    def _list_members(self, held: Collection[str]) -> tuple[str, ...]:
        if self._roster is None:
            if self._collector is not None:
                self._roster = self._collector.obtain_roster(held)
            else:
                with suppress(errors.NotFoundError, errors.CorruptError):
                    self._roster = read_roster(self._store, self._keys.job, self._cooldown.epoch)
        return self._roster.members if self._roster is not None else ()

    def _collect(
        self,
        collector: Collector,
        living: Collection[str],
        epoch: EpochRecord | None,
        *,
        last: bool,
    ) -> EpochRecord | None:
        if self._roster is not None:
            if epoch is None:
                epoch = collector.advance(self._roster, self._tally, living)
            elif epoch.root is None:  # members may go on in the background
                collector.finish_checkpoint(self._roster, self._tally, living)
        if epoch is None and last:
            epoch = collector.end_without_checkpoint(
                "it had not ended within the owner's time limit"
            )
        return epoch

    def _end_for_dead_members(self, members: tuple[str, ...]) -> EpochRecord | None:
        """End the epoch for its dead members, if its checkpoint is committed and intact."""
        favourite = self._tally.find_majority(members, members)
        job, number = self._keys.job, self._cooldown.epoch
        if favourite is None or not self._committed.is_intact(favourite.step, favourite.root):
            return None
        return commit_epoch(self._store, favourite.make_epoch_record(job, number))
