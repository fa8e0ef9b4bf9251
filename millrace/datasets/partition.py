"""Shard one partition: read, encode, hash, upload and commit, in overlapping stages.

A shard is a pure function of the partition's samples and the plan's layout. If a machine is killed
and another machine continues, the other machine makes the same bytes. The next shard is encoded
while earlier shards are hashed and uploaded, and so is the first shard of the next partition.
Commits are made in order, so the ledger has no gaps.

A source that is not reproducible may give two machines different samples for the same rows. Then
the first commit counts. A machine whose commit comes second continues after the first one.
"""

import logging
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial

import orjson

from millrace import errors
from millrace.dataset_ledger import iterate_commits
from millrace.datasets.formats import BadSampleError, ShardFormat
from millrace.datasets.formats.shard_set import ShardSet
from millrace.datasets.plan_digest import check_plan_digest
from millrace.datasets.progress_events import (
    PartitionEnded,
    PartitionEnding,
    PartitionOpened,
    ShardCommitted,
    ShardEncoded,
    ShardHalfEncoded,
    ShardUploaded,
)
from millrace.datasets.sample import BadRow, Row, RowBatch
from millrace.datasets.sources.base import BatchSource, Source
from millrace.datasets.stall_watch import RowNotes
from millrace.datasets.transforms import TransformedSource
from millrace.datasets.transforms.base import IMPURE_FUNCTION
from millrace.digest import combine_blocks, compute_digest, compute_stream_digest, hash_blocks
from millrace.keys.datasets import CommitName, DatasetKeys
from millrace.progress import Progress
from millrace.records import commit_once, commit_same, fetch
from millrace.schemas.dataset import (
    CommittedShard,
    Partition,
    PartitionEnd,
    ShardCommit,
    ShardLayout,
    SourceRange,
    count_source_rows,
    encode_sample_offsets,
)
from millrace.storage import Store, create, exists, list_objects, stream

logger = logging.getLogger(__name__)

_OTHER_PROGRAM_ADVICE = (
    "Another program writes under this dataset's name: use another name, or remove that object."
)
_FUNCTION_ADVICE = (
    f"Either {IMPURE_FUNCTION}, or another program writes under this dataset's name. Correct the "
    "function, and shard the source under another dataset name."
)


class _SupersededError(Exception):
    """Another process has committed other shards of the same rows, and these count."""


class ShardBuffers:
    """Fixed number of shards in memory, which the partitions of a process use one after the other.

    Args:
        layout: Layout of the shards.
        uploads: Number of concurrent uploads. Memory: ``shard_bytes * (uploads + 1)`` for each
            format, and one sample if a sample is larger than ``shard_bytes``.

    Attributes:
        uploading: Semaphore that an upload holds while it compresses and sends shards.
    """

    def __init__(self, layout: ShardLayout, uploads: int) -> None:
        self.layout, self.uploads = layout, uploads
        self.uploading = threading.Semaphore(uploads)
        self._free: queue.SimpleQueue[ShardSet] = queue.SimpleQueue()
        for _ in range(uploads + 1):
            self._free.put(ShardSet(layout))

    def take(self) -> ShardSet:
        """Return an empty shard of each format; wait until they are free."""
        return self._free.get()

    def give_back(self, shards: ShardSet) -> None:
        """Empty shards, and let the next caller take them."""
        try:
            shards.reset()
        finally:
            self._free.put(shards)  # otherwise `take` could wait for ever


