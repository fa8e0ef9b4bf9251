"""Finalize a dataset: make the manifest from the ledger after all partitions have ended."""

from dataclasses import dataclass, field

from millrace import errors
from millrace.block_lists import ShardBlockList
from millrace.dataset_ledger import iterate_commits, iterate_partition_ledgers
from millrace.datasets.indexes import make_indexes
from millrace.datasets.partition import check_contiguous
from millrace.datasets.plan import check_still_committed
from millrace.datasets.plan_digest import check_plan_digest, compute_plan_digest
from millrace.datasets.progress_events import (
    BlockDigestsUploaded,
    IndexUploaded,
    ManifestCommitted,
    ManifestComputed,
)
from millrace.datasets.quarantine import QuarantineLimit
from millrace.datasets.repair import LostShard, remake_shards
from millrace.datasets.sources import SourceFiles
from millrace.keys.datasets import DatasetKeys
from millrace.progress import Progress
from millrace.records import commit_same, fetch
from millrace.schemas.dataset import (
    DatasetPlan,
    Manifest,
    ManifestShard,
    PartitionEnd,
    ShardCommit,
    count_source_rows,
)
from millrace.storage import Store, list_objects, put


def finalize_dataset(
    store: Store,
    keys: DatasetKeys,
    plan: DatasetPlan,
    *,
    files: SourceFiles,
    limit: QuarantineLimit,
    progress: Progress,
) -> Manifest:
    """Write the digests of all blocks and the indexes of the formats, and commit the manifest.

    A run that removes a replaced plan may be suspended meanwhile. Then that run may delete shards
    that were committed afterwards. So this function lists the shards once, and compares them with
    the ledger. It makes lost shards again.

    The ledger is read partition by partition. Memory: about 1 KiB for each shard, with the plan.

    Args:
        store: Store of the dataset.
        keys: Names of the dataset.
        plan: Plan of the dataset.
        files: Files of the source. They are read only if the store lacks committed shards.
        limit: Limit on the quarantined rows, which is enforced before the first write.
        progress: Called at each boundary.

    Raises:
        QuarantineError: More rows were quarantined than allowed, or there are no samples.
        ChangedError: A shard is lost, and the source no longer gives the same bytes.
        ConflictError: The ledger has gaps, or another manifest was committed.
        CorruptError: The digests of blocks in a commit do not fit the shard.
    """
    ledger = _read_ledger(store, keys, plan)
    limit.check(
        samples=sum(ledger.samples.values()),
        rows=ledger.rows,
        bad_rows=ledger.bad_rows,
        dropped=ledger.dropped,
    )
    check_still_committed(store, keys, plan)
    if lost := _find_lost_shards(store, keys, ledger.shards):
        remake_shards(store, plan, files, lost, progress=progress)
    manifest = ledger.make_manifest(keys, plan)
    progress(ManifestComputed(key=keys.manifest, shards=len(manifest.shards)))
    put(store, keys.block_digests, bytes(ledger.blocks.content))
    progress(BlockDigestsUploaded(key=keys.block_digests))
    for key, body in make_indexes(manifest).items():
        put(store, key, body)
        progress(IndexUploaded(key=key))
    manifest = commit_same(store, keys.manifest, manifest).record
    progress(
        ManifestCommitted(
            key=keys.manifest,
            shards=len(manifest.shards),
            size=manifest.size,
            samples=manifest.samples,
        )
    )
    return manifest


