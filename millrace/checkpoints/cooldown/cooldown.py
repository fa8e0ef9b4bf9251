"""Cooldown of a member: the end of an epoch with a checkpoint that all members agree on.

Members communicate through the bucket only. Each member votes with the digest of its content before
any upload. The content of more than half of the members is saved. A member with another content
fails. The seed of the epoch orders the members, and the first living ones upload (`shared_upload`).
A member that sees a complete and verified upload commits the checkpoint's metadata. Then it commits
the record that ends the epoch, which is created once.

A confined member writes and uploads below its own prefixes only. The owner of the job copies,
verifies and commits (`collector`).
"""

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

from millrace import errors
from millrace.checkpoints.contents import Content, normalise_json
from millrace.checkpoints.cooldown.checkpointers import (
    SelectionRule,
    count_checkpointers,
    order_checkpointers,
)
from millrace.checkpoints.cooldown.collector import compute_listing_limit
from millrace.checkpoints.cooldown.membership import (
    Membership,
    VoteTally,
    commit_epoch,
    find_epoch_end,
    obtain_roster,
    read_epoch,
)
from millrace.checkpoints.cooldown.shared_upload import SharedUpload
from millrace.checkpoints.find import commit_checkpoint, read_checkpoint
from millrace.checkpoints.progress_events import (
    CheckpointSaved,
    ContentAgreed,
    CooldownExtended,
    EpochEndedWithoutCheckpoint,
    UploadCompleted,
    UploadStarted,
)
from millrace.checkpoints.settings import CooldownSettings, OnTimeout
from millrace.digest import compute_sha256, dump_canonical_json
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.cooldowns import CooldownKeys
from millrace.progress import Progress, ignore_event
from millrace.records import commit_once
from millrace.schemas.checkpoint import (
    Checkpoint,
    CooldownOutcome,
    CooldownRecord,
    EpochRecord,
    LateVote,
    Roster,
    Vote,
)
from millrace.storage import Store, exists, list_objects

_POLL_INTERVAL = 0.5  # seconds between polls
_CENSUS_TICKS = 2  # polls between reads of the living members
_OWNER_TIMEOUT = (
    60.0  # seconds that a confined member waits for its owner after the time of the epoch
)
_REQUEST_TIMEOUT = timedelta(seconds=5)  # for retries of a request: the next poll repeats it


@dataclass(frozen=True, slots=True)
class EpochResult:
    """Result of the end of an epoch, for one member.

    Attributes:
        outcome: Outcome. `CooldownOutcome.COMMITTED` means that this member committed.
        reason: Sentence with the reason; empty if there is none.
        epoch: Record that ended the epoch; None if it has not ended. Then do not train on.
        sent: Bytes that this member uploaded.
        checked: Bytes of other members that this member verified.
        replaced: Number of other members' files that did not match their digests.
        seconds: Duration.
        rest: With `OnTimeout.BACKGROUND`, the future result of the upload that continues.
    """

    outcome: CooldownOutcome
    reason: str
    epoch: EpochRecord | None
    sent: int = 0
    checked: int = 0
    replaced: int = 0
    seconds: float = 0.0
    rest: "Future[EpochResult] | None" = field(default=None, repr=False)

    @property
    def is_durable(self) -> bool:
        """True if the epoch ended with a checkpoint of any member."""
        return self.epoch is not None and self.epoch.root is not None