def write_partition(
    store: Store,
    source: TransformedSource,
    keys: DatasetKeys,
    buffers: ShardBuffers,
    partition: Partition,
    *,
    plan_digest: str,
    progress: Progress,
    notes: RowNotes,
    is_reproducible: bool = True,
) -> Callable[[], PartitionEnd]:
    """Read the rows of a partition that are not committed, and upload their shards.

    The last shards may still be uploading then. The returned function waits for their commits,
    commits the partition's end, and has the errors of this function. It can be called in another
    thread, while this one writes the next partition.

    Args:
        store: Store of the dataset.
        source: Source of the samples.
        keys: Names of the dataset.
        buffers: Shards in memory. After an error they cannot be used again.
        partition: Partition to shard.
        plan_digest: Digest of the dataset's plan.
        progress: Called at each boundary, in the thread that reached it.
        notes: Notes of this process about the rows of the partition.
        is_reproducible: Whether every read of the source gives the same samples. Otherwise the
            names of the shards have digits of their digests, and work that another process has
            committed first is dropped. Then this function also waits for the partition's end.

    Raises:
        ChangedError: The source differs from the plan. No changed bytes were committed.
        ConflictError: A shard or commit is already there with another content.
        ConfigurationError: The source is not reproducible, and a row makes several samples.
    """
    source = _note_source_rows(source, notes)
    while True:
        if exists(store, keys.make_end_key(partition.name)):
            end = fetch(store, keys.make_end_key(partition.name), PartitionEnd)
            check_plan_digest([end], plan_digest)
            progress(PartitionEnded.describe(end))
            return lambda: end
        last = _read_last_commit(store, keys, partition.name)
        check_plan_digest([last] if last else [], plan_digest)
        position, number = (last.next_position, last.number + 1) if last else ((0, 0), 0)
        cursor = position[0]
        progress(
            PartitionOpened(
                partition=partition.name,
                cursor=cursor,
                commits=number,
                fraction=partition.source_range.compute_fraction_before(cursor),
            )
        )
        uploader = _ShardUploader(
            store, keys, partition, buffers, plan_digest, number, progress,
            is_reproducible=is_reproducible, calls_functions=source.calls_functions,
        )  # fmt: skip
        finish = partial(_finish_partition, store, keys, plan_digest, uploader, source)
        try:
            try:
                _PartitionWriter(uploader, source, position, notes).write_rows()
            except BaseException:
                uploader.wait()  # shards before an error are valid, so their commits are finished
                raise
            if is_reproducible:
                return finish
            end = finish()
        except _SupersededError:
            logger.info("%s: another run has committed these rows first", partition.name)
        else:
            return lambda: end


class _PartitionWriter:
    """Writer of a partition's rows into its next commit, and of this commit into the store.

    Args:
        uploader: Uploader of the commits.
        source: Source of the rows.
        position: Cursor and `skip` of the first row.
        notes: Notes of this process about the rows.
    """

    def __init__(
        self,
        uploader: "_ShardUploader",
        source: TransformedSource,
        position: tuple[int, int],
        notes: RowNotes,
    ) -> None:
        self._notes = notes
        self._uploader, self._layout, self._source = uploader, uploader.layout, source
        self._position = position
        self._pending = uploader.begin_commit(position)

    def write_rows(self) -> None:
        """Write all rows from the first position on. The last commit may still be uploading."""
        # A source that is not reproducible must not have rows of several samples. `_add_row`
        # refuses such rows, and `_add_batch` does not.
        takes_batches = self._pending.shards.takes_batches and self._uploader.is_reproducible
        iterate = self._source.iterate_batches if takes_batches else self._source.iterate_rows
        rows = iterate(self._uploader.partition.source_range, *self._position)
        try:
            for row in rows:
                self._notes.note_row(_get_name(row))
                if isinstance(row, RowBatch):
                    self._add_batch(row)
                else:
                    self._add_row(row)
                del row  # a large row is not held while the next is read
        finally:
            if isinstance(rows, Generator):
                rows.close()  # ends downloads, also if an error holds this frame
        self._uploader.finish(self._pending)

    def _add_batch(self, batch: RowBatch) -> None:
        """Add samples. The commits are the same as those of `_add_row` for each sample.

        Bad samples are rare, so the samples of their batch are added one by one.
        """
        while batch:
            try:
                added = self._pending.shards.add_batch(
                    batch, self._layout.shard_bytes, self._layout.shard_samples
                )
            except BadSampleError:
                for sample in batch.iterate_samples():
                    self._add_row(sample)
                return
            if added:
                self._move_on(batch.get_position(added - 1))
                batch = batch.slice(added, len(batch))
            else:
                self._start_next_commit()

    def _add_row(self, row: Row) -> None:
        """Add a sample, or quarantine a row that makes none.

        Raises:
            ConfigurationError: The row is one of several samples of a row that may not be the same
                when it is read again.
        """
        if row.next_skip and not self._uploader.is_reproducible:
            raise errors.ConfigurationError(
                f"A transform makes several samples of one row, such as {_get_name(row)}, and "
                "another download of its URL may give other bytes. Shard the URLs without this "
                "transform, and then the shards with it (`kind: webdataset`), under another "
                "dataset name."
            )
        if not isinstance(row, BadRow):
            try:
                if not self._pending.shards.add(row, self._layout.shard_bytes):
                    self._start_next_commit()
                    self._pending.shards.add(row, self._layout.shard_bytes)
            except BadSampleError as error:
                share = self._source.get_share()
                row = BadRow(row.key, str(error), b"", row.next_cursor, row.next_skip, share)
        if isinstance(row, BadRow):
            self._pending.quarantine(row)
        self._move_on((row.next_cursor, row.next_skip))

    def _move_on(self, position: tuple[int, int]) -> None:
        """Set the position after the rows of the next commit; upload the commit if it is full."""
        pending = self._pending
        pending.next_position = position
        if self._source.has_transforms:
            counts = self._source.take_rows(position[0])
            pending.rows = (pending.rows or 0) + counts.rows
            pending.dropped += counts.dropped
        if not pending.is_halfway and 2 * pending.shards.size >= self._layout.shard_bytes:
            pending.is_halfway = True
            self._uploader.progress(
                ShardHalfEncoded(
                    partition=pending.name.partition,
                    number=pending.name.number,
                    samples=pending.shards.samples,
                )
            )
        is_full = pending.shards.samples >= self._layout.shard_samples
        if is_full or pending.bad_bytes >= _MAX_BAD_BYTES:
            self._start_next_commit()

    def _start_next_commit(self) -> None:
        self._pending = self._uploader.upload(self._pending)


