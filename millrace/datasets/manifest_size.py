"""Estimate the size of a dataset's manifest, before shards are made that no manifest can name."""

from dataclasses import asdict

from millrace import errors
from millrace.datasets.formats import open_format
from millrace.digest import compute_digest, dump_canonical_json
from millrace.keys.datasets import CommitName, DatasetKeys
from millrace.schemas.dataset import (
    DatasetPlan,
    Manifest,
    ManifestShard,
    Partition,
    RowRange,
    SampleList,
)

_MARGIN = 4  # filters and columns may leave out most of the bytes of a source


def check_manifest_size(plan: DatasetPlan) -> str:
    """Check that the shards of a planned dataset are not too many for its manifest.

    Each partition has a shard of each format, and more by the numbers of its rows if they are
    known. The bytes of the source show only about how many shards there are.

    Returns:
        A sentence if there may be too many shards; else an empty text.

    Raises:
        ConfigurationError: There are too many shards, also if their number is overestimated.
    """
    if not plan.partitions:
        return ""
    layout, has_transforms = plan.layout, "transforms" in plan.source.settings
    least = expected = 0
    for partition in plan.partitions:
        by_rows = -(-_count_rows(partition) // layout.shard_samples)
        least += max(1, 0 if has_transforms else by_rows)
        expected += max(1, by_rows, partition.source_range.size // layout.shard_bytes)
    largest = Manifest.record_bytes // _measure_shards(plan)
    if expected <= largest:
        return ""
    if len(plan.partitions) > largest:
        remedies = ["raise `partition_bytes` and `partition_files`"]
    else:
        remedies = ["raise `shard_bytes` and `shard_samples`"]
    if len(layout.formats) > 1:
        remedies.append("name fewer `formats`")
    remedies.append("make several datasets of the source")
    count = len(layout.formats)
    sentence = (
        f"about {expected * count:,} shards, and its manifest can name about {largest * count:,}: "
        f"{', or '.join(remedies)}."
    )
    if least > largest or expected > _MARGIN * largest:
        raise errors.ConfigurationError(f"{plan.dataset} would have {sentence}")
    return f"Unless most of its source is left out, {plan.dataset} would have {sentence}"


def _count_rows(partition: Partition) -> int:
    """Return the number of rows of a partition; 0 if only a read of the source would show it."""
    match partition.source_range:
        case SampleList(samples=samples):
            return samples
        case RowRange(start=start, end=end):
            return end - start
        case _:
            return 0


def _measure_shards(plan: DatasetPlan) -> int:
    """Return the bytes in the manifest of one shard of each format, at least."""
    keys, digest = DatasetKeys(plan.dataset), compute_digest(b"")
    suffix = "" if plan.source.is_reproducible else digest
    last = plan.partitions[-1]
    name = CommitName(last.name, 0)
    size = 0
    for shard_format in map(open_format, plan.layout.formats):
        shard = ManifestShard(
            format=shard_format.name,
            key=keys.make_shard_key(
                shard_format.name, last.split, name, shard_format.extension, suffix
            ),
            split=last.split,
            samples=0,
            size=plan.layout.shard_bytes,
            digest=digest,
        )
        size += len(dump_canonical_json(asdict(shard))) + len(b",")
    return size
