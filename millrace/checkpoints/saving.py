"""Saving of checkpoints during training. The trainer waits only for a copy of its state.

The state is copied once, into the bytes of its files. With enough cores, the upload begins while
later files are copied. Each file is created under its digest, so equal bytes are uploaded once.
A save in place copies each file only for its upload, and its caller leaves the state as it is.
``metadata.json`` is written last. After a kill, the uploaded files remain without metadata, and the
next save of the step uses them.
"""

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Self

from millrace import errors
from millrace.checkpoints.block_digests import put_block_list
from millrace.checkpoints.contents import PartContent, normalise_json
from millrace.checkpoints.find import (
    check_content,
    check_description,
    commit_checkpoint,
    find_newest,
)
from millrace.checkpoints.progress_events import CheckpointSaved, PartStored
from millrace.checkpoints.ranks import Ranks, commit_together, has_share, merge_shares
from millrace.checkpoints.restoring import restore_parts
from millrace.checkpoints.retention import BackgroundRetention
from millrace.checkpoints.settings import RetentionSettings, SaveSettings
from millrace.checkpoints.snapshot import SnapshotBuffers, StateLayout, StateShards
from millrace.digest import combine_blocks, hash_blocks
from millrace.keys.checkpoints import CheckpointKeys, check_step
from millrace.progress import Progress, ignore_event, serialize_events
from millrace.schemas.checkpoint import Checkpoint, Part, RankShare
from millrace.storage import (
    Store,
    create,
    describe_difference,
    list_objects,
    matches_stored_checksum,
    put,
)
from millrace.threads import count_processors

_log = logging.getLogger(__name__)
_CORES_PER_EARLY_UPLOAD = 8

OpenFile = Callable[[], AbstractContextManager[memoryview]]
"""Function that returns a context with the bytes of a file."""


class PendingSave:
    """Checkpoint that is being saved. An error that no call has raised is logged at the end.

    Attributes:
        step: Step of the checkpoint.
        held: Seconds that the trainer waited, for the copy and for the end of an earlier save.
    """

    def __init__(
        self,
        step: int,
        held: timedelta,
        future: "Future[Checkpoint]",
        reads: "Sequence[Future[Part]]" = (),
    ) -> None:
        self.step, self.held = step, held
        self._future, self._reads = future, tuple(reads)
        failures: list[str] = []  # without the error, whose traceback refers to this save
        self._log_failures = weakref.finalize(self, _log_failures, step, failures)
        future.add_done_callback(partial(_note_failure, failures))

    def done(self) -> bool:
        """Decide whether the save has ended, with or without success."""
        return self._future.done()

    def result(self, timeout: timedelta | None = None) -> Checkpoint:
        """Wait for the checkpoint, and return its metadata.

        Args:
            timeout: Longest wait in seconds; by default without a limit.

        Raises:
            MillraceError: The save failed.
            TimeoutError: The save has not ended yet.
        """
        try:
            return self._future.result(timeout.total_seconds() if timeout else None)
        finally:
            if self._future.done():
                self._log_failures.detach()

    def wait_for_state(self) -> None:
        """Wait until the save no longer reads the state, whether it succeeds or not."""
        wait(self._reads)

    def wait(self) -> None:
        """Wait until the save has ended, and raise its error unless `result` has raised it."""
        error = self._future.exception()
        if self._log_failures.detach() and error is not None:
            raise error


def _note_failure(failures: list[str], future: "Future[Checkpoint]") -> None:
    """Append the error of a save, if the save failed."""
    error = future.exception()
    if error is not None:
        failures.append(errors.format_error(error))


def _log_failures(step: int, failures: Sequence[str]) -> None:
    """Log the errors of a save."""
    for failure in failures:
        _log.error("The checkpoint of step %d was not saved: %s", step, failure)


