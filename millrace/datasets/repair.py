"""Make missing and damaged shards of a complete dataset again."""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from millrace import errors
from millrace.block_lists import join_shard_blocks
from millrace.dataset_ledger import fetch_plan, iterate_commits, read_manifest
from millrace.datasets.card import make_card, write_card
from millrace.datasets.formats import BadSampleError
from millrace.datasets.formats.shard_set import ShardSet
from millrace.datasets.indexes import make_indexes
from millrace.datasets.progress_events import ShardRepaired, ShardRepairStarted
from millrace.datasets.settings import PipelineSettings
from millrace.datasets.sources import BadRow, SourceFiles
from millrace.datasets.transforms import (
    TransformedSource,
    list_transform_changes,
    open_transformed_source,
    record_transforms,
)
from millrace.datasets.transforms.base import IMPURE_FUNCTION
from millrace.datasets.verify import ShardFault, verify_dataset
from millrace.datasets.writers import describe_writers
from millrace.digest import compute_digest
from millrace.formatting import format_count
from millrace.keys.datasets import DatasetKeys
from millrace.progress import Progress, ignore_event
from millrace.records import fetch
from millrace.schemas.dataset import (
    CommittedShard,
    DatasetCard,
    DatasetPlan,
    Partition,
    ShardCommit,
    ShardLayout,
)
from millrace.storage import Store, create, describe_difference, open_store, put


class LostShard(NamedTuple):
    """Committed shard that is missing from the store or has another size.

    Attributes:
        entry: Commit of the shard.
        shard: The shard.
        reason: Short text about the difference.
    """

    entry: ShardCommit
    shard: CommittedShard
    reason: str


@dataclass(frozen=True, slots=True)
class Repair:
    """Result of a repair.

    Attributes:
        shards: Number of shards that were verified.
        remade_keys: Keys of the shards and of other objects that were made again.
        strays: Objects in the folders of the shards that the manifest does not name. They stay.
    """

    shards: int
    remade_keys: tuple[str, ...]
    strays: tuple[ShardFault, ...] = ()


def repair_dataset(settings: PipelineSettings, *, progress: Progress = ignore_event) -> Repair:
    """Verify a complete dataset, and make each shard again that is missing or damaged.

    A shard is made from the source by the committed plan. A file is also read if it was written
    again since then, with another time or ETag. A shard is written only if it has the digest of
    the manifest. Intact objects are never replaced. If they are at fault, the digests of all blocks
    are made from the ledger, and the indexes and the dataset card from the manifest. Memory: one
    shard of each format, and the memory of `verify_dataset`.

    Args:
        settings: Settings that the dataset was made with.
        progress: Called for each shard verified, and before and after each shard made.

    Raises:
        NotFoundError: The dataset is not complete.
        ConfigurationError: The records under this name are those of a dataset with another name.
        ChangedError: The source no longer gives the same bytes, or is a list of URLs.
        ConflictError: The ledger has no commit of a faulty shard, the plan has other transforms
            than the settings, other versions of the plan's writers give other bytes, or only the
            settings of a dataset card can make it again, and there are none.
        CorruptError: The ledger does not have the digests of all blocks.
    """
    store, keys = open_store(settings.store), DatasetKeys(settings.dataset)
    found = verify_dataset(store, settings.dataset, progress=progress)
    if not (found.faults or found.other_faults):
        return Repair(found.shards, (), found.strays)
    plan = fetch_plan(store, keys)
    _check_transforms(plan, settings, store)
    manifest = read_manifest(store, keys)
    manifest_shards = {shard.key: shard for shard in manifest.shards}
    committed = {
        shard.key: (entry, shard)
        for entry in iterate_commits(store, keys)
        for shard in entry.shards
    }
    lost: list[LostShard] = []
    for fault in found.faults:
        if fault.key not in committed:
            raise errors.ConflictError(
                f"{store.make_url(fault.key)} is {fault.reason}, and its commit is missing: it "
                "cannot be made again. Shard the source under another name."
            )
        entry, shard = committed[fault.key]
        named = manifest_shards[fault.key]
        expected = replace(shard, size=named.size, digest=named.digest)
        lost.append(LostShard(entry, expected, fault.reason))
    remake_shards(store, plan, settings.source.open_files(plan.source), lost, progress=progress)
    remade = [fault.key for fault in found.faults]
    indexes = make_indexes(manifest)
    for fault in found.other_faults:
        if fault.key == keys.block_digests:
            shards = {key: shard for key, (_, shard) in committed.items()}
            put(store, fault.key, join_shard_blocks(manifest, shards))
        elif fault.key in {keys.card, keys.readme}:
            write_card(store, _find_card(store, keys, plan, settings), manifest)
        else:
            put(store, fault.key, indexes[fault.key])
        remade.append(fault.key)
    return Repair(found.shards, tuple(remade), found.strays)


