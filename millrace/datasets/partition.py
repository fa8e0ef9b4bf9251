"""Shard one partition: read → encode → hash → put → commit, in overlapping stages.

A shard is a pure function of the partition's samples and the plan's layout. So a machine that
continues after another was killed makes the same bytes. The next shard is encoded while earlier
ones are hashed and uploaded. Commits are made in order, so the ledger has no gaps.
"""

import queue
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import orjson

from millrace import errors
from millrace.datasets.formats.base import BadSampleError, ShardEncoder
from millrace.datasets.formats.webdataset import EXTENSION, TarEncoder
from millrace.datasets.progress_events import (
    PartitionEnded,
    PartitionEnding,
    PartitionOpened,
    ShardCommitted,
    ShardEncoded,
    ShardHalfEncoded,
    ShardUploaded,
)
from millrace.datasets.sources import BadRow, Row, Source
from millrace.digest import compute_sha256, compute_stream_sha256
from millrace.keys.datasets import DatasetKeys, ShardName
from millrace.progress import Progress
from millrace.records import commit_same, fetch
from millrace.schemas.dataset import Partition, PartitionEnd, ShardCommit, ShardLayout
from millrace.schemas.ledger import iterate_commits
from millrace.storage import Store, create, exists, list_objects, stream


def run_partition(
    store: Store,
    source: Source,
    keys: DatasetKeys,
    layout: ShardLayout,
    partition: Partition,
    *,
    plan_digest: str,
    uploads: int,
    progress: Progress,
) -> PartitionEnd:
    """Make the missing shards of a partition, and commit the partition's end.

    Args:
        store: Store of the dataset.
        source: Source of the samples.
        keys: Names of the dataset.
        layout: Layout of the shards.
        partition: Partition to shard.
        plan_digest: Digest of the dataset's plan.
        uploads: Number of concurrent uploads. Memory: ``shard_bytes * (uploads + 1)``, and one
            sample, if it is larger than ``shard_bytes``.
        progress: Called at each boundary, in the thread that reached it.

    Raises:
        ChangedError: The source differs from the plan. No changed bytes were committed.
        ConflictError: A shard or commit is already there with another content.
    """
    if exists(store, keys.end(partition.name)):
        end = fetch(store, keys.end(partition.name), PartitionEnd)
        check_plan([end], plan_digest)
        return end
    last = _read_last_commit(store, keys, partition.name)
    check_plan([last] if last else [], plan_digest)
    cursor, number = (last.next_cursor, last.number + 1) if last else (0, 0)
    progress(
        PartitionOpened(
            partition=partition.name,
            cursor=cursor,
            commits=number,
            fraction=partition.source_range.fraction_before(cursor),
        )
    )
    with _ShardUploader(
        store, keys, partition, layout, plan_digest, number, uploads, progress
    ) as uploader:
        batch = uploader.begin_batch(cursor)
        rows = iter(source.iterate_rows(partition.source_range, cursor))
        for row in rows:
            batch = _add_row(batch, row, layout, uploader)
            del row  # a large row is not held while the next is read
        uploader.finish(batch)
    return _commit_end(
        store, keys, partition.name, plan_digest, uploader.commit_count, uploader.cursor, progress
    )


def _add_row(
    batch: "_Batch", row: Row, layout: ShardLayout, uploader: "_ShardUploader"
) -> "_Batch":
    """Add a row to a batch; return the batch of the next row."""
    if not isinstance(row, BadRow):
        try:
            if not batch.encoder.add(row, layout.shard_bytes):
                batch = uploader.upload(batch)
                batch.encoder.add(row, layout.shard_bytes)
        except BadSampleError as error:
            row = BadRow(row.key, str(error), b"", row.next_cursor)
    if isinstance(row, BadRow):
        batch.quarantine(row)
    batch.next_cursor = row.next_cursor
    if not batch.is_halfway and 2 * batch.encoder.size >= layout.shard_bytes:
        batch.is_halfway = True
        uploader.progress(
            ShardHalfEncoded(
                partition=batch.name.partition,
                number=batch.name.number,
                samples=batch.encoder.samples,
            )
        )
    if batch.encoder.samples >= layout.shard_samples or batch.bad_bytes >= _MAX_BAD_BYTES:
        return uploader.upload(batch)
    return batch


_MAX_BAD_BYTES = 4 << 20  # bytes of bad rows in one commit


