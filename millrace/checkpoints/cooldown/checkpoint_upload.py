"""Upload and commit of an epoch's checkpoint, by one of its members.

The members share one prefix of files. A confined member uploads below its own prefix instead, and
the owner of the job commits (`collector`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from millrace import errors
from millrace.checkpoints.contents import Content
from millrace.checkpoints.cooldown.collector import compute_listing_limit
from millrace.checkpoints.cooldown.membership import Membership
from millrace.checkpoints.cooldown.result import EpochResult
from millrace.checkpoints.find import commit_checkpoint, is_replaceable, read_checkpoint
from millrace.checkpoints.progress_events import CheckpointSaved, UploadCompleted, UploadStarted
from millrace.checkpoints.restoring import restore_parts
from millrace.checkpoints.settings import CooldownSettings
from millrace.checkpoints.shared_upload import SharedUpload
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.cooldowns import CooldownKeys
from millrace.progress import Progress, ignore_event
from millrace.records import commit_once
from millrace.schemas.checkpoint import Checkpoint
from millrace.storage import Store, list_objects


class CheckpointUpload:
    """Upload of an epoch's checkpoint from the side of one member.

    Args:
        membership: Membership of this member.
        reads: Store that the job is read from at each poll.
        content: Files of the checkpoint.
        draft: Metadata of the checkpoint.
        keys: Keys of the epoch's end.
        settings: Settings of the end of the epoch.
        on_change: Function that other threads call when the upload is complete or has failed.
        progress: Receives `UploadStarted`, `PartStored` for each sent file, `UploadCompleted` and
            `CheckpointSaved`.
    """

    def __init__(
        self,
        membership: Membership,
        reads: Store,
        content: Content,
        draft: Checkpoint,
        keys: CooldownKeys,
        settings: CooldownSettings,
        *,
        on_change: Callable[[], None],
        progress: Progress = ignore_event,
    ) -> None:
        self._membership, self._reads, self._draft = membership, reads, draft
        self._keys, self._cooldown = CheckpointKeys(membership.job), keys
        self._progress = progress
        self._restore_parts = partial(
            restore_parts,
            membership.store,
            membership.job,
            verified=frozenset(content.parts),
            open_part=content.open_part,
            uploads=settings.save.uploads,
            check=settings.check,
        )
        self._is_committed = False
        self._files = SharedUpload(
            membership.store,
            content,
            self._make_part_key,
            keys=None if membership.confined else self._keys,
            reads=membership.reads,
            uploads=settings.save.uploads,
            check=settings.check,
            on_change=on_change,
            progress=progress,
        )

    @property
    def has_begun(self) -> bool:
        """True if this member has begun to upload."""
        return self._files.has_begun

    @property
    def is_committed(self) -> bool:
        """True if the last look found undamaged metadata. The files may be damaged or missing."""
        return self._is_committed

    @property
    def error(self) -> errors.MillraceError | None:
        """Error that stopped the upload; None without one."""
        return self._files.error

    @property
    def advances(self) -> int:
        """Number that grows with each file that is stored or verified by any member."""
        return self._files.advances

    def start(self, uploaders: Sequence[str]) -> None:
        """Begin to upload, if this member is an uploader and has not begun.

        Args:
            uploaders: Names of the members that upload.
        """
        member = self._membership.member
        if self._files.has_begun or member not in uploaders:
            return
        rank = uploaders.index(member)
        self._progress(
            UploadStarted(member=self._membership.member, rank=rank, checkpointers=len(uploaders))
        )
        if self._membership.confined:
            self._commit_draft()
        self._files.start(rank, len(uploaders))

    def find_files(self, uploaders: Sequence[str]) -> bool:
        """Find uploaded files, and return whether the checkpoint is complete.

        Returns:
            Whether all files are uploaded and verified. For a confined member, whether the
            checkpoint is committed.

        Raises:
            ConflictError: The step has a checkpoint with another content or position.
        """
        metadata = self._keys.make_metadata_key(self._draft.step)
        if self._membership.confined:
            for name in {*uploaders, self._membership.member}:
                self._files.note_files(self._iterate_own_files(name))
            return self._find_metadata() is not None
        stats = list(list_objects(self._reads, self._keys.make_folder_prefix(self._draft.step)))
        parts = ((self._keys.parse_part(stat.key), stat.key) for stat in stats)
        self._files.note_files((part[1], key) for part, key in parts if part is not None)
        if not any(stat.key == metadata for stat in stats):
            self._is_committed = False
        elif not self._is_committed and (there := self._find_metadata()) is not None:
            self._check_content(there)
            self._is_committed = True
        return self._files.is_complete

    def commit(self) -> bool:
        """Commit the checkpoint's metadata, and return whether this member was first.

        Call this method after `find_files` has returned true. Files that were deleted since, and
        damaged files of other steps to which committed metadata refers, are uploaded again.

        Raises:
            ConflictError: The step has a checkpoint with another content or position.
        """
        self._restore_parts(self._draft.parts)
        commit = commit_checkpoint(self._membership.store, self._draft)
        self._progress(UploadCompleted(member=self._membership.member, size=self._draft.size))
        self._check_content(commit.record)
        self._restore_parts(commit.record.parts)
        key = self._keys.make_metadata_key(self._draft.step)
        self._progress(CheckpointSaved(key=key, size=self._draft.size))
        return commit.mine

    def stop(self) -> None:
        """Stop all threads, and wait for their end."""
        self._files.stop()

    def add_counts(self, result: EpochResult) -> EpochResult:
        """Return a result with the current counts of bytes and files."""
        files = self._files
        return replace(result, sent=files.sent, checked=files.checked, replaced=files.replaced)

    def _find_metadata(self) -> Checkpoint | None:
        """Return the undamaged metadata of the step; None if `commit` creates it."""
        try:
            there = read_checkpoint(self._reads, self._draft.job, self._draft.step)
        except (errors.NotFoundError, errors.CorruptError):
            return None  # a member with all files moves damaged metadata away
        return None if is_replaceable(self._reads, there, self._draft.root) else there

    def _check_content(self, there: Checkpoint) -> None:
        """Check that committed metadata has this member's content and position.

        Raises:
            ConflictError: It has others.
        """
        if (there.root, there.position) != (self._draft.root, self._draft.position):
            url = self._membership.store.make_url(self._keys.make_metadata_key(self._draft.step))
            raise errors.ConflictError(
                f"{url} is a checkpoint of the same step with another "
                "content or position, saved before this epoch ended. Give this job another name, "
                "or resume from that checkpoint."
            )

    def _commit_draft(self) -> None:
        """Commit the metadata below this member's own prefix."""
        store, key = self._membership.store, self._cooldown.make_draft_key(self._membership.member)
        try:
            commit_once(store, key, self._draft)
        except errors.ExistsError:
            # This member, restarted, found its earlier draft, and the owner deleted that draft
            # before it was read: the epoch has ended.
            commit_once(store, key, self._draft)

    def _make_part_key(self, step: int, digest: str) -> str:
        """Return the key to which this member uploads a file."""
        if self._membership.confined:
            return self._cooldown.make_part_key(self._membership.member, digest)
        return self._keys.make_part_key(step, digest)

    def _iterate_own_files(self, member: str) -> Iterator[tuple[str, str]]:
        """Yield the digests and keys of the files that a member uploaded below its own prefix."""
        listed = list_objects(self._reads, self._cooldown.make_parts_prefix(member))
        for stat in islice(listed, compute_listing_limit(len(self._draft.parts))):
            digest = self._cooldown.parse_part(member, stat.key)
            if digest is not None:
                yield digest, stat.key
