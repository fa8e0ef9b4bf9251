"""Make the shards of a complete dataset again that are missing or damaged."""

import contextlib
from dataclasses import dataclass

from millrace import errors
from millrace.digest import sha256
from millrace.formats.base import BadSampleError
from millrace.formats.webdataset import TarEncoder
from millrace.keys import DatasetKeys
from millrace.models.dataset import Layout, ManifestShard, Plan, ShardCommit, Split
from millrace.models.ledger import ledger
from millrace.progress import Event, Progress, silent
from millrace.records import fetch
from millrace.shards.settings import PipelineSettings
from millrace.shards.verify import sealed, verify
from millrace.sources import BadRow, Source, open_source
from millrace.storage import Store, create, difference, open_store, put


@dataclass(frozen=True, slots=True)
class Repair:
    """Result of a repair.

    Attributes:
        shards: Number of shards that were verified.
        made: Keys of the shards that were made again.
    """

    shards: int
    made: tuple[str, ...]


def repair_dataset(config: PipelineSettings, *, progress: Progress = silent) -> Repair:
    """Verify a complete dataset, and make each shard again that is missing or damaged.

    A shard is made from the source by the pinned plan. It is written only if its SHA-256 is that
    of the manifest; a damaged object is replaced only then, and a good one never. Memory: one
    shard, and what `verify` takes.

    Args:
        config: The settings that the dataset was made with.
        progress: Called for each shard verified, and before and after each shard made.

    Raises:
        NotFoundError: The dataset is not complete.
        ChangedError: The source no longer gives the same bytes.
        ConflictError: The ledger does not have the shard.
    """
    store, keys = open_store(config.store), DatasetKeys(config.dataset)
    found = verify(store, config.dataset, progress=progress)
    if found.good:
        return Repair(found.shards, ())
    plan = fetch(store, keys.plan, Plan)
    source_store = open_store(config.source.store, make_folder=False)
    source = open_source(plan.source, source_store, store)
    splits = {split.name: split for split in plan.splits}
    shards = {shard.key: shard for shard in sealed(store, keys).shards}
    entries = {entry.key: entry for entry in ledger(store, keys)}
    made: list[str] = []
    for fault in found.faults:
        entry = entries.get(fault.key)
        if entry is None:
            raise errors.ConflictError(
                f"{store.url_of(fault.key)} is {fault.reason}, and its commit is missing: it "
                "cannot be made again. Shard the source under another name."
            )
        progress(Event("shard.repairing", fault.key, {"why": fault.reason}))
        data = _made_again(source, splits[entry.split], plan.layout, entry)
        _replace(store, shards[fault.key], data)
        progress(Event("shard.repaired", fault.key, {"bytes": len(data)}))
        made.append(fault.key)
    return Repair(found.shards, tuple(made))


def _made_again(source: Source, split: Split, layout: Layout, entry: ShardCommit) -> memoryview:
    encoder = TarEncoder(layout.shard_bytes)
    for row in source.rows(split.piece, entry.start):
        if row.next > entry.next or encoder.samples == entry.samples:
            break
        if not isinstance(row, BadRow):
            with contextlib.suppress(BadSampleError):  # it was put aside
                encoder.add(row, max(layout.shard_bytes, entry.size))
    return encoder.close()


def _replace(store: Store, shard: ManifestShard, data: memoryview) -> None:
    """Write a shard whose bytes are proven; an object that is good by now stays."""
    if sha256(data) != shard.sha256:
        raise errors.ChangedError(
            f"{store.url_of(shard.key)} cannot be made again: the source gives other bytes now. "
            "Nothing was replaced. Put the source back as it was when the dataset was planned."
        )
    try:
        create(store, shard.key, data, sha256=shard.sha256)
    except errors.ExistsError:
        if difference(store, shard.key, shard.size, shard.sha256):
            put(store, shard.key, data)
