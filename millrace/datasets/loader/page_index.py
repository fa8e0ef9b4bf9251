"""Index of the pages of a dataset: the places of all pages, which loaders read instead of footers.

An index is a record with all files and their ETags, and one object with the layouts of a column. A
loader finds the newest index in the listing of the files. A file that was written since then has
another ETag. Such a stale entry is not used, and the loader reads the end of this file.

A layout may have a checksum of each page, by which copies in other stores are compared.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, groupby, repeat

import numpy as np

from millrace import errors
from millrace.datasets.loader.column import ColumnLayout, compute_checksums, read_layout
from millrace.datasets.loader.layout_encoding import decode_layout, encode_layout
from millrace.datasets.loader.templar_index import (
    SHARD_SIZES,
    find_named,
    match_files,
    read_templar_index,
)
from millrace.datasets.sources import is_store_url, open_files
from millrace.datasets.sources.files import LocatedFiles, Patterns, SourceFiles, list_files
from millrace.datasets.sources.table import iterate_files
from millrace.digest import compute_digest
from millrace.formatting import format_count
from millrace.keys.datasets import (
    is_page_index,
    make_page_index_key,
    make_page_layouts_key,
    parse_page_index,
)
from millrace.records import commit_once, decode_record
from millrace.schemas.dataset import FileRef
from millrace.schemas.pages import IndexedFile, PageIndex
from millrace.storage import StoreSpec, create, open_store, put, read

FOOTER_CONCURRENCY = 16
"""Files whose ends, or pages for checksums, are read at once."""
_log = logging.getLogger(__name__)
_WHOLE_BYTES = 4 << 20  # layouts up to this size are read in one request
_SHOWN = 3  # stale files in a message
# Size and nanoseconds of `make_local_etag`; inode, microseconds and size of obstore.
_LOCAL_ETAGS = re.compile(r'([0-9a-f]+)-([0-9a-f]+) "[0-9a-f]+-([0-9a-f]+)-\1"')
_ATTEMPTS = 10  # indexes of others that are committed meanwhile


class _FilesWithIndexes(Patterns):
    """Patterns of files, and of the indexes of the files and of their pages."""

    def matches(self, path: str) -> bool:
        """Decide whether a path is that of a file or of an index."""
        return path == SHARD_SIZES or is_page_index(path) or super().matches(path)


@dataclass(frozen=True, slots=True)
class ListedFiles:
    """Files of a dataset, with the objects of its indexes.

    Attributes:
        files: Files with rows, in the order of their paths.
        indexes: Objects of indexes, by their paths.
        sizes: Templar's index of the files; None if there is none.
    """

    files: list[FileRef]
    indexes: dict[str, FileRef]
    sizes: FileRef | None

    @classmethod
    def collect(cls, files: SourceFiles, include: Sequence[str]) -> "ListedFiles":
        """List files and indexes in one listing.

        Files whose names cannot be read are left out, with a warning.

        Raises:
            NotFoundError: No file matches the patterns, or none has a name that can be read.
        """
        table = files.collect(_FilesWithIndexes(include))
        listed, indexes = list[FileRef](), dict[str, FileRef]()
        sizes: FileRef | None = None
        left_out, example = 0, ""
        for _, file, reason in iterate_files(table, local=files.is_local):
            if file.path == SHARD_SIZES:
                sizes = file
            elif is_page_index(file.path):
                indexes[file.path] = file
            elif reason:
                left_out += 1
                example = example or f"{files.make_url(file.path)}: {reason}"
            else:
                listed.append(file)
        if left_out:
            sentence = f"{format_count(left_out, 'file')} cannot be read by name, such as {example}"
            if not listed:
                raise errors.NotFoundError(f"{sentence}. There are no others. Rename them.")
            _log.warning("%s. They are left out. Rename them.", sentence)
        if not listed:
            list_files(files, Patterns(include))  # raises the error of an empty listing
        return cls(listed, indexes, sizes)

    def select_named(self, files: SourceFiles, patterns: Patterns) -> list[FileRef]:
        """Return the files that Templar's index names, if there is one. One request.

        Others are left out, with a warning. A run that was overtaken by another one may leave such
        a shard, with the rows of a shard that counts.

        Args:
            files: Files of the dataset.
            patterns: Patterns of the listed files.

        Raises:
            CorruptError: The index cannot be read.
        """
        if self.sizes is None:
            return self.files
        paths = [file.path for file in self.files]
        named = find_named(files, self.sizes, paths, patterns)
        if unnamed := [path for path in paths if path not in named]:
            _log.warning(
                "%s does not name %s, such as %s. They are left out. Delete them, or make that "
                "index again.",
                files.make_url(SHARD_SIZES),
                format_count(len(unnamed), "file"),
                unnamed[0],
            )
        return [file for file in self.files if file.path in named]

    def find_newest(self, column: str) -> int:
        """Return the number of the newest index of a column; 0 if there is none."""
        numbers = (parse_page_index(column, path) for path in self.indexes)
        return max((number for number in numbers if number is not None), default=0)


class IndexReader:
    """Entries of the newest index of a column, which read layouts.

    Args:
        record: Record of the index.
        layouts: Object with the layouts.
    """

    def __init__(self, record: PageIndex, layouts: FileRef) -> None:
        self._record, self._layouts = record, layouts
        self._entries = {entry.path: entry for entry in record.files}

    @property
    def is_small(self) -> bool:
        """True if all layouts are best read in one request."""
        return self._record.size <= _WHOLE_BYTES

    @property
    def digest(self) -> str:
        """Digest of the object with the layouts."""
        return self._record.digest

    @property
    def paths(self) -> set[str]:
        """Paths of the indexed files."""
        return set(self._entries)

    @property
    def entries(self) -> Sequence[IndexedFile]:
        """Entries of the indexed files."""
        return self._record.files

    def find(self, file: FileRef) -> IndexedFile | None:
        """Return the entry of a file; None if there is none, or if the file was written since."""
        entry = self._entries.get(file.path)
        if entry is None or entry.size != file.size or not _are_equal(entry.etag, file.etag):
            return None
        return entry

    def read_all(self, files: SourceFiles) -> bytes:
        """Return all layouts, verified. One request.

        Raises:
            CorruptError: The object does not have its digest.
        """
        body = files.read(self._layouts)
        if compute_digest(body) != self._record.digest:
            raise errors.CorruptError(
                f"{files.make_url(self._layouts.path)} does not have its digest. Make the "
                f"index again: millrace dataset index {files.url}"
            )
        return body

    def read_layout(
        self, files: SourceFiles, entry: IndexedFile, whole: bytes | None = None
    ) -> ColumnLayout:
        """Return the layout of a file. One request, or none with the bytes of all layouts.

        Raises:
            CorruptError: The layout is damaged.
        """
        if whole is None:
            blocks = files.iterate_blocks(self._layouts, entry.start, entry.end)
            body = b"".join(blocks)
        else:
            body = whole[entry.start : entry.end]
        reason = "it has other rows than its entry"
        try:
            layout = decode_layout(body)
        except ValueError as error:
            layout, reason = None, str(error)
        if layout is None or layout.rows != sum(expand_row_groups(entry.row_groups)):
            raise errors.CorruptError(
                f"{files.make_url(self._layouts.path)} is damaged at {entry.path} ({reason}). "
                f"Make the index again: millrace dataset index {files.url}"
            )
        return layout


def _are_equal(indexed: str, listed: str) -> bool:
    """Decide whether two ETags are of one version of a file, also of one in a folder with mirrors.

    Such a folder is listed as a store, whose ETags are other ones than those of `LocalFiles`.
    """
    if indexed == listed:
        return True
    times = _LOCAL_ETAGS.fullmatch(f"{indexed} {listed}")
    return times is not None and int(times[2], 16) // 1000 == int(times[3], 16)


def find_index(files: SourceFiles, listed: ListedFiles, column: str) -> IndexReader | None:
    """Return the newest index of a column; None if there is none. One request.

    An index that cannot be used is left out, with a warning.

    Args:
        files: Files of the dataset.
        listed: Files and indexes.
        column: Column of the pages.
    """
    newest = listed.find_newest(column)
    if not newest:
        return None
    ref = listed.indexes[make_page_index_key(column, newest)]
    url = files.make_url(ref.path)
    reason = f"{url} has more than {PageIndex.record_bytes >> 20} MiB"
    if ref.size <= PageIndex.record_bytes:
        try:
            record, _ = decode_record(url, PageIndex, files.read(ref))
        except (errors.CorruptError, errors.VersionError, errors.ChangedError) as error:
            reason = str(error)
        else:
            layouts = listed.indexes.get(record.layouts)
            if record.column == column and layouts and layouts.size == record.size:
                return IndexReader(record, layouts)
            reason = f"{url} does not fit its layouts at {record.layouts}"
    _log.warning(
        "The index of the pages is not used: %s. Make the index again: millrace dataset index %s",
        reason.rstrip("."),
        files.url,
    )
    return None


def warn_of_stale(url: str, stale: Sequence[str]) -> None:
    """Log the files that an index describes in an earlier version."""
    if stale:
        more = f" and {len(stale) - _SHOWN} more" if len(stale) > _SHOWN else ""
        _log.warning(
            "The index of the pages of %s is stale: %s%s %s written since. The ends of these files "
            "are read. Make the index again: millrace dataset index %s",
            url,
            ", ".join(stale[:_SHOWN]),
            more,
            "were" if len(stale) > 1 else "was",
            url,
        )


@dataclass(frozen=True, slots=True)
class IndexReport:
    """State of an index after it was made or checked.

    Attributes:
        url: URL of the files.
        column: Column of the pages.
        number: Number of the index; 0 if there is none.
        files: Number of files.
        rows: Number of rows of all files.
        size: Bytes of all layouts.
        checked: Number of files with checksums of their pages.
        stale: Paths of the files that an earlier index had in another version.
        missing: Paths of the files that no earlier index had.
        gone: Paths that an earlier index had, and that are no files by now.
        unchecked: Paths of the files without checksums, if these are wanted.
        differing: Sentences about other numbers of rows in Templar's index.
        is_new: Whether this call has made the index.
    """

    url: str
    column: str
    number: int
    files: int
    rows: int
    size: int
    checked: int
    stale: tuple[str, ...]
    missing: tuple[str, ...]
    gone: tuple[str, ...]
    unchecked: tuple[str, ...]
    differing: tuple[str, ...]
    is_new: bool

    @property
    def is_current(self) -> bool:
        """True if the index describes all files as they are, with the wanted checksums."""
        return self.is_new or not (self.stale or self.missing or self.gone or self.unchecked)


def index_pages(
    source: str | StoreSpec,
    column: str = "text",
    *,
    include: Sequence[str] = ("*.parquet",),
    includes_checksums: bool = False,
    is_check: bool = False,
) -> IndexReport:
    """Make the index of the pages of a column, or make it again if files have changed.

    Only the ends of new and changed files are read, 16 at a time. With checksums, the whole column
    of these files is, and of those without checksums, in blocks of up to 8 MiB.

    Args:
        source: URL of a store or a folder, or URL and credentials.
        column: Column of the pages.
        include: Patterns of the paths of the files.
        includes_checksums: Whether to store a checksum of each page, by which loaders compare
            copies of the files in other stores. Files that did not change keep their checksums.
        is_check: Whether to write nothing, and to report what is stale.

    Raises:
        NotFoundError: There are no such files, or a file has no such column.
        ConfigurationError: The files are on a web server or on the Hub.
        CorruptError: A file is no parquet file, or is damaged.
    """
    spec = StoreSpec(url=source) if isinstance(source, str) else source
    if not is_store_url(spec.url):
        raise errors.ConfigurationError(
            f"An index is stored beside its files, and Millrace does not write to {spec.url}. "
            "Copy the files to a bucket or a folder first."
        )
    files = open_files(spec)
    listed = ListedFiles.collect(files, include)
    patterns = Patterns(include)
    chosen = listed.select_named(files, patterns)
    reader = find_index(files, listed, column)
    whole = b""
    if reader is not None:
        try:
            whole = reader.read_all(files)
        except (errors.CorruptError, errors.ChangedError) as error:
            _log.warning("The index of the pages is not used: %s", error)
            reader = None
    found = [reader.find(file) if reader else None for file in chosen]
    indexed = {path for path in reader.paths if patterns.matches(path)} if reader else set[str]()
    paths = {file.path for file in chosen}
    unknown = [file.path for file, entry in zip(chosen, found, strict=True) if not entry]
    unchecked = [entry.path for entry in found if entry and not entry.has_checksums]
    report = IndexReport(
        url=files.url,
        column=column,
        number=listed.find_newest(column),
        files=len(chosen),
        rows=0,
        size=0,
        checked=0,
        stale=tuple(path for path in unknown if path in indexed),
        missing=tuple(path for path in unknown if path not in indexed),
        gone=tuple(sorted(indexed - paths)),
        unchecked=tuple(unchecked if includes_checksums else ()),
        differing=(),
        is_new=False,
    )
    if not (is_check or report.is_current):
        kept = [entry if entry and entry.path not in report.unchecked else None for entry in found]
        others = [one for one in reader.entries if not patterns.matches(one.path)] if reader else []
        report, found = _make_index(
            spec, files, chosen, whole, kept, others, report, includes_checksums=includes_checksums
        )
    known = [entry for entry in found if entry]
    report = replace(
        report,
        rows=sum(sum(expand_row_groups(entry.row_groups)) for entry in known),
        size=sum(entry.end - entry.start for entry in known),
        checked=sum(entry.has_checksums for entry in known),
    )
    differing = _compare_rows(spec, chosen, found, patterns)
    return replace(report, differing=tuple(differing))


def _compare_rows(
    spec: StoreSpec,
    files: Sequence[FileRef],
    entries: Sequence[IndexedFile | None],
    patterns: Patterns,
) -> Iterator[str]:
    """Yield a sentence for each file with other rows than Templar's index of the files says."""
    configs = read_templar_index(open_store(spec, make_folder=False))
    numbers = match_files(list(configs.values()), [file.path for file in files], patterns)
    for path, expected in (one for config in configs.values() for one in config.files):
        entry = entries[numbers[path]] if path in numbers else None
        rows = sum(expand_row_groups(entry.row_groups)) if entry else expected
        if rows != expected:
            yield f"{path} has {rows} rows, and {SHARD_SIZES} says {expected}."


