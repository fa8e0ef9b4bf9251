"""Interface of the destinations of checkpoints."""

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from millrace.checkpoints.contents import Content
from millrace.checkpoints.find import VerifyDepth
from millrace.errors import CorruptError, DeniedError, ReadOnlyError
from millrace.progress import Event, Progress, ignore_event
from millrace.schemas.checkpoint import Checkpoint
from millrace.storage import Store

SAMPLE_SIZE = 4 << 20
"""Bytes of the sample of `Destination.try_save`."""


class Destination(Protocol):
    """A place for checkpoints. What is there is found by listing, and committed once."""

    @property
    def url(self) -> str:
        """URL of the destination, without credentials."""
        ...

    @property
    def store(self) -> Store | None:
        """Store of the destination; None for the Hub."""
        ...

    def try_save(self, job: str, *, timeout: timedelta) -> float:
        """Do what a save does with a sample, and leave nothing behind.

        Args:
            job: Job of the checkpoints.
            timeout: Longest time that each request is tried.

        Returns:
            Bytes a second of the upload.

        Raises:
            ReadOnlyError: The credentials may list, and not write, overwrite or delete.
            DeniedError, NotFoundError, UnavailableError: A request fails.
            CorruptError: Other bytes are read than were written.
        """
        ...

    def iterate_checkpoints(self, job: str) -> Iterator[Checkpoint]:
        """Return the complete checkpoints of a job, newest first. Their files are not looked at."""
        ...

    def read_checkpoint(self, job: str, step: int) -> Checkpoint:
        """Return the checkpoint of a step.

        Raises:
            NotFoundError: There is none that is complete.
            CorruptError: What is there is not the checkpoint of this job and step.
        """
        ...

    def open_content(self, checkpoint: Checkpoint) -> Content:
        """Return the content of a checkpoint; its files are verified when they are read."""
        ...

    def verify(
        self, checkpoint: Checkpoint, *, check: VerifyDepth = VerifyDepth.DIGESTS
    ) -> dict[str, str]:
        """Return the damage of a checkpoint: a sentence by the digest of each file at fault."""
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
        """Bring a checkpoint here, and commit it once, under the same step.

        What is here already is not sent again. Killed at any time, the next call goes on; of
        several callers one commits, and all return what it has committed.

        Args:
            checkpoint: Which.
            content: Its files, wherever they are.
            job: Whose it is here.
            uploads: Files that are uploaded at once; each takes its size in memory.
            progress: Told of each file: ``checkpoint.part``, and at the end ``checkpoint.saved``.

        Raises:
            CorruptError: A file is not the bytes that were saved: nothing was committed.
            ConflictError: Another checkpoint of this step is here.
            UnavailableError, DeniedError: The place fails, or refuses.
        """
        ...


@contextmanager
def mark_read_only() -> Generator[None]:
    """Raise a `ReadOnlyError` where credentials that may list are refused."""
    try:
        yield
    except DeniedError as error:
        raise ReadOnlyError(str(error)) from error


def check_sample(url: str, body: bytes, written: bytes) -> None:
    """Check that a destination returns the bytes that were written.

    Raises:
        CorruptError: It returns other bytes.
    """
    if body != written:
        raise CorruptError(
            f"{url} is not what was written a moment ago: this store is broken, or "
            "something between here and there changes bytes or keeps old ones."
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
    """Copy a checkpoint from one place to another, verified on both sides. See `publish`."""
    content = source.open_content(checkpoint)
    return destination.publish(checkpoint, content, job, uploads=uploads, progress=progress)


@dataclass(frozen=True, slots=True)
class TransferredCheckpoint:
    """A checkpoint that was copied to a destination.

    Attributes:
        url: URL of the destination.
        checkpoint: The checkpoint as it was committed there.
        sent_bytes: Bytes that this call sent; the others were there before.
        seconds: Duration of the copy.
    """

    url: str
    checkpoint: Checkpoint
    sent_bytes: int
    seconds: float


def transfer_checkpoint(
    source: Destination,
    checkpoint: Checkpoint,
    destination: Destination,
    job: str,
    *,
    progress: Progress = ignore_event,
) -> TransferredCheckpoint:
    """Copy a checkpoint as `copy_checkpoint` does, and measure the copy."""
    began, sent = time.monotonic(), 0

    def count_bytes(event: Event) -> None:
        nonlocal sent
        if event.name == "checkpoint.part":
            sent += int(event.figures["sent"])
        progress(event)

    saved = copy_checkpoint(source, checkpoint, destination, job, progress=count_bytes)
    return TransferredCheckpoint(destination.url, saved, sent, time.monotonic() - began)