def cool_down(
    membership: Membership | None,
    content: Content,
    *,
    epoch: int,
    run: str = "",
    position: Mapping[str, Any] | None = None,
    notes: Mapping[str, str] | None = None,
    seed: int | None = None,
    settings: CooldownSettings | None = None,
    cancel: threading.Event | None = None,
    progress: Progress = ignore_event,
) -> EpochResult:
    """End an epoch together with the other members, with a checkpoint or without.

    All members call this function, also those that upload nothing, since more than half of the
    living members must vote for the content. A member that was killed calls it again.

    Args:
        membership: Entered membership of the job; None if the member has no destination.
        content: Content to save: the same on all members, at the same step.
        epoch: Number of the epoch.
        run: Name of the run, the same on all members.
        position: Position in the data at which training continues, the same on all members.
        notes: Free text.
        seed: Seed of 64 bits for the order of the checkpointers, the same on all members. By
            default the first member draws one.
        settings: Settings of the end of the epoch.
        cancel: Event that stops this member's part.
        progress: Receives `ContentAgreed`, `UploadStarted`, `PartStored` for each sent file,
            `UploadCompleted`, `CheckpointSaved`, `CooldownExtended` and
            `EpochEndedWithoutCheckpoint`, from several threads.

    Raises:
        ConfigurationError: The position or the notes are not JSON.
        UnavailableError: The store does not answer at the beginning.
        DeniedError: The credentials may not write to the job.
    """
    if membership is None:
        reason = "This member has no destination, and saved no checkpoint: set one."
        return EpochResult(CooldownOutcome.NO_DESTINATION, reason, None)
    draft = Checkpoint(
        job=membership.job,
        step=content.parts[0].step,
        run=run,
        position=normalise_json(position, "position"),
        notes=normalise_json(notes, "notes"),
        saved=datetime.now(UTC),
        root=content.root,
        parts=content.parts,
        tensors=dict(content.tensors),
    )
    cancelled = cancel.is_set if cancel is not None else lambda: False
    try:
        roster = obtain_roster(membership, epoch, seed, cancelled=cancelled)
    except errors.StoppedError as error:
        return EpochResult(CooldownOutcome.CANCELLED, str(error), None)
    one = _MemberCooldown(
        membership, content, draft, roster, settings or CooldownSettings(), cancel, progress
    )
    return one.run()


def count_epochs_without_checkpoint(store: Store, job: str, epoch: int) -> int:
    """Count the epochs in a row before this one that ended without a checkpoint.

    Raises:
        UnavailableError: The store does not answer.
    """
    count = 0
    for before in range(epoch - 1, -1, -1):
        try:
            record = read_epoch(store, job, before)
        except errors.NotFoundError:
            break  # the job began after this epoch
        except errors.CorruptError:
            continue  # unknown: neither counts nor ends the row
        if record.root is not None:
            break
        with suppress(errors.NotFoundError, errors.CorruptError):
            read_checkpoint(store, job, record.step)
            break  # its checkpoint was committed later, in the background
        count += 1
    return count


