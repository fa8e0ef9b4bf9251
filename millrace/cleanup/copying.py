"""Copy the objects of a store into another store, with a proof that each copy is right.

Both stores are listed. An object that is at the destination with the same bytes is skipped, so a
killed copy continues where it was. Another object with the same key is a conflict, and stays. The
metadata of checkpoints is copied after all other objects, unless a file of it could not be copied.

The store copies by itself if the credentials of the destination may read the source. Otherwise the
bytes go through this process, and the attributes of the object (its type, and the metadata of its
writer) go with them. Large objects are copied in the parts that they were uploaded in. So the copy
has the ETag of its source, which proves the bytes (`millrace.storage.etags`), and the parts that a
killed process has sent are not sent again. Where ETags prove nothing, the copy is read back, unless
the store has made it by itself.

The identity of an installation is not copied: with it, the reaper of the copy would release the
machines that are rented with the source.
"""

import queue
import time
from collections.abc import Iterable, Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from millrace import errors
from millrace.cleanup.copy_result import CopyOutcome, CopyResult
from millrace.cleanup.object_copier import ObjectCopier
from millrace.cleanup.planner import list_with_progress
from millrace.cleanup.progress_events import ObjectsCopied
from millrace.cleanup.protection import find_path
from millrace.cleanup.usage import ObjectFilter
from millrace.keys.checkpoints import CheckpointKeys, is_metadata_key, parse_part_digest
from millrace.keys.kinds import classify_key, split_store_prefix
from millrace.keys.rentals import is_installation_key
from millrace.progress import Progress, ignore_event
from millrace.records import fetch
from millrace.schemas.checkpoint import Checkpoint
from millrace.storage import (
    Backend,
    Location,
    Stat,
    Store,
    StoreSpec,
    list_objects,
    marks_folder,
    open_store,
)
from millrace.storage.folders import UnlistedEntry, UnlistedReason, remove_partial_files
from millrace.storage.overlap import locate_prefix

_CONCURRENCY = 16  # objects that are copied at once
_MAX_PENDING = 1000  # objects that wait for a thread
_MAX_UNAVAILABLE = 8  # objects without an answer, and no copy between them: the store is down
_INSTALLATION_REASON = (
    "it is the identity of this store for rented machines, and each store gets its own"
)

_Pair = tuple[Stat, Stat | None]


def copy_objects(
    source: Store,
    destination: Store,
    objects: ObjectFilter | None = None,
    *,
    overwrite: bool = False,
    progress: Progress = ignore_event,
) -> CopyResult:
    """Copy objects of a store into another store, under the same keys.

    Another process may write to the destination at the same time. Files and small objects are
    created only if there is none. Copies of a small object by the store itself have this condition
    on S3 and R2. On other stores, and before a large object appears, its key is looked up once
    more: an object that is written between this request and the copy is replaced.

    The metadata of checkpoints comes last, so that readers of the destination find only complete
    ones. It is a failure, and not copied, if one of its files was not copied, or differs there.

    Memory: that of a page of each listing, of 20 parts of at most 64 MiB, and of 16 objects of at
    most 32 MiB, and the names of the metadata. The listing of a folder has no order, so a folder's
    names are in memory.

    Args:
        source: Store to copy from.
        destination: Store to copy to.
        objects: Conditions for the objects that are copied; by default all are.
        overwrite: Whether to replace objects at the destination that differ.
        progress: Receives `ObjectsCopied`.

    Raises:
        ConfigurationError: A store is inside the other one.
        DeniedError, UnavailableError: A store cannot be listed, the destination refuses writes, or
            several objects in a row had no answer.
    """
    return _copy_pairs(
        source, destination, objects, overwrite=overwrite, dry_run=False, progress=progress
    )


def compare_objects(
    source: Store,
    destination: StoreSpec,
    objects: ObjectFilter | None = None,
    *,
    overwrite: bool = False,
    progress: Progress = ignore_event,
) -> CopyResult:
    """Return what `copy_objects` would do, and change nothing. The arguments are the same.

    A folder that is not there yet is not made, and counts as empty.
    """
    there = _open_unmade(destination)
    return _copy_pairs(source, there, objects, overwrite=overwrite, dry_run=True, progress=progress)


def open_copy_target(
    source: Store, destination: StoreSpec, objects: ObjectFilter | None = None
) -> Store:
    """Open a store to copy to. A missing folder is made after the source was listed. One request.

    Raises:
        ConfigurationError: A store is inside the other one.
        DeniedError, UnavailableError: The source cannot be listed.
    """
    _refuse_overlap(source, _open_unmade(destination))
    next(list_objects(source, objects.prefix if objects else ""), None)
    return open_store(destination)