class Saver:
    """Saver of a job's checkpoints. A second save waits until the first has ended.

    Memory: one copy of the state, or a few files for a save in place. Later saves reuse it.

    Args:
        store: Store to save to.
        job: Name of the job.
        settings: Settings of the files and their upload.
        ranks: Rank of this process, if several ranks save each checkpoint together.
        retention: Rules by which other threads remove the job's old checkpoints after each save, as
            `apply_retention` does. Of several ranks, the first does. Failures are logged, and fail
            no save. By default, nothing is removed.
        progress: Receives `PartStored` for each file, then `CheckpointSaved`. Calls come from other
            threads, one at a time.
    """

    def __init__(
        self,
        store: Store,
        job: str,
        settings: SaveSettings | None = None,
        *,
        ranks: Ranks | None = None,
        retention: RetentionSettings | None = None,
        progress: Progress = ignore_event,
    ) -> None:
        self._store, self._keys, self._ranks = store, CheckpointKeys(job), ranks
        self._settings = settings or SaveSettings()
        is_first = ranks is None or ranks.rank == 0
        self._retention = (
            BackgroundRetention(store, job, retention) if retention and is_first else None
        )
        self._progress = serialize_events(progress)
        self._memory = SnapshotBuffers()
        self._under_way: PendingSave | None = None
        self._saves = 0
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
        in_place: bool = False,
    ) -> PendingSave:
        """Copy a state, and save the copy in other threads.

        If several ranks save together, each calls this method with a state of the same structure.
        Each rank saves its shards of DTensors. The first rank saves everything else. There is no
        collective. All ranks make as many calls, with or without success: only what they save in
        the same call becomes one checkpoint.

        Args:
            state: Nested dicts, lists and tuples of tensors, numpy arrays and plain values, such as
                the state dicts of the model, the optimizer, the scheduler and the loader.
            step: Step of the training.
            run: Name of the run.
            position: Position in the data at which training continues, as JSON of at most 4 MiB.
            notes: Free text of at most 4 MiB.
            mine: Function that selects by path the whole tensors that this rank saves, such as
                those of its pipeline stage. Other tensors may be on the device ``meta``.
            own: State of this rank alone, such as that of its loader and its generators.
            in_place: Whether each file is copied only for its upload, so that the memory is that of
                the files that are uploaded at once. Do not change the state before
                `PendingSave.wait_for_state` returns.

        Raises:
            ConfigurationError: A value cannot be saved (the message has its path), the step is
                negative or has more than 18 digits, or the position or the notes are not JSON or
                larger than readers accept. Nothing was sent.
            MillraceError: The previous save failed, and nothing has raised its error yet.
        """
        began = time.monotonic()
        self._saves += 1  # before any error, so that the ranks have the same number
        check_step(step)
        where, said = normalise_json(position, "position"), normalise_json(notes, "notes")
        if self._under_way is not None:
            self._under_way.wait()
        copy_began = time.monotonic()
        uploads = _FileUploads(
            self._pool,
            self._count_early_uploads(),
            lambda: self._finisher.submit(self._list_stored, step),
            partial(self._upload, step),
        )
        part_bytes, rank = self._settings.part_bytes, self._ranks and self._ranks.rank
        try:
            shards = StateShards(state, rank=rank, mine=mine, own=own)
            if in_place:
                files = tuple(shards.iterate_files(part_bytes))
                for open_file in self._memory.open_files(shards, files, self._settings.uploads):
                    uploads.add(open_file)
                layout = shards.make_layout(files)
            else:
                layout = self._memory.snapshot(
                    shards,
                    part_bytes,
                    on_copied=lambda body: uploads.add(partial(nullcontext, body), early=True),
                ).layout
        except BaseException:
            with suppress(Exception):  # the error of the copy is more important
                uploads.wait()
            raise
        reads = uploads.start_all()
        held = timedelta(seconds=time.monotonic() - began)
        future = self._finisher.submit(
            self._finish, layout, uploads, copy_began, self._saves, step, run, where, said
        )
        self._under_way = PendingSave(step, held, future, reads if in_place else ())
        return self._under_way

    def _count_early_uploads(self) -> int:
        """Return the number of files that are uploaded at once during the copy."""
        # The copy needs all cores and the memory's bandwidth. On few cores, an upload would delay
        # it, and the trainer with it.
        return min(self._settings.uploads, count_processors() // _CORES_PER_EARLY_UPLOAD)

    def close(self) -> None:
        """Wait for the save and the retention in progress, and free the memory.

        Raises:
            MillraceError: The save failed, and nothing has raised its error yet.
        """
        try:
            if self._under_way is not None:
                self._under_way.wait()
        finally:
            self._finisher.shutdown()
            if self._retention is not None:
                self._retention.close()
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
        try:
            self.close()
        except errors.MillraceError as failure:  # the error of the block is more important
            assert self._under_way is not None
            _log_failures(self._under_way.step, [errors.format_error(failure)])

    # -- in other threads

    def _finish(
        self,
        layout: StateLayout,
        uploads: "_FileUploads",
        began: float,
        number: int,
        step: int,
        run: str,
        position: dict[str, Any],
        notes: dict[str, str],
    ) -> Checkpoint:
        parts = uploads.wait()
        files = uploads.map_files()
        self._proved = set(parts)
        restore = partial(
            restore_parts,
            self._store,
            self._keys.job,
            verified=self._proved,
            open_part=partial(self._open_part, step, files),
            uploads=self._settings.uploads,
        )
        if self._retention is not None:
            self._retention.protect(step)  # or this save may find a checkpoint that goes
        restore(parts)
        share = RankShare(
            job=self._keys.job,
            step=step,
            rank=self._ranks.rank if self._ranks else 0,
            world=self._ranks.world if self._ranks else 1,
            parts=parts,
            tensors=layout.describe_tensors(),
            run=run,
            position=position,
            notes=notes,
        )
        checkpoint = self._commit(share, number)
        # A retention that had planned before the commit may have deleted files since. Metadata of
        # an earlier save may refer to other files than this save has uploaded.
        restore([part for part in checkpoint.parts if part.digest in files])
        if self._settings.refer:
            self._known = {part.digest: part for part in checkpoint.parts}
        self._progress(
            CheckpointSaved(
                key=self._keys.make_metadata_key(step),
                size=sum(part.size for part in parts),
                seconds=round(time.monotonic() - began, 3),
            )
        )
        if self._retention is not None:
            self._retention.start(step)
        return checkpoint

    def _commit(self, share: RankShare, number: int) -> Checkpoint:
        """Commit the share of this rank, and return the committed checkpoint.

        Args:
            share: Share of this rank.
            number: Number of the save.

        Raises:
            ConflictError: The step has a checkpoint with another content, position or notes.
        """
        key = self._keys.make_metadata_key(share.step)
        if self._ranks is None:
            made = merge_shares([share])
            there = commit_checkpoint(self._store, made).record
            root = made.root
        else:
            within = self._settings.ranks_within
            there = commit_together(self._store, self._ranks, share, number, within)
            # The other ranks' shares are unknown here. The checkpoint is right if it has this one.
            root = there.root if has_share(there, share) else ""
        where = self._store.make_url(key)
        check_content(where, there, root)
        # The position and the notes of a checkpoint are those of the first rank.
        return there if share.rank else check_description(where, there, share)

    def _list_stored(self, step: int) -> "_StoredFiles":
        """Return the files that an earlier save of this step uploaded, and the reusable ones."""
        stats = list_objects(self._store, self._keys.make_parts_prefix(step))
        found = ((self._keys.parse_part(stat.key), stat.size) for stat in stats)
        there = {part[1]: size for part, size in found if part is not None}
        return _StoredFiles(there, self._find_reusable())

    def _find_reusable(self) -> dict[str, Part]:
        if not self._settings.refer:
            return {}
        if self._known is None:
            before = find_newest(self._store, self._keys.job)
            self._known = {part.digest: part for part in before.parts} if before else {}
        return self._known

    def _upload(self, step: int, open_file: OpenFile, stored: "Future[_StoredFiles]") -> Part:
        with open_file() as body:
            return self._upload_bytes(step, body, stored)

    def _upload_bytes(self, step: int, body: memoryview, stored: "Future[_StoredFiles]") -> Part:
        blocks = hash_blocks(body)
        digest = combine_blocks(blocks)
        there, reusable = stored.result().sizes, stored.result().reusable
        sent = 0
        part = reusable.get(digest)
        if part is None or not self._is_intact(part, body):
            part = Part(step=step, digest=digest, size=len(body))
            if digest not in there:
                put_block_list(self._store, self._keys, part, blocks)
            sent = self._ensure_uploaded(part, body, there.get(digest))
        self._progress(PartStored(digest=digest, size=len(body), sent=sent))
        return part

    def _ensure_uploaded(self, part: Part, body: memoryview, size: int | None) -> int:
        """Create a file unless the store has the same bytes, and return the number of sent bytes.

        Args:
            part: Description of the file.
            body: Bytes of the file.
            size: Size of the object that was listed under the file's key; None if there was none.
        """
        key = self._keys.make_part_key(part.step, part.digest)
        if size is None:
            try:
                create(self._store, key, body)
            except errors.ExistsError:
                size = part.size  # from another saver, or from a try whose answer was lost
            else:
                return len(body)
        if size == part.size and self._is_intact(part, body):
            return 0
        put(self._store, key, body)  # the key is a digest, so the other bytes are damaged
        return len(body)

    @contextmanager
    def _open_part(
        self, step: int, files: Mapping[str, OpenFile], part: Part
    ) -> Generator[PartContent]:
        """Open a file of a save to upload it again.

        Args:
            step: Step of the save.
            files: Functions that open the files of the save, by their digests.
            part: File to open.

        Raises:
            ChangedError: The state of a save in place has changed since the upload.
        """
        with files[part.digest]() as body:
            blocks = hash_blocks(body)
            if combine_blocks(blocks) != part.digest:
                url = self._store.make_url(self._keys.make_part_key(part.step, part.digest))
                raise errors.ChangedError(
                    f"{url} is missing or damaged after step {step} was saved, and the state has "
                    "changed since. Save the step again."
                )
            yield PartContent(body, blocks)

    def _is_intact(self, part: Part, body: memoryview) -> bool:
        """Decide whether the store has a file with its bytes. Each saver verifies a file once.

        The file is read, unless the store keeps a checksum of it. Later, only its size is asked
        for, since a reader may have moved a damaged file away.
        """
        key = self._keys.make_part_key(part.step, part.digest)
        if part in self._proved:
            return not describe_difference(self._store, key, part.size)
        kept = matches_stored_checksum(self._store, key, body)
        return not describe_difference(self._store, key, part.size, None if kept else part.digest)


@dataclass(frozen=True, slots=True)
class _StoredFiles:
    """Files that the store has before the upload of a save.

    Attributes:
        sizes: Sizes of the step's files, by their digests.
        reusable: Files of the newest checkpoint, by their digests.
    """

    sizes: dict[str, int]
    reusable: dict[str, Part]


class _FileUploads:
    """Uploads of a save's files, which may begin while later files are copied.

    Args:
        pool: Threads of the uploads.
        early: Number of files that are uploaded at once during the copy.
        list_stored: Function that begins to list the stored files.
        upload: Function that uploads a file, for which it waits for the listing.
    """

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        early: int,
        list_stored: Callable[[], "Future[_StoredFiles]"],
        upload: Callable[[OpenFile, "Future[_StoredFiles]"], Part],
    ) -> None:
        self._pool, self._early = pool, early
        self._list_stored, self._upload = list_stored, upload
        self._stored: Future[_StoredFiles] | None = None
        self._waiting = deque[OpenFile]()
        self._opened: list[OpenFile] = []  # by the order of the uploads
        self._started: list[Future[Part]] = []
        self._running: list[Future[Part]] = []

    def add(self, open_file: OpenFile, *, early: bool = False) -> None:
        """Add a file.

        Args:
            open_file: Function that opens the file.
            early: Whether the upload may begin at once.
        """
        self._waiting.append(open_file)
        if early:
            self._running = [future for future in self._running if not future.done()]
            self._start(min(self._early - len(self._running), len(self._waiting)))

    def start_all(self) -> list[Future[Part]]:
        """Start the uploads of all added files, and return all uploads."""
        self._start(len(self._waiting))
        return self._started

    def wait(self) -> tuple[Part, ...]:
        """Wait for the uploads, and return the descriptions of the files in their order.

        The next save overwrites the memory of the files, so all uploads end before an error.

        Raises:
            MillraceError: An upload failed.
        """
        wait(self._started)
        return tuple(future.result() for future in self._started)

    def map_files(self) -> dict[str, OpenFile]:
        """Return the functions that open the files, by the files' digests, after `wait`."""
        files = zip(self._started, self._opened, strict=True)
        return {future.result().digest: open_file for future, open_file in files}

    def _start(self, count: int) -> None:
        if self._stored is None:
            self._stored = self._list_stored()
        for _ in range(count):
            self._opened.append(self._waiting.popleft())
            future = self._pool.submit(self._upload, self._opened[-1], self._stored)
            self._started.append(future)
            self._running.append(future)
