"""Cooldown of a member: the end of an epoch with a checkpoint that all members agree on.

Members communicate through the bucket only. Each member votes with the digest of its content before
any upload. The content of more than half of the members is saved. A member with another content
fails. The seed of the epoch orders the members, and the first living ones upload. A member that
sees a complete and verified upload commits the checkpoint's metadata. Then it commits the record
that ends the epoch, which is created once. `member_cooldown` has these steps.

A confined member writes and uploads below its own prefixes only. The owner of the job copies,
verifies and commits (`collector`).
"""

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from millrace import errors
from millrace.checkpoints.contents import Content, normalise_json
from millrace.checkpoints.cooldown.member_cooldown import MemberCooldown
from millrace.checkpoints.cooldown.membership import Membership
from millrace.checkpoints.cooldown.result import EpochResult
from millrace.checkpoints.cooldown.rosters import check_seed, obtain_roster
from millrace.checkpoints.settings import CooldownSettings
from millrace.keys.checkpoints import check_step
from millrace.keys.cooldowns import CooldownKeys
from millrace.progress import Progress, ignore_event, serialize_events
from millrace.records import commit_once
from millrace.schemas.checkpoint import Checkpoint, CooldownOutcome, CooldownRecord, Roster
from millrace.storage import delete_one

_POLL_INTERVAL = 0.5  # seconds between polls
_REQUEST_TIMEOUT = timedelta(seconds=5)  # for retries of a request: the next poll repeats it


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
            `EpochEndedWithoutCheckpoint`.

    Raises:
        ConfigurationError: The step is negative or has more than 18 digits, the seed does not have
            64 bits, or the position or the notes are not JSON or larger than readers accept.
        UnavailableError: The store does not answer at the beginning.
        DeniedError: The credentials may not write to the job.
    """
    if membership is None:
        reason = "This member has no destination, and saved no checkpoint: set one."
        return EpochResult(CooldownOutcome.NO_DESTINATION, reason, None)
    check_seed(seed)
    draft = Checkpoint(
        job=membership.job,
        step=check_step(content.parts[0].step),
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
    run_of_member = _CooldownRun(
        membership, content, draft, roster, settings or CooldownSettings(), cancel, progress
    )
    return run_of_member.run()


class _CooldownRun:
    """Polls of one member until it has a result, and the record of the result."""

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
        self._membership, self._epoch = membership, roster.epoch
        self._cancel = cancel or threading.Event()
        self._changed = threading.Event()
        self._cooldown = MemberCooldown(
            membership,
            membership.reads.with_retry_timeout(_REQUEST_TIMEOUT),
            content,
            draft,
            roster,
            settings,
            on_change=self._changed.set,
            progress=serialize_events(progress),
        )

    def run(self) -> EpochResult:
        """Poll until there is a result, commit its record, and return the result."""
        try:
            result = self._poll_until_result()
        finally:
            if not self._cooldown.is_in_background:
                self._cooldown.upload.stop()
        if self._cooldown.is_in_background:
            result = replace(result, background_result=self._continue_in_background())
        else:
            result = self._cooldown.upload.add_counts(result)
        self._commit_record(result)
        return result

    def _poll_until_result(self) -> EpochResult:
        timeout = self._membership.store.spec.retry_timeout.total_seconds()
        answered = time.monotonic()
        while True:
            self._changed.clear()
            try:
                result = self._check_abort() or self._cooldown.poll()
                answered = time.monotonic()
            except errors.UnavailableError as error:
                is_gone = time.monotonic() - answered > timeout
                result = self._make_failure(error) if is_gone else None
            except errors.MillraceError as error:
                result = self._make_failure(error)
            if result is not None:
                return result
            self._changed.wait(_POLL_INTERVAL)

    def _check_abort(self) -> EpochResult | None:
        """Return the result if this member was cancelled or its upload failed; otherwise None."""
        if self._cancel.is_set():
            return self._cooldown.make_result(
                CooldownOutcome.CANCELLED, "The cooldown was cancelled."
            )
        error = self._cooldown.upload.error
        return None if error is None else self._make_failure(error)

    def _make_failure(self, error: errors.MillraceError) -> EpochResult:
        return self._cooldown.make_result(CooldownOutcome.FAILED, str(error))

    def _continue_in_background(self) -> Future[EpochResult]:
        """Continue the upload in another thread, and return its future result."""
        background_result: Future[EpochResult] = Future()

        def finish() -> None:
            try:
                try:
                    result = self._poll_until_result()
                finally:
                    self._cooldown.upload.stop()
                self._commit_record(result, replace_earlier=True)
            except BaseException as error:
                background_result.set_exception(error)
                raise
            background_result.set_result(result)

        threading.Thread(target=finish, name="cooldown", daemon=True).start()
        return background_result

    def _commit_record(self, result: EpochResult, *, replace_earlier: bool = False) -> None:
        """Commit a record of the result for observers.

        A member that finds the epoch ended keeps the record of its earlier call.

        Args:
            result: Result of this member.
            replace_earlier: Whether to replace the record of the result before the background.
        """
        member = self._membership.member
        key = CooldownKeys(self._membership.job, self._epoch).make_result_key(member)
        record = CooldownRecord(
            member=member,
            outcome=result.outcome,
            reason=result.reason,
            sent=result.sent,
            checked=result.checked,
            replaced=result.replaced,
            seconds=result.seconds,
        )
        with suppress(errors.MillraceError):  # the result does not depend on the record
            store = self._membership.store.with_retry_timeout(_REQUEST_TIMEOUT)
            if replace_earlier:
                delete_one(store, key)
            commit_once(store, key, record)
