"""Verify: what the manifest says, held against what the store has."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from millrace import errors
from millrace.keys import DatasetKeys
from millrace.progress import Event, Progress, silent
from millrace.records import fetch
from millrace.schemas.dataset import Manifest, ManifestShard
from millrace.storage import Store, difference


@dataclass(frozen=True, slots=True)
class Fault:
    """A shard that is not what the manifest says."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of a verification.

    Attributes:
        shards: How many were looked at.
        size: Their bytes by the manifest.
        faults: Those that are missing or differ.
        digests: Whether their bytes were read, or only their sizes asked for.
    """

    shards: int
    size: int
    faults: tuple[Fault, ...]
    digests: bool

    @property
    def good(self) -> bool:
        """True if nothing is wrong."""
        return not self.faults


def verify(
    store: Store,
    dataset: str,
    *,
    digests: bool = True,
    at_once: int = 4,
    progress: Progress = silent,
) -> Verification:
    """Check every shard of a sealed dataset.

    Args:
        store: Where it is.
        dataset: Its name.
        digests: Read every byte and compare digests; else one HEAD a shard, for its size.
        at_once: Shards read side by side; 24 MiB of memory each.
        progress: Told of every shard.

    Raises:
        NotFoundError: The dataset was never sealed.
    """
    keys = DatasetKeys(dataset)
    manifest = sealed(store, keys)
    faults: list[Fault] = []
    with ThreadPoolExecutor(at_once, thread_name_prefix="verify") as pool:
        for shard, fault in _checked(pool, store, manifest, digests=digests):
            progress(Event("shard.verified", shard.key, {"bytes": shard.size, "good": not fault}))
            if fault:
                faults.append(Fault(shard.key, fault))
    return Verification(len(manifest.shards), manifest.size, tuple(faults), digests)


def sealed(store: Store, keys: DatasetKeys) -> Manifest:
    """Return the manifest of a dataset.

    Raises:
        NotFoundError: There is none yet.
    """
    try:
        return fetch(store, keys.manifest, Manifest)
    except errors.NotFoundError:
        raise errors.NotFoundError(
            f"{store.url_of(keys.dataset)} has no manifest: it was never finished, or the name is "
            "another. `millrace status` shows how far it is, `millrace run` finishes it."
        ) from None


def _checked(
    pool: ThreadPoolExecutor, store: Store, manifest: Manifest, *, digests: bool
) -> Iterator[tuple[ManifestShard, str]]:
    def pair(shard: ManifestShard) -> tuple[ManifestShard, str]:
        sha256 = shard.sha256 if digests else None
        return shard, difference(store, shard.key, shard.size, sha256)

    shards = iter(manifest.shards)
    while batch := list(islice(shards, 256)):
        yield from pool.map(pair, batch)