def _open_unmade(spec: StoreSpec) -> Store:
    """Open a store; a folder that is not there is empty, and is not made."""
    try:
        return open_store(spec, make_folder=False)
    except errors.NotFoundError:
        empty = open_store("memory://missing-folder")
        return replace(empty, location=Location.parse(spec.url))


def _copy_pairs(
    source: Store,
    destination: Store,
    objects: ObjectFilter | None,
    *,
    overwrite: bool,
    dry_run: bool,
    progress: Progress,
) -> CopyResult:
    _refuse_overlap(source, destination)
    began, result = time.monotonic(), CopyResult(source.url, destination.url)
    copier = ObjectCopier(source, destination, result, overwrite=overwrite, dry_run=dry_run)
    recorder = _ProgressRecorder(result, progress)
    objects = objects or ObjectFilter()
    for entry in objects.list_unlisted(source):
        result.add_unlisted(entry)
    if not dry_run:
        remove_partial_files(destination, objects.prefix)
    pairs, files = _pair(source, destination, objects), _FileTracker(destination)
    metadata: list[_Pair] = []  # copied last, so that no reader finds it without its files
    path = find_path(source)
    collector = _OutcomeCollector(result, path)

    def select_others() -> Iterator[_Pair]:
        for stat, there in pairs:
            if any(is_installation_key(key) for key in (stat.key, f"{path}{stat.key}")):
                result.add_skipped(stat.key, _INSTALLATION_REASON)
                continue
            if marks_folder(stat) and not destination.is_s3_compatible:
                result.add_unlisted(UnlistedEntry(stat.key, UnlistedReason.MARKER))
                continue
            file = files.find_above(stat.key)
            if file and there is None:
                reason = f"{destination.url} cannot have a file and a folder named {file!r}."
                result.add_failure(stat.key, reason)
            elif is_metadata_key(split_store_prefix(f"{path}{stat.key}")[1]):
                metadata.append((stat, there))
            else:
                yield stat, there

    def copy_all(chosen: Iterable[_Pair]) -> None:
        pending = 0
        for stat, there in chosen:
            copying = pool.submit(copier.copy, stat, there)
            copying.add_done_callback(partial(collector.add, stat))
            pending += 1
            pending -= collector.take(must_wait=pending >= _MAX_PENDING)
            recorder.record()
        while pending:
            pending -= collector.take(must_wait=True)
            recorder.record()

    with ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="copy") as pool:
        try:
            copy_all(select_others())
            copy_all(collector.select_complete(source, metadata, overwrite=overwrite))
            collector.check_end()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    recorder.record(is_last=True)
    result.conflicts.sort()
    result.failures.sort(key=lambda one: one.key)
    result.seconds = time.monotonic() - began
    return result


class _OutcomeCollector:
    """Collector of the outcomes of objects, which decides whether the copy goes on.

    Args:
        result: Result to count in.
        path: Path of the source's URL, which may be a job's own folder.
    """

    def __init__(self, result: CopyResult, path: str) -> None:
        self._result, self._path = result, path
        self._done: queue.SimpleQueue[tuple[Stat, Future[CopyOutcome]]] = queue.SimpleQueue()
        self._unavailable: list[errors.UnavailableError] = []  # since the last copied object
        self._bad_parts: set[str] = set()  # files of checkpoints

    def add(self, stat: Stat, copying: Future[CopyOutcome]) -> None:
        """Add an object that is done. Threads may call this."""
        self._done.put((stat, copying))

    def take(self, *, must_wait: bool) -> int:
        """Count the objects that are done, and return their number.

        Args:
            must_wait: Whether to wait up to half a second for one.

        Raises:
            UnavailableError: Several objects in a row had no answer.
            NoSpaceError: No other object would fare better.
            DeniedError: The same, since no object was copied before.
        """
        count = 0
        while True:
            try:
                stat, copying = self._done.get(must_wait and not count, 0.5)
            except queue.Empty:
                return count
            count += 1
            self._take_one(stat, copying)

    def select_complete(
        self, source: Store, metadata: Iterable[_Pair], *, overwrite: bool
    ) -> Iterator[_Pair]:
        """Yield the metadata of checkpoints without a bad file. The others are failures."""
        for stat, there in metadata:
            bad = _find_bad_part(source, self._path, stat.key, self._bad_parts)
            if bad and (there is None or overwrite):
                reason = f"Its file {bad} was not copied, or differs there: copy both again."
                self._result.add_failure(stat.key, reason)
            else:
                yield stat, there

    def check_end(self) -> None:
        """Check that a store has answered for an object, if any did not have an answer.

        Raises:
            UnavailableError: It has not.
        """
        if self._unavailable and not any(self._result.objects.values()):
            raise self._unavailable[-1]

    def _take_one(self, stat: Stat, copying: Future[CopyOutcome]) -> None:
        try:
            outcome = copying.result()
            self._result.add(stat, outcome)
            if outcome is CopyOutcome.CONFLICT:
                self._note_bad_part(stat.key)
            if outcome is CopyOutcome.COPIED:  # others may have needed no request
                self._unavailable.clear()
        except errors.NoSpaceError:
            raise
        except errors.DeniedError as error:
            if not any(self._result.objects.values()):
                raise
            self._add_failure(stat.key, error)
        except errors.MillraceError as error:
            if isinstance(error, errors.UnavailableError):
                self._unavailable.append(error)
            if len(self._unavailable) >= _MAX_UNAVAILABLE:
                raise
            self._add_failure(stat.key, error)

    def _add_failure(self, key: str, error: errors.MillraceError) -> None:
        self._result.add_failure(key, errors.format_error(error))
        self._note_bad_part(key)

    def _note_bad_part(self, key: str) -> None:
        if parse_part_digest(split_store_prefix(f"{self._path}{key}")[1]):
            self._bad_parts.add(key)


