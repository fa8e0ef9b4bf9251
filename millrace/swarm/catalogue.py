"""Catalogue of a run: the files for every node, and their division into pieces.

Every node divides the same list of files into the same pieces, so a number identifies a piece. A
large file is cut at multiples of the piece size. Small files share a piece.
"""

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from millrace.digest import (
    BLOCK_SIZE,
    Algorithm,
    combine_blocks,
    compute_digest,
    get_algorithm,
    get_hex,
)
from millrace.errors import ConfigurationError

MIN_PIECE_SIZE = 1 << 20
MAX_PIECE_SIZE = 64 << 20
_MAX_DEFAULT_SIZE = 4 << 20
_WANTED_PIECES = 2000  # pieces of a run, about, if the piece size is not given
_MAX_SHARED_FILES = 32  # files in one piece at most
_LONGEST_NAME = 255  # bytes of a file name, the limit of common file systems

RECORDS_FOLDER = ".millrace"
"""Folder below the root with the records of the node. No file has its destination there."""

# Names of files and folders that are incomplete, or are being replaced.
_UNFINISHED = re.compile(r"\.[0-9a-f]{16}(\.[0-9a-f]{16})?\.(part|unpacking|replaced)")


@dataclass(frozen=True, slots=True)
class File:
    """One object of the store, and its destination on every node.

    Attributes:
        path: Destination below the root, with ``/`` between its components.
        size: Bytes of the object.
        etag: ETag of the object.
        origin: URL of the object, without credentials. The server follows the URL if the run has an
            object of another server with the same URL.
        digest: Digest of the object, from a record, the caller or the store. The MD5 of the object
            if only its ETag is known, and is one; else empty.
        mode: Permission bits of the file.
        owner: User id and group id of the file; None keeps those of the agent.
        links: Further destinations of the same object.
        unpack: Method of `millrace.swarm.archives.unpack`; empty for a file that is kept as it is.
        into: Folder below the root for the unpacked content.
        check: Check of a file of an earlier run (`CacheCheck`); empty for that of the run.
    """

    path: str
    size: int
    etag: str
    origin: str
    digest: str = ""
    mode: int = 0o644
    owner: tuple[int, int] | None = None
    links: tuple[str, ...] = ()
    unpack: str = ""
    into: str = ""
    check: str = ""

    @property
    def has_md5(self) -> bool:
        """True if the digest is an MD5 that was taken from the ETag, which may be none."""
        return self.algorithm is Algorithm.MD5

    @property
    def algorithm(self) -> Algorithm:
        """Algorithm of the digest; BLAKE3 if there is no digest."""
        return get_algorithm(self.digest) if self.digest else Algorithm.BLAKE3


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of one file.

    Attributes:
        file: Number of the file in the catalogue.
        start: Position of the first byte.
        size: Number of bytes.
    """

    file: int
    start: int
    size: int


Piece = tuple[Segment, ...]
"""Segments that nodes transfer together."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The files of a run, and their pieces.

    Attributes:
        id: Digest of the files, their ETags, their destinations and the piece size.
        files: Files for every node.
        piece_size: Bytes of a piece at most.
        pieces: Pieces of the files. An empty file has one segment without bytes.
    """

    id: str
    files: tuple[File, ...]
    piece_size: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def list_piece_sizes(self) -> list[int]:
        """Return the bytes of each piece."""
        return [sum(segment.size for segment in piece) for piece in self.pieces]

    def list_unproven_pieces(self) -> list[int]:
        """Return the pieces with bytes of a file that has no digest."""
        return [
            number
            for number, piece in enumerate(self.pieces)
            if any(s.size and not self.files[s.file].digest for s in piece)
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the catalogue, for `from_json`."""
        return {"piece_size": self.piece_size, "files": [_to_row(file) for file in self.files]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Catalogue":
        """Return the catalogue of a JSON object of `to_json`.

        Raises:
            ConfigurationError: A destination leads out of the root.
        """
        return build_catalogue(map(_from_row, data["files"]), data["piece_size"])


def build_catalogue(files: Iterable[File], piece_size: int | None = None) -> Catalogue:
    """Divide files into pieces, and return the catalogue.

    Args:
        files: Files, in the order in which they should be ready.
        piece_size: Bytes of a piece; by default 1 to 4 MiB, larger for more data.

    Raises:
        ConfigurationError: A destination leads out of the root, or two files have the same one.
    """
    files = tuple(files)
    _check_paths(files)
    if piece_size is None:
        wanted = sum(file.size for file in files) // _WANTED_PIECES
        power = 1 << max(0, wanted - 1).bit_length()
        piece_size = min(_MAX_DEFAULT_SIZE, max(MIN_PIECE_SIZE, power))
    listing = json.dumps([piece_size, *map(_to_row, files)])
    name = get_hex(compute_digest(listing.encode()))[:16]
    return Catalogue(name, files, piece_size, tuple(_cut_pieces(files, piece_size)))


def check_relative_path(path: str) -> str:
    """Check that a relative path stays below the root, and return the path.

    Raises:
        ConfigurationError: The path is absolute, is no path, leads out of the root, or is reserved
            for records of the node.
    """
    components = path.split("/")
    if (
        not path
        or path.startswith("/")
        or not {"", ".", ".."}.isdisjoint(components)
        or "\0" in path
    ):
        raise ConfigurationError(
            f"{path!r} cannot be a destination: it must name a file below the root, without "
            "empty components, . and .. in it. Rename the object, or request it by its own key."
        )
    if any(len(name.encode("utf-8", "surrogateescape")) > _LONGEST_NAME for name in components):
        raise ConfigurationError(
            f"{path!r} has a component that is longer than {_LONGEST_NAME} bytes."
        )
    if _fold_case(components[0]) == RECORDS_FOLDER or any(map(is_unfinished, components)):
        raise ConfigurationError(
            f"{path!r} cannot be a destination: a node keeps its own records under that name. Give "
            "the object another destination, or request the other objects without it."
        )
    return path


def is_unfinished(name: str) -> bool:
    """Tell whether a name is one that Millrace gives to incomplete files and folders."""
    return _UNFINISHED.fullmatch(_fold_case(name)) is not None


def _fold_case(name: str) -> str:
    """Return a name in the form that file systems that ignore case compare."""
    return unicodedata.normalize("NFKC", name).casefold()


def _check_paths(files: Sequence[File]) -> None:
    taken: set[str] = set()
    for file in files:
        for path in (file.path, *file.links, *([file.into] if file.into else [])):
            if check_relative_path(path) in taken:
                raise ConfigurationError(
                    f"Two requests have the destination {path}: give each its own."
                )
            taken.add(path)
    for path in taken:
        above = path
        while above := above.rpartition("/")[0]:
            if above in taken:
                raise ConfigurationError(
                    f"{path} would be inside of {above}, which is a destination too: choose "
                    "another one."
                )


def _cut_pieces(files: Sequence[File], piece_size: int) -> Iterable[Piece]:
    shared: list[Segment] = []
    room = piece_size
    for number, file in enumerate(files):
        if file.size >= piece_size:
            for start in range(0, file.size, piece_size):
                yield (Segment(number, start, min(piece_size, file.size - start)),)
            continue
        if shared and (file.size > room or len(shared) >= _MAX_SHARED_FILES):
            yield tuple(shared)
            shared, room = [], piece_size
        shared.append(Segment(number, 0, file.size))
        room -= file.size
    if shared:
        yield tuple(shared)


def combine_segment_blocks(block_digests: Sequence[bytes]) -> str:
    """Combine the block digests of segments (`hash_blocks`) into one digest.

    The digest of a single segment is that of its bytes.
    """
    return combine_segments([combine_blocks(digests) for digests in block_digests])


def combine_segments(digests: Sequence[str]) -> str:
    """Combine the BLAKE3 digests of segments into one digest, as `combine_segment_blocks` does."""
    return digests[0] if len(digests) == 1 else compute_digest("".join(digests).encode())


def can_combine(file: File, piece_size: int) -> bool:
    """Decide whether the digest of a file follows from the block digests of its segments.

    The digest must be a BLAKE3, and each segment must begin with a block.
    """
    aligned = piece_size % BLOCK_SIZE == 0 or file.size <= piece_size
    return aligned and file.algorithm is Algorithm.BLAKE3


def _to_row(file: File) -> list[Any]:
    return [getattr(file, name) for name in _FIELDS]


def _from_row(row: list[Any]) -> File:
    named = dict(zip(_FIELDS, row, strict=True))
    named["links"] = tuple(named["links"])
    if named["owner"] is not None:
        named["owner"] = tuple(named["owner"])
    return File(**named)


_FIELDS = tuple(field.name for field in fields(File))
