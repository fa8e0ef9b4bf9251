"""Bucket or folder as a destination of checkpoints."""

import os
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from millrace.audit.write_probe import create_write_probe, open_write_probe
from millrace.checkpoints import find
from millrace.checkpoints.contents import Content, open_content
from millrace.checkpoints.destinations.base import SAMPLE_SIZE, check_sample, mark_read_only
from millrace.checkpoints.find import VerifyDepth
from millrace.checkpoints.progress_events import CheckpointSaved
from millrace.checkpoints.restoring import restore_parts
from millrace.checkpoints.shared_upload import SharedUpload
from millrace.keys.checkpoints import CheckpointKeys
from millrace.progress import Progress, ignore_event
from millrace.schemas.checkpoint import Checkpoint
from millrace.storage import Store, list_objects, put, read


def try_writes(store: Store, scope: str) -> float:
    """Create, read, overwrite and delete a sample under a scope.

    Returns:
        Rate of the upload in bytes per second.

    Raises:
        ReadOnlyError: The credentials may list, but not write, overwrite or delete.
        DeniedError, NotFoundError, UnavailableError: A request fails.
        CorruptError: The store returns other bytes than were written.
    """
    next(list_objects(store, f"{scope}/"), None)
    body, other = os.urandom(SAMPLE_SIZE), secrets.token_bytes(16)
    with mark_read_only(), open_write_probe(store, scope) as key:
        url = store.make_url(key)
        began = time.monotonic()
        create_write_probe(store, key, body)
        rate = len(body) / max(time.monotonic() - began, 1e-6)
        check_sample(url, read(store, key, max_size=SAMPLE_SIZE), body)
        put(store, key, other)
        check_sample(url, read(store, key, max_size=SAMPLE_SIZE), other)
    return rate


@dataclass(frozen=True, slots=True)
class StoreDestination:
    """Destination in a store, with each file as an object under its digest.

    Attributes:
        store: Store of the checkpoints.
    """

    store: Store

    @property
    def url(self) -> str:
        """URL of the store."""
        return self.store.url

    def try_save(self, job: str, *, timeout: timedelta) -> float:
        """Create, read, overwrite and delete an object under the job's prefix."""
        return try_writes(self.store.with_retry_timeout(timeout), CheckpointKeys(job).job)

    def iterate_checkpoints(self, job: str) -> Iterator[Checkpoint]:
        """Yield the complete checkpoints of a job, newest first."""
        return find.iterate_checkpoints(self.store, job)

    def read_checkpoint(self, job: str, step: int) -> Checkpoint:
        """Return the checkpoint of a step."""
        return find.read_checkpoint(self.store, job, step)

    def open_content(self, checkpoint: Checkpoint) -> Content:
        """Return the content of a checkpoint."""
        return open_content(self.store, checkpoint)

    def verify(
        self, checkpoint: Checkpoint, *, check: VerifyDepth = VerifyDepth.DIGESTS
    ) -> dict[str, str]:
        """Return the damage of a checkpoint."""
        return find.verify(self.store, checkpoint, check=check)

    def write_copy(
        self,
        checkpoint: Checkpoint,
        content: Content,
        job: str,
        *,
        uploads: int = 4,
        progress: Progress = ignore_event,
    ) -> Checkpoint:
        """Copy the files that are missing, and commit the checkpoint."""
        store, keys = self.store, CheckpointKeys(job)
        ended = threading.Event()
        upload = SharedUpload(  # by a single member, which uploads all files
            store,
            content,
            keys.make_part_key,
            keys=keys,
            reads=store,
            uploads=uploads,
            check=VerifyDepth.DIGESTS,
            on_change=ended.set,
            progress=progress,
        )
        stats = list_objects(store, keys.make_parts_prefix(checkpoint.step))
        parts = ((keys.parse_part(stat.key), stat.key) for stat in stats)
        upload.note_files((part[1], key) for part, key in parts if part is not None)
        upload.start(0, 1)
        try:
            if not upload.is_complete:  # without files, it is complete at once
                ended.wait()
        finally:
            upload.stop()
        if upload.error is not None:
            raise upload.error
        key = keys.make_metadata_key(checkpoint.step)
        restore = partial(
            restore_parts,
            store,
            job,
            verified=frozenset(content.parts),
            open_part=content.open_part,
            uploads=uploads,
            progress=progress,
        )
        restore(content.parts)
        there = find.commit_checkpoint(store, content.make_metadata(checkpoint, job)).record
        find.check_content(store.make_url(key), there, content.root)
        restore(there.parts)
        progress(CheckpointSaved(key=key, size=content.size))
        return there
