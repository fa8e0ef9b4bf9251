"""Samples from the files of a folder or prefix.

Files that share their name up to the first dot are one sample. The rule is webdataset's own:
``a/cat.jpg`` and ``a/cat.json`` are the sample ``a/cat`` with the fields ``jpg`` and ``json``. So
readers of the shards see the names of the files.
"""

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import orjson

from millrace import errors
from millrace.datasets.sample import BadRow, LargeFile, Row, Sample
from millrace.datasets.sources.files import drop_etag, iterate_file_blocks, read_ahead
from millrace.datasets.sources.table import (
    FileTable,
    decode_path,
    encode_path,
    escape_path,
    find_unreadable_reason,
)
from millrace.digest import compute_digest
from millrace.schemas.dataset import FileRef, SampleList, SourceRange
from millrace.storage import Store, read

# Size in bytes above which the files of a sample are read block by block during the encoding. The
# files of smaller samples are read ahead: whole, and several at once.
_LARGE = 32 * 1024 * 1024
_NAME = re.compile(r"(?P<key>(?:.*/)?[^./][^./]*)\.(?P<extension>[^/]+)", re.DOTALL)
MAX_SAMPLE_LIST_BYTES = 64 << 20
"""Largest sample list of a partition, in bytes. A list of 10,000 files has 1 to 15 MiB."""
RESERVED = re.compile(r"__[^/]*__")  # extensions that readers reserve
_SKIPPED = re.compile(r"__[^/]*__($|/)")  # names that webdataset does not read


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


def _parse_path(path: str) -> tuple[str, str]:
    match = _NAME.fullmatch(path)
    if match:
        key, extension = match["key"], match["extension"].lower()
    elif "." not in path.rpartition("/")[2]:
        key, extension = path, "bin"
    else:
        return path, ""
    return (f"./{key}" if _SKIPPED.match(f"{key}.{extension}") else key), extension


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
    elif any(RESERVED.search(extension) for extension in extensions):
        reason = "readers of WebDataset reserve names like __this__"
    elif len(set(extensions)) < len(extensions):
        reason = "two files of one sample have the same extension"
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


class FolderSource:
    """The samples of a folder or prefix.

    Args:
        store: Store of the files.
        dataset_store: Store of the partitions' sample lists.
        any_version: Whether a file is also read if it was written again after the plan was made.
    """

    def __init__(self, store: Store, dataset_store: Store, *, any_version: bool = False) -> None:
        self._any_version = any_version
        self._store = store
        self._dataset_store = dataset_store

    def iterate_rows(self, source_range: SourceRange, cursor: int) -> Iterator[Row]:
        """Yield the samples of a source range from number `cursor` on.

        The files of a sample of more than 32 MiB are `LargeFile`: the encoder reads their blocks.
        """
        if not isinstance(source_range, SampleList):
            raise errors.ConfigurationError(
                f"A folder is divided by files, not {source_range.kind}."
            )
        body = read(self._dataset_store, source_range.listing, max_size=MAX_SAMPLE_LIST_BYTES)
        if compute_digest(body) != source_range.digest:
            raise errors.CorruptError(
                f"{self._dataset_store.make_url(source_range.listing)} does not have the digest "
                "of the plan: another program has written under this dataset's name. Shard the "
                "source under another name."
            )
        samples = decode_sample_list(body)[cursor:]
        if self._any_version:
            samples = [s._replace(files=tuple(map(drop_etag, s.files))) for s in samples]
        small_files = (
            file
            for sample in samples
            if not sample.reason
            for file in sample.files
            if not _is_large(sample, file)
        )
        contents = read_ahead(self._store, small_files)
        for next_cursor, sample in enumerate(samples, start=cursor + 1):
            if sample.reason:
                names = ", ".join(file.path for file in sample.files)
                yield BadRow(names, sample.reason, b"", next_cursor)
            else:
                data = [
                    self._make_large_file(file) if _is_large(sample, file) else next(contents)
                    for file in sample.files
                ]
                fields = dict(zip(sample.extensions, data, strict=True))
                yield Sample(sample.key, fields, next_cursor)

    def _make_large_file(self, file: FileRef) -> LargeFile:
        return LargeFile(file.size, lambda: iterate_file_blocks(self._store, file, 0, file.size))


def _is_large(sample: SampleFiles, file: FileRef) -> bool:
    """Return whether a file is read block by block. An empty file has no block to check."""
    return file.size > 0 and sample.size > _LARGE
