"""Index of the files that earlier runs have put on this node, and the check of these files.

``files.jsonl`` has a line for each file that received its final name. A file without a line does
not belong to Millrace. A further line has the file's size, times and inode after its bytes were
verified. While these values are the same, they are enough to recognise the file, or a few sampled
segments with them.
"""

import contextlib
import json
import os
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from millrace.digest import (
    BLOCK_SIZE,
    combine_blocks,
    count_blocks,
    hash_blocks,
    make_hasher,
    slice_blocks,
)
from millrace.errors import ConfigurationError
from millrace.swarm.catalogue import Catalogue, File, can_combine

_SAMPLED_SEGMENTS = 8  # segments of a cached file that are read again
_MIN_TRIMMED_SIZE = 1 << 20  # bytes of an index that is written anew: 15 GiB of content


class CacheCheck(StrEnum):
    """Check by which a file of an earlier run is recognised."""

    STAT = "stat"
    SAMPLED = "sampled"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """Record of a file: a line of ``files.jsonl``.

    Attributes:
        path: Path of the file below the root.
        size: Bytes of the file.
        mtime_ns: Modification time of the file, in ns.
        etag: ETag of the object.
        origin: URL of the object.
        digest: Digest of the object; empty if it was not known.
        piece_size: Size of the segments of `digests`, as for `hash_file_segments`.
        digests: Block digests of each segment, in hexadecimal.
        seen: Size, modification time, change time (both in ns) and inode of the file after its
            bytes were verified; empty if they were not noted.
    """

    path: str
    size: int
    mtime_ns: int
    etag: str
    origin: str
    digest: str
    piece_size: int
    digests: list[str]
    seen: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file on the disk that this run can use.

    Attributes:
        digests: Block digests of each segment; None for damaged segments.
        entry: Entry of the index for the file; None if its digest alone identified it.
        hashed: Whether all bytes of the file were read.
    """

    digests: list[bytes | None]
    entry: CacheEntry | None
    hashed: bool


def read_identity(path: Path) -> tuple[int, ...]:
    """Read the values that change when a file is written or replaced (`CacheEntry.seen`)."""
    stat = path.lstat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def is_unchanged(path: Path, identity: tuple[int, ...]) -> bool:
    """Tell whether a file still has an earlier identity (`read_identity`).

    The change time is not compared: it also changes with the mode, and with each link to the file.
    """
    try:
        size, modified, _, inode = read_identity(path)
    except FileNotFoundError:
        return False
    return (size, modified, inode) == (identity[0], identity[1], identity[3])


def recognise_file(
    path: Path, file: File, entries: list[CacheEntry], catalogue: Catalogue, check: CacheCheck
) -> CachedFile | None:
    """Check an existing file at a destination of this run.

    Args:
        path: Path of the existing file.
        file: File of this run with this destination.
        entries: Entries of the index for this destination, oldest first.
        catalogue: Files of this run.
        check: Kind of the check, unless the file has its own.

    A file of Millrace has the size and modification time of an entry, or the recorded bytes.

    Returns:
        None if the existing file is one of Millrace with another content: the run replaces it.

    Raises:
        ConfigurationError: The existing file is not one of Millrace.
    """
    check = CacheCheck(file.check) if file.check else check
    stat = path.lstat()
    plain = path.is_file() and not path.is_symlink()
    content = file.origin, file.etag, file.size
    same = [entry for entry in entries if (entry.origin, entry.etag, entry.size) == content]
    unchanged = plain and any(
        (entry.size, entry.mtime_ns) == (stat.st_size, stat.st_mtime_ns) for entry in entries
    )
    if plain and same and stat.st_size == file.size:
        cached = _check_cached(path, file, same[-1], catalogue, check)
        if unchanged or None not in cached.digests:  # other bytes with another time are a user's
            return cached
    elif unchanged:
        return None
    if file.digest and not file.has_md5 and plain and stat.st_size == file.size:
        whole, digests = hash_file(path, file, catalogue.piece_size)
        if whole == file.digest:
            return CachedFile(list(digests), None, hashed=True)
    raise ConfigurationError(
        f"{path} exists, and Millrace did not make it, or it was changed since. It was not "
        "changed now. Move it away, or choose another destination."
    )


def _check_cached(
    path: Path, file: File, entry: CacheEntry, catalogue: Catalogue, check: CacheCheck
) -> CachedFile:
    recorded = [bytes.fromhex(digest) for digest in entry.digests]
    count, same_pieces = len(recorded), entry.piece_size == catalogue.piece_size
    was_known = file.digest in {"", entry.digest}
    identity = read_identity(path)
    # Earlier versions could note the identity of another content, whose time is another one.
    verified = entry.seen == identity and entry.mtime_ns == identity[1] and was_known
    expected = (
        recorded if same_pieces else _cut_digests(recorded, file, entry, catalogue.piece_size)
    )
    if check is not CacheCheck.FULL and verified and expected:
        samples = 0 if check is CacheCheck.STAT else _SAMPLED_SEGMENTS
        chosen = random.sample(range(count), min(count, samples))
        sampled = [recorded[index] for index in chosen]
        if hash_file_segments(path, file, entry.piece_size, chosen) == sampled:
            return CachedFile(list(expected), entry, hashed=False)
    whole, digests = hash_file(path, file, catalogue.piece_size)
    found: list[bytes | None] = list(digests)
    if file.digest:
        right = whole == file.digest
    elif expected:
        right = digests == expected
    else:
        right = hash_file_segments(path, file, entry.piece_size, range(count)) == recorded
    if not right:
        kept = dict(enumerate(expected if digests != expected else []))
        found = [each if each == kept.get(i) else None for i, each in enumerate(digests)]
    return CachedFile(found, entry, hashed=True)


def _cut_digests(
    recorded: list[bytes], file: File, entry: CacheEntry, piece_size: int
) -> list[bytes]:
    """Return the recorded block digests of a file for segments of another size.

    Returns:
        Block digests of each segment; empty if segments do not begin with a block.
    """
    blocks = b"".join(recorded)
    if file.size <= min(piece_size, entry.piece_size):
        return [blocks]
    if piece_size % BLOCK_SIZE or entry.piece_size % BLOCK_SIZE:
        return []
    count = piece_size // BLOCK_SIZE
    starts = range(0, count_blocks(file.size), count)
    return [slice_blocks(blocks, range(start, start + count)) for start in starts]


def hash_file_segments(
    path: Path, file: File, piece_size: int, indexes: Iterable[int]
) -> list[bytes]:
    """Return the block digests of some segments of a file on the disk, by their indexes."""
    found: list[bytes] = []
    step = piece_size if file.size >= piece_size else max(file.size, 1)
    with path.open("rb", buffering=0) as opened:
        for index in indexes:
            opened.seek(index * step)
            found.append(hash_blocks(opened.read(min(step, file.size - index * step))))
    return found


def hash_file(path: Path, file: File, piece_size: int) -> tuple[str, list[bytes]]:
    """Return the digest of a file, as for `File.digest`, and the block digests of its segments."""
    block_digests: list[bytes] = []
    whole = None if can_combine(file, piece_size) else make_hasher(file.algorithm)
    with path.open("rb", buffering=0) as opened:
        while segment := opened.read(piece_size):
            if whole is not None:
                whole.update(segment)
            block_digests.append(hash_blocks(segment))
    block_digests = block_digests or [hash_blocks(b"")]
    return whole.compute() if whole else combine_blocks(b"".join(block_digests)), block_digests


def read_index(path: Path) -> dict[str, list[CacheEntry]]:
    """Read the entries of each file. Skip lines that are cut or damaged."""
    index: dict[str, list[CacheEntry]] = {}
    with contextlib.suppress(FileNotFoundError), path.open(errors="replace") as lines:
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                row = json.loads(line)
                seen = tuple(row.pop("seen", ()))
                if row.keys() == {"path"}:
                    entries = index[row["path"]]
                    entries[-1] = replace(entries[-1], seen=seen)
                else:
                    entry = CacheEntry(**row, seen=seen)
                    index.setdefault(entry.path, []).append(entry)
    return index


def trim_index(
    path: Path, index: dict[str, list[CacheEntry]], root: Path
) -> dict[str, list[CacheEntry]]:
    """Write an index anew without the entries that recognise no file, if these are most of it.

    The caller holds the lock of the root, so nobody appends an entry meanwhile.

    Args:
        path: Path of the index.
        index: Entries of the index (`read_index`).
        root: Folder that the paths of the entries are below.

    Returns:
        The entries that the index has now.
    """
    size = path.stat().st_size if path.exists() else 0
    if size < _MIN_TRIMMED_SIZE:
        return index
    kept = {name: _select_entries(root / name, entries) for name, entries in index.items()}
    rows = [_make_row(entry) for entries in kept.values() for entry in entries]
    if 2 * sum(map(_estimate_size, rows)) > size:
        return index
    new = path.with_suffix(".new")
    try:
        new.unlink(missing_ok=True)  # of a killed run
        _append(new, rows)
        new.rename(path)
    except OSError:  # such as a full disk: the longer index serves as well
        new.unlink(missing_ok=True)
        return index
    return {name: entries for name, entries in kept.items() if entries}


def _select_entries(path: Path, entries: list[CacheEntry]) -> list[CacheEntry]:
    """Return the newest entry of a file, and that of each content with the file's size and time.

    An identity belongs to the newest entry, so that entry stays the last one.
    """
    try:
        stat = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError:  # such as a folder that this user may not read now
        return entries
    found = {
        (entry.origin, entry.etag): entry
        for entry in entries
        if (entry.size, entry.mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    }
    return [*(entry for entry in found.values() if entry is not entries[-1]), entries[-1]]


def _estimate_size(row: dict[str, Any]) -> int:
    """Return the bytes of a line of the index: about 200 of them are names and numbers."""
    texts = [row["path"], row["etag"], row["origin"], row["digest"], *row["digests"]]
    return 200 + sum(len(text) + len('"", ') for text in texts)


def append_entries(path: Path, entries: list[CacheEntry]) -> None:
    """Append entries to the index, and sync it."""
    _append(path, [_make_row(entry) for entry in entries])


def append_identities(path: Path, seen: dict[str, tuple[int, ...]]) -> None:
    """Append `CacheEntry.seen` of files, which belongs to the last entry of each file."""
    _append(path, [{"path": name, "seen": identity} for name, identity in seen.items()])


def _make_row(entry: CacheEntry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in CacheEntry.__slots__}


def _append(path: Path, rows: list[dict[str, Any]]) -> None:
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    with path.open("a") as file:
        # A line that a kill has cut is terminated first.
        file.write(lines if file.tell() == 0 else f"\n{lines}")
        file.flush()
        os.fsync(file.fileno())
