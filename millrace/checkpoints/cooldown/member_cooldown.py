"""Steps of one member at the end of an epoch: agree, upload, commit, or go on without."""

from collections.abc import Callable
from datetime import timedelta

from millrace import errors
from millrace.checkpoints.contents import Content
from millrace.checkpoints.cooldown.agreement import Agreement
from millrace.checkpoints.cooldown.checkpoint_upload import CheckpointUpload
from millrace.checkpoints.cooldown.deadline import Deadline
from millrace.checkpoints.cooldown.destination_upload import DestinationUpload
from millrace.checkpoints.cooldown.epoch_records import commit_epoch
from millrace.checkpoints.cooldown.epoch_view import EpochView
from millrace.checkpoints.cooldown.late_voting import LateVoting
from millrace.checkpoints.cooldown.membership import Membership
from millrace.checkpoints.cooldown.result import EpochResult
from millrace.checkpoints.cooldown.uploaders import UploaderSelection
from millrace.checkpoints.find import compute_rest
from millrace.checkpoints.progress_events import CooldownExtended
from millrace.checkpoints.settings import CooldownSettings, OnTimeout
from millrace.keys.cooldowns import CooldownKeys
from millrace.progress import Progress, ignore_event
from millrace.schemas.checkpoint import Checkpoint, CooldownOutcome, EpochRecord, Roster, Vote
from millrace.storage import Store, delete_one

_BACKGROUND_REASON = "The epoch was over."
_LEAST_BACKGROUND_TIMEOUT = timedelta(minutes=5)


