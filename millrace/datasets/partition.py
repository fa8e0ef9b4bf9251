"""One split: read → encode → hash → put → commit, the stages overlapping.

A shard is a pure function of the split's samples and the plan's layout, so any machine that goes
on where another was killed makes the same bytes. The next shard is encoded while the last ones
are hashed and uploaded; their commits are made in order, so the ledger has no gaps.
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
from millrace.datasets.sources import BadRow, Row, Source
from millrace.digest import sha256, sha256_of
from millrace.keys import DatasetKeys, ShardName
from millrace.progress import Event, Progress
from millrace.records import commit_same, fetch
from millrace.schemas.dataset import ShardCommit, ShardLayout, Split, SplitEnd
from millrace.schemas.ledger import iterate_commits
from millrace.storage import Store, create, exists, list_objects, stream


def run_split(
    store: Store,
    source: Source,
    keys: DatasetKeys,
    layout: ShardLayout,
    split: Split,
    *,
    plan: str,
    uploads: int,
    progress: Progress,
) -> SplitEnd:
    """Make what is missing of a split's shards, and commit its end.

    Args:
        store: Where the shards go.
        source: Where the samples come from.
        keys: The dataset's names.
        layout: What the shards look like.
        split: Which samples.
        plan: Digest of the dataset's plan.
        uploads: Shards on their way at once. Memory: ``shard_bytes * (uploads + 1)``, and once
            the largest sample, if it is larger than ``shard_bytes``.
        progress: Told at each boundary, in the thread that reached it.

    Raises:
        ChangedError: The source is not what the plan says; nothing of it was mixed in.
        ConflictError: A shard or commit is already there with another content.
    """
    if exists(store, keys.end(split.name)):
        end = fetch(store, keys.end(split.name), SplitEnd)
        check_plan([end], plan)
        return end
    last = _last_commit(store, keys, split.name)
    check_plan([last] if last else [], plan)
    cursor, number = (last.next, last.n + 1) if last else (0, 0)
    opened = {"cursor": cursor, "commits": number, "through": split.piece.fraction_before(cursor)}
    progress(Event("split.opened", split.name, opened))
    with _Shipping(store, keys, split, layout, plan, number, uploads, progress) as shipping:
        batch = shipping.begin(cursor)
        rows = iter(source.rows(split.piece, cursor))
        for row in rows:
            batch = _take(batch, row, layout, shipping)
            del row  # a large one is not held while the next is read
        shipping.finish(batch)
    return _end(store, keys, split.name, plan, shipping.number, shipping.cursor, progress)


def _take(batch: "_Batch", row: Row, layout: ShardLayout, shipping: "_Shipping") -> "_Batch":
    """Add a row to a batch; returns the batch that the next row belongs to."""
    if not isinstance(row, BadRow):
        try:
            if not batch.encoder.add(row, layout.shard_bytes):
                batch = shipping.ship(batch)
                batch.encoder.add(row, layout.shard_bytes)
        except BadSampleError as error:
            row = BadRow(row.key, str(error), b"", row.next)
    if isinstance(row, BadRow):
        batch.put_aside(row)
    batch.next = row.next
    if not batch.halfway and 2 * batch.encoder.size >= layout.shard_bytes:
        batch.halfway = True
        shipping.progress(Event("shard.half", str(batch.name), {"samples": batch.encoder.samples}))
    if batch.encoder.samples >= layout.shard_samples or batch.bad_bytes >= _MOST_BAD:
        return shipping.ship(batch)
    return batch


_MOST_BAD = 4 << 20  # bytes of bad rows in one commit


@dataclass(slots=True)
class _Batch:
    """The rows of one commit: a shard being encoded, and what is put aside meanwhile."""

    name: ShardName
    encoder: ShardEncoder
    start: int
    next: int
    bad: list[bytes] = field(default_factory=list[bytes])
    bad_bytes: int = 0
    halfway: bool = False

    def put_aside(self, row: BadRow) -> None:
        line = orjson.dumps(
            {
                "where": row.where,
                "reason": row.reason,
                "data": row.data.decode("utf-8", "backslashreplace"),
            }
        )
        self.bad.append(line)
        self.bad_bytes += len(line)


class _Shipping:
    """The threads that hash, upload and commit, and the buffers that go round between them.

    A buffer comes back when its shard is committed, so no more shards than buffers are ever on
    their way.

    Attributes:
        number: How many commits the split has, once those on their way are made.
        cursor: Where the last of them ends.
    """

    def __init__(
        self,
        store: Store,
        keys: DatasetKeys,
        split: Split,
        layout: ShardLayout,
        plan: str,
        number: int,
        uploads: int,
        progress: Progress,
    ) -> None:
        self.progress = progress
        self._shard_bytes = layout.shard_bytes
        self._plan = plan
        self._store, self._keys, self._split = store, keys, split
        self.number, self.cursor = number, 0
        self._free: queue.SimpleQueue[ShardEncoder] = queue.SimpleQueue()
        for _ in range(uploads + 1):
            self._free.put(TarEncoder(layout.shard_bytes))
        self._puts = ThreadPoolExecutor(uploads, thread_name_prefix="put")
        self._commits = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._fault: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        # Also when reading failed: what was cut before the fault is good, and may be finished.
        self._puts.shutdown(wait=True)
        self._commits.shutdown(wait=True)
        if error is None:
            self._raise_fault()

    def begin(self, cursor: int) -> _Batch:
        """Return the next batch, once a buffer is free."""
        encoder = self._free.get()
        self._raise_fault()
        self.cursor = cursor
        return _Batch(ShardName(self._split.name, self.number), encoder, cursor, cursor)

    def ship(self, batch: _Batch) -> _Batch:
        """Send a batch on its way; returns the one that follows it.

        A shard larger than the limit is waited for: only one such is in memory at a time.
        """
        large = batch.encoder.size > self._shard_bytes
        committed = self._send(batch)
        if large:
            committed.result()
        return self.begin(batch.next)

    def finish(self, batch: _Batch) -> None:
        """Send the last batch on its way, if there is anything in it."""
        if batch.encoder.samples or batch.bad:
            self._send(batch)
            self.cursor = batch.next

    def _send(self, batch: _Batch) -> Future[None]:
        self.number += 1
        put = self._puts.submit(self._put, batch)
        return self._commits.submit(self._commit_or_remember, batch, put)

    def _raise_fault(self) -> None:
        """Return the first fault, in the order of the commits: it stays, so nothing can miss it."""
        if self._fault is not None:
            raise self._fault

    def _put(self, batch: _Batch) -> ShardCommit:
        name, samples, key, size, digest = batch.name, batch.encoder.samples, None, 0, ""
        if samples:
            shard = batch.encoder.close()
            key, size, digest = self._keys.shard(name, EXTENSION), len(shard), sha256(shard)
            self.progress(Event("shard.encoded", key, {"samples": samples, "bytes": size}))
            _create_same(self._store, key, shard, digest)
        quarantine = self._put_aside(batch)
        self.progress(Event("shard.put", str(name), {"samples": samples, "bytes": size}))
        return ShardCommit(
            split=name.split,
            n=name.n,
            key=key,
            size=size,
            sha256=digest,
            samples=samples,
            start=batch.start,
            next=batch.next,
            quarantine=quarantine,
            quarantined=len(batch.bad),
            plan=self._plan,
        )

    def _put_aside(self, batch: _Batch) -> str | None:
        """Upload a batch's bad rows; return their key, None if there are none."""
        if not batch.bad:
            return None
        key, body = self._keys.quarantine(batch.name), b"\n".join(batch.bad)
        _create_same(self._store, key, body, sha256(body))
        return key

    def _restore(self, batch: _Batch, commit: ShardCommit) -> None:
        """Upload what a commit names again, if it is no longer there.

        A process may be suspended between its uploads and its commit for longer than its lease
        lasts. Garbage collection may have deleted by then what no commit named.
        """
        if commit.key is not None and not exists(self._store, commit.key):
            _create_same(self._store, commit.key, batch.encoder.close(), commit.sha256)
        if commit.quarantine is not None and not exists(self._store, commit.quarantine):
            self._put_aside(batch)

    def _commit_or_remember(self, batch: _Batch, put: Future[ShardCommit]) -> None:
        try:
            if self._fault is None:  # else one before it failed, and the ledger has no gaps
                self._commit(batch, put.result())
        except BaseException as error:  # noqa: BLE001 - raised in the thread that reads
            self._fault = error
        finally:
            try:
                batch.encoder.reset()
            finally:
                self._free.put(batch.encoder)  # else who reads would wait for it for ever

    def _commit(self, batch: _Batch, commit: ShardCommit) -> None:
        self._restore(batch, commit)
        commit_same(self._store, self._keys.commit(batch.name), commit)
        figures = {
            "samples": commit.samples,
            "bytes": commit.size,
            "quarantined": commit.quarantined,
            "split": commit.split,
            "through": self._split.piece.fraction_before(commit.next),
        }
        self.progress(Event("shard.committed", commit.key or str(batch.name), figures))