@dataclass(slots=True)
class _Batch:
    """Rows of one commit: the shard being encoded, and the quarantined rows."""

    name: ShardName
    encoder: ShardEncoder
    start_cursor: int
    next_cursor: int
    bad_rows: list[bytes] = field(default_factory=list[bytes])
    bad_bytes: int = 0
    is_halfway: bool = False

    def quarantine(self, row: BadRow) -> None:
        line = orjson.dumps(
            {
                "where": row.where,
                "reason": row.reason,
                "data": row.data.decode("utf-8", "backslashreplace"),
            }
        )
        self.bad_rows.append(line)
        self.bad_bytes += len(line)


class _ShardUploader:
    """Threads that hash, upload and commit, and the buffers that they share.

    A buffer is free again when its shard is committed. So there are never more unfinished shards
    than buffers.

    Attributes:
        commit_count: Number of commits of the partition, unfinished ones included.
        cursor: Cursor after the last of these commits.
    """

    def __init__(
        self,
        store: Store,
        keys: DatasetKeys,
        partition: Partition,
        layout: ShardLayout,
        plan_digest: str,
        commit_count: int,
        uploads: int,
        progress: Progress,
    ) -> None:
        self.progress = progress
        self._shard_bytes = layout.shard_bytes
        self._plan_digest = plan_digest
        self._store, self._keys, self._partition = store, keys, partition
        self.commit_count, self.cursor = commit_count, 0
        self._free_encoders: queue.SimpleQueue[ShardEncoder] = queue.SimpleQueue()
        for _ in range(uploads + 1):
            self._free_encoders.put(TarEncoder(layout.shard_bytes))
        self._upload_pool = ThreadPoolExecutor(uploads, thread_name_prefix="put")
        self._commit_pool = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._fault: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        # Also after a read error: the shards before it are valid, so their commits are finished.
        self._upload_pool.shutdown(wait=True)
        self._commit_pool.shutdown(wait=True)
        if error is None:
            self._raise_fault()

    def begin_batch(self, cursor: int) -> _Batch:
        """Wait for a free buffer, and return a new batch."""
        encoder = self._free_encoders.get()
        self._raise_fault()
        self.cursor = cursor
        return _Batch(ShardName(self._partition.name, self.commit_count), encoder, cursor, cursor)

    def upload(self, batch: _Batch) -> _Batch:
        """Start the upload of a batch; return the next batch.

        A shard larger than the limit is waited for: only one such shard is in memory at a time.
        """
        large = batch.encoder.size > self._shard_bytes
        committed = self._submit(batch)
        if large:
            committed.result()
        return self.begin_batch(batch.next_cursor)

    def finish(self, batch: _Batch) -> None:
        """Start the upload of the last batch, unless the batch is empty."""
        if batch.encoder.samples or batch.bad_rows:
            self._submit(batch)
            self.cursor = batch.next_cursor

    def _submit(self, batch: _Batch) -> Future[None]:
        self.commit_count += 1
        put = self._upload_pool.submit(self._upload_shard, batch)
        return self._commit_pool.submit(self._commit_or_record_fault, batch, put)

    def _raise_fault(self) -> None:
        """Raise the first fault, in the order of the commits. Each later call raises it again."""
        if self._fault is not None:
            raise self._fault

    def _upload_shard(self, batch: _Batch) -> ShardCommit:
        name, samples, key, size, digest = batch.name, batch.encoder.samples, None, 0, ""
        if samples:
            shard = batch.encoder.close()
            key, size, digest = self._keys.shard(name, EXTENSION), len(shard), compute_sha256(shard)
            self.progress(
                ShardEncoded(
                    partition=name.partition,
                    number=name.number,
                    key=key,
                    samples=samples,
                    size=size,
                )
            )
            _create_same(self._store, key, shard, digest)
        quarantine = self._upload_quarantine(batch)
        self.progress(
            ShardUploaded(partition=name.partition, number=name.number, samples=samples, size=size)
        )
        return ShardCommit(
            partition=name.partition,
            number=name.number,
            key=key,
            size=size,
            sha256=digest,
            samples=samples,
            start_cursor=batch.start_cursor,
            next_cursor=batch.next_cursor,
            quarantine_key=quarantine,
            quarantined=len(batch.bad_rows),
            plan_digest=self._plan_digest,
        )

    def _upload_quarantine(self, batch: _Batch) -> str | None:
        """Upload a batch's bad rows; return their key, None if there are none."""
        if not batch.bad_rows:
            return None
        key, body = self._keys.quarantine(batch.name), b"\n".join(batch.bad_rows)
        _create_same(self._store, key, body, compute_sha256(body))
        return key

    def _restore_missing(self, batch: _Batch, commit: ShardCommit) -> None:
        """Upload the objects of a commit again, if they are missing.

        A process may be suspended between its uploads and its commit for longer than its lease
        timeout. Garbage collection may then have deleted the objects, which no commit named.
        """
        if commit.key is not None and not exists(self._store, commit.key):
            _create_same(self._store, commit.key, batch.encoder.close(), commit.sha256)
        if commit.quarantine_key is not None and not exists(self._store, commit.quarantine_key):
            self._upload_quarantine(batch)

    def _commit_or_record_fault(self, batch: _Batch, put: Future[ShardCommit]) -> None:
        try:
            if self._fault is None:  # else an earlier commit failed, and the ledger has no gaps
                self._commit(batch, put.result())
        except BaseException as error:  # noqa: BLE001 - raised in the thread that reads
            self._fault = error
        finally:
            try:
                batch.encoder.reset()
            finally:
                self._free_encoders.put(batch.encoder)  # else `begin_batch` would wait for ever

    def _commit(self, batch: _Batch, commit: ShardCommit) -> None:
        self._restore_missing(batch, commit)
        commit_same(self._store, self._keys.commit(batch.name), commit)
        self.progress(
            ShardCommitted(
                partition=commit.partition,
                number=commit.number,
                key=commit.key,
                samples=commit.samples,
                size=commit.size,
                quarantined=commit.quarantined,
                fraction=self._partition.source_range.fraction_before(commit.next_cursor),
            )
        )