class MemberCooldown:
    """End of one epoch from the side of one member. Each poll does what is possible now.

    Args:
        membership: Entered membership of the job.
        reads: Store that the job is read from at each poll.
        content: Content to save.
        draft: Metadata of the checkpoint.
        roster: Roster of the epoch.
        settings: Settings of the end of the epoch.
        on_change: Function that other threads call when the upload is complete or has failed.
        progress: Receives the events of `cool_down`.

    Attributes:
        upload: Upload of the checkpoint.
        is_in_background: Whether the epoch has ended, and the upload continues.
    """

    def __init__(
        self,
        membership: Membership,
        reads: Store,
        content: Content,
        draft: Checkpoint,
        roster: Roster,
        settings: CooldownSettings,
        *,
        on_change: Callable[[], None],
        progress: Progress = ignore_event,
    ) -> None:
        vote = make_vote(membership.member, draft)
        self._membership, self._settings, self._progress = membership, settings, progress
        destination = membership.destination
        self._view = EpochView(reads, roster, membership.member, membership.census, destination)
        self._agreement = Agreement(membership.store, vote, self._view, progress=progress)
        self._uploaders = UploaderSelection(self._view, vote, settings.choice)
        self.upload: CheckpointUpload | DestinationUpload
        if destination is None:
            keys = CooldownKeys(roster.job, roster.epoch)
            self.upload = CheckpointUpload(
                membership, reads, content, draft, keys, settings, on_change=on_change,
                progress=progress,
            )  # fmt: skip
        else:
            self.upload = DestinationUpload(
                membership.member, destination, content, draft, settings, on_change=on_change,
                progress=progress,
            )  # fmt: skip
        self._deadline = Deadline(settings.time, settings.extensions)
        self._late = LateVoting(membership, reads, self._view, settings, progress=progress)
        self._epoch: EpochRecord | None = None
        self._background: Deadline | None = None
        self._seen: tuple[bool, int] | None = None
        self._has_begun = False
        self.is_in_background = False

    def poll(self) -> EpochResult | None:
        """Do what is possible now, and return the result of this member once it has one.

        Raises:
            UnavailableError: The store does not answer. Another call may succeed.
            MillraceError: This member has failed.
        """
        if not self.is_in_background and (epoch := self._view.find_end()) is not None:
            return self._conclude(epoch)
        if not self._has_begun:
            self._delete_earlier_records()
        self._view.read(late=self._late.has_voted)
        self._agreement.advance()
        if self._agreement.is_reached:
            finished = self._advance_upload()
            if finished is not None:
                return finished
        if self.is_in_background:
            self._require_progress()
        elif self._deadline.is_over:
            return self._handle_timeout()
        return None

    def make_result(self, outcome: CooldownOutcome, reason: str) -> EpochResult:
        """Return a result of this member, with the current counts."""
        seconds = round(self._deadline.elapsed, 3)
        return self.upload.add_counts(EpochResult(outcome, reason, self._epoch, seconds=seconds))

    def _delete_earlier_records(self) -> None:
        """Delete the result and the late vote of this member's earlier call for the same epoch.

        A member with a result does not work on the epoch, and the others end it without that
        member. So the deletion comes before this member's first read of the others' records. Each
        member deletes its own records only. A member that is killed before the deletion is dead
        for the others, and one that is killed after it is a dead member without a result. A member
        that lives and has not called again does not work on the epoch, so its result counts.
        """
        keys = CooldownKeys(self._view.roster.job, self._view.roster.epoch)
        store, member = self._membership.store, self._membership.member
        for key in (keys.make_result_key(member), keys.make_late_vote_key(member)):
            delete_one(store, key)
        self._has_begun = True

    def _require_progress(self) -> None:
        """Let the upload in the background fail if nothing has advanced for the whole time limit.

        Raises:
            MillraceError: It failed.
        """
        seen = (self._agreement.is_reached, self.upload.advances)
        settings, roster = self._settings, self._view.roster
        limit = max(settings.time * (settings.extensions + 1), _LEAST_BACKGROUND_TIMEOUT)
        if self._background is None or seen != self._seen:
            self._background, self._seen = Deadline(limit, 0), seen
        elif self._background.is_over:
            silent = {*roster.members} & self._view.living - self._view.tally.votes.keys()
            reason = (
                "no further file was stored"
                if self._agreement.is_reached
                else f"{', '.join(sorted(silent))} did not vote"
            )
            raise errors.MillraceError(
                f"Epoch {roster.epoch} has no checkpoint, and its upload in the background has "
                f"ended, since {reason} for {limit.total_seconds():g} s. Find out why, and end "
                "the next epoch."
            )

    def _advance_upload(self) -> EpochResult | None:
        uploaders = self._uploaders.select()
        if self.upload.find_files(uploaders) and not self._membership.confined:
            return self._commit()
        if self.upload.is_committed and not self._uploaders.are_working(uploaders):
            # The metadata does not prove the files, and no other member verifies them.
            uploaders = [self._membership.member]
        self.upload.start(uploaders)
        return None

    def _commit(self) -> EpochResult:
        """Commit the checkpoint and the epoch's end, unless another member has."""
        member, roster = self._membership.member, self._view.roster
        mine = self.upload.commit()
        if self.is_in_background:
            return self.make_result(
                self._decide_outcome(member if mine else ""), _BACKGROUND_REASON
            )
        there = self._membership.destination.url if self._membership.destination else ""
        record = self._agreement.vote.make_epoch_record(roster.job, roster.epoch, member, there)
        return self._conclude(commit_epoch(self._membership.store, record))

    def _handle_timeout(self) -> EpochResult | None:
        """Extend the time limit, or try to end the epoch without a checkpoint."""
        settings = self._settings
        waited = f"{self._deadline.elapsed:.0f} s"
        if not self._late.has_voted:
            may_wait = settings.on_timeout in {OnTimeout.EXTEND, OnTimeout.ELECT}
            if may_wait and self._deadline.extend():
                if settings.on_timeout is OnTimeout.ELECT:
                    self._uploaders.add_more()
                self._progress(
                    CooldownExtended(
                        member=self._membership.member,
                        extensions=self._deadline.times,
                        max_extensions=settings.extensions,
                    )
                )
                return None
            self._late.vote(waited)
        epoch = self._late.try_end(waited, self._agreement.vote.step)
        return None if epoch is None else self._conclude(epoch)

    def _conclude(self, epoch: EpochRecord) -> EpochResult:
        """Return the result of an ended epoch."""
        self._epoch = epoch
        if epoch.root is None:
            reason = f"Epoch {epoch.epoch} has no checkpoint: {epoch.reason}"
            # The owner of a confined member deletes its uploads after the epoch's end.
            may_continue = not self._membership.confined
            if may_continue and self._settings.on_timeout is OnTimeout.BACKGROUND:
                self.is_in_background = True
                reason = f"Epoch {epoch.epoch} ended without a checkpoint; the upload continues."
            return self.make_result(CooldownOutcome.FAILED, reason)
        if (epoch.step, epoch.root, epoch.rest) != self._agreement.vote.agreement_key:
            return self.make_result(
                CooldownOutcome.FAILED,
                f"Epoch {epoch.epoch} ended with another content than {self._membership.member} "
                f"has, that of {epoch.member}: load its checkpoint.",
            )
        outcome = self._decide_outcome(epoch.member)
        first = outcome is CooldownOutcome.COMMITTED
        return self.make_result(outcome, "" if first else f"{epoch.member} committed first.")

    def _decide_outcome(self, winner: str) -> CooldownOutcome:
        """Return the outcome for this member of a checkpoint that ``winner`` committed."""
        member = self._membership.member
        if winner == member:
            return CooldownOutcome.COMMITTED
        was_uploader = self.upload.has_begun or member in self._uploaders.select()
        return CooldownOutcome.LOST if was_uploader else CooldownOutcome.NOT_CHOSEN


def make_vote(member: str, draft: Checkpoint) -> Vote:
    """Return the vote of a member for the content, the position and the run of a checkpoint."""
    return Vote(
        member=member,
        step=draft.step,
        root=draft.root,
        rest=compute_rest(draft),
        size=draft.size,
    )
