"""What we have put on this node before: recognised by digests, and never taken on trust.

``files.jsonl`` has a line for each file that got its final name. Whatever is not in it is not ours.
"""

import contextlib
import hashlib
import json
import os
import random
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from millrace.errors import ConfigurationError
from millrace.swarm.pieces import Catalogue, File

_SAMPLED = 8  # segments of a cached file that are read again


class CacheCheck(StrEnum):
    """How a file that an earlier run has left is recognised."""

    SAMPLED = "sampled"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Made:
    """What we made: a line of ``files.jsonl``.

    Attributes:
        path: Below the root.
        size: Bytes.
        mtime_ns: When it was last changed.
        etag: The store's name for the content.
        origin: Its URL.
        sha256: Of the whole, if it was known.
        piece_size: What `digests` are cut by.
        digests: SHA-256 of each segment.
    """

    path: str
    size: int
    mtime_ns: int
    etag: str
    origin: str
    sha256: str
    piece_size: int
    digests: list[str]


def recognised(
    path: Path, file: File, made: list[Made], catalogue: Catalogue, check: CacheCheck
) -> list[bytes | None] | None:
    """The digests of a file that is in our way, None for each segment that is damaged.

    None for all: it is ours, and of another content, so it will be replaced.
    """
    stat = path.lstat()
    plain = path.is_file() and not path.is_symlink()
    content = file.origin, file.etag, file.size
    same = [entry for entry in made if (entry.origin, entry.etag, entry.size) == content]
    if plain and same and stat.st_size == file.size:
        return _checked(path, file, same[-1], catalogue, check)
    if plain and any(
        (entry.size, entry.mtime_ns) == (stat.st_size, stat.st_mtime_ns) for entry in made
    ):
        return None
    if file.sha256 and plain and stat.st_size == file.size:
        whole, digests = hash_file(path, file, catalogue.piece_size)
        if whole == file.sha256:
            return list(digests)
    raise ConfigurationError(
        f"{path} is there already, and was not put there by us (or was changed since): move "
        "it away, or choose another destination. It was not touched."
    )


def _checked(
    path: Path, file: File, made: Made, catalogue: Catalogue, check: CacheCheck
) -> list[bytes | None]:
    recorded = [bytes.fromhex(digest) for digest in made.digests]
    count = len(recorded)
    if check is CacheCheck.SAMPLED and made.piece_size == catalogue.piece_size:
        chosen = random.sample(range(count), min(count, _SAMPLED))
        if segment_digests(path, file, made.piece_size, chosen) == [recorded[i] for i in chosen]:
            return list(recorded)
    found = segment_digests(path, file, made.piece_size, range(count))
    if made.piece_size == catalogue.piece_size:
        return [a if a == b else None for a, b in zip(found, recorded, strict=True)]
    _, digests = hash_file(path, file, catalogue.piece_size)
    return list(digests) if found == recorded else [None] * len(digests)


def segment_digests(path: Path, file: File, piece_size: int, indexes: Iterable[int]) -> list[bytes]:
    found: list[bytes] = []
    step = piece_size if file.size >= piece_size else max(file.size, 1)
    with path.open("rb", buffering=0) as opened:
        for index in indexes:
            opened.seek(index * step)
            found.append(hashlib.sha256(opened.read(min(step, file.size - index * step))).digest())
    return found


def hash_file(path: Path, file: File, piece_size: int) -> tuple[str, list[bytes]]:
    """SHA-256 of a file, and of each of its segments."""
    whole, parts = hashlib.sha256(), list[bytes]()
    with path.open("rb", buffering=0) as opened:
        while block := opened.read(piece_size):
            whole.update(block)
            parts.append(hashlib.sha256(block).digest())
    return whole.hexdigest(), parts or [hashlib.sha256().digest()]


def read_made(path: Path) -> dict[str, list[Made]]:
    """The lines of each file; a line that a kill has cut is nobody's."""
    made: dict[str, list[Made]] = {}
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError, TypeError):
                entry = Made(**json.loads(line))
                made.setdefault(entry.path, []).append(entry)
    return made


def append_made(path: Path, made: list[Made]) -> None:
    lines = "".join(
        json.dumps({name: getattr(entry, name) for name in Made.__slots__}) + "\n" for entry in made
    )
    with path.open("a") as file:
        # A line that a kill has cut is ended first.
        file.write(lines if file.tell() == 0 else f"\n{lines}")
        file.flush()
        os.fsync(file.fileno())
