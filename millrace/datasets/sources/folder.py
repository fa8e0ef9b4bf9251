"""A folder or prefix of files as samples: files that share their name up to the first dot.

That is webdataset's own rule (``a/cat.jpg`` and ``a/cat.json`` are the sample ``a/cat`` with the
fields ``jpg`` and ``json``), so what is read back has the names that the files had.
"""

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import orjson

from millrace import errors
from millrace.datasets.sources.files import file_blocks, of_any_version, read_ahead
from millrace.datasets.sources.table import FileTable, path_bytes, path_text, shown, unreadable
from millrace.digest import sha256
from millrace.schemas.dataset import FileGroup, FileRef, SourceRange
from millrace.schemas.sample import BadRow, LargeFile, Row, Sample
from millrace.storage import Store, read

# Bytes of a sample from which its files are read while its shard is encoded. Smaller ones are read
# ahead, whole and several at once.
_LARGE = 32 * 1024 * 1024
_NAME = re.compile(r"(?P<key>(?:.*/)?[^./][^./]*)\.(?P<extension>[^/]+)", re.DOTALL)
LISTING_BYTES = 64 << 20
"""Largest listing of a split, in bytes: 10,000 files (`split_files`) have 1 to 15 MiB."""
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
        """Bytes of the sample."""
        return sum(file.size for file in self.files)


class Groups(Sequence[Group]):
    """The samples of a source in the order of their keys, each made when it is asked for.

    Memory: that of `FileTable`, and 12 bytes a sample. The rows of the files are taken over.

    Args:
        files: The files; their rows are packed anew, in place.
        local: Whether they are in a folder of this machine.
    """

    def __init__(self, files: FileTable, *, local: bool) -> None:
        self._local = local
        self._rows = rows = files.rows
        for place, row in enumerate(rows):
            rows[place] = _keyed(row)
        rows.sort()
        self._starts, self.sizes = array("I"), array("Q")
        before: bytes | None = None
        for place, row in enumerate(rows):
            key, _, _, size, _ = row.split(_NUL)
            if key != before:
                before = key
                self._starts.append(place)
                self.sizes.append(0)
            self.sizes[-1] += int(size)
        self._starts.append(len(rows))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, place: Any) -> Any:
        key, members = b"", list[tuple[str, str, int, str]]()
        for row in self._rows[self._starts[place] : self._starts[place + 1]]:
            key, extension, path, size, etag = row.split(_NUL)
            name = path or b"%b.%b" % (key, extension)
            members.append((path_text(extension), path_text(name), int(size), etag.decode()))
        return _group(path_text(key), sorted(members), local=self._local)

    def files_of(self, place: int) -> int:
        """Return how many files a sample has."""
        return self._starts[place + 1] - self._starts[place]


_NUL = b"\0"


def _keyed(row: bytes) -> bytes:
    """Pack a file's row anew: key, extension, path where these two do not give it, size, ETag."""
    path, _, rest = row.partition(_NUL)
    key, extension = (path_bytes(part) for part in _parsed(path_text(path)))
    given = b"" if path == b"%b.%b" % (key, extension) else path
    return b"%b\0%b\0%b\0%b" % (key, extension, given, rest)


def _parsed(path: str) -> tuple[str, str]:
    match = _NAME.fullmatch(path)
    if match:
        key, extension = match["key"], match["extension"].lower()
    elif "." not in path.rpartition("/")[2]:
        key, extension = path, "bin"
    else:
        return path, ""
    return (f"./{key}" if _SKIPPED.match(f"{key}.{extension}") else key), extension


def _group(key: str, members: list[tuple[str, str, int, str]], *, local: bool) -> Group:
    extensions = tuple(extension for extension, *_ in members)
    reasons = [reason for _, path, *_ in members if (reason := unreadable(path, local=local))]
    reason = ""
    if reasons:
        reason = reasons[0]
    elif "" in extensions:
        reason = "a name that begins with a dot has no key by WebDataset's rule"
    elif any(RESERVED.search(extension) for extension in extensions):
        reason = "readers of WebDataset keep names like __this__ for themselves"
    elif len(set(extensions)) < len(extensions):
        reason = "two files of one sample have the same extension"
    files = (FileRef(path=shown(p) if reason else p, size=s, etag=e) for _, p, s, e in members)
    if reason:
        key, extensions = shown(key), tuple(shown(extension) for extension in extensions)
    return Group(key, extensions, tuple(files), reason)


def encode_listing(groups: Iterable[Group]) -> bytes:
    """Return a split's samples as JSON lines, for the store."""
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
    """Return the samples of a split's listing."""
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
        any_version: Whether files are read that were written again since the plan was made.
    """

    def __init__(self, store: Store, dataset: Store, *, any_version: bool = False) -> None:
        self._any_version = any_version
        self._store = store
        self._dataset = dataset

    def rows(self, piece: SourceRange, cursor: int) -> Iterator[Row]:
        """Yield the samples of a piece from the cursor-th on.

        The files of a sample of more than 32 MiB are `LargeFile`: they are read by whoever
        encodes it.
        """
        if not isinstance(piece, FileGroup):
            raise errors.ConfigurationError(f"A folder is cut by files, not {piece.kind}.")
        body = read(self._dataset, piece.listing, largest=LISTING_BYTES)
        if sha256(body) != piece.sha256:
            raise errors.CorruptError(
                f"{self._dataset.url_of(piece.listing)} is not the listing that the plan was "
                "made with: something wrote under this dataset's name."
            )
        groups = decode_listing(body)[cursor:]
        if self._any_version:
            groups = [g._replace(files=tuple(map(of_any_version, g.files))) for g in groups]
        wanted = (
            file
            for group in groups
            if not group.reason
            for file in group.files
            if not _is_large(group, file)
        )
        contents = read_ahead(self._store, wanted)
        for place, group in enumerate(groups, start=cursor + 1):
            if group.reason:
                names = ", ".join(file.path for file in group.files)
                yield BadRow(names, group.reason, b"", place)
            else:
                data = [
                    self._later(file) if _is_large(group, file) else next(contents)
                    for file in group.files
                ]
                yield Sample(group.key, dict(zip(group.extensions, data, strict=True)), place)

    def _later(self, file: FileRef) -> LargeFile:
        return LargeFile(file.size, lambda: file_blocks(self._store, file, 0, file.size))


def _is_large(group: Group, file: FileRef) -> bool:
    """Return whether a file is read block by block: an empty one has no block to check."""
    return file.size > 0 and group.size > _LARGE