class _NotedSource:
    """Source whose rows are noted one by one, since its reader may take many of them at once.

    A row is noted when the next one is asked for, so the last note is about the row before.
    """

    def __init__(self, source: Source, notes: RowNotes) -> None:
        self._source, self._notes = source, notes

    def iterate_rows(self, source_range: SourceRange, cursor: int) -> Iterator[Row]:
        """Yield the rows of a source range from a cursor on."""
        for row in self._source.iterate_rows(source_range, cursor):
            name = _get_name(row)
            held = [row]
            del row  # a large row is not held while the next is read
            yield held.pop()
            self._notes.note_row(name)


def _note_source_rows(source: TransformedSource, notes: RowNotes) -> TransformedSource:
    """Return a source whose rows are noted as they are read, unless it reads them in batches."""

    def wrap(inner: Source) -> Source:
        is_batched = isinstance(inner, BatchSource) and not source.has_transforms
        return inner if is_batched else _NotedSource(inner, notes)

    return source.wrap_source(wrap)


def _get_name(row: Row | RowBatch) -> str:
    """Return the name of a row, or of the last row of a batch."""
    if isinstance(row, RowBatch):
        return row.keys[-1] if row else ""
    return row.where if isinstance(row, BadRow) else row.key


_MAX_BAD_BYTES = 4 << 20  # bytes of bad rows in one commit


@dataclass(slots=True)
class _PendingCommit:
    """Rows of the next commit: the shards that are being encoded, and the quarantined rows.

    Attributes:
        name: Name of the commit.
        shards: One shard of each format.
        start_position: Cursor and `skip` of the first row.
        next_position: Cursor and `skip` after the last row.
        quarantine_lines: Quarantined rows, each as one line of JSON.
        bad_bytes: Bytes of the quarantined rows.
        is_halfway: Whether a shard has reached half of its largest size.
        rows: Number of rows of the source; None without transforms.
        dropped: Number of these rows that transforms dropped.
        bad_share: Sum of the quarantined rows' shares in their rows of the source.
    """

    name: CommitName
    shards: ShardSet
    start_position: tuple[int, int]
    next_position: tuple[int, int]
    quarantine_lines: list[bytes] = field(default_factory=list[bytes])
    bad_bytes: int = 0
    is_halfway: bool = False
    rows: int | None = None
    dropped: int = 0
    bad_share: float = 0.0

    def quarantine(self, row: BadRow) -> None:
        """Add a row that makes no sample."""
        line = orjson.dumps(
            {
                "where": row.where,
                "reason": row.reason,
                "data": row.data.decode("utf-8", "backslashreplace"),
            }
        )
        self.quarantine_lines.append(line)
        self.bad_bytes += len(line)
        self.bad_share += row.share


