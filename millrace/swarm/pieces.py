"""Files that are put on every node, and the pieces that they travel in.

Every node cuts the same list of files into the same pieces, so a piece is known by its number.
A large file is cut at multiples of the piece size; small files share a piece.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from millrace.errors import ConfigurationError

MIN_PIECE_SIZE = 1 << 20
MAX_PIECE_SIZE = 4 << 20
_WANTED_PIECES = 2000  # about so many, where the size may be chosen
_MAX_SHARED_FILES = 32  # files in one piece at most
_LONGEST_NAME = 255  # bytes, on every file system in use

RECORDS_FOLDER = ".millrace"
"""Folder below the root with a node's own records: no destination."""

# Names of files and folders that are not whole yet, or are being replaced.
_UNFINISHED = re.compile(r"\.[0-9a-f]{16}(\.[0-9a-f]{16})?\.(part|unpacking|replaced)")


@dataclass(frozen=True, slots=True)
class File:
    """One object of the store, and where it goes.

    Attributes:
        path: Its destination, below the root, with ``/``.
        size: Bytes.
        etag: The store's name for this content.
        origin: The object's URL in the store, without credentials: for people, and for the id.
        sha256: Of the whole, where a record or the store says what it should be; else empty.
        md5: Of the whole, where the ETag is one; else empty.
        mode: Permission bits.
        owner: User and group id, if they are to be set.
        links: Further destinations of the same object.
        unpack: Method of unpacking, of `millrace.swarm.archives.unpack`; empty if it is not.
        into: The folder that it is unpacked into, below the root.
    """

    path: str
    size: int
    etag: str
    origin: str
    sha256: str = ""
    md5: str = ""
    mode: int = 0o644
    owner: tuple[int, int] | None = None
    links: tuple[str, ...] = ()
    unpack: str = ""
    into: str = ""

    @property
    def digest(self) -> str:
        """Digest of the whole: SHA-256, or else MD5; empty where none is known."""
        return self.sha256 or self.md5

    def make_hasher(self) -> Any:
        """Return what makes `digest`; SHA-256 where there is none."""
        if self.md5 and not self.sha256:
            return hashlib.md5(usedforsecurity=False)
        return hashlib.sha256()


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of one file.

    Attributes:
        file: The file's number in the catalogue.
        start: Its first byte.
        size: Bytes.
    """

    file: int
    start: int
    size: int


Piece = tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The files of a run, and their pieces.

    Attributes:
        id: The same for the same files, contents, destinations and piece size: a run that was
            stopped is known again by it.
        files: What goes on every node.
        piece_size: Bytes of a piece at most.
        pieces: What they are cut into. An empty file has a segment too, of no bytes.
    """

    id: str
    files: tuple[File, ...]
    piece_size: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(file.size for file in self.files)

    def list_piece_sizes(self) -> list[int]:
        """Bytes of each piece."""
        return [sum(segment.size for segment in piece) for piece in self.pieces]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON from which another machine makes the catalogue again."""
        return {"piece_size": self.piece_size, "files": [_to_row(file) for file in self.files]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Catalogue":
        """Make the catalogue that `to_json` wrote.

        Raises:
            ConfigurationError: A destination leads out of the root.
        """
        return catalogue_of(map(_from_row, data["files"]), data["piece_size"])


def catalogue_of(files: Iterable[File], piece_size: int | None = None) -> Catalogue:
    """Cut files into pieces.

    Args:
        files: In the order in which they should be ready.
        piece_size: Bytes; by default 1 to 4 MiB, larger for more data.

    Raises:
        ConfigurationError: A destination leads out of the root, or two are the same.
    """
    files = tuple(files)
    _check_destinations(files)
    if piece_size is None:
        wanted = sum(file.size for file in files) // _WANTED_PIECES
        piece_size = min(MAX_PIECE_SIZE, max(MIN_PIECE_SIZE, 1 << max(0, wanted - 1).bit_length()))
    listing = json.dumps([piece_size, *map(_to_row, files)])
    name = hashlib.sha256(listing.encode()).hexdigest()[:16]
    return Catalogue(name, files, piece_size, tuple(_cut_pieces(files, piece_size)))


def check_destination(path: str) -> str:
    """Return a destination, once it is known to lie below the root.

    Raises:
        ConfigurationError: It is absolute, leads out, is no path, or is a node's own.
    """
    parts = path.split("/")
    if not path or path.startswith("/") or not {"", ".", ".."}.isdisjoint(parts) or "\0" in path:
        raise ConfigurationError(
            f"{path!r} cannot be a destination: it must name a file below the root, without "
            "empty parts, . and .. in it. Rename the object, or request it by its own key."
        )
    if any(len(part.encode("utf-8", "surrogateescape")) > _LONGEST_NAME for part in parts):
        raise ConfigurationError(f"{path!r} has a part that is longer than {_LONGEST_NAME} bytes.")
    if _fold_case(parts[0]) == RECORDS_FOLDER or any(map(is_unfinished, parts)):
        raise ConfigurationError(
            f"{path!r} cannot be a destination: a node keeps its own records under that name. Give "
            "the object another destination, or request the other objects without it."
        )
    return path


def is_unfinished(name: str) -> bool:
    """Tell whether a name is one of files and folders that are not whole yet."""
    return _UNFINISHED.fullmatch(_fold_case(name)) is not None


def _fold_case(name: str) -> str:
    """Return the name by which file systems that ignore case know a file."""
    return unicodedata.normalize("NFKC", name).casefold()


def _check_destinations(files: Sequence[File]) -> None:
    taken: set[str] = set()
    for file in files:
        for path in (file.path, *file.links, *([file.into] if file.into else [])):
            if check_destination(path) in taken:
                raise ConfigurationError(
                    f"Two requests have the destination {path}: give each one."
                )
            taken.add(path)
    for path in taken:
        above = path
        while above := above.rpartition("/")[0]:
            if above in taken:
                raise ConfigurationError(
                    f"{path} would lie inside {above}, which is a destination itself."
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


def digest_of(parts: Sequence[bytes]) -> str:
    """Return a piece's digest, from the SHA-256 of each of its segments."""
    return parts[0].hex() if len(parts) == 1 else hashlib.sha256(b"".join(parts)).hexdigest()


def _to_row(file: File) -> list[Any]:
    return [getattr(file, name) for name in _FIELDS]


def _from_row(row: list[Any]) -> File:
    named = dict(zip(_FIELDS, row, strict=True))
    named["links"] = tuple(named["links"])
    if named["owner"] is not None:
        named["owner"] = tuple(named["owner"])
    return File(**named)


_FIELDS = tuple(field.name for field in fields(File))
