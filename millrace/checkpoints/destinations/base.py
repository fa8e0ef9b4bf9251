"""Interface of the destinations of checkpoints."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Protocol

from millrace.checkpoints.contents import Content
from millrace.checkpoints.find import VerifyDepth
from millrace.checkpoints.probing import REQUEST_TIMEOUT, ProbeResult
from millrace.progress import Progress, ignore_event
from millrace.schemas.checkpoint import Checkpoint


class Destination(Protocol):
    """Destination of checkpoints. A listing finds them, and each is committed once."""

    @property
    def url(self) -> str:
        """URL of the destination, without credentials."""
        ...

    def probe(
        self,
        job: str,
        *,
        size: int = 0,
        within: timedelta | None = None,
        timeout: timedelta = REQUEST_TIMEOUT,
    ) -> ProbeResult:
        """Try the requests of a save, and leave no object. See `millrace.checkpoints.probing`."""
        ...

    def iterate_checkpoints(self, job: str) -> Iterator[Checkpoint]:
        """Yield the complete checkpoints of a job, newest first. The files are not read."""
        ...

    def read_checkpoint(self, job: str, step: int) -> Checkpoint:
        """Return the checkpoint of a step.

        Raises:
            NotFoundError: There is no complete checkpoint of this step.
            CorruptError: The metadata is damaged, or belongs to another job or step.
        """
        ...

    def open_content(self, checkpoint: Checkpoint) -> Content:
        """Return the content of a checkpoint. Each file is verified when it is read."""
        ...

    def verify(
        self, checkpoint: Checkpoint, *, check: VerifyDepth = VerifyDepth.DIGESTS
    ) -> dict[str, str]:
        """Return a sentence about the damage of each damaged file, by the file's digest."""
        ...

    def publish(
        self,
        checkpoint: Checkpoint,
        content: Content,
        job: str,
        *,
        uploads: int = 4,
        progress: Progress = ignore_event,
    ) -> Checkpoint:
        """Upload a checkpoint to this destination, and commit it under the same step.

        Files that the destination has are not sent again. After a kill, another call continues. Of
        several callers one commits, and all return the committed checkpoint.

        Args:
            checkpoint: Metadata of the checkpoint.
            content: Files of the checkpoint.
            job: Name of the job at this destination.
            uploads: Number of files that are uploaded at once. Each needs its size in memory.
            progress: Receives ``checkpoint.part`` for each file, then ``checkpoint.saved``.

        Raises:
            CorruptError: A file has other bytes than were saved. Nothing was committed.
            ConflictError: The destination has another checkpoint of this step.
            UnavailableError, DeniedError: The destination does not answer, or refuses.
        """
        ...


def copy_checkpoint(
    source: Destination,
    checkpoint: Checkpoint,
    destination: Destination,
    job: str,
    *,
    uploads: int = 4,
    progress: Progress = ignore_event,
) -> Checkpoint:
    """Copy a checkpoint to another destination, verified on both sides. See `publish`."""
    content = source.open_content(checkpoint)
    return destination.publish(checkpoint, content, job, uploads=uploads, progress=progress)
