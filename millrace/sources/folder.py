"""A folder or prefix of files as samples: files that share their name up to the first dot.

That is webdataset's own rule (``a/cat.jpg`` and ``a/cat.json`` are the sample ``a/cat`` with the
fields ``jpg`` and ``json``), so what is read back has the names that the files had.
"""

import hashlib
import re
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import orjson

from millrace import errors
from millrace.digest import sha256
from millrace.models.dataset import FileGroup, FileRef, Piece
from millrace.models.sample import BadRow, Row, Sample
from millrace.sources.files import read_ahead
from millrace.storage import Store, read

_NAME = re.compile(r"(?P<key>(?:.*/)?[^./][^./]*)\.(?P<extension>[^/]+)", re.DOTALL)
RESERVED = re.compile(r"__[^/]*__")  # of extensions: readers keep such names for themselves
_SKIPPED = re.compile(r"__[^/]*__($|/)")  # webdataset leaves such names out of what it reads


class Group(NamedTuple):
    """The files of one sample, in the order in which they are written.

    ``reason`` says why they make none; it is empty for a good sample.
    """

    key: str
    extensions: tuple[str, ...]
    files: tuple[FileRef, ...]
    reason: str

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def groups_of(files: list[FileRef]) -> list[Group]:
    """Group files into samples, in the order of their keys."""
    named = sorted(
        ((*_parsed(file.path), file) for file in files), key=lambda n: (n[0], n[1], n[2].path)
    )
    return [
        _group(key, [(extension, file) for _, extension, file in members])
        for key, members in groupby(named, key=lambda n: n[0])
    ]


def _parsed(path: str) -> tuple[str, str]:
    match = _NAME.fullmatch(path)
    if match:
        key, extension = match["key"], match["extension"].lower()
    elif "." not in path.rpartition("/")[2]:
        key, extension = path, "bin"
    else:
        return path, ""
    return (f"./{key}" if _SKIPPED.match(f"{key}.{extension}") else key), extension


def _group(key: str, members: list[tuple[str, FileRef]]) -> Group:
    extensions = tuple(extension for extension, _ in members)
    reason = ""
    if "" in extensions:
        reason = "a name that begins with a dot has no key by WebDataset's rule"
    elif any(RESERVED.search(extension) for extension in extensions):
        reason = "readers of WebDataset keep names like __this__ for themselves"
    elif any(not file.path.isprintable() for _, file in members):
        reason = "its name is not text that prints"
    elif len(set(extensions)) < len(extensions):
        reason = "two files of one sample have the same extension"
    return Group(key, extensions, tuple(file for _, file in members), reason)


def encode_listing(groups: list[Group]) -> bytes:
    """A split's samples as JSON lines, for the store."""
    lines = [
        orjson.dumps(
            [
                g.key,
                g.reason,
                [[e, f.path, f.size, f.etag] for e, f in zip(g.extensions, g.files, strict=True)],
            ]
        )
        for g in groups
    ]
    return b"\n".join(lines)


def decode_listing(body: bytes) -> list[Group]:
    """The samples of a split's listing."""
    groups: list[Group] = []
    for line in body.split(b"\n"):
        key, reason, members = orjson.loads(line)
        files = tuple(FileRef(path=path, size=size, etag=etag) for _, path, size, etag in members)
        groups.append(Group(key, tuple(member[0] for member in members), files, reason))
    return groups


class Folder:
    """The samples of a folder or prefix.

    Args:
        store: Where the files are.
        dataset: Where the splits' listings are.
    """

    def __init__(self, store: Store, dataset: Store) -> None:
        self._store = store
        self._dataset = dataset

    def rows(self, piece: Piece, cursor: int) -> Iterator[Row]:
        """The samples of a piece from the cursor-th on."""
        if not isinstance(piece, FileGroup):
            raise errors.ConfigurationError(f"A folder is cut by files, not {piece.kind}.")
        body = read(self._dataset, piece.listing)
        if sha256(body) != piece.sha256:
            raise errors.CorruptError(
                f"{self._dataset.url_of(piece.listing)} is not the listing that the plan was "
                "made with: something wrote under this dataset's name."
            )
        groups = decode_listing(body)[cursor:]
        contents = read_ahead(self._store, (file for group in groups for file in group.files))
        for place, group in enumerate(groups, start=cursor + 1):
            data = [next(contents) for _ in group.files]
            if group.reason:
                names = ", ".join(file.path for file in group.files)
                yield BadRow(names, group.reason, b"", place)
            else:
                yield Sample(group.key, dict(zip(group.extensions, data, strict=True)), place)


def piece_of(groups: list[Group], listing: str, body: bytes) -> FileGroup:
    """The piece that a listing stands for."""
    return FileGroup(
        listing=listing,
        sha256=hashlib.sha256(body).hexdigest(),
        samples=len(groups),
        size=sum(group.size for group in groups),
    )
