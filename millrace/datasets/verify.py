"""Verify a dataset by a comparison of its manifest with the objects in the store."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from millrace import errors
from millrace.block_lists import describe_block_digests, read_shard_blocks
from millrace.dataset_ledger import read_manifest
from millrace.datasets.card import describe_card_faults
from millrace.datasets.indexes import describe_index, make_indexes
from millrace.datasets.progress_events import ShardVerified
from millrace.formatting import format_count
from millrace.keys.datasets import DatasetKeys
from millrace.lease import Census, StoreClock
from millrace.progress import Progress, ignore_event
from millrace.records import fetch
from millrace.schemas.dataset import Manifest, ManifestShard
from millrace.storage import (
    Store,
    StoreSpec,
    describe_difference,
    list_objects,
    marks_folder,
    open_store,
)

_STRAY = "not in the manifest; `millrace dataset collect-garbage` deletes it after an hour"
_FOREIGN = (
    "not in the manifest, and its name is not one of the dataset's: move or delete it yourself"
)


@dataclass(frozen=True, slots=True)
class ShardFault:
    """Shard that is missing or differs from the manifest, or another object of the dataset.

    Attributes:
        key: Key of the object.
        reason: Short text about the difference.
    """

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of a verification.

    Attributes:
        shards: Number of shards that were checked.
        size: Bytes of these shards, by the manifest.
        faults: Shards that are missing or differ.
        includes_digests: Whether digests were compared; False if only sizes were.
        other_faults: Object with the digests of all blocks, indexes of the formats, and objects of
            the dataset card, that are missing or do not fit the manifest.
        strays: Objects in the folders of the shards that the manifest does not name. A reader that
            takes all files of a folder would read them, too.
        notes: Sentences about objects that could not be judged.
    """

    shards: int
    size: int
    faults: tuple[ShardFault, ...]
    includes_digests: bool
    other_faults: tuple[ShardFault, ...] = ()
    strays: tuple[ShardFault, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_intact(self) -> bool:
        """True if no shard and no other object is at fault, and no object is stray."""
        return not self.all_faults

    @property
    def all_faults(self) -> tuple[ShardFault, ...]:
        """Shards at fault, then other objects at fault, then stray objects."""
        return (*self.faults, *self.other_faults, *self.strays)


def verify_dataset(
    store: Store,
    dataset: str,
    *,
    digests: bool = True,
    concurrency: int = 4,
    progress: Progress = ignore_event,
    manifest: Manifest | None = None,
) -> Verification:
    """Check every shard of a complete dataset, the digests of all blocks, indexes, and the card.

    One listing finds objects beside the shards that the manifest does not name. They are not judged
    while a run works on the dataset, since the run may be uploading them.

    Args:
        store: Store of the dataset.
        dataset: Name of the dataset.
        digests: Whether to read every byte and compare digests. Otherwise one HEAD for each shard
            compares sizes.
        concurrency: Number of shards that are read concurrently. Each needs 24 MiB of memory.
        progress: Called for every shard.
        manifest: Manifest of the dataset elsewhere, of which this store is a mirror. By default the
            store's own.

    Raises:
        NotFoundError: The dataset is not complete.
        ConfigurationError: The manifest is that of a dataset with another name.
    """
    keys = DatasetKeys(dataset)
    others: list[ShardFault] = []
    if manifest is None:
        manifest = read_manifest(store, keys)
    elif reason := _describe_manifest(store, keys, manifest):
        others.append(ShardFault(keys.manifest, reason))
    blocks = read_shard_blocks(store, manifest)
    faults: list[ShardFault] = []
    with ThreadPoolExecutor(concurrency, thread_name_prefix="verify") as pool:
        for shard, fault in _check_shards(pool, store, manifest, blocks, digests=digests):
            progress(ShardVerified(key=shard.key, size=shard.size, is_intact=not fault))
            if fault:
                faults.append(ShardFault(shard.key, fault))
    reason = describe_block_digests(store, manifest, blocks)
    if reason:
        others.append(ShardFault(keys.block_digests, reason))
    for key, expected in make_indexes(manifest).items():
        if reason := describe_index(store, key, expected):
            others.append(ShardFault(key, reason))
    others += [ShardFault(key, reason) for key, reason in describe_card_faults(store, manifest)]
    strays = _list_strays(store, keys, manifest)
    notes: tuple[str, ...] = ()
    if strays and _is_worked_on(store, dataset):
        sentence = (
            f"{format_count(len(strays), 'object')} beside the shards, such as "
            f"{store.make_url(strays[0])}, may be of a run that works on the dataset now. Verify "
            "it again when the run has ended."
        )
        strays, notes = [], (sentence,)
    return Verification(
        shards=len(manifest.shards),
        size=manifest.size,
        faults=tuple(faults),
        includes_digests=digests,
        other_faults=tuple(others),
        strays=tuple(ShardFault(key, _STRAY if keys.is_own(key) else _FOREIGN) for key in strays),
        notes=notes,
    )


def verify_mirror(
    store: Store, mirror: StoreSpec, dataset: str, *, digests: bool = True
) -> Verification:
    """Check the copies of a complete dataset in a mirror against the manifest of its store.

    A mirror that cannot be read is a fault of the mirror, and raises no error.

    Args:
        store: Store of the dataset.
        mirror: Location with copies of the store's objects.
        dataset: Name of the dataset.
        digests: Whether to read every byte, as in `verify_dataset`.

    Raises:
        NotFoundError: The dataset is not complete in its store.
    """
    manifest = read_manifest(store, DatasetKeys(dataset))
    try:
        copies = open_store(mirror, make_folder=False)
        return verify_dataset(copies, dataset, digests=digests, manifest=manifest)
    except errors.MillraceError as error:
        fault = ShardFault(mirror.url, str(error))
        return Verification(len(manifest.shards), manifest.size, (), digests, other_faults=(fault,))


def _describe_manifest(store: Store, keys: DatasetKeys, expected: Manifest) -> str:
    """Describe the difference of a mirror's manifest; empty if there is none."""
    try:
        found = fetch(store, keys.manifest, Manifest)
    except errors.NotFoundError:
        return "missing"
    except errors.CorruptError as error:
        return str(error)
    return "" if found == expected else "another one than in the bucket"


def _list_strays(store: Store, keys: DatasetKeys, manifest: Manifest) -> list[str]:
    """Return the objects below the prefix of the shards that are no shard and no index.

    Shards that are named by their digests, of a list of URLs, are left out: readers take them by
    the manifest, and other downloads of the same rows may lie beside them.
    """
    named = {shard.key for shard in manifest.shards}
    is_of_urls = any(map(keys.is_named_by_digest, named))
    folders = {
        one
        for shard_format in manifest.formats
        for split in manifest.samples
        for one in (
            f"{keys.shards}{shard_format}",
            keys.make_shards_prefix(shard_format, split).removesuffix("/"),
        )
    }  # a store that does not list slashes at the end of keys may have such marks, too
    return [
        stat.key
        for stat in list_objects(store, keys.shards, exact=True)
        if stat.key not in named
        and stat.key not in folders
        and not marks_folder(stat)
        and not keys.is_index(stat.key)
        and not (is_of_urls and keys.is_named_by_digest(stat.key))
    ]


def _is_worked_on(store: Store, dataset: str) -> bool:
    """Decide whether a process holds a lease of the dataset. Up to four requests."""
    clock = StoreClock.read_if_permitted(store, dataset)
    return bool(Census(store, dataset, "", clock, strict=False).find_holders())


def _check_shards(
    pool: ThreadPoolExecutor,
    store: Store,
    manifest: Manifest,
    blocks: Mapping[str, bytes],
    *,
    digests: bool,
) -> Iterator[tuple[ManifestShard, str]]:
    def check_shard(shard: ManifestShard) -> tuple[ManifestShard, str]:
        digest = shard.digest if digests else None
        known = blocks.get(shard.key, b"")
        return shard, describe_difference(store, shard.key, shard.size, digest, blocks=known)

    shards = iter(manifest.shards)
    while batch := list(islice(shards, 256)):
        yield from pool.map(check_shard, batch)
