"""Interface of the destinations of checkpoints."""

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from millrace.checkpoints.contents import Content
from millrace.checkpoints.find import VerifyDepth, check_description
from millrace.checkpoints.progress_events import PartStored
from millrace.errors import CorruptError, DeniedError, ReadOnlyError
from millrace.keys.checkpoints import CheckpointKeys
from millrace.progress import Event, Progress, ignore_event
from millrace.schemas.checkpoint import Checkpoint
from millrace.storage import Store

SAMPLE_SIZE = 4 << 20
"""Size in bytes of the sample that `Destination.try_save` uploads."""


class Destination(Protocol):
    """Destination of checkpoints. A listing finds them, and each is committed once."""

    @property
    def url(self) -> str:
        """URL of the destination, without credentials."""
        ...

    @property
    def store(self) -> Store | None:
        """Store of the destination; None for the Hub."""
        ...

    def try_save(self, job: str, *, timeout: timedelta) -> float:
        """Make the requests of a save with a sample, and leave no object.

        Args:
            job: Name of the job.
            timeout: Limit on the time for retries of each request.

        Returns:
            Rate of the upload in bytes per second.

        Raises:
            ReadOnlyError: The credentials may list, but not write, overwrite or delete.
            DeniedError, NotFoundError, UnavailableError: A request fails.
            CorruptError: The destination returns other bytes than were written.
        """
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

    def write_copy(
        self,
        checkpoint: Checkpoint,
        content: Content,
        job: str,
        *,
        uploads: int = 4,
        progress: Progress = ignore_event,
    ) -> Checkpoint:
        """Upload a copy of a checkpoint to this destination, and commit it under the same step.

        Files that the destination has are not sent again. After a kill, another call continues. Of
        several callers one commits, and all return the committed checkpoint. Its position and its
        notes may differ from those of the given one.

        Args:
            checkpoint: Metadata of the checkpoint.
            content: Files of the checkpoint.
            job: Name of the job at this destination.
            uploads: Number of files that are uploaded at once. Each needs its size in memory.
            progress: Receives `PartStored` for each file, then `CheckpointSaved`.

        Raises:
            CorruptError: A file has other bytes than were saved. Nothing was committed.
            ConflictError: The destination has another checkpoint of this step.
            UnavailableError, DeniedError: The destination does not answer, or refuses.
        """
        ...


@contextmanager
def mark_read_only() -> Generator[None]:
    """Raise `ReadOnlyError` for refused credentials, after a listing has succeeded."""
    try:
        yield
    except DeniedError as error:
        raise ReadOnlyError(str(error)) from error


def check_sample(url: str, body: bytes, written: bytes) -> None:
    """Check that a destination returns the bytes that were written.

    Raises:
        CorruptError: The bytes differ.
    """
    if body != written:
        raise CorruptError(
            f"{url} does not have the bytes that were just written: the store is broken, or a "
            "proxy changes or caches them. Use another store, or no proxy."
        )


def copy_checkpoint(
    source: Destination,
    checkpoint: Checkpoint,
    destination: Destination,
    job: str,
    *,
    uploads: int = 4,
    progress: Progress = ignore_event,
) -> Checkpoint:
    """Copy a checkpoint to another destination, verified on both sides.

    Raises:
        ConflictError: The destination has another checkpoint of this step, or one with another
            position or other notes.
        CorruptError: A file has other bytes than were saved. Nothing was committed.
        UnavailableError, DeniedError: A destination does not answer, or refuses.
    """
    content = source.open_content(checkpoint)
    there = destination.write_copy(checkpoint, content, job, uploads=uploads, progress=progress)
    where = f"{destination.url}/{CheckpointKeys(job).make_metadata_key(checkpoint.step)}"
    return check_description(where, there, checkpoint)


@dataclass(frozen=True, slots=True)
class CopiedCheckpoint:
    """Checkpoint that was copied to a destination.

    Attributes:
        url: URL of the destination.
        checkpoint: Metadata that the destination has committed.
        sent_bytes: Bytes that this call sent; the destination had the others.
        seconds: Duration of the copy.
    """

    url: str
    checkpoint: Checkpoint
    sent_bytes: int
    seconds: float


def copy_and_measure(
    source: Destination,
    checkpoint: Checkpoint,
    destination: Destination,
    job: str,
    *,
    progress: Progress = ignore_event,
) -> CopiedCheckpoint:
    """Copy a checkpoint as `copy_checkpoint` does, and measure the copy."""
    began, sent = time.monotonic(), 0

    def count_bytes(event: Event) -> None:
        nonlocal sent
        if isinstance(event, PartStored):
            sent += event.sent
        progress(event)

    saved = copy_checkpoint(source, checkpoint, destination, job, progress=count_bytes)
    return CopiedCheckpoint(destination.url, saved, sent, time.monotonic() - began)
