"""Read the records of a dataset, and find the keys that these records name.

The ledger is the list of all commits of shards. Sharding, cleanup and prewarming use this module.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from millrace import errors
from millrace.keys.datasets import DatasetKeys
from millrace.keys.names import MAX_LENGTH
from millrace.records import fetch, iterate_records, read_records, require_intact
from millrace.schemas.dataset import (
    DatasetPlan,
    Manifest,
    PartitionEnd,
    SampleList,
    ShardCommit,
)
from millrace.storage import Backend, Stat, Store, list_sorted_keys


class PartitionLedger(NamedTuple):
    """Records of one partition in the ledger.

    Attributes:
        partition: Name of the partition.
        commits: Commits of the partition, in the order of their numbers.
        end: End of the partition; None if the partition has not ended.
    """

    partition: str
    commits: list[ShardCommit]
    end: PartitionEnd | None


def fetch_plan(store: Store, keys: DatasetKeys) -> DatasetPlan:
    """Return the plan of a dataset.

    Raises:
        NotFoundError: There is no plan under this name.
        ConfigurationError: The plan is that of a dataset with another name.
    """
    plan = fetch(store, keys.plan, DatasetPlan)
    _check_name(store, keys, plan.dataset)
    return plan


def read_manifest(store: Store, keys: DatasetKeys) -> Manifest:
    """Return the manifest of a dataset.

    Raises:
        NotFoundError: There is no manifest.
        ConfigurationError: The manifest is that of a dataset with another name.
    """
    try:
        manifest = fetch(store, keys.manifest, Manifest)
    except errors.NotFoundError:
        raise errors.NotFoundError(
            f"{store.make_url(keys.dataset)} has no manifest: the dataset is not complete, or the "
            "name is wrong. `millrace status` shows its progress, `millrace run` completes it."
        ) from None
    _check_name(store, keys, manifest.dataset)
    return manifest


def describe_other_name(store: Store, keys: DatasetKeys, recorded: str) -> str:
    """Describe records of a dataset with another name; return an empty text for the same name.

    Such records name objects by other keys than those that a listing of this name returns.

    Args:
        store: Store of the dataset.
        keys: Keys by which the records were found.
        recorded: Name of the dataset in the records.
    """
    if recorded == keys.dataset:
        return ""
    here, name = store.make_url(keys.dataset), repr(recorded[:MAX_LENGTH])
    location = store.location
    is_folder = location.backend is Backend.FILE
    root = location.bucket if is_folder else location.prefix
    path = f"/{root}/{keys.dataset}".replace("//", "/")
    if not path.endswith(f"/{recorded}"):
        return (
            f"{here} is a copy of the dataset {name}, or was renamed, and its records name the "
            f"objects of {name}. Use the original, or copy the objects to a folder of that name."
        )
    above = path.removesuffix(f"/{recorded}")
    parent = replace(location, **{"bucket": above or "/"} if is_folder else {"prefix": above[1:]})
    return f"{here} is the dataset {name} of {parent}: open that URL, and name the dataset {name}."


def _check_name(store: Store, keys: DatasetKeys, recorded: str) -> None:
    if sentence := describe_other_name(store, keys, recorded):
        raise errors.ConfigurationError(sentence)


def iterate_commits(store: Store, keys: DatasetKeys, partition: str = "") -> Iterator[ShardCommit]:
    """Yield the commits of a partition, or of the whole dataset, in the order of a listing.

    Raises:
        CorruptError: Commits are damaged. Raised after all intact commits were yielded.
        ConflictError: The dataset has records of an earlier version of Millrace, by other names.
    """

    def is_commit(stat: Stat) -> bool:
        if keys.is_earlier_record(stat.key):
            # Their shards would be taken for garbage.
            raise errors.ConflictError(
                f"{store.make_url(stat.key)} is a record of an earlier version of Millrace, which "
                "this version does not read. Work on this dataset with the version that began it, "
                "or shard the source under another name."
            )
        return keys.parse_commit(stat.key) is not None

    prefix = keys.make_commits_prefix(partition) if partition else keys.commits
    found = iterate_records(store, prefix, ShardCommit, wanted=is_commit)
    return require_intact(store.make_url(prefix), found)


def iterate_partition_ledgers(store: Store, keys: DatasetKeys) -> Iterator[PartitionLedger]:
    """Yield the records of each partition, in the order of the partitions' names.

    One listing of the ledger. Only the records of one partition, and those that are read ahead, are
    in memory.

    Raises:
        CorruptError: Records are damaged. Raised after all intact records were yielded.
    """

    def iterate_wanted() -> Iterator[tuple[None, str, type[ShardCommit | PartitionEnd]]]:
        for key in list_sorted_keys(store, keys.commits):
            if keys.parse_commit(key):
                yield None, key, ShardCommit
            elif keys.parse_end(key):
                yield None, key, PartitionEnd

    found = require_intact(store.make_url(keys.commits), read_records(store, iterate_wanted()))
    for partition, records in groupby(found, key=lambda record: record.partition):
        commits: list[ShardCommit] = []
        end = None
        for record in records:
            if isinstance(record, PartitionEnd):
                end = record
            else:
                commits.append(record)
        yield PartitionLedger(partition, sorted(commits, key=lambda one: one.number), end)


def find_referenced_keys(store: Store, keys: DatasetKeys, plan: DatasetPlan) -> set[str]:
    """Return all keys of shards, quarantined rows and sample lists in a dataset's records.

    The keys of the code and the tokenizers of transforms are returned also.

    The manifest names the shards of a complete dataset also if commits are lost.

    Raises:
        CorruptError: Commits or the manifest are damaged, so the keys that they name are unknown.
    """
    names: set[str] = set()
    for entry in iterate_commits(store, keys):
        names.update(shard.key for shard in entry.shards)
        if entry.quarantine_key:
            names.add(entry.quarantine_key)
    with contextlib.suppress(errors.NotFoundError):
        names.update(shard.key for shard in fetch(store, keys.manifest, Manifest).shards)
    source_ranges = (partition.source_range for partition in plan.partitions)
    names.update(r.listing for r in source_ranges if isinstance(r, SampleList))
    steps = plan.source.settings.get("transforms", {}).get("steps", [])
    names.update(step["object"] for step in steps if "object" in step)
    return names
