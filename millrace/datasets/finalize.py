"""The seal: a manifest made from the ledger, when every split has ended."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import orjson

from millrace import errors
from millrace.datasets.partition import check_plan, check_whole
from millrace.digest import dump_canonical_json, sha256
from millrace.keys import DatasetKeys
from millrace.progress import Event, Progress
from millrace.records import commit_same, fetch
from millrace.schemas.dataset import (
    DatasetPlan,
    Manifest,
    ManifestShard,
    ShardCommit,
    Split,
    SplitEnd,
)
from millrace.schemas.ledger import iterate_commits
from millrace.storage import Store, list_objects, put


class LostShard(NamedTuple):
    """A shard that is committed, and that the store does not have as it was committed."""

    entry: ShardCommit
    reason: str


def seal(
    store: Store,
    keys: DatasetKeys,
    plan: DatasetPlan,
    progress: Progress,
    *,
    check: Callable[[Iterable[ShardCommit]], None] = lambda _: None,
    remake: Callable[[Iterable[LostShard]], None],
) -> Manifest:
    """Commit the manifest, and write the index that readers of WebDataset know.

    A run that removed a replaced plan, and was suspended meanwhile, may have deleted shards that
    were committed afterwards. So the shards are listed once, and compared with the ledger.

    Args:
        store: Store of the dataset.
        keys: Names of the dataset.
        plan: The dataset's plan.
        progress: Called at each boundary.
        check: Called with the ledger before anything is written; what it raises prevents that.
        remake: Called with the committed shards that the store has not, if there are any; it makes
            them again.

    Raises:
        ConflictError: The ledger is not whole, or another manifest is there.
    """
    entries = sorted(iterate_commits(store, keys), key=lambda e: (e.split, e.n))
    with ThreadPoolExecutor(32) as pool:

        def end(split: Split) -> SplitEnd:
            return fetch(store, keys.end(split.name), SplitEnd)

        ends = list(pool.map(end, plan.splits))
    check_plan([*entries, *ends], plan_digest(plan))
    _check(entries, ends)
    check(entries)
    _check_still_pinned(store, keys, plan)
    if lost := find_lost(store, keys, entries):
        remake(lost)
    manifest = _manifest(keys, plan, entries)
    progress(Event("manifest.sealing", keys.manifest, {"shards": len(manifest.shards)}))
    put(store, keys.index, wids_index(manifest, keys))
    progress(Event("index.put", keys.index))
    sealed = commit_same(store, keys.manifest, manifest).record
    progress(
        Event(
            "manifest.sealed",
            keys.manifest,
            {"shards": len(sealed.shards), "bytes": sealed.size, **sealed.samples},
        )
    )
    return sealed


def find_lost(store: Store, keys: DatasetKeys, entries: Iterable[ShardCommit]) -> list[LostShard]:
    """Return the committed shards that the store has not, or has in another size. One listing."""
    missing = {entry.key: entry for entry in entries if entry.key is not None}
    damaged: list[LostShard] = []
    for stat in list_objects(store, keys.shards):
        entry = missing.pop(stat.key, None)
        if entry is not None and stat.size != entry.size:
            damaged.append(LostShard(entry, f"has {stat.size} bytes, not {entry.size}"))
    return [*damaged, *(LostShard(entry, "missing") for entry in missing.values())]


def wids_index(manifest: Manifest, keys: DatasetKeys) -> bytes:
    """Return the shards as webdataset's index files list them (wids-shard-index-v1).

    URLs are relative to the index. Our digests are SHA-256; there is no ``md5sum``.
    """
    shards = [
        {
            "url": shard.key.removeprefix(f"{keys.dataset}/"),
            "nsamples": shard.samples,
            "filesize": shard.size,
            "sha256": shard.sha256,
        }
        for shard in manifest.shards
    ]
    index = {
        "__kind__": "wids-shard-index-v1",
        "wids_version": 1,
        "name": manifest.dataset,
        "shardlist": shards,
    }
    return orjson.dumps(index, option=orjson.OPT_INDENT_2)


def plan_digest(plan: DatasetPlan) -> str:
    """SHA-256 of a plan: which one a manifest was made by."""
    return sha256(dump_canonical_json(plan.model_dump(mode="json")))


def _check_still_pinned(store: Store, keys: DatasetKeys, plan: DatasetPlan) -> None:
    """Refuse to complete a dataset whose plan was replaced since this run has read it.

    A plan is replaced only after its deletion, if there are no commits then. All commits of this
    plan are made by now: so either this finds that it was deleted, or the other finds them.
    """
    try:
        pinned = fetch(store, keys.plan, DatasetPlan)
    except errors.NotFoundError:
        pinned = None
    if pinned != plan:
        raise errors.ConflictError(
            f"{keys.dataset}: another run has replaced the plan meanwhile. Run it again."
        )


def _check(entries: list[ShardCommit], ends: list[SplitEnd]) -> None:
    by_split: dict[str, list[ShardCommit]] = {end.split: [] for end in ends}
    for entry in entries:
        by_split.setdefault(entry.split, []).append(entry)
    for end in ends:
        own = by_split[end.split]
        check_whole(own, end.split)
        if len(own) != end.commits or sum(entry.samples for entry in own) != end.samples:
            raise errors.ConflictError(
                f"The ledger of {end.split} is not what its end says ({len(own)} commits of "
                f"{end.commits}): somebody deleted from it. Shard it under another name."
            )


def _manifest(keys: DatasetKeys, plan: DatasetPlan, entries: list[ShardCommit]) -> Manifest:
    partitions = {split.name: split.partition for split in plan.splits}
    samples = dict.fromkeys(sorted(set(partitions.values())), 0)
    for entry in entries:
        samples[partitions[entry.split]] += entry.samples
    return Manifest(
        dataset=keys.dataset,
        plan=plan_digest(plan),
        format=plan.layout.format,
        shards=tuple(
            ManifestShard(
                key=entry.key,
                partition=partitions[entry.split],
                samples=entry.samples,
                size=entry.size,
                sha256=entry.sha256,
            )
            for entry in entries
            if entry.key is not None
        ),
        samples=samples,
        size=sum(entry.size for entry in entries),
        quarantined=sum(entry.quarantined for entry in entries),
    )
