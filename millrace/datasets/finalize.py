"""Finalize a dataset: make the manifest from the ledger after all partitions have ended."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from millrace import errors
from millrace.block_lists import join_shard_blocks
from millrace.dataset_ledger import iterate_commits
from millrace.datasets.indexes import make_indexes
from millrace.datasets.partition import check_contiguous
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
    Partition,
    PartitionEnd,
    ShardCommit,
)
from millrace.storage import Store, list_objects, put

_CONCURRENCY = 32  # concurrent reads of the ends of partitions


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
    entries = sorted(iterate_commits(store, keys), key=lambda e: (e.partition, e.number))
    ends = _read_ends(store, keys, plan)
    check_plan_digest([*entries, *ends], compute_plan_digest(plan))
    _check_ledger(entries, ends)
    limit.check(entries)
    _check_still_pinned(store, keys, plan)
    if lost := find_lost_shards(store, keys, entries):
        remake_shards(store, plan, files, lost, progress=progress)
    manifest = _make_manifest(keys, plan, entries)
    progress(ManifestComputed(key=keys.manifest, shards=len(manifest.shards)))
    committed = {shard.key: shard for entry in entries for shard in entry.shards}
    put(store, keys.block_digests, join_shard_blocks(manifest, committed))
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


def find_lost_shards(
    store: Store, keys: DatasetKeys, entries: Iterable[ShardCommit]
) -> list[LostShard]:
    """Return the committed shards that are missing or have another size. One listing."""
    missing = {shard.key: (entry, shard) for entry in entries for shard in entry.shards}
    damaged: list[LostShard] = []
    for stat in list_objects(store, keys.shards):
        entry, shard = missing.pop(stat.key, (None, None))
        if entry and shard and stat.size != shard.size:
            damaged.append(LostShard(entry, shard, f"has {stat.size} bytes, not {shard.size}"))
    return [*damaged, *(LostShard(*one, "missing") for one in missing.values())]


def _read_ends(store: Store, keys: DatasetKeys, plan: DatasetPlan) -> list[PartitionEnd]:
    """Return the end of each partition of the plan.

    Raises:
        NotFoundError: A partition has no end.
    """

    def read_end(partition: Partition) -> PartitionEnd:
        return fetch(store, keys.make_end_key(partition.name), PartitionEnd)

    ends: list[PartitionEnd] = []
    partitions = iter(plan.partitions)
    with ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="ends") as pool:
        while batch := list(islice(partitions, _CONCURRENCY * 8)):
            ends += pool.map(read_end, batch)
    return ends


def _check_still_pinned(store: Store, keys: DatasetKeys, plan: DatasetPlan) -> None:
    """Refuse to complete a dataset whose plan was replaced after this run had read it.

    A run that replaces a plan deletes the plan first, and then looks for commits. All commits of
    this plan are made by now. So either this run finds that the plan is deleted, or the other run
    finds the commits.
    """
    try:
        pinned = fetch(store, keys.plan, DatasetPlan)
    except errors.NotFoundError:
        pinned = None
    if pinned != plan:
        raise errors.ConflictError(
            f"{keys.dataset}: another run has replaced the plan meanwhile. Run it again."
        )


def _check_ledger(entries: list[ShardCommit], ends: list[PartitionEnd]) -> None:
    by_partition: dict[str, list[ShardCommit]] = {end.partition: [] for end in ends}
    for entry in entries:
        by_partition.setdefault(entry.partition, []).append(entry)
    for end in ends:
        own = by_partition[end.partition]
        check_contiguous(own, end.partition)
        if len(own) != end.commits or sum(entry.samples for entry in own) != end.samples:
            raise errors.ConflictError(
                f"The ledger of {end.partition} has {len(own)} commits, and its end record names "
                f"{end.commits}: commits were deleted. Shard the source under another name."
            )


def _make_manifest(keys: DatasetKeys, plan: DatasetPlan, entries: list[ShardCommit]) -> Manifest:
    splits = {partition.name: partition.split for partition in plan.partitions}
    samples = dict.fromkeys(sorted(set(splits.values())), 0)
    for entry in entries:
        samples[splits[entry.partition]] += entry.samples
    return Manifest(
        dataset=keys.dataset,
        plan_digest=compute_plan_digest(plan),
        formats=plan.layout.formats,
        fields=plan.layout.fields,
        shards=tuple(
            ManifestShard(
                format=shard.format,
                key=shard.key,
                split=splits[entry.partition],
                samples=entry.samples,
                size=shard.size,
                digest=shard.digest,
            )
            for entry in entries
            for shard in entry.shards
        ),
        samples=samples,
        size=sum(entry.size for entry in entries),
        quarantined=sum(entry.quarantined for entry in entries),
    )
