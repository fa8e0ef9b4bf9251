"""The ledger of a dataset, and what it names."""

from collections.abc import Iterator

from millrace.keys import DatasetKeys
from millrace.records import iterate_records, require_intact
from millrace.schemas.dataset import DatasetPlan, FileGroup, ShardCommit
from millrace.storage import Store


def iterate_commits(store: Store, keys: DatasetKeys, split: str = "") -> Iterator[ShardCommit]:
    """Yield the commits of a split, or of the whole dataset, in the listing's order.

    Raises:
        CorruptError: Commits are damaged: after all others.
    """
    prefix = keys.commits_of(split) if split else keys.commits
    found = iterate_records(
        store, prefix, ShardCommit, wanted=lambda stat: keys.parse_commit(stat.key) is not None
    )
    return require_intact(store.url_of(prefix), found)


def find_referenced_keys(store: Store, keys: DatasetKeys, plan: DatasetPlan) -> set[str]:
    """Return the keys of all shards, quarantines and listings that a dataset's records name.

    Raises:
        CorruptError: Commits are damaged, so it is unknown what they name.
    """
    names: set[str] = set()
    for entry in iterate_commits(store, keys):
        names.update(key for key in (entry.key, entry.quarantine) if key)
    pieces = (split.piece for split in plan.splits)
    names.update(piece.listing for piece in pieces if isinstance(piece, FileGroup))
    return names