def _find_card(
    store: Store, keys: DatasetKeys, plan: DatasetPlan, settings: PipelineSettings
) -> DatasetCard:
    """Return the record of a card, from the settings or else from the store.

    Raises:
        ConflictError: The settings have no card, and the record cannot be read.
    """
    if settings.card:
        return make_card(settings.card, plan)
    try:
        return fetch(store, keys.card, DatasetCard)
    except errors.CorruptError:
        raise errors.ConflictError(
            f"{store.make_url(keys.card)} cannot be read. Add `card` to the settings, and the "
            "repair writes the dataset card again."
        ) from None


def _check_transforms(plan: DatasetPlan, settings: PipelineSettings, store: Store) -> None:
    """Check that a plan has the transforms of the settings, since their code is run.

    Raises:
        ConflictError: The plan has other transforms.
    """
    proposed = record_transforms(
        settings.sharding.transforms,
        DatasetKeys(settings.dataset),
        seed=settings.sharding.seed,
        dataset_store=store,
        allow_private=settings.source.allow_private,
    ).record
    if changes := list_transform_changes(plan.source.settings.get("transforms", {}), proposed):
        raise errors.ConflictError(
            f"The dataset {settings.dataset} was planned with other settings: "
            f"{', '.join(changes)}. Repair it with those."
        )


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
        ChangedError: The source no longer gives the same bytes, or never gives them twice.
        ConflictError: Other versions of the plan's writers give other bytes.
    """
    lost = list(lost)
    if lost and not plan.source.is_reproducible:
        raise errors.ChangedError(
            f"{format_count(len(lost), 'shard')} of {plan.dataset} cannot be made again "
            f"({store.make_url(lost[0].shard.key)}: {lost[0].reason}), since another download of "
            "the URLs may give other bytes. Nothing was replaced. Restore the objects from a copy, "
            "or shard the list of URLs under another dataset name."
        )
    source = open_transformed_source(
        plan.source, files, store, types=plan.layout.fields, any_version=True
    )
    partitions = {partition.name: partition for partition in plan.partitions}
    by_commit: dict[tuple[str, int], list[LostShard]] = {}
    for one in lost:
        by_commit.setdefault((one.entry.partition, one.entry.number), []).append(one)
    for together in by_commit.values():
        entry = together[0].entry
        for one in together:
            progress(ShardRepairStarted(key=one.shard.key, reason=one.reason))
        remade = _remake_shards(source, partitions[entry.partition], plan.layout, entry)
        for one in together:
            _replace_shard(
                store,
                plan,
                one.shard,
                remade[one.shard.format],
                calls_functions=source.calls_functions,
            )
            progress(ShardRepaired(key=one.shard.key, size=one.shard.size))


def _remake_shards(
    source: TransformedSource, partition: Partition, layout: ShardLayout, entry: ShardCommit
) -> dict[str, memoryview]:
    """Return the shards of a commit by their formats."""
    shards = ShardSet(layout)
    for row in source.iterate_rows(partition.source_range, *entry.start_position):
        if not isinstance(row, BadRow):
            with contextlib.suppress(BadSampleError):  # the sample is quarantined
                shards.add(row, layout.shard_bytes)
        # Stop before the next row is read, since the next row may be as large as this row.
        position = row.next_cursor, row.next_skip
        if position >= entry.next_position or shards.samples == entry.samples:
            break
    return dict(zip(layout.formats, shards.close(), strict=True))


def _replace_shard(
    store: Store,
    plan: DatasetPlan,
    shard: CommittedShard,
    data: memoryview,
    *,
    calls_functions: bool,
) -> None:
    """Write a shard that has the digest of its commit. An object that is intact by now stays."""
    key = shard.key
    if compute_digest(data) != shard.digest:
        writers = describe_writers(
            plan.dataset, plan.layout, plan.source.kind, plan.partitions[0], [shard.format]
        )
        if writers:
            raise errors.ConflictError(
                f"{store.make_url(key)} has other bytes if it is made again, and was not replaced. "
                f"{writers} to repair it."
            )
        reason = "the source has other bytes now"
        advice = "Restore the source as it was when the dataset was planned."
        if calls_functions:
            reason += f", or {IMPURE_FUNCTION}"
            advice += (
                " What such a function made cannot be made again: restore the shard from a copy, "
                "or correct the function, and shard the source under another dataset name."
            )
        raise errors.ChangedError(
            f"{store.make_url(key)} cannot be made again: {reason}. It was not replaced. {advice}"
        )
    try:
        create(store, key, data)
    except errors.ExistsError:
        if describe_difference(store, key, shard.size, shard.digest):
            put(store, key, data)