def _create_same(store: Store, key: str, data: memoryview | bytes, digest: str) -> None:
    """Create an object, or find that exactly these bytes are there already.

    Raises:
        ConflictError: Others are.
    """
    try:
        create(store, key, data, sha256=digest)
    except errors.ExistsError:
        there, size = sha256_of(stream(store, key))
        if there != digest:
            raise errors.ConflictError(
                f"{store.url_of(key)} is already there with other bytes ({size} of SHA-256 "
                f"{there}, not {len(data)} of {digest}). Something else writes under this "
                "dataset's name: use another, or remove that object."
            ) from None


def _last_commit(store: Store, keys: DatasetKeys, split: str) -> ShardCommit | None:
    names = [
        name
        for stat in list_objects(store, keys.commits_of(split))
        if (name := keys.parse_commit(stat.key)) is not None
    ]
    return fetch(store, keys.commit(max(names, key=lambda n: n.n)), ShardCommit) if names else None


def check_plan(records: Iterable[ShardCommit | SplitEnd], plan: str) -> None:
    """Refuse records that were made by another plan.

    Raises:
        ConflictError: A run with a plan that was replaced has committed since.
    """
    for record in records:
        if record.plan not in {"", plan}:
            raise errors.ConflictError(
                f"{record.split} has a commit of another plan: a run that began before the plan "
                "was replaced still worked. Shard the source under another name."
            )


