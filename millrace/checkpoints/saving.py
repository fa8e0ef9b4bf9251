"""Save checkpoints while training goes on: the trainer waits for the copy, and for nothing else.

A state is copied once, straight into the bytes of its files. Those are hashed and created under
their digests, so that equal bytes are uploaded once, whoever saves them; ``metadata.json`` comes
last. A saver that is killed leaves files that the next one takes over, and no checkpoint.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from millrace import errors
from millrace.checkpoints.contents import normalise_json
from millrace.checkpoints.find import check_content, commit_checkpoint, find_newest
from millrace.checkpoints.ranks import Ranks, commit_together, has_share, merge_shares
from millrace.checkpoints.settings import SaveSettings
from millrace.checkpoints.snapshot import Snapshot, SnapshotBuffers
from millrace.digest import compute_sha256
from millrace.keys.checkpoints import CheckpointKeys
from millrace.progress import Event, Progress, ignore_event
from millrace.schemas.checkpoint import Checkpoint, Part, RankShare
from millrace.storage import (
    Store,
    create,
    describe_difference,
    fetch_stored_sha256,
    list_objects,
    put,
)


class PendingSave:
    """A checkpoint on its way.

    Attributes:
        step: Which.
        held: How long the trainer was held: for the copy, and for the save before it to end.
    """

    def __init__(self, step: int, held: timedelta, future: "Future[Checkpoint]") -> None:
        self.step, self.held = step, held
        self._future = future
        self._asked = False

    def done(self) -> bool:
        """Tell whether the save has ended, with or without success."""
        return self._future.done()

    def result(self, timeout: timedelta | None = None) -> Checkpoint:
        """Wait for the checkpoint.

        Raises:
            MillraceError: It was not saved; what says so.
            TimeoutError: It is not over yet.
        """
        try:
            return self._future.result(timeout.total_seconds() if timeout else None)
        finally:
            self._asked = self._future.done()

    def wait(self) -> None:
        """Wait until it is over; raise what went wrong if nobody has heard it yet."""
        error = self._future.exception()
        if error is not None and not self._asked:
            self._asked = True
            raise error


class Saver:
    """Saves the checkpoints of a job. One at a time: a second one waits for the first's memory.

    Memory: one copy of the state, kept from one save to the next.

    Args:
        store: Where to.
        job: Whose checkpoints they are.
        settings: How.
        ranks: Where several ranks save each checkpoint together: which this is.
        progress: Told of each file: ``checkpoint.part`` with ``bytes`` and ``sent``, and at the
            end ``checkpoint.saved``; from other threads, one at a time.
    """

    def __init__(
        self,
        store: Store,
        job: str,
        settings: SaveSettings | None = None,
        *,
        ranks: Ranks | None = None,
        progress: Progress = ignore_event,
    ) -> None:
        self._store, self._keys, self._ranks = store, CheckpointKeys(job), ranks
        self._settings = settings or SaveSettings()
        self._progress, self._telling = progress, threading.Lock()
        self._memory = SnapshotBuffers()
        self._under_way: PendingSave | None = None
        self._known: dict[str, Part] | None = None
        self._proved: set[Part] = set()
        self._pool = ThreadPoolExecutor(self._settings.uploads, thread_name_prefix="part")
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        run: str = "",
        position: Mapping[str, Any] | None = None,
        notes: Mapping[str, str] | None = None,
        mine: Callable[[str], bool] | None = None,
        own: Mapping[str, Any] | None = None,
    ) -> PendingSave:
        """Copy a state, and save the copy while the caller goes on.

        Where several ranks save together, each calls it, with a state of the same form: of DTensors
        each saves its shard, and the first saves all else. No collective is waited for.

        Args:
            state: Nested dicts, lists and tuples of tensors, numpy arrays and plain values: the
                state dicts of the model, the optimizer, the scheduler, the loader, the generators.
            step: Of the training.
            run: Which run of the job this is.
            position: Where the data goes on, as JSON.
            notes: Free text.
            mine: Where each rank has other tensors whole, such as a pipeline's stages: which of
                them this one saves, by their paths. The others may be on the device ``meta``.
            own: What this rank alone has: the state of its loader, its generators.

        Raises:
            ConfigurationError: Something in the state cannot be saved, and its path is named; or
                the position is no JSON. Nothing was sent.
            MillraceError: The save before this one failed, and nobody has asked for its result.
        """
        began = time.monotonic()
        where, said = normalise_json(position, "position"), normalise_json(notes, "notes")
        if self._under_way is not None:
            self._under_way.wait()
        copied = self._memory.snapshot(
            state,
            self._settings.part_bytes,
            rank=self._ranks and self._ranks.rank,
            mine=mine,
            own=own,
        )
        held = timedelta(seconds=time.monotonic() - began)
        future = self._finisher.submit(self._finish, copied, step, run, where, said)
        self._under_way = PendingSave(step, held, future)
        return self._under_way

    def close(self) -> None:
        """Wait for what is under way, and let go of the memory.

        Raises:
            MillraceError: It failed, and nobody has asked for its result.
        """
        try:
            if self._under_way is not None:
                self._under_way.wait()
        finally:
            self._finisher.shutdown()
            self._pool.shutdown()
            self._memory.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        with suppress(errors.MillraceError):  # what was raised in the block says more
            self.close()

    # -- in the background

    def _finish(
        self,
        copied: Snapshot,
        step: int,
        run: str,
        position: dict[str, Any],
        notes: dict[str, str],
    ) -> Checkpoint:
        began = time.monotonic()
        there = dict(self._iterate_existing(step))
        known = self._find_reusable()

        def upload(body: memoryview) -> Part:
            return self._upload(step, body, there, known)

        futures = [self._pool.submit(upload, body) for body in copied.files]
        wait(futures)  # also if one fails: the next save writes where the others read
        parts = tuple(future.result() for future in futures)
        self._proved = set(parts)
        share = RankShare(
            job=self._keys.job,
            step=step,
            rank=self._ranks.rank if self._ranks else 0,
            world=self._ranks.world if self._ranks else 1,
            parts=parts,
            tensors=copied.tensors,
            run=run,
            position=position,
            notes=notes,
        )
        checkpoint = self._commit(share)
        if self._settings.refer:
            self._known = {part.sha256: part for part in checkpoint.parts}
        figures = {
            "bytes": sum(part.size for part in parts),
            "seconds": round(time.monotonic() - began, 3),
        }
        self._emit(Event("checkpoint.saved", self._keys.metadata(step), figures))
        return checkpoint

    def _commit(self, share: RankShare) -> Checkpoint:
        """Return the checkpoint, once its metadata is there.

        Raises:
            ConflictError: It is another one.
        """
        key = self._keys.metadata(share.step)
        if self._ranks is None:
            made = merge_shares([share])
            there = commit_checkpoint(self._store, made).record
            return check_content(self._store.make_url(key), there, made.root)
        there = commit_together(self._store, self._ranks, share, self._settings.ranks_within)
        # What the others have is not known here: it is this one if it is made of this share.
        root = there.root if has_share(there, share) else ""
        return check_content(self._store.make_url(key), there, root)

    def _iterate_existing(self, step: int) -> Iterator[tuple[str, int]]:
        """Yield the digests and sizes of files that an earlier save of this step has left there."""
        for stat in list_objects(self._store, self._keys.parts(step)):
            found = self._keys.parse_part(stat.key)
            if found is not None:
                yield found[1], stat.size

    def _find_reusable(self) -> dict[str, Part]:
        if not self._settings.refer:
            return {}
        if self._known is None:
            before = find_newest(self._store, self._keys.job)
            self._known = {part.sha256: part for part in before.parts} if before else {}
        return self._known

    def _upload(
        self, step: int, body: memoryview, there: dict[str, int], known: dict[str, Part]
    ) -> Part:
        digest = compute_sha256(body)
        sent = 0
        part = known.get(digest)
        if part is None or not self._is_intact(part):
            part = Part(step=step, sha256=digest, size=len(body))
            sent = self._ensure_uploaded(part, body, there.get(digest))
        self._emit(Event("checkpoint.part", digest, {"bytes": len(body), "sent": sent}))
        return part

    def _ensure_uploaded(self, part: Part, body: memoryview, size: int | None) -> int:
        """Create a file, or prove that what is there is this one; return the bytes sent.

        Args:
            part: The file.
            body: Its bytes.
            size: That of what was listed under its name; None if nothing was.
        """
        key = self._keys.part(part.step, part.sha256)
        if size is None:
            try:
                create(self._store, key, body, sha256=part.sha256)
            except errors.ExistsError:
                size = part.size  # by another saver, or by a try whose answer was lost
            else:
                return len(body)
        if size == part.size and self._is_intact(part):
            return 0
        put(self._store, key, body)  # only these bytes can stand there: a power cut left others
        return len(body)

    def _is_intact(self, part: Part) -> bool:
        """Tell whether a file is there with these bytes: proved once a saver.

        The store is asked for its digest; where it keeps none, the file is read.
        """
        if part in self._proved:
            return True
        key = self._keys.part(part.step, part.sha256)
        kept = fetch_stored_sha256(self._store, key) == part.sha256
        return not describe_difference(self._store, key, part.size, None if kept else part.sha256)

    def _emit(self, event: Event) -> None:
        with self._telling:
            self._progress(event)