class _MemberCooldown:
    """End of one epoch from the side of one member."""

    def __init__(
        self,
        membership: Membership,
        content: Content,
        draft: Checkpoint,
        roster: Roster,
        settings: CooldownSettings,
        cancel: threading.Event | None,
        progress: Progress,
    ) -> None:
        self._member, self._store = membership.member, membership.store
        self._hurried = membership.reads.with_retry_timeout(_REQUEST_TIMEOUT)
        self._confined = membership.confined
        self._membership, self._draft, self._roster = membership, draft, roster
        self._settings, self._progress = settings, progress
        self._cancel = cancel or threading.Event()
        self._keys = CheckpointKeys(membership.job)
        self._cooldown = CooldownKeys(membership.job, roster.epoch)
        rest = {"position": draft.position, "run": draft.run}
        self._claim = Vote(
            member=self._member,
            step=draft.step,
            root=draft.root,
            rest=compute_sha256(dump_canonical_json(rest)),
            size=content.size,
        )
        self._order = order_checkpointers(roster.members, roster.seed, settings.choice)
        self._number = count_checkpointers(len(roster.members), settings.choice)
        self._heard = VoteTally(self._hurried, self._cooldown)
        self._living = set(roster.members)
        self._claimed = self._agreed = False
        self._news = threading.Event()
        self._upload = SharedUpload(
            self._store,
            content,
            self._make_part_key,
            reads=membership.reads,
            uploads=settings.save.uploads,
            check=settings.check,
            news=self._news.set,
            progress=progress,
        )
        self._began = time.monotonic()
        self._due = self._began + settings.time.total_seconds()
        self._late = self._looks = 0
        self._behind = False
        self._voted_late = 0.0  # time of the vote to go on without a checkpoint
        self._epochs_without = 0
        self._epoch: EpochRecord | None = None

    def run(self) -> EpochResult:
        try:
            cooled = self._run_until_over()
        finally:
            if not self._behind:
                self._upload.stop()
        return self._commit_result(cooled if self._behind else self._add_counts(cooled))

    def _run_until_over(self) -> EpochResult:
        """Poll until there is a result."""
        timeout = self._store.spec.retry_timeout.total_seconds()
        heard = time.monotonic()
        while True:
            self._news.clear()
            try:
                cooled = self._check_abort() or self._poll()
                heard = time.monotonic()
            except errors.UnavailableError as error:
                gone = time.monotonic() - heard > timeout
                cooled = self._make_result(CooldownOutcome.FAILED, str(error)) if gone else None
            except errors.MillraceError as error:
                cooled = self._make_result(CooldownOutcome.FAILED, str(error))
            if cooled is not None:
                return cooled
            self._news.wait(_POLL_INTERVAL)

    def _poll(self) -> EpochResult | None:
        if (
            not self._behind
            and (epoch := find_epoch_end(self._hurried, self._keys.job, self._roster.epoch))
            is not None
        ):
            return self._conclude(epoch)
        if not self._looks % _CENSUS_TICKS:
            self._living = {*self._membership.census.find_holders(), self._member}
        self._looks += 1
        fault = self._check_agreement()
        if fault:
            return self._make_result(CooldownOutcome.FAILED, fault)
        if self._agreed:
            finished = self._advance_upload()
            if finished is not None:
                return finished
        if not self._behind and time.monotonic() > self._due:
            return self._handle_timeout()
        return None

    def _check_abort(self) -> EpochResult | None:
        """Return the result if this member was cancelled or its upload failed; otherwise None."""
        if self._cancel.is_set():
            return self._make_result(CooldownOutcome.CANCELLED, "The cooldown was cancelled.")
        if self._upload.error is not None:
            return self._make_result(CooldownOutcome.FAILED, str(self._upload.error))
        return None

    # -- agreement on the content

    def _check_agreement(self) -> str:
        """Read the votes; return a sentence if there is no majority for this member's content."""
        members = self._roster.members
        self._heard.read_new(
            members, results=bool(self._looks % _CENSUS_TICKS), late=self._voted_late > 0
        )
        if self._agreed:
            return ""
        if self._member in members and not self._claimed:
            said = commit_once(self._store, self._cooldown.vote(self._member), self._claim).record
            if said != self._claim:
                return (
                    f"{self._member} has voted for another content of this epoch before, so it did "
                    "not resume from its last state. Load the newest checkpoint."
                )
            self._claimed = True
            self._heard.claims[self._member] = said
        voters = self._heard.list_voters(members, self._living)
        favourite, count = self._heard.find_favourite()
        if favourite is not None and 2 * count > len(voters):
            if favourite.agreement_key != self._claim.agreement_key:
                return (
                    f"{count} of {len(voters)} members have another content than {self._member}, "
                    "whose content is not saved. Load the epoch's checkpoint."
                )
            self._agreed = True
            self._progress(ContentAgreed(member=self._member, votes=count, voters=len(voters)))
        elif voters <= self._heard.claims.keys():
            different = len({claim.agreement_key for claim in self._heard.claims.values()})
            return (
                f"The {len(voters)} members have {different} different contents, and none has "
                "more than half of them: nothing is saved. Load the newest checkpoint."
            )
        return ""

    # -- the upload

    def _make_part_key(self, step: int, digest: str) -> str:
        """Return the key to which this member uploads a file."""
        if self._confined:
            return self._cooldown.part(self._member, digest)
        return self._keys.part(step, digest)

    def _advance_upload(self) -> EpochResult | None:
        if self._is_complete():
            if not self._confined:
                return self._commit()
            if self._behind:
                return self._make_result(self._decide_outcome(""), "The epoch was over.")
        if not self._upload.has_begun:
            uploaders = self._select_uploaders()
            if self._member in uploaders:
                rank = uploaders.index(self._member)
                self._progress(
                    UploadStarted(member=self._member, rank=rank, checkpointers=len(uploaders))
                )
                if self._confined:
                    commit_once(self._store, self._cooldown.draft(self._member), self._draft)
                self._upload.start(rank, len(uploaders))
        return None

    def _is_complete(self) -> bool:
        """Decide whether all files are uploaded and verified, or the checkpoint is committed."""
        metadata = self._keys.metadata(self._draft.step)
        if self._confined:
            for name in {*self._select_uploaders(), self._member}:
                self._upload.note_files(self._iterate_uploads(name))
            return exists(self._hurried, metadata)
        stats = list(list_objects(self._hurried, self._keys.folder(self._draft.step)))
        parts = ((self._keys.parse_part(stat.key), stat.key) for stat in stats)
        self._upload.note_files((part[1], key) for part, key in parts if part is not None)
        return self._upload.is_complete or any(stat.key == metadata for stat in stats)

    def _iterate_uploads(self, member: str) -> Iterator[tuple[str, str]]:
        """Yield the digests and keys of the files that a member uploaded below its own prefix."""
        listed = list_objects(self._hurried, self._cooldown.parts(member))
        for stat in islice(listed, compute_listing_limit(len(self._draft.parts))):
            digest = self._cooldown.parse_part(member, stat.key)
            if digest is not None:
                yield digest, stat.key

    def _select_uploaders(self) -> list[str]:
        """Return the members that upload, as far as this member knows."""
        if self._settings.choice is SelectionRule.PSYCHE:
            return self._order[: self._number]
        apart = {
            name
            for name, claim in self._heard.claims.items()
            if claim.agreement_key != self._claim.agreement_key
        }
        able = [name for name in self._order if name in self._living - apart]
        # Members that failed come last. They remain candidates, since others may fail too.
        able.sort(key=self._has_failed)
        return able[: self._number]

    def _has_failed(self, name: str) -> bool:
        ended = self._heard.ended.get(name)
        return ended is not None and ended.outcome is CooldownOutcome.FAILED

    def _commit(self) -> EpochResult:
        """Commit the checkpoint and the epoch's end, unless another member has."""
        self._progress(UploadCompleted(member=self._member, size=self._draft.size))
        mine = self._commit_metadata()
        self._progress(
            CheckpointSaved(key=self._keys.metadata(self._draft.step), size=self._draft.size)
        )
        if self._behind:
            return self._make_result(
                self._decide_outcome(self._member if mine else ""), "The epoch was over."
            )
        record = EpochRecord(
            job=self._draft.job,
            epoch=self._roster.epoch,
            step=self._draft.step,
            root=self._draft.root,
            rest=self._claim.rest,
            member=self._member,
        )
        return self._conclude(commit_epoch(self._store, record))

    def _commit_metadata(self) -> bool:
        """Commit the checkpoint's metadata, and return whether this member was first.

        Raises:
            ConflictError: The step has a checkpoint with another content or position.
        """
        key = self._keys.metadata(self._draft.step)
        commit = commit_checkpoint(self._store, self._draft)
        there = commit.record
        if (there.root, there.position) != (self._draft.root, self._draft.position):
            raise errors.ConflictError(
                f"{self._store.make_url(key)} is a checkpoint of the same step with another "
                "content or position, saved before this epoch ended. Give this job another name, "
                "or resume from that checkpoint."
            )
        return commit.mine

    # -- the result

    def _conclude(self, epoch: EpochRecord) -> EpochResult:
        """Return the result of an ended epoch."""
        self._epoch = epoch
        if epoch.root is None:
            if self._settings.on_timeout is OnTimeout.BACKGROUND:
                return self._continue_in_background()
            return self._make_result(
                CooldownOutcome.FAILED,
                f"Epoch {epoch.epoch} has no checkpoint: {epoch.why}",
            )
        if (epoch.step, epoch.root, epoch.rest) != self._claim.agreement_key:
            return self._make_result(
                CooldownOutcome.FAILED,
                f"Epoch {epoch.epoch} ended with another content than {self._member} has, that of "
                f"{epoch.member}: load its checkpoint.",
            )
        outcome = self._decide_outcome(epoch.member)
        first = outcome is CooldownOutcome.COMMITTED
        return self._make_result(outcome, "" if first else f"{epoch.member} committed first.")

    def _decide_outcome(self, winner: str) -> CooldownOutcome:
        """Return the outcome for this member of a checkpoint that ``winner`` committed."""
        if winner == self._member:
            return CooldownOutcome.COMMITTED
        chosen = self._upload.has_begun or self._member in self._select_uploaders()
        return CooldownOutcome.LOST if chosen else CooldownOutcome.NOT_CHOSEN

    def _handle_timeout(self) -> EpochResult | None:
        settings, epoch = self._settings, self._roster.epoch
        waited = f"{time.monotonic() - self._began:.0f} s"
        if self._voted_late:
            return self._end_without_checkpoint(waited)
        self._late += 1
        may_wait = settings.on_timeout in {OnTimeout.EXTEND, OnTimeout.ELECT}
        if may_wait and self._late <= settings.extensions:
            self._due += settings.time.total_seconds()
            if settings.on_timeout is OnTimeout.ELECT:
                self._number += count_checkpointers(len(self._order), settings.choice)
            self._progress(
                CooldownExtended(
                    member=self._member, extensions=self._late, max_extensions=settings.extensions
                )
            )
            return None
        without = count_epochs_without_checkpoint(self._hurried, self._draft.job, epoch)
        if without >= settings.without:
            return self._make_result(
                CooldownOutcome.FAILED,
                f"There is no checkpoint after {waited}, and the {without} epochs before have none "
                "either: do not train on. Find out why no member can upload, and end the epoch "
                "again.",
            )
        if self._member in self._roster.members:
            vote = LateVote(member=self._member, why=f"no checkpoint after {waited}")
            commit_once(self._store, self._cooldown.late(self._member), vote)
            self._heard.late[self._member] = vote
        self._voted_late, self._epochs_without = time.monotonic(), without
        return self._end_without_checkpoint(waited)

    def _end_without_checkpoint(self, waited: str) -> EpochResult | None:
        """End the epoch without a checkpoint, if most members voted to; otherwise return None."""
        epoch, members = self._roster.epoch, self._roster.members
        whole = self._settings.time.total_seconds() * (self._settings.extensions + 1)
        again = time.monotonic() - self._voted_late > whole
        if self._confined:
            if time.monotonic() - self._voted_late < whole + _OWNER_TIMEOUT:
                return None
            return self._make_result(
                CooldownOutcome.FAILED,
                f"There is no checkpoint after {waited}, and the owner of {self._draft.job} has "
                f"not ended epoch {epoch}. Start the owner's campaign again.",
            )
        # Members without any vote get the same time once more.
        there = self._living & self._heard.claims.keys() if again else self._living
        alone = not (there & set(members)) - self._heard.ended.keys()
        if not alone and not self._heard.has_late_majority(members, there):
            return None
        record = EpochRecord(
            job=self._draft.job,
            epoch=epoch,
            step=self._draft.step,
            root=None,
            member=self._member,
            why=f"no checkpoint after {waited}",
        )
        found = commit_epoch(self._store, record)
        if found == record:
            self._progress(
                EpochEndedWithoutCheckpoint(
                    member=self._member,
                    epochs=self._epochs_without + 1,
                    max_epochs=self._settings.without,
                )
            )
        return self._conclude(found)

    def _continue_in_background(self) -> EpochResult:
        """Continue the upload in another thread, and return a result for the caller."""
        self._behind = True
        rest: Future[EpochResult] = Future()
        reason = f"Epoch {self._roster.epoch} ended without a checkpoint; the upload continues."
        cooled = replace(self._make_result(CooldownOutcome.FAILED, reason), rest=rest)

        def finish() -> None:
            try:
                ended = self._run_until_over()
            except BaseException as error:
                rest.set_exception(error)
                raise
            finally:
                self._upload.stop()
            rest.set_result(ended)

        threading.Thread(target=finish, name="cooldown", daemon=True).start()
        return cooled

    def _make_result(self, outcome: CooldownOutcome, reason: str) -> EpochResult:
        seconds = round(time.monotonic() - self._began, 3)
        return self._add_counts(EpochResult(outcome, reason, self._epoch, seconds=seconds))

    def _add_counts(self, cooled: EpochResult) -> EpochResult:
        """Return the result with the current counts of bytes and files."""
        race = self._upload
        return replace(cooled, sent=race.sent, checked=race.checked, replaced=race.replaced)

    def _commit_result(self, cooled: EpochResult) -> EpochResult:
        """Commit a record of the result for observers, and return the result."""
        record = CooldownRecord(
            member=self._member,
            outcome=cooled.outcome,
            reason=cooled.reason,
            sent=cooled.sent,
            checked=cooled.checked,
            replaced=cooled.replaced,
            seconds=cooled.seconds,
        )
        with suppress(errors.MillraceError):  # the result does not depend on the record
            store = self._store.with_retry_timeout(_REQUEST_TIMEOUT)
            commit_once(store, self._cooldown.result(self._member), record)
        return cooled