def check_whole(entries: list[ShardCommit], split: str) -> None:
    """Refuse a ledger with a gap.

    Raises:
        ConflictError: Commits are missing, or do not begin where the one before ends.
    """
    cursor = 0
    for n, entry in enumerate(entries):
        if entry.n != n or (n > 0 and entry.start != cursor):
            raise errors.ConflictError(
                f"The ledger of {split} has no commit {n}, or one that does not begin where the "
                "one before it ends: somebody deleted from it. Shard the source under another name."
            )
        cursor = entry.next


def _end(
    store: Store,
    keys: DatasetKeys,
    split: str,
    plan: str,
    commits: int,
    cursor: int,
    progress: Progress,
) -> SplitEnd:
    """Commit that a split has no more rows, held against what was read of it."""
    entries = sorted(iterate_commits(store, keys, split), key=lambda entry: entry.n)
    check_plan(entries, plan)
    check_whole(entries, split)
    if len(entries) != commits or (entries and entries[-1].next != cursor):
        raise errors.ConflictError(
            f"{split} was read to {cursor} in {commits} commits, and its ledger has "
            f"{len(entries)}: it is not complete. Run it again; it goes on from the ledger."
        )
    end = SplitEnd(
        split=split,
        commits=len(entries),
        samples=sum(entry.samples for entry in entries),
        size=sum(entry.size for entry in entries),
        quarantined=sum(entry.quarantined for entry in entries),
        plan=plan,
    )
    progress(Event("split.ending", split, {"samples": end.samples, "bytes": end.size}))
    commit_same(store, keys.end(split), end)
    figures = {"samples": end.samples, "bytes": end.size, "quarantined": end.quarantined}
    progress(Event("split.ended", split, figures))
    return end