def _find_bad_part(source: Store, path: str, key: str, bad_parts: Set[str]) -> str:
    """Return a bad file that the metadata of a checkpoint names; empty if it names none.

    Metadata that cannot be read is copied as it is.
    """
    prefix, inner_key = split_store_prefix(f"{path}{key}")
    classified = classify_key(inner_key)
    if classified is None or not bad_parts:
        return ""
    keys = CheckpointKeys(classified.scope)
    if not any(f"{path}{one}".startswith(f"{prefix}{keys.prefix}") for one in bad_parts):
        return ""
    try:
        found = fetch(source, key, Checkpoint)
    except errors.MillraceError:
        return ""
    named = (
        f"{prefix}{keys.make_part_key(part.step, part.digest)}".removeprefix(path)
        for part in found.parts
    )
    return next((one for one in named if one in bad_parts), "")


def _refuse_overlap(source: Store, destination: Store) -> None:
    (bucket, one), (other_bucket, other) = map(locate_prefix, (source, destination))
    if bucket == other_bucket and (one.startswith(other) or other.startswith(one)):
        raise errors.ConfigurationError(
            f"{destination.url} and {source.url} overlap: the copies would be copied again. Choose "
            "a prefix or a bucket beside it."
        )


def _pair(source: Store, destination: Store, objects: ObjectFilter) -> Iterator[_Pair]:
    """Yield the objects to copy, each with the object that the destination has; in key order."""
    listed = list_with_progress(destination, objects.prefix, ignore_event)
    existing = _sort(destination, listed)
    there = next(existing, None)
    chosen = objects.iterate_objects(source, datetime.now(UTC))
    for stat in _sort(source, chosen):
        while there is not None and there.key < stat.key:
            there = next(existing, None)
        yield stat, there if there is not None and there.key == stat.key else None


def _sort(store: Store, stats: Iterator[Stat]) -> Iterator[Stat]:
    """Sort the listing of a folder, which has no order, in memory."""
    if store.location.backend is not Backend.FILE:
        return stats
    return iter(sorted(stats, key=lambda one: one.key))


class _FileTracker:
    """Tracker of keys in their order that finds those below another key, which no folder can have.

    Args:
        store: Destination; only a folder has this limit.
    """

    def __init__(self, store: Store) -> None:
        self._is_folder = store.location.backend is Backend.FILE
        self._files: list[str] = []  # keys that may still be above later ones

    def find_above(self, key: str) -> str:
        """Return an earlier key that is a folder of this one; empty if there is none."""
        if not self._is_folder:
            return ""
        while self._files and not key.startswith(self._files[-1]):
            self._files.pop()
        found = next((one for one in self._files if key.startswith(f"{one}/")), "")
        self._files.append(key)
        return found


class _ProgressRecorder:
    def __init__(self, result: CopyResult, progress: Progress) -> None:
        self._result, self._progress = result, progress
        self._due = 0.0

    def record(self, *, is_last: bool = False) -> None:
        if is_last or time.monotonic() >= self._due:
            self._due = time.monotonic() + 0.3
            done = sum(self._result.objects.values()) + self._result.failed
            self._progress(ObjectsCopied(objects=done, size=sum(self._result.sizes.values())))
