"""Make missing and damaged shards of a complete dataset again."""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from millrace import errors
from millrace.block_lists import join_shard_blocks
from millrace.dataset_ledger import iterate_commits
from millrace.datasets.formats.base import BadSampleError
from millrace.datasets.formats.webdataset import TarEncoder
from millrace.datasets.progress_events import ShardRepaired, ShardRepairStarted
from millrace.datasets.settings import PipelineSettings
from millrace.datasets.sources import BadRow, Source, SourceFiles, open_source
from millrace.datasets.verify import read_manifest, verify_dataset
from millrace.digest import compute_digest
from millrace.keys.datasets import DatasetKeys
from millrace.progress import Progress, ignore_event
from millrace.records import fetch
from millrace.schemas.dataset import DatasetPlan, Partition, ShardCommit, ShardLayout
from millrace.storage import Store, create, describe_difference, open_store, put


class LostShard(NamedTuple):
    """Committed shard that is missing from the store or has another size.

    Attributes:
        entry: Commit of the shard.
        reason: Short text about the difference.
    """

    entry: ShardCommit
    reason: str


@dataclass(frozen=True, slots=True)
class Repair:
    """Result of a repair.

    Attributes:
        shards: Number of shards that were verified.
        remade_keys: Keys of the shards that were made again, and the key of the digests of all
            blocks, if they were.
    """

    shards: int
    remade_keys: tuple[str, ...]


def repair_dataset(config: PipelineSettings, *, progress: Progress = ignore_event) -> Repair:
    """Verify a complete dataset, and make each shard again that is missing or damaged.

    A shard is made from the source by the pinned plan. A file is also read if it was written again
    since then, with another time or ETag. A shard is written only if its digest is that of the
    manifest. Intact objects are never replaced. The digests of all blocks are made from the ledger
    if they are at fault. Memory: one shard, and the memory of `verify_dataset`.

    Args:
        config: Settings that the dataset was made with.
        progress: Called for each shard verified, and before and after each shard made.

    Raises:
        NotFoundError: The dataset is not complete.
        ChangedError: The source no longer gives the same bytes.
        ConflictError: The ledger has no commit of a faulty shard.
        CorruptError: The ledger does not have the digests of all blocks.
    """
    store, keys = open_store(config.store), DatasetKeys(config.dataset)
    found = verify_dataset(store, config.dataset, progress=progress)
    if found.is_intact:
        return Repair(found.shards, ())
    plan = fetch(store, keys.plan, DatasetPlan)
    manifest = read_manifest(store, keys)
    manifest_shards = {shard.key: shard for shard in manifest.shards}
    entries = {entry.key: entry for entry in iterate_commits(store, keys) if entry.key}
    lost: list[LostShard] = []
    for fault in found.faults:
        entry = entries.get(fault.key)
        if entry is None:
            raise errors.ConflictError(
                f"{store.make_url(fault.key)} is {fault.reason}, and its commit is missing: it "
                "cannot be made again. Shard the source under another name."
            )
        shard = manifest_shards[fault.key]
        expected = entry.model_copy(update={"size": shard.size, "digest": shard.digest})
        lost.append(LostShard(expected, fault.reason))
    remake_shards(store, plan, config.source.open_files(plan.source.url), lost, progress=progress)
    remade = [fault.key for fault in found.faults]
    if found.block_digests_fault:
        put(store, keys.block_digests, join_shard_blocks(manifest, entries))
        remade.append(keys.block_digests)
    return Repair(found.shards, tuple(remade))


def remake_shards(
    store: Store,
    plan: DatasetPlan,
    files: SourceFiles,
    lost: Iterable[LostShard],
    *,
    progress: Progress = ignore_event,
) -> None:
    """Make shards again from the source. A shard must have the digest of its commit.

    Args:
        store: Store of the dataset.
        plan: Plan of the dataset.
        files: Files of the source.
        lost: Shards to make.
        progress: Called before and after each shard.

    Raises:
        ChangedError: The source no longer gives the same bytes.
    """
    source = open_source(plan.source, files, store, any_version=True)
    partitions = {partition.name: partition for partition in plan.partitions}
    for entry, reason in lost:
        key = str(entry.key)
        progress(ShardRepairStarted(key=key, reason=reason))
        _replace_shard(
            store,
            key,
            entry,
            _remake_shard(source, partitions[entry.partition], plan.layout, entry),
        )
        progress(ShardRepaired(key=key, size=entry.size))


def _remake_shard(
    source: Source, partition: Partition, layout: ShardLayout, entry: ShardCommit
) -> memoryview:
    encoder = TarEncoder(layout.shard_bytes)
    for row in source.iterate_rows(partition.source_range, entry.start_cursor):
        if not isinstance(row, BadRow):
            with contextlib.suppress(BadSampleError):  # the sample is quarantined
                encoder.add(row, max(layout.shard_bytes, entry.size))
        # Stop before the next row is read, since the next row may be as large as this row.
        if row.next_cursor >= entry.next_cursor or encoder.samples == entry.samples:
            break
    return encoder.close()


def _replace_shard(store: Store, key: str, entry: ShardCommit, data: memoryview) -> None:
    """Write a shard that has the digest of its commit. An object that is intact by now stays."""
    if compute_digest(data) != entry.digest:
        raise errors.ChangedError(
            f"{store.make_url(key)} cannot be made again: the source has other bytes now. "
            "Nothing was replaced. Restore the source as it was when the dataset was planned."
        )
    try:
        create(store, key, data)
    except errors.ExistsError:
        if describe_difference(store, key, entry.size, entry.digest):
            put(store, key, data)
