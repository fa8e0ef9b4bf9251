"""Build buckets to clean, with every kind of object as Millrace writes it."""

import os
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from millrace.checkpoints.find import add_digest, compute_root
from millrace.digest import BLOCK_SIZE, compute_digest, dump_canonical_json, get_hex, hash_blocks
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.datasets import CommitName, DatasetKeys
from millrace.keys.gradients import ChainKeys, GradientKeys
from millrace.keys.leases import LeaseKeys
from millrace.lease import Holder, LeaseTerm
from millrace.records import commit_once, encode_record
from millrace.schemas.chain import ChainLink, ChainStart, OuterOptimizer, UpdateEntry
from millrace.schemas.checkpoint import Checkpoint, EpochRecord, Part, Pin
from millrace.schemas.dataset import (
    CommittedShard,
    DatasetPlan,
    Manifest,
    ShardCommit,
    ShardLayout,
    SourceRecord,
)
from millrace.schemas.gradient import Codec
from millrace.schemas.merge import MergeSettings
from millrace.storage import Store, put

OTHER_HOLDER = Holder(id="elsewhere", host="elsewhere", machine="elsewhere", pid=1, started="1")


def compute_hex_digest(body: bytes) -> str:
    """Return the hexadecimal digits of the digest of some bytes."""
    return get_hex(compute_digest(body))