class _ShardUploader:
    """Threads that hash, upload and commit the shards of one partition.

    The buffer of a shard is free again when the shard is committed. Therefore there are never more
    unfinished shards than buffers.

    Attributes:
        partition: Partition of the shards.
        layout: Layout of the shards.
        is_reproducible: Whether every read of the source gives the same samples.
        calls_functions: Whether transforms call functions of the user.
        commit_count: Number of commits of the partition, unfinished ones included.
        position: Cursor and `skip` after the last of these commits.
    """

    def __init__(
        self,
        store: Store,
        keys: DatasetKeys,
        partition: Partition,
        buffers: ShardBuffers,
        plan_digest: str,
        commit_count: int,
        progress: Progress,
        *,
        is_reproducible: bool,
        calls_functions: bool,
    ) -> None:
        self.progress = progress
        self.partition, self.layout = partition, buffers.layout
        self.is_reproducible, self.calls_functions = is_reproducible, calls_functions
        self._plan_digest = plan_digest
        self._store, self._keys = store, keys
        self.commit_count, self.position = commit_count, (0, 0)
        self._buffers = buffers
        self._upload_pool = ThreadPoolExecutor(buffers.uploads, thread_name_prefix="put")
        self._commit_pool = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._fault: BaseException | None = None

    def wait(self) -> None:
        """Wait for the end of all uploads and commits."""
        self._upload_pool.shutdown(wait=True)
        self._commit_pool.shutdown(wait=True)

    def wait_for_commits(self) -> None:
        """Wait until all shards are committed.

        Raises:
            MillraceError: The first fault.
        """
        self.wait()
        if self._fault is not None:
            raise self._fault

    def begin_commit(self, position: tuple[int, int]) -> _PendingCommit:
        """Begin the next commit with free buffers; wait until there are some.

        Args:
            position: Cursor and `skip` of the first row of the commit.
        """
        shards = self._buffers.take()
        if (fault := self._fault) is not None:
            self._buffers.give_back(shards)
            raise fault
        self.position = position
        name = CommitName(self.partition.name, self.commit_count)
        return _PendingCommit(name, shards, position, position)

    def upload(self, pending: _PendingCommit) -> _PendingCommit:
        """Start the upload of a commit; return the next pending commit.

        Shards larger than the limit are committed before the call returns. So only one such sample
        is in memory at a time.
        """
        self._submit(pending)
        return self.begin_commit(pending.next_position)

    def finish(self, pending: _PendingCommit) -> None:
        """Start the upload of the last commit, as `upload` does, unless the commit has no rows."""
        if pending.shards.samples or pending.quarantine_lines:
            self._submit(pending)
            self.position = pending.next_position
        else:
            self._buffers.give_back(pending.shards)

    def _submit(self, pending: _PendingCommit) -> None:
        is_large = pending.shards.size > self.layout.shard_bytes
        self.commit_count += 1
        uploaded = self._upload_pool.submit(self._upload_commit, pending)
        committed = self._commit_pool.submit(self._commit_or_record_fault, pending, uploaded)
        if is_large:
            committed.result()

    def _upload_commit(self, pending: _PendingCommit) -> ShardCommit:
        name, samples = pending.name, pending.shards.samples
        with self._buffers.uploading:  # the partition before may still upload
            shards = self._upload_shards(pending) if samples else []
            quarantine = self._upload_quarantine(pending)
        size = sum(shard.size for shard in shards)
        self.progress(
            ShardUploaded(partition=name.partition, number=name.number, samples=samples, size=size)
        )
        return ShardCommit(
            partition=name.partition,
            number=name.number,
            shards=tuple(shards),
            samples=samples,
            start_cursor=pending.start_position[0],
            start_skip=pending.start_position[1],
            next_cursor=pending.next_position[0],
            next_skip=pending.next_position[1],
            quarantine_key=quarantine,
            quarantined=len(pending.quarantine_lines),
            dropped=pending.dropped,
            rows=pending.rows,
            bad_rows=None if pending.rows is None else pending.bad_share,
            plan_digest=self._plan_digest,
        )

    def _upload_shards(self, pending: _PendingCommit) -> list[CommittedShard]:
        made = zip(
            pending.shards.formats,
            pending.shards.close(),
            pending.shards.sample_offsets,
            strict=True,
        )
        return [self._upload_shard(pending, *one) for one in made]

    def _upload_shard(
        self,
        pending: _PendingCommit,
        shard_format: ShardFormat,
        data: memoryview,
        offsets: Sequence[tuple[int, int]],
    ) -> CommittedShard:
        name, split = pending.name, self.partition.split
        blocks = hash_blocks(data)  # the only pass of hashing: the root follows from the blocks
        digest = combine_blocks(blocks)
        key = self._keys.make_shard_key(
            shard_format.name, split, name, shard_format.extension, self._select_suffix(digest)
        )
        shard = CommittedShard(
            format=shard_format.name,
            key=key,
            size=len(data),
            digest=digest,
            blocks=CommittedShard.encode_blocks(blocks),
            sample_offsets=encode_sample_offsets(offsets),
        )
        self.progress(
            ShardEncoded(
                partition=name.partition,
                number=name.number,
                key=key,
                samples=pending.shards.samples,
                size=shard.size,
            )
        )
        self._create_same(key, data, shard.digest)
        return shard

    def _upload_quarantine(self, pending: _PendingCommit) -> str | None:
        """Upload the bad rows of a commit; return their key, or None if there are no bad rows."""
        if not pending.quarantine_lines:
            return None
        body = b"\n".join(pending.quarantine_lines)
        digest = compute_digest(body)
        key = self._keys.make_quarantine_key(pending.name, self._select_suffix(digest))
        self._create_same(key, body, digest)
        return key

    def _create_same(self, key: str, data: memoryview | bytes, digest: str) -> None:
        """Create an object, unless an object with the same bytes is there already.

        Raises:
            ConflictError: An object with other bytes is there.
        """
        try:
            create(self._store, key, data)
        except errors.ExistsError:
            existing, size = compute_stream_digest(stream(self._store, key))
            if existing != digest:
                raise errors.ConflictError(
                    f"{self._store.make_url(key)} is already there with other bytes ({size} of "
                    f"{existing}, not {len(data)} of {digest}). "
                    f"{_FUNCTION_ADVICE if self.calls_functions else _OTHER_PROGRAM_ADVICE}"
                ) from None

    def _select_suffix(self, digest: str) -> str:
        """Return the digest that a key contains, by which no other bytes have the key."""
        return "" if self.is_reproducible else digest

    def _restore_missing(self, pending: _PendingCommit, commit: ShardCommit) -> None:
        """Upload the objects of a commit again if they are missing.

        A process may be suspended between its uploads and its commit for longer than its lease
        timeout. Garbage collection may then have deleted the objects, since no commit named them.
        """
        for n, shard in enumerate(commit.shards):
            if not exists(self._store, shard.key):
                data = pending.shards.close()[n]
                self._create_same(shard.key, data, shard.digest)
        if commit.quarantine_key is not None and not exists(self._store, commit.quarantine_key):
            self._upload_quarantine(pending)

    def _commit_or_record_fault(
        self, pending: _PendingCommit, uploaded: Future[ShardCommit]
    ) -> None:
        try:
            if self._fault is None:  # after a failed commit, a later one would leave a gap
                self._commit(pending, uploaded.result())
        except BaseException as error:  # noqa: BLE001 - raised in the thread that reads
            self._fault = error
        finally:
            if not uploaded.cancel():
                wait((uploaded,))  # after a fault, the upload may still read the buffers
            self._buffers.give_back(pending.shards)

    def _commit(self, pending: _PendingCommit, commit: ShardCommit) -> None:
        self._restore_missing(pending, commit)
        key = self._keys.make_commit_key(pending.name)
        if self.is_reproducible:
            _commit_same(self._store, key, commit, calls_functions=self.calls_functions)
        elif commit_once(self._store, key, commit).record != commit:
            raise _SupersededError(key)
        self.progress(ShardCommitted.describe(commit, self.partition))


