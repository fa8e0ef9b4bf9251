"""Table of the samples of a folder or prefix, and the lists of the samples of its partitions.

Files that share their name up to the first dot are one sample. The rule is webdataset's own:
``a/cat.jpg`` and ``a/cat.json`` are the sample ``a/cat`` with the fields ``jpg`` and ``json``. So
readers of the shards see the names of the files.
"""

import re
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import orjson

from millrace.datasets.field_names import RESERVED
from millrace.datasets.sources.table import (
    FileTable,
    decode_path,
    encode_path,
    escape_path,
    find_unreadable_reason,
)
from millrace.schemas.dataset import FileRef

_NAME = re.compile(r"(?P<key>(?:.*/)?[^./][^./]*)\.(?P<extension>[^/]+)", re.DOTALL)
SKIPPED_NAME = re.compile(r"__[^/]*__($|/)")
"""Beginning of the names that webdataset does not read."""


class SampleFiles(NamedTuple):
    """The files of one sample, sorted by their extensions.

    Attributes:
        key: Key of the sample.
        extensions: Extension of each file.
        files: The files.
        reason: Reason why the files make no sample; empty for a good sample.
    """

    key: str
    extensions: tuple[str, ...]
    files: tuple[FileRef, ...]
    reason: str

    @property
    def size(self) -> int:
        """Bytes of the sample."""
        return sum(file.size for file in self.files)


class SampleTable(Sequence[SampleFiles]):
    """The samples of a source in the order of their keys, each made on access.

    Memory: that of `FileTable`, and 12 bytes for each sample.

    Args:
        files: The files. The table packs their rows again, in place.
        local: Whether the files are in a folder of this machine.
    """

    def __init__(self, files: FileTable, *, local: bool) -> None:
        self._local = local
        self._rows = rows = files.rows
        for index, row in enumerate(rows):
            rows[index] = _pack_by_key(row)
        rows.sort()
        self._starts, self.sizes = array("I"), array("Q")
        before: bytes | None = None
        for index, row in enumerate(rows):
            key, _, _, size, _ = row.split(_NUL)
            if key != before:
                before = key
                self._starts.append(index)
                self.sizes.append(0)
            self.sizes[-1] += int(size)
        self._starts.append(len(rows))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: Any) -> Any:
        key, members = b"", list[tuple[str, str, int, str]]()
        for row in self._rows[self._starts[index] : self._starts[index + 1]]:
            key, extension, path, size, etag = row.split(_NUL)
            name = path or b"%b.%b" % (key, extension)
            members.append((decode_path(extension), decode_path(name), int(size), etag.decode()))
        return _make_sample_files(decode_path(key), sorted(members), local=self._local)

    def count_files(self, index: int) -> int:
        """Return the number of files of a sample."""
        return self._starts[index + 1] - self._starts[index]


_NUL = b"\0"


def _pack_by_key(row: bytes) -> bytes:
    """Pack a file's row as key, extension, path (empty if ``key.extension``), size, ETag."""
    path, _, rest = row.partition(_NUL)
    key, extension = (encode_path(part) for part in _parse_path(decode_path(path)))
    stored_path = b"" if path == b"%b.%b" % (key, extension) else path
    return b"%b\0%b\0%b\0%b" % (key, extension, stored_path, rest)


def split_name(name: str) -> tuple[str, str] | None:
    """Return the key and the extension of a file or member; None if the name has no key."""
    match = _NAME.fullmatch(name)
    return (match["key"], match["extension"].lower()) if match else None


def find_extension_fault(extensions: Sequence[str]) -> str:
    """Return the reason why files with these extensions make no sample; empty if they make one."""
    if any(RESERVED.search(extension) for extension in extensions):
        return "readers of WebDataset reserve names like __this__"
    if len(set(extensions)) < len(extensions):
        return "two files of one sample have the same extension"
    return ""


def _parse_path(path: str) -> tuple[str, str]:
    parts = split_name(path)
    if parts:
        key, extension = parts
    elif "." not in path.rpartition("/")[2]:
        key, extension = path, "bin"
    else:
        return path, ""
    return (f"./{key}" if SKIPPED_NAME.match(f"{key}.{extension}") else key), extension


def _make_sample_files(
    key: str, members: list[tuple[str, str, int, str]], *, local: bool
) -> SampleFiles:
    extensions = tuple(extension for extension, *_ in members)
    reasons = [
        reason for _, path, *_ in members if (reason := find_unreadable_reason(path, local=local))
    ]
    reason = ""
    if reasons:
        reason = reasons[0]
    elif "" in extensions:
        reason = "a name that begins with a dot has no key by WebDataset's rule"
    else:
        reason = find_extension_fault(extensions)
    files = (
        FileRef(path=escape_path(p) if reason else p, size=s, etag=e) for _, p, s, e in members
    )
    if reason:
        key, extensions = (
            escape_path(key),
            tuple(escape_path(extension) for extension in extensions),
        )
    return SampleFiles(key, extensions, tuple(files), reason)


def encode_sample_list(samples: Iterable[SampleFiles]) -> bytes:
    """Encode a partition's samples as JSON lines."""
    lines = [
        orjson.dumps(
            [
                s.key,
                s.reason,
                [[e, f.path, f.size, f.etag] for e, f in zip(s.extensions, s.files, strict=True)],
            ]
        )
        for s in samples
    ]
    return b"\n".join(lines)


def decode_sample_list(body: bytes) -> list[SampleFiles]:
    """Return the samples of a partition's sample list."""
    samples: list[SampleFiles] = []
    for line in body.split(b"\n"):
        key, reason, members = orjson.loads(line)
        files = tuple(FileRef(path=path, size=size, etag=etag) for _, path, size, etag in members)
        samples.append(SampleFiles(key, tuple(member[0] for member in members), files, reason))
    return samples