def _make_index(
    spec: StoreSpec,
    files: LocatedFiles,
    listed: Sequence[FileRef],
    whole: bytes,
    found: Sequence[IndexedFile | None],
    others: Sequence[IndexedFile],
    report: IndexReport,
    *,
    includes_checksums: bool,
) -> tuple[IndexReport, Sequence[IndexedFile]]:
    """Commit an index of the listed files, and of other files that an earlier index has.

    Args:
        spec: URL and credentials.
        files: Files of the dataset.
        listed: Listed files.
        whole: All layouts of the earlier index.
        found: Entries of the listed files in the earlier index.
        others: Entries of other files in the earlier index.
        report: State of the earlier index.
        includes_checksums: Whether the entries that are made have checksums.
    """
    kept = [FileRef(path=one.path, size=one.size, etag=one.etag) for one in others]
    all_files, all_found = [*listed, *kept], [*found, *others]

    def encode(file: FileRef, entry: IndexedFile | None) -> tuple[IndexedFile, bytes]:
        if entry is not None:
            return entry, whole[entry.start : entry.end]
        layout = read_layout(files, file, report.column)
        if includes_checksums:
            layout = compute_checksums(files, file, layout)
        entry = IndexedFile(
            path=file.path,
            size=file.size,
            etag=file.etag,
            row_groups=compress_row_groups(np.diff(layout.starts).tolist()),
            start=0,
            end=0,
            has_checksums=includes_checksums,
        )
        return entry, encode_layout(layout)

    with ThreadPoolExecutor(FOOTER_CONCURRENCY, thread_name_prefix="footers") as pool:
        encoded = list(pool.map(encode, all_files, all_found))
    body = b"".join(layout for _, layout in encoded)
    ends = np.cumsum([len(layout) for _, layout in encoded]).tolist()
    digest = compute_digest(body)
    record = PageIndex(
        column=report.column,
        layouts=make_page_layouts_key(report.column, digest),
        size=len(body),
        digest=digest,
        files=tuple(
            entry.model_copy(update={"start": end - len(layout), "end": end})
            for (entry, layout), end in zip(encoded, ends, strict=True)
        ),
    )
    store = open_store(spec, make_folder=False)
    try:
        create(store, record.layouts, body)
    except errors.ExistsError:  # its key is its digest, so it has the same bytes or is damaged
        stored = b""
        with suppress(errors.CorruptError):  # it is larger
            stored = read(store, record.layouts, max_size=len(body))
        if stored != body:
            put(store, record.layouts, body)
    for number in range(report.number + 1, report.number + 1 + _ATTEMPTS):
        commit = commit_once(store, make_page_index_key(report.column, number), record)
        if commit.mine or commit.record == record:
            break
    else:
        raise errors.ConflictError(
            f"{store.url} was indexed {format_count(_ATTEMPTS, 'time')} by others meanwhile. Run "
            "it again when they have ended."
        )
    return replace(report, number=number, is_new=True), record.files[: len(listed)]


def compress_row_groups(rows: Iterable[int]) -> tuple[int, ...]:
    """Return runs of equal numbers: each number, and how often it follows itself."""
    runs = ((number, sum(1 for _ in run)) for number, run in groupby(rows))
    return tuple(chain.from_iterable(runs))


def expand_row_groups(runs: Sequence[int]) -> list[int]:
    """Return the numbers of runs, see `compress_row_groups`."""
    return list(
        chain.from_iterable(
            repeat(number, count) for number, count in zip(runs[::2], runs[1::2], strict=True)
        )
    )