def _commit_same(
    store: Store, key: str, record: ShardCommit | PartitionEnd, *, calls_functions: bool
) -> None:
    """Commit a record, unless the same record is there already.

    Raises:
        ConflictError: Another record is there.
    """
    try:
        commit_same(store, key, record)
    except errors.ConflictError as error:
        if not calls_functions:
            raise
        raise errors.ConflictError(f"{error} {_FUNCTION_ADVICE}") from None


def _read_last_commit(store: Store, keys: DatasetKeys, partition: str) -> ShardCommit | None:
    names = [
        name
        for stat in list_objects(store, keys.make_commits_prefix(partition))
        if (name := keys.parse_commit(stat.key)) is not None
    ]
    return (
        fetch(store, keys.make_commit_key(max(names, key=lambda n: n.number)), ShardCommit)
        if names
        else None
    )


def check_contiguous(entries: list[ShardCommit], partition: str) -> None:
    """Refuse a ledger with a gap.

    Raises:
        ConflictError: A commit is missing, or does not begin where the previous commit ends.
    """
    position = (0, 0)
    for n, entry in enumerate(entries):
        if entry.number != n or (n > 0 and entry.start_position != position):
            raise errors.ConflictError(
                f"The ledger of {partition} has no commit {n}, or it does not begin where the "
                "previous one ends: commits were deleted. Shard the source under another name."
            )
        position = entry.next_position


