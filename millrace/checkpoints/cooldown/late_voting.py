"""End of an epoch without a checkpoint, which most members must vote for."""

import time

from millrace import errors
from millrace.checkpoints.cooldown.epoch_records import (
    commit_epoch,
    count_epochs_without_checkpoint,
)
from millrace.checkpoints.cooldown.epoch_view import EpochView
from millrace.checkpoints.cooldown.membership import Membership
from millrace.checkpoints.progress_events import EpochEndedWithoutCheckpoint
from millrace.checkpoints.settings import CooldownSettings
from millrace.keys.cooldowns import CooldownKeys
from millrace.progress import Progress, ignore_event
from millrace.records import commit_once
from millrace.schemas.checkpoint import EpochRecord, LateVote
from millrace.storage import Store

_OWNER_TIMEOUT = 60.0  # seconds that a confined member waits longer for the job's owner


class LateVoting:
    """Votes to end an epoch without a checkpoint, from the side of one member.

    Args:
        membership: Membership of this member.
        reads: Store that the job is read from.
        view: State of the epoch's end.
        settings: Settings of the end of the epoch.
        progress: Receives `EpochEndedWithoutCheckpoint`.
    """

    def __init__(
        self,
        membership: Membership,
        reads: Store,
        view: EpochView,
        settings: CooldownSettings,
        *,
        progress: Progress = ignore_event,
    ) -> None:
        self._membership, self._reads, self._view = membership, reads, view
        self._settings, self._progress = settings, progress
        self._voted_at = 0.0
        self._epochs_before = 0

    @property
    def has_voted(self) -> bool:
        """True if this member has voted."""
        return self._voted_at > 0

    def vote(self, waited: str) -> None:
        """Vote to go on without a checkpoint. A member outside the roster only counts the votes.

        Args:
            waited: Duration of the wait for the checkpoint, as text.

        Raises:
            UnavailableError: The store does not answer.
            MillraceError: Too many epochs before have no checkpoint either.
        """
        roster, member = self._view.roster, self._membership.member
        before = count_epochs_without_checkpoint(self._reads, roster.job, roster.epoch)
        if before >= self._settings.without:
            raise errors.MillraceError(
                f"There is no checkpoint after {waited}, and the {before} epochs before have none "
                "either: do not train on. Find out why no member can upload, and end the epoch "
                "again."
            )
        if member in roster.members:
            vote = LateVote(member=member, reason=f"no checkpoint after {waited}")
            key = CooldownKeys(roster.job, roster.epoch).make_late_vote_key(member)
            commit_once(self._membership.store, key, vote)
            self._view.tally.late[member] = vote
        self._voted_at, self._epochs_before = time.monotonic(), before

    def try_end(self, waited: str, step: int) -> EpochRecord | None:
        """End the epoch without a checkpoint, if most members voted to; otherwise return None.

        A confined member waits for the record of its owner instead.

        Args:
            waited: Duration of the wait for the checkpoint, as text.
            step: Step of this member.

        Raises:
            MillraceError: The owner of the job has not ended the epoch in time.
        """
        roster, tally, living = self._view.roster, self._view.tally, self._view.living
        whole = self._settings.time.total_seconds() * (self._settings.extensions + 1)
        again = time.monotonic() - self._voted_at > whole
        if self._membership.confined:
            if time.monotonic() - self._voted_at < whole + _OWNER_TIMEOUT:
                return None
            raise errors.MillraceError(
                f"There is no checkpoint after {waited}, and the owner of {roster.job} has "
                f"not ended epoch {roster.epoch}. Start the owner's campaign again."
            )
        # Members without any vote get the same time once more.
        there = living & tally.votes.keys() if again else living
        alone = not (there & set(roster.members)) - tally.ended.keys()
        if not alone and not tally.has_late_majority(roster.members, there):
            return None
        record = EpochRecord(
            job=roster.job,
            epoch=roster.epoch,
            step=step,
            root=None,
            member=self._membership.member,
            reason=f"no checkpoint after {waited}",
        )
        found = commit_epoch(self._membership.store, record)
        if found == record:
            self._progress(
                EpochEndedWithoutCheckpoint(
                    member=self._membership.member,
                    epochs=self._epochs_before + 1,
                    max_epochs=self._settings.without,
                )
            )
        return found
