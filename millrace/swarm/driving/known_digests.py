"""Digests of pieces that the driver knows before the run.

The pieces of a file follow from the digests of its blocks, which a dataset has for its shards, and
a checkpoint for its files. No vote about such pieces is needed, and a wrong copy is found where it
arrives. The digests of blocks stay with the driver.
"""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from millrace.block_lists import (
    describe_block_digests,
    read_blocks_of,
    read_file_blocks,
    read_shard_blocks,
)
from millrace.digest import (
    BLOCK_SIZE,
    Algorithm,
    combine_blocks,
    compute_digest,
    count_blocks,
    slice_blocks,
)
from millrace.keys.checkpoints import find_block_list_key
from millrace.swarm.catalogue import Catalogue, File, Segment, can_combine, combine_segments
from millrace.swarm.resolving import ResolvedCatalogue

_CONCURRENCY = 16  # requests for digests of blocks
_EMPTY = compute_digest(b"")


@dataclass(frozen=True, slots=True)
class KnownDigests:
    """Digests that are known before the run.

    Attributes:
        pieces: Digest of each piece whose segments are all known, by its number.
        files: Combined digest of the segments of each file whose pieces are all known, by the
            number of the file.
        refused: Reason for each dataset, and for the checkpoints of each store, whose digests of
            blocks are missing or do not fit.
    """

    pieces: dict[int, str] = field(default_factory=dict[int, str])
    files: dict[int, str] = field(default_factory=dict[int, str])
    refused: tuple[str, ...] = ()


def find_known_digests(resolved: ResolvedCatalogue) -> KnownDigests:
    """Return the digests that are known before the run.

    One request for each dataset, and one for each file of a checkpoint.

    Digests of blocks that do not fit the digest of their file are not used.

    Raises:
        UnavailableError: The store does not answer.
    """
    blocks: dict[int, bytes] = {}
    refused: list[str] = []
    for numbers in _group_by_dataset(resolved):
        found, reason = _read_blocks(resolved, numbers)
        blocks |= found
        if reason:
            store, _ = resolved.objects[numbers[0]]
            origin = store.make_url(resolved.manifests[numbers[0]].dataset)
            refused.append(f"The block digests of {origin} were not used: {reason}.")
    for lists in _group_parts(resolved).values():
        found, reason = _read_part_blocks(resolved, lists)
        blocks |= found
        if reason:
            refused.append(reason)
    pieces = _compute_pieces(resolved.catalogue, blocks)
    files = _compute_files(resolved.catalogue, blocks, pieces)
    return KnownDigests(pieces, files, tuple(refused))


def _group_by_dataset(resolved: ResolvedCatalogue) -> Iterable[list[int]]:
    """Return the files of each dataset whose pieces need digests of blocks."""
    groups: dict[tuple[tuple[str, str], str, str], list[int]] = {}
    for number, manifest in sorted(resolved.manifests.items()):
        if _needs_blocks(resolved.catalogue, number):
            store, _ = resolved.objects[number]
            dataset = store.bucket_id, store.url, manifest.dataset
            groups.setdefault(dataset, []).append(number)
    return groups.values()


def _read_blocks(resolved: ResolvedCatalogue, numbers: list[int]) -> tuple[dict[int, bytes], str]:
    """Return the digests of the blocks of files of one dataset, and the reason for missing ones."""
    store, key = resolved.objects[numbers[0]]
    manifest = resolved.manifests[numbers[0]]
    if len(numbers) == 1:
        lists = {key: read_blocks_of(store, manifest, key)}
    else:
        lists = read_shard_blocks(store, manifest)
    found: dict[int, bytes] = {}
    for number in numbers:
        if given := lists.get(resolved.objects[number][1], b""):
            found[number] = given
    if len(found) == len(numbers):
        return found, ""
    whole = lists if len(numbers) > 1 else read_shard_blocks(store, manifest)
    return found, describe_block_digests(store, manifest, whole)


def _needs_blocks(catalogue: Catalogue, number: int) -> bool:
    """Decide whether the pieces of a file follow from the digests of its blocks only."""
    file = catalogue.files[number]
    return file.size > catalogue.piece_size and can_combine(file, catalogue.piece_size)


def _group_parts(resolved: ResolvedCatalogue) -> dict[str, dict[int, str]]:
    """Return the checkpoints' files whose pieces need digests of blocks, by the URL of the store.

    Each file has the key of the object with the digests of its blocks.
    """
    groups: dict[str, dict[int, str]] = {}
    for number, (store, key) in enumerate(resolved.objects):
        list_key = find_block_list_key(key)
        if list_key and _needs_blocks(resolved.catalogue, number):
            groups.setdefault(store.url, {})[number] = list_key
    return groups


def _read_part_blocks(
    resolved: ResolvedCatalogue, lists: Mapping[int, str]
) -> tuple[dict[int, bytes], str]:
    """Return the digests of the blocks of checkpoints' files, and the reason for missing ones."""

    def read_one(number: int) -> bytes:
        store, file = resolved.objects[number][0], resolved.catalogue.files[number]
        return read_file_blocks(store, lists[number], file.digest, file.size)

    with ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="blocks") as pool:
        read = dict(zip(lists, pool.map(read_one, lists), strict=True))
    found = {number: blocks for number, blocks in read.items() if blocks}
    if len(found) == len(lists):
        return found, ""
    url = resolved.objects[next(iter(lists))][0].url
    return found, (
        f"The block digests of {len(lists) - len(found):,} of {len(lists):,} checkpoint files of "
        f"{url} were not used: they are missing, or do not fit their files."
    )


def _compute_pieces(catalogue: Catalogue, blocks: Mapping[int, bytes]) -> dict[int, str]:
    pieces: dict[int, str] = {}
    for number, piece in enumerate(catalogue.pieces):
        digests = list(_iterate_digests(catalogue, blocks, piece))
        if len(digests) == len(piece):
            pieces[number] = combine_segments(digests)
    return pieces


def _compute_files(
    catalogue: Catalogue, blocks: Mapping[int, bytes], pieces: Mapping[int, str]
) -> dict[int, str]:
    segments: dict[int, list[Segment]] = {}
    unknown: set[int] = set()
    for number, piece in enumerate(catalogue.pieces):
        for segment in piece:
            segments.setdefault(segment.file, []).append(segment)
            if number not in pieces:
                unknown.add(segment.file)
    return {
        number: combine_segments(list(_iterate_digests(catalogue, blocks, found)))
        for number, found in segments.items()
        if number not in unknown
    }


def _iterate_digests(
    catalogue: Catalogue, blocks: Mapping[int, bytes], segments: Iterable[Segment]
) -> Iterator[str]:
    """Yield the digest of each segment that is known."""
    for segment in segments:
        digest = _find_digest(catalogue.files[segment.file], segment, blocks.get(segment.file))
        if digest:
            yield digest


def _find_digest(file: File, segment: Segment, blocks: bytes | None) -> str:
    """Return the digest of a segment; empty if it is not known."""
    if not segment.size:
        return _EMPTY
    if segment.size == file.size:
        return file.digest if file.algorithm is Algorithm.BLAKE3 else ""
    if blocks is None:
        return ""
    first = segment.start // BLOCK_SIZE
    numbers = range(first, first + count_blocks(segment.size))
    return combine_blocks(slice_blocks(blocks, numbers))