@dataclass(slots=True)
class _LedgerTotals:
    """Contents of the ledger that the manifest and the digests of all blocks are made of.

    Attributes:
        plan_digest: Digest of the plan.
        is_reproducible: Whether every read of the source gives the same samples.
        samples: Number of samples by split.
        shards: Shards of all formats, in the order of their commits.
        blocks: Digests of the blocks of these shards.
        size: Bytes of these shards.
        quarantined: Number of quarantined rows.
        dropped: Number of rows that transforms dropped.
        rows: Number of rows of the source.
        bad_rows: Quarantined rows of the source; may be a fraction, as in `ShardCommit`.
    """

    plan_digest: str
    is_reproducible: bool
    samples: dict[str, int]
    shards: list[ManifestShard] = field(default_factory=list[ManifestShard])
    blocks: ShardBlockList = field(default_factory=ShardBlockList)
    size: int = 0
    quarantined: int = 0
    dropped: int = 0
    rows: int = 0
    bad_rows: float = 0.0

    def add(self, commits: list[ShardCommit], end: PartitionEnd, split: str) -> None:
        """Add the commits of a partition.

        Raises:
            ConflictError: The partition has commits of another plan, or lacks commits.
            CorruptError: The digests of blocks in a commit do not fit the shard.
        """
        check_plan_digest([*commits, end], self.plan_digest)
        if not self.is_reproducible:
            commits = commits[: end.commits]  # a run that was overtaken may have made later ones
        check_contiguous(commits, end.partition)
        samples = sum(commit.samples for commit in commits)
        if len(commits) != end.commits or samples != end.samples:
            raise errors.ConflictError(
                f"The ledger of {end.partition} has {len(commits)} commits, and its end record "
                f"names {end.commits}: commits were deleted. Shard the source under another name."
            )
        for commit in commits:
            for shard in commit.shards:
                self.blocks.add(shard)
                self.shards.append(
                    ManifestShard(
                        format=shard.format,
                        key=shard.key,
                        split=split,
                        samples=commit.samples,
                        size=shard.size,
                        digest=shard.digest,
                        sample_offsets=shard.sample_offsets,
                    )
                )
        self.samples[split] += samples
        self.size += sum(commit.size for commit in commits)
        self.quarantined += sum(commit.quarantined for commit in commits)
        self.dropped += end.dropped
        rows, bad_rows = count_source_rows(end)
        self.rows += rows
        self.bad_rows += bad_rows

    def make_manifest(self, keys: DatasetKeys, plan: DatasetPlan) -> Manifest:
        """Return the manifest of the dataset."""
        return Manifest(
            dataset=keys.dataset,
            plan_digest=self.plan_digest,
            formats=plan.layout.formats,
            fields=plan.layout.fields,
            shards=tuple(self.shards),
            samples=self.samples,
            size=self.size,
            quarantined=self.quarantined,
            dropped=self.dropped,
        )


def _read_ledger(store: Store, keys: DatasetKeys, plan: DatasetPlan) -> _LedgerTotals:
    """Read the ledger, and check it against the plan.

    Raises:
        NotFoundError: A partition has no end.
        ConflictError: The ledger has gaps, or commits of another plan.
        CorruptError: Records are damaged.
    """
    splits = {partition.name: partition.split for partition in plan.partitions}
    totals = _LedgerTotals(
        compute_plan_digest(plan),
        plan.source.is_reproducible,
        dict.fromkeys(sorted({*splits.values()}), 0),
    )
    fault: errors.MillraceError | None = None
    for ledger in iterate_partition_ledgers(store, keys):
        split = splits.pop(ledger.partition, None)
        try:
            if split is None:
                check_plan_digest(ledger.commits, totals.plan_digest)
            else:
                end = ledger.end or fetch(store, keys.make_end_key(ledger.partition), PartitionEnd)
                totals.add(ledger.commits, end, split)
        except (errors.ConflictError, errors.NotFoundError) as error:
            fault = fault or error  # a damaged record leaves a gap, and is named instead
    if fault:
        raise fault
    for name in splits:  # a partition without any record
        fetch(store, keys.make_end_key(name), PartitionEnd)
    return totals


def _find_lost_shards(
    store: Store, keys: DatasetKeys, shards: list[ManifestShard]
) -> list[LostShard]:
    """Return the committed shards that are missing or have another size.

    One listing. If shards are lost, their commits are read again.
    """
    missing = {shard.key: shard.size for shard in shards}
    reasons: dict[str, str] = {}
    for stat in list_objects(store, keys.shards):
        size = missing.pop(stat.key, stat.size)
        if stat.size != size:
            reasons[stat.key] = f"has {stat.size} bytes, not {size}"
    reasons |= dict.fromkeys(missing, "missing")
    if not reasons:
        return []
    return [
        LostShard(entry, shard, reasons[shard.key])
        for entry in iterate_commits(store, keys)
        for shard in entry.shards
        if shard.key in reasons
    ]