@dataclass
class BucketBuilder:
    """Write objects to a store. In a folder, each object can have an age in hours.

    Attributes:
        store: Store of the objects.
        pool: Threads that write the objects, which then have no ages. None to write at once.
    """

    store: Store
    pool: Executor | None = None
    _writes: list[Future[None]] = field(default_factory=list)

    def put(self, key: str, body: bytes = b"x", *, hours: float = 0) -> str:
        """Write an object, and return its key."""
        if self.pool is not None:
            self._writes.append(self.pool.submit(put, self.store, key, body))
            return key
        put(self.store, key, body)
        return self.set_age(key, hours)

    def wait_for_writes(self) -> None:
        """Wait until all objects are written."""
        for write in self._writes:
            write.result()
        self._writes.clear()

    def put_record(self, key: str, record, *, hours: float = 0) -> str:
        """Write a record, and return its key."""
        return self.put(key, encode_record(record, "nonce"), hours=hours)

    def set_age(self, key: str, hours: float) -> str:
        """Date the last write of an object back, and return its key. Needs a folder."""
        if hours:
            path = Path(self.store.location.bucket) / key
            modified = (datetime.now(UTC) - timedelta(hours=hours)).timestamp()
            os.utime(path, (modified, modified))
        return key

    def put_gradient(self, run: str, uid: str, window: int, version: str, hours: float = 0) -> str:
        key = GradientKeys(run, version).make_gradient_key(uid, window)
        return self.put(key, os.urandom(8), hours=hours)

    def put_start_window(
        self, run: str, uid: str, window: int, version: str, hours: float = 0
    ) -> str:
        return self.put(
            GradientKeys(run, version).make_start_window_key(uid, window), b"{}", hours=hours
        )

    def put_lease(self, scope: str, name: str, *, ended: bool = False) -> None:
        """Write a lease that another machine holds for an hour from now, or has ended."""
        keys = LeaseKeys(scope, name)
        term = LeaseTerm(holder=OTHER_HOLDER, ttl=timedelta(hours=1))
        commit_once(self.store, keys.make_term_key(0), term)
        put(self.store, keys.make_beat_key(0), b"elsewhere")
        if ended:
            put(self.store, keys.make_end_key(0), b"elsewhere")

    def put_checkpoint(
        self,
        job: str,
        step: int,
        bodies: list[bytes],
        *,
        homes: dict[bytes, int] | None = None,
        window: int | None = None,
        hours: float = 0,
        missing: int | None = None,
    ) -> None:
        """Write a checkpoint.

        Args:
            job: Name of the job.
            step: Step of the checkpoint.
            bodies: Bytes of the files.
            homes: Earlier steps in whose folders files are stored, by the bytes of the files.
            window: Window of the checkpoint, if it is one of a run of gradients.
            hours: Age of the objects.
            missing: Index of a file that is not written.
        """
        keys = CheckpointKeys(job)
        parts: list[Part] = []
        for number, body in enumerate(bodies):
            home = (homes or {}).get(body, step)
            parts.append(Part(step=home, digest=compute_digest(body), size=len(body)))
            if number != missing:
                self.put(keys.make_part_key(home, compute_digest(body)), body, hours=hours)
            if len(body) > BLOCK_SIZE:
                blocks = keys.make_block_list_key(home, compute_digest(body))
                self.put(blocks, hash_blocks(body), hours=hours)
        position = {} if window is None else {"window": window}
        checkpoint = Checkpoint(
            job=job, step=step, run="", position=position, notes={},
            saved=datetime(2026, 1, 1, tzinfo=UTC), root=compute_root(parts, {}),
            parts=tuple(parts), tensors={},
        )  # fmt: skip
        self.put_record(keys.make_metadata_key(step), add_digest(checkpoint), hours=hours)

    def put_pin(self, job: str, step: int) -> None:
        self.put_record(
            CheckpointKeys(job).make_pin_key(step), Pin(job=job, step=step, reason="mine")
        )

    def put_epoch(self, job: str, number: int, step: int) -> None:
        self.put_record(
            CheckpointKeys(job).make_epoch_key(number),
            EpochRecord(job=job, epoch=number, step=step, root=None),
        )

    def put_chain(
        self, run: str, version: str, windows: int, heads: dict[int, float], hours: float = 0
    ) -> None:
        """Write the chain of a run, and checkpoints of some windows.

        Args:
            run: Name of the run.
            version: Version of the run.
            windows: Number of windows.
            heads: Ages of the checkpoints in hours by their windows.
            hours: Age of the links and updates.
        """
        keys = ChainKeys(run, version)
        start = ChainStart(run=run, job=keys.job, step=0, root="", state="")
        self.put_record(keys.make_link_key(0), start, hours=hours)
        for window in range(1, windows + 1):
            body = f"{run} {version} {window}".encode()
            key = self.put(keys.make_update_key(window, compute_digest(body)), body, hours=hours)
            update = UpdateEntry(key=key, digest=compute_digest(body), size=len(body), tensors=0)
            link = ChainLink(
                run=run, window=window, step=window, updates=(update,), codec=Codec(), names=(),
                shapes=(), outer=OuterOptimizer(), merge=MergeSettings(), taken={}, excluded={},
                seconds=0.0, scores="", previous="", state="",
            )  # fmt: skip
            self.put_record(keys.make_link_key(window), link, hours=hours)
        for window, age in heads.items():
            body = f"{run} {version} weights {window}".encode()
            self.put_checkpoint(keys.job, window, [body], window=window, hours=age)

    def put_dataset(
        self,
        name: str,
        shards: int,
        *,
        is_complete: bool = True,
        orphans: int = 0,
        hours: float = 0,
    ) -> None:
        keys = DatasetKeys(name)
        source = SourceRecord(
            kind="jsonl", url="x", settings={}, files=0, size=0, digest=compute_digest(b"")
        )
        layout = ShardLayout(formats=("webdataset",), writer={}, shard_bytes=1, shard_samples=1)
        plan = DatasetPlan(
            dataset=name, source=source, layout=layout, seed=None, holdout=0, partition_bytes=1,
            partitions=(),
        )  # fmt: skip
        self.put_record(keys.plan, plan, hours=hours)
        digest = compute_digest(dump_canonical_json(plan.model_dump(mode="json")))
        for number in range(shards + orphans):
            shard = CommitName("train-00000", number)
            key = self.put(
                keys.make_shard_key("webdataset", "train", shard, "tar"),
                f"{name} {number}".encode(),
                hours=hours,
            )
            if number < shards:
                entry = ShardCommit(
                    partition="train-00000", number=number, shards=(
                        CommittedShard(
                            format="webdataset", key=key, size=1, digest=compute_digest(b"x")
                        ),
                    ),
                    samples=1, start_cursor=number, next_cursor=number + 1, plan_digest=digest,
                )  # fmt: skip
                self.put_record(keys.make_commit_key(shard), entry, hours=hours)
        if is_complete:
            manifest = Manifest(
                dataset=name, plan_digest=digest,
                formats=("webdataset",), shards=(), samples={}, size=0, quarantined=0,
            )  # fmt: skip
            self.put_record(keys.manifest, manifest, hours=hours)
