"""Bucket or folder as a destination of checkpoints."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from millrace.checkpoints import find
from millrace.checkpoints.contents import Content, open_content
from millrace.checkpoints.cooldown.shared_upload import SharedUpload
from millrace.checkpoints.find import VerifyDepth
from millrace.checkpoints.probing import REQUEST_TIMEOUT, ProbeResult, probe
from millrace.keys.checkpoints import CheckpointKeys
from millrace.progress import Event, Progress, ignore_event
from millrace.schemas.checkpoint import Checkpoint
from millrace.storage import Store, list_objects


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

    def probe(
        self,
        job: str,
        *,
        size: int = 0,
        within: timedelta | None = None,
        timeout: timedelta = REQUEST_TIMEOUT,
    ) -> ProbeResult:
        """Try the requests of a save."""
        return probe(self.store, job, size=size, within=within, timeout=timeout)

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

    def publish(
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
        news = threading.Event()
        race = SharedUpload(
            store,
            content,
            keys.part,
            reads=store,
            uploads=uploads,
            check=VerifyDepth.DIGESTS,
            news=news.set,
            progress=progress,
        )
        stats = list_objects(store, keys.parts(checkpoint.step))
        parts = ((keys.parse_part(stat.key), stat.key) for stat in stats)
        race.note_files((part[1], key) for part, key in parts if part is not None)
        race.start(0, 1)
        try:
            news.wait()
        finally:
            race.stop()
        if race.error is not None:
            raise race.error
        key = keys.metadata(checkpoint.step)
        there = find.commit_checkpoint(store, content.make_metadata(checkpoint, job)).record
        find.check_content(store.make_url(key), there, content.root)
        progress(Event("checkpoint.saved", key, {"bytes": content.size}))
        return there