def _finish_partition(
    store: Store,
    keys: DatasetKeys,
    plan_digest: str,
    uploader: _ShardUploader,
    source: TransformedSource,
) -> PartitionEnd:
    """Wait for the commits, compare the ledger with the rows that were read, and commit the end.

    Of a source that is not reproducible, the first end counts. Then later commits of this run are
    in no dataset.

    Args:
        store: Store of the dataset.
        keys: Names of the dataset.
        plan_digest: Digest of the dataset's plan.
        uploader: Uploader of the partition's commits.
        source: Source whose rows were read to their end.
    """
    uploader.wait_for_commits()
    partition, position = uploader.partition.name, uploader.position
    rest = source.take_rows()
    entries = sorted(iterate_commits(store, keys, partition), key=lambda entry: entry.number)
    check_plan_digest(entries, plan_digest)
    check_contiguous(entries, partition)
    if len(entries) > uploader.commit_count and not uploader.is_reproducible:
        raise _SupersededError(partition)  # by another run, to which the last rows gave samples
    if len(entries) != uploader.commit_count or (entries and entries[-1].next_position != position):
        raise errors.ConflictError(
            f"{partition} was read to {position[0]} in {uploader.commit_count} commits, and its "
            f"ledger has {len(entries)}: it is not complete. Run it again; the run continues from "
            "the ledger."
        )
    counts = [count_source_rows(entry) for entry in entries]
    end = PartitionEnd(
        partition=partition,
        commits=len(entries),
        samples=sum(entry.samples for entry in entries),
        size=sum(entry.size for entry in entries),
        quarantined=sum(entry.quarantined for entry in entries),
        dropped=sum(entry.dropped for entry in entries) + rest.dropped,
        rows=sum(rows for rows, _ in counts) + rest.rows if source.has_transforms else None,
        bad_rows=sum(bad for _, bad in counts) if source.has_transforms else None,
        plan_digest=plan_digest,
    )
    uploader.progress(PartitionEnding(partition=partition, samples=end.samples, size=end.size))
    key = keys.make_end_key(partition)
    if uploader.is_reproducible:
        _commit_same(store, key, end, calls_functions=source.calls_functions)
    else:  # a run that has met the end first may have downloaded other bytes
        end = commit_once(store, key, end).record
        check_plan_digest([end], plan_digest)
    uploader.progress(PartitionEnded.describe(end))
    return end
