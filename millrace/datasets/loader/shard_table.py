"""Shards of one split and one format of a dataset, by its manifest."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from millrace.datasets.formats import Fields, FieldType, FormatName
from millrace.datasets.loader.sample_offsets import SampleOffsets
from millrace.digest import compute_digest, count_blocks, dump_canonical_json
from millrace.errors import ConfigurationError
from millrace.schemas.dataset import Manifest


class ListedShard(NamedTuple):
    """A shard of the table.

    Attributes:
        key: Key of the shard.
        samples: Number of samples.
        size: Bytes of the shard.
        digest: Digest of the shard.
        first_block: Number of the shard's first block among the blocks of all shards.
        sample_offsets: Offsets of some samples, as the manifest has them.
    """

    key: str
    samples: int
    size: int
    digest: str
    first_block: int
    sample_offsets: str


@dataclass(frozen=True, slots=True)
class ShardTable:
    """Shards of one split and one format, in the order of the manifest.

    All formats of a dataset have the same samples in the same order, so the order of an epoch is
    the same for each of them.

    Attributes:
        dataset: Name of the dataset.
        manifest_digest: Digest of the manifest.
        split: Split of the samples.
        format: Format of the shards.
        fields: Types of the fields; empty if the manifest has none.
        shards: The shards.
        block_count: Number of blocks of all shards of the dataset.
        largest_size: Bytes of the split in the format with the largest shards.
        decode: Whether fields are decoded. Otherwise they are the bytes in the shard.
        offsets: Offsets of samples in tar shards, from the manifest and from readers.
    """

    dataset: str
    manifest_digest: str
    split: str
    format: FormatName
    fields: Fields
    shards: Sequence[ListedShard]
    block_count: int
    largest_size: int
    decode: bool = True
    offsets: SampleOffsets = field(default_factory=SampleOffsets, compare=False, repr=False)

    @property
    def mean_size(self) -> float:
        """Mean bytes of a sample."""
        return sum(shard.size for shard in self.shards) / max(1, self._samples)

    @property
    def largest_mean_size(self) -> float:
        """Mean bytes of a sample in the format with the largest shards."""
        return self.largest_size / max(1, self._samples)

    @property
    def _samples(self) -> int:
        return sum(shard.samples for shard in self.shards)


def make_shard_table(
    manifest: Manifest,
    split: str,
    shard_format: FormatName | None = None,
    *,
    decode: bool = True,
) -> ShardTable:
    """Return the shards of a split and a format.

    Args:
        manifest: Manifest of the dataset.
        split: Split of the samples.
        shard_format: Format of the shards; by default the first one of the dataset.
        decode: Whether fields are decoded.

    Raises:
        ConfigurationError: The dataset has no such split or format, or the format has no bytes of
            fields.
    """
    chosen = shard_format or FormatName(manifest.formats[0])
    if chosen not in manifest.formats:
        raise ConfigurationError(
            f"The dataset {manifest.dataset} has no shards in the format {chosen}. Its formats are "
            f"{', '.join(manifest.formats)}."
        )
    if not decode and chosen is not FormatName.WEBDATASET:
        raise ConfigurationError(
            f"Shards in the format {chosen} have values of the types of the manifest, and no bytes "
            "of fields. Remove `decode=False`, or shard the dataset as webdataset, too."
        )
    shards: list[ListedShard] = []
    sizes = Counter[str]()
    block = 0
    for shard in manifest.shards:
        if (shard.format, shard.split) == (chosen, split):
            listed = ListedShard(
                shard.key, shard.samples, shard.size, shard.digest, block, shard.sample_offsets
            )
            shards.append(listed)
        if shard.split == split:
            sizes[shard.format] += shard.size
        block += count_blocks(shard.size)
    if not shards:
        raise ConfigurationError(
            f"The dataset {manifest.dataset} has no samples in the split {split!r}. Its splits are "
            f"{', '.join(sorted(manifest.samples)) or 'none'}."
        )
    return ShardTable(
        dataset=manifest.dataset,
        manifest_digest=compute_digest(dump_canonical_json(manifest.model_dump(mode="json"))),
        split=split,
        format=chosen,
        fields={name: FieldType(kind) for name, kind in manifest.fields.items()},
        shards=shards,
        block_count=block,
        largest_size=max(sizes.values()),
        decode=decode,
    )
