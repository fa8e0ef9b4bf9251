"""Upload and commit of an epoch's checkpoint to another destination than the members' store.

A destination such as a repository of the Hub takes a whole checkpoint from one member. So the first
uploader uploads all files, and the next one begins when it dies or the time limit is extended.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from millrace import errors
from millrace.checkpoints.contents import Content, PartContent
from millrace.checkpoints.cooldown.checkpointers import SelectionRule
from millrace.checkpoints.cooldown.result import EpochResult
from millrace.checkpoints.destinations.base import Destination
from millrace.checkpoints.progress_events import PartStored, UploadCompleted, UploadStarted
from millrace.checkpoints.settings import CooldownSettings
from millrace.progress import Event, Progress, ignore_event
from millrace.schemas.checkpoint import Checkpoint


class DestinationUpload:
    """Upload of an epoch's checkpoint to a destination, from the side of one member.

    Args:
        member: Name of this member.
        destination: Destination of the checkpoint.
        content: Files of the checkpoint.
        draft: Metadata of the checkpoint.
        settings: Settings of the end of the epoch.
        on_change: Function that the upload's thread calls when it has ended.
        progress: Receives `UploadStarted`, `PartStored` for each file, `CheckpointSaved` and
            `UploadCompleted`.

    Attributes:
        error: Error that stopped the upload; None without one.
    """

    def __init__(
        self,
        member: str,
        destination: Destination,
        content: Content,
        draft: Checkpoint,
        settings: CooldownSettings,
        *,
        on_change: Callable[[], None],
        progress: Progress = ignore_event,
    ) -> None:
        self._member, self._destination, self._draft = member, destination, draft
        self._content = replace(content, read=self._read_unless_stopped, mend=None)
        self._read = content.read
        self._settings, self._on_change, self._progress = settings, on_change, progress
        self._first_uploaders = 0
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._saved: Checkpoint | None = None
        self._sent = 0
        self._stored = 0
        self.error: errors.MillraceError | None = None

    @property
    def has_begun(self) -> bool:
        """True if this member has begun to upload."""
        return self._thread is not None

    @property
    def is_committed(self) -> bool:
        """True if this member knows that the destination has committed the checkpoint."""
        return self._saved is not None

    @property
    def advances(self) -> int:
        """Number of files that this member has stored."""
        return self._stored

    def start(self, uploaders: Sequence[str]) -> None:
        """Begin to upload, if it is this member's turn and it has not begun.

        Args:
            uploaders: Names of the members that may upload. The first one uploads, and as many
                further ones as were added to them.
        """
        self._first_uploaders = self._first_uploaders or len(uploaders)
        turn = uploaders[: 1 + max(0, len(uploaders) - self._first_uploaders)]
        if self._settings.choice is SelectionRule.PSYCHE:  # a dead uploader is not replaced
            turn = uploaders
        if self.has_begun or self._member not in turn:
            return
        rank = turn.index(self._member)
        self._progress(UploadStarted(member=self._member, rank=rank, checkpointers=len(turn)))
        self._thread = threading.Thread(target=self._upload, name="upload", daemon=True)
        self._thread.start()

    def find_files(self, uploaders: Sequence[str]) -> bool:
        """Return whether this member has uploaded the checkpoint, or found it there."""
        del uploaders
        return self._saved is not None

    def commit(self) -> bool:
        """Check the checkpoint that the destination has committed.

        Raises:
            ConflictError: It has another position.
        """
        there, draft = self._saved, self._draft
        assert there is not None
        if there.position != draft.position:
            raise errors.ConflictError(
                f"{self._destination.url} has a checkpoint of step {draft.step} of {draft.job} "
                "with another position, saved before this epoch ended. Give this job another "
                "name, or resume from that checkpoint."
            )
        self._progress(UploadCompleted(member=self._member, size=draft.size))
        return True

    def stop(self) -> None:
        """Stop the upload after the current files, and wait for its end."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def add_counts(self, result: EpochResult) -> EpochResult:
        """Return a result with the current count of bytes."""
        return replace(result, sent=self._sent)

    # -- in the upload's thread

    def _upload(self) -> None:
        try:
            self._saved = self._destination.write_copy(
                self._draft,
                self._content,
                self._draft.job,
                uploads=self._settings.save.uploads,
                progress=self._count_bytes,
            )
        except errors.StoppedError:
            return
        except errors.MillraceError as error:
            self.error = error
        except BaseException as error:
            self.error = errors.MillraceError(f"The upload failed: {errors.format_error(error)}")
            raise
        finally:
            self._on_change()

    def _count_bytes(self, event: Event) -> None:
        if isinstance(event, PartStored):
            self._sent += event.sent
            self._stored += 1
        self._progress(event)

    def _read_unless_stopped(self, number: int) -> PartContent:
        if self._stopped.is_set():
            raise errors.StoppedError("The upload was stopped.")
        return self._read(number)
