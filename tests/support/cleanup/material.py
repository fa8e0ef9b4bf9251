"""Buckets to clean: every kind of object, written as those who use them would."""

import os
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from millrace.checkpoints.find import add_digest, compute_root
from millrace.digest import BLOCK_SIZE, compute_digest, dump_canonical_json, get_hex, hash_blocks
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.datasets import DatasetKeys, ShardName
from millrace.keys.gradients import ChainKeys, GradientKeys
from millrace.keys.leases import LeaseKeys
from millrace.lease import Holder, LeaseTerm
from millrace.records import commit_once, encode_record
from millrace.schemas.chain import ChainLink, ChainStart, OuterOptimizer, UpdateEntry
from millrace.schemas.checkpoint import Checkpoint, EpochRecord, Part, Pin
from millrace.schemas.dataset import DatasetPlan, Manifest, ShardCommit, ShardLayout, SourceRecord
from millrace.schemas.gradient import Codec
from millrace.schemas.merge import MergeSettings
from millrace.storage import Store, put

ELSEWHERE = Holder(id="elsewhere", host="elsewhere", machine="elsewhere", pid=1, started="1")


def compute_hex_digest(body: bytes) -> str:
    return get_hex(compute_digest(body))


@dataclass
class Place:
    """A store that is filled, each object with its age where the store is a folder.

    Attributes:
        store: Which.
        pool: Where there are many objects: threads that write them.
    """

    store: Store
    pool: Executor | None = None
    _writing: list[Future[None]] = field(default_factory=list)

    def put(self, key: str, body: bytes = b"x", *, hours: float = 0) -> str:
        if self.pool is not None:
            self._writing.append(self.pool.submit(put, self.store, key, body))
            return key
        put(self.store, key, body)
        return self.set_age(key, hours)

    def settle(self) -> None:
        """Wait until all is written."""
        for one in self._writing:
            one.result()
        self._writing.clear()

    def put_record(self, key: str, record, *, hours: float = 0) -> str:
        return self.put(key, encode_record(record, "nonce"), hours=hours)

    def set_age(self, key: str, hours: float) -> str:
        if hours:
            path = Path(self.store.location.bucket) / key
            then = (datetime.now(UTC) - timedelta(hours=hours)).timestamp()
            os.utime(path, (then, then))
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
        """A lease that another machine holds for an hour from now, or has given back."""
        keys = LeaseKeys(scope, name)
        term = LeaseTerm(holder=ELSEWHERE, ttl=timedelta(hours=1))
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
        """A checkpoint of files; those of `homes` lie in an earlier step's folder."""
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
        made = Checkpoint(
            job=job, step=step, run="", position=position, notes={},
            saved=datetime(2026, 1, 1, tzinfo=UTC), root=compute_root(parts, {}),
            parts=tuple(parts), tensors={},
        )  # fmt: skip
        self.put_record(keys.make_metadata_key(step), add_digest(made), hours=hours)

    def put_pin(self, job: str, step: int) -> None:
        self.put_record(CheckpointKeys(job).make_pin_key(step), Pin(job=job, step=step, why="mine"))

    def put_epoch(self, job: str, number: int, step: int) -> None:
        self.put_record(
            CheckpointKeys(job).make_epoch_key(number),
            EpochRecord(job=job, epoch=number, step=step, root=None),
        )

    def put_chain(
        self, run: str, version: str, windows: int, heads: dict[int, float], hours: float = 0
    ) -> None:
        """A run of so many windows, with checkpoints after some of them; `heads`: their ages."""
        keys = ChainKeys(run, version)
        start = ChainStart(run=run, job=keys.job, step=0, root="", state="")
        self.put_record(keys.make_link_key(0), start, hours=hours)
        for window in range(1, windows + 1):
            body = f"{run} {version} {window}".encode()
            key = self.put(keys.make_update_key(window, compute_digest(body)), body, hours=hours)
            update = UpdateEntry(key=key, digest=compute_digest(body), size=len(body), tensors=0)
            link = ChainLink(
                run=run, window=window, step=window, updates=(update,), codec=Codec(), names=(),
                shapes=(), outer=OuterOptimizer(), merge=MergeSettings(), taken={}, out={},
                seconds=0.0, previous="", state="",
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
        layout = ShardLayout(format="webdataset", writer={}, shard_bytes=1, shard_samples=1)
        plan = DatasetPlan(
            dataset=name, source=source, layout=layout, seed=None, holdout=0, partition_bytes=1,
            partitions=(),
        )  # fmt: skip
        self.put_record(keys.plan, plan, hours=hours)
        digest = compute_digest(dump_canonical_json(plan.model_dump(mode="json")))
        for n in range(shards + orphans):
            shard = ShardName("train-00000", n)
            key = self.put(keys.make_shard_key(shard, "tar"), f"{name} {n}".encode(), hours=hours)
            if n < shards:
                entry = ShardCommit(
                    partition="train-00000", number=n, key=key, size=1,
                    digest=compute_digest(b"x"), samples=1, start_cursor=n, next_cursor=n + 1,
                    plan_digest=digest,
                )  # fmt: skip
                self.put_record(keys.make_commit_key(shard), entry, hours=hours)
        if is_complete:
            manifest = Manifest(
                dataset=name, plan_digest=digest,
                format="webdataset", shards=(), samples={}, size=0, quarantined=0,
            )  # fmt: skip
            self.put_record(keys.manifest, manifest, hours=hours)