def _create_same(store: Store, key: str, data: memoryview | bytes, digest: str) -> None:
    """Create an object, unless an object with the same bytes is there already.

    Raises:
        ConflictError: An object with other bytes is there.
    """
    try:
        create(store, key, data, sha256=digest)
    except errors.ExistsError:
        existing, size = compute_stream_sha256(stream(store, key))
        if existing != digest:
            raise errors.ConflictError(
                f"{store.make_url(key)} is already there with other bytes ({size} of SHA-256 "
                f"{existing}, not {len(data)} of {digest}). Another program writes under this "
                "dataset's name: use another name, or remove that object."
            ) from None


def _read_last_commit(store: Store, keys: DatasetKeys, partition: str) -> ShardCommit | None:
    names = [
        name
        for stat in list_objects(store, keys.commits_of(partition))
        if (name := keys.parse_commit(stat.key)) is not None
    ]
    return (
        fetch(store, keys.commit(max(names, key=lambda n: n.number)), ShardCommit)
        if names
        else None
    )


def check_plan(records: Iterable[ShardCommit | PartitionEnd], plan_digest: str) -> None:
    """Refuse records that were made by another plan.

    Raises:
        ConflictError: A run with a replaced plan has committed since.
    """
    for record in records:
        if record.plan_digest not in {"", plan_digest}:
            raise errors.ConflictError(
                f"{record.partition} has a commit of another plan: a run that began before "
                "the plan was replaced was still working. Shard the source under another name."
            )


def check_contiguous(entries: list[ShardCommit], partition: str) -> None:
    """Refuse a ledger with a gap.

    Raises:
        ConflictError: A commit is missing, or does not begin where the previous commit ends.
    """
    cursor = 0
    for n, entry in enumerate(entries):
        if entry.number != n or (n > 0 and entry.start_cursor != cursor):
            raise errors.ConflictError(
                f"The ledger of {partition} has no commit {n}, or it does not begin where the "
                "previous one ends: commits were deleted. Shard the source under another name."
            )
        cursor = entry.next_cursor


def _commit_end(
    store: Store,
    keys: DatasetKeys,
    partition: str,
    plan_digest: str,
    commits: int,
    cursor: int,
    progress: Progress,
) -> PartitionEnd:
    """Compare the ledger with the rows that were read, and commit the partition's end."""
    entries = sorted(iterate_commits(store, keys, partition), key=lambda entry: entry.number)
    check_plan(entries, plan_digest)
    check_contiguous(entries, partition)
    if len(entries) != commits or (entries and entries[-1].next_cursor != cursor):
        raise errors.ConflictError(
            f"{partition} was read to {cursor} in {commits} commits, and its ledger has "
            f"{len(entries)}: it is not complete. Run it again; the run continues from the ledger."
        )
    end = PartitionEnd(
        partition=partition,
        commits=len(entries),
        samples=sum(entry.samples for entry in entries),
        size=sum(entry.size for entry in entries),
        quarantined=sum(entry.quarantined for entry in entries),
        plan_digest=plan_digest,
    )
    progress(PartitionEnding(partition=partition, samples=end.samples, size=end.size))
    commit_same(store, keys.end(partition), end)
    progress(
        PartitionEnded(
            partition=partition,
            samples=end.samples,
            size=end.size,
            quarantined=end.quarantined,
        )
    )
    return end
