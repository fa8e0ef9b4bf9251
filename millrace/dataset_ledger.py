"""Read the ledger of a dataset, and find the keys that the dataset's records name.

The ledger is the list of all commits of shards. Sharding and cleanup both use this module.
"""

import contextlib
from collections.abc import Iterator

from millrace import errors
from millrace.keys.datasets import DatasetKeys
from millrace.records import fetch, iterate_records, require_intact
from millrace.schemas.dataset import DatasetPlan, Manifest, SampleList, ShardCommit
from millrace.storage import Store


def iterate_commits(store: Store, keys: DatasetKeys, partition: str = "") -> Iterator[ShardCommit]:
    """Yield the commits of a partition, or of the whole dataset, in the order of a listing.

    Raises:
        CorruptError: Commits are damaged. Raised after all intact commits were yielded.
    """
    prefix = keys.make_commits_prefix(partition) if partition else keys.commits
    found = iterate_records(
        store, prefix, ShardCommit, wanted=lambda stat: keys.parse_commit(stat.key) is not None
    )
    return require_intact(store.make_url(prefix), found)


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
