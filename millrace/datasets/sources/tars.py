"""Samples from WebDataset's tar files, of which each becomes one range.

The cursor is the offset of the header of a sample's first member. A run that continues reads the
stored index of the file and the samples from the cursor on, and no byte before them.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from millrace import errors
from millrace.datasets.sample import BadRow, LargeFile, Row, Sample
from millrace.datasets.sources.files import SourceFiles, drop_etag, fetch_ahead
from millrace.datasets.sources.folder import LARGE_SAMPLE_BYTES
from millrace.datasets.sources.ranges import FileRange, iterate_unreadable
from millrace.datasets.sources.reader import SourceFileReader
from millrace.datasets.sources.table import FileTable, iterate_files
from millrace.datasets.sources.tar_index import (
    MemberData,
    TarSample,
    build_index,
    iterate_samples,
    read_index,
    store_index,
)
from millrace.keys.datasets import DatasetKeys
from millrace.schemas.dataset import ByteRange, FileRef, MemberRange, SourceRange
from millrace.storage import Store

_COMPRESSED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".lz4")
_CONCURRENCY = 8  # concurrent reads of samples
_MAX_HELD_BYTES = 128 << 20  # of a tar file elsewhere that is read once, and held
_BATCH_BYTES, _LOCAL_BATCH_BYTES = 4 << 20, 768 << 10  # bytes of the samples in one read
_BATCH_SAMPLES = 1024
_WINDOW = 64 << 10  # bytes read at first for headers
_MAX_WINDOW, _MAX_LOCAL_WINDOW = 8 << 20, 1 << 20  # bytes read at a time for headers
_GAP, _LOCAL_GAP = 1 << 20, 128 << 10  # bytes between two windows that are read as one
_FIRST_BYTES = 8 << 20  # bytes in which the first samples of a range begin


def divide_tars(files: SourceFiles, table: FileTable, keys: DatasetKeys) -> list[FileRange]:
    """Make each tar file of a source one range. Nothing is read.

    Args:
        files: Files of the source.
        table: Table of these files.
        keys: Names of the dataset.

    Raises:
        ConfigurationError: A file is compressed, or the server sends no parts of it.
    """
    ranges: list[FileRange] = []
    for number, file, reason in iterate_files(table, local=files.is_local):
        if not file.size:
            continue
        if reason:
            unreadable = ByteRange(
                file=file, file_index=number, start=0, end=file.size, reason=reason
            )
            ranges.append(unreadable)
            continue
        if file.path.lower().endswith(_COMPRESSED):
            raise errors.ConfigurationError(
                f"{files.make_url(file.path)} is compressed, and no run could continue within it. "
                "Decompress the file (gunzip, zstd -d), or leave it out with `exclude`."
            )
        if file.path in files.unseekable:
            raise errors.ConfigurationError(
                f"{files.make_url(file.path)}: the server sends no parts of files, which tar files "
                "need. Copy the file to a bucket or a folder."
            )
        index = keys.make_member_index_key(number)
        ranges.append(
            MemberRange(file=file, file_index=number, start=0, end=file.size, index=index)
        )
    return ranges


def store_first_members(files: SourceFiles, store: Store, source_range: MemberRange) -> None:
    """Store an index of the samples that begin in the first 8 MiB of a range, and of no others.

    Args:
        files: Files of the source.
        store: Store that no run uses, which needs the index of the whole file.
        source_range: Range of the file.
    """
    file = source_range.file
    end = source_range.start + _FIRST_BYTES
    index = build_index(files, file, _TarData(files, file).read, end)
    store_index(store, source_range, index)


class TarSource:
    """The samples of WebDataset's tar files.

    Args:
        files: Files of the source.
        dataset_store: Store of the dataset, for the indexes of the files.
        any_version: Whether a file is also read if it was written again after the plan was made.
    """

    def __init__(
        self, files: SourceFiles, dataset_store: Store, *, any_version: bool = False
    ) -> None:
        self._files, self._store, self._any_version = files, dataset_store, any_version

    def iterate_rows(self, source_range: SourceRange, cursor: int) -> Iterator[Row]:
        """Yield the samples whose first members begin within a range of a file, from a cursor on.

        The members of a sample of more than 32 MiB are `LargeFile`: the encoder reads their blocks.
        """
        if isinstance(source_range, ByteRange) and source_range.reason:
            yield from iterate_unreadable(source_range, cursor)
            return
        if not isinstance(source_range, MemberRange):
            raise errors.ConfigurationError(
                f"Tar files are divided by members, not {source_range.kind}."
            )
        start = max(cursor, source_range.start)
        if start >= source_range.end:
            return
        file = drop_etag(source_range.file) if self._any_version else source_range.file
        data = _TarData(self._files, file)
        index = read_index(self._store, source_range)
        if index is None:
            data.hold()
            index = build_index(self._files, file, data.read)
            if not self._any_version:
                store_index(self._store, source_range, index)
        samples = iterate_samples(index, start, source_range.end, file.size)
        batches = ((batch, sum(map(_count_read_bytes, batch))) for batch in data.batch(samples))
        concurrency = 0 if data.is_near else _CONCURRENCY
        for batch, spans in fetch_ahead(data.fetch, batches, concurrency):
            for sample in batch:
                yield data.make_row(sample, spans)


class _TarData:
    """Bytes of one tar file, which are read in parts, or held in memory as a whole.

    Args:
        files: Files of the source.
        file: The tar file.
    """

    def __init__(self, files: SourceFiles, file: FileRef) -> None:
        self._files, self._file = files, file
        self._held: bytes | None = None
        self._window, self._window_start = b"", 0
        self._window_size = _WINDOW

    @property
    def is_near(self) -> bool:
        """True if a read takes no request."""
        return self._files.is_local or self._held is not None

    def hold(self) -> None:
        """Read a file of up to 128 MiB from elsewhere, so that its bytes are sent once."""
        if not self._files.is_local and self._file.size <= _MAX_HELD_BYTES:
            blocks = self._files.iterate_blocks(self._file, 0, self._file.size)
            self._held = b"".join(blocks)

    def read(self, offset: int, size: int) -> bytes:
        """Return bytes for the headers: as many as wanted, or up to the end of the file.

        While headers are near each other, more bytes are read at a time. Otherwise the data between
        them is not read.
        """
        if self._held is not None:
            return self._held[offset : offset + size]
        end = min(offset + size, self._file.size)
        window_end = self._window_start + len(self._window)
        if not self._window_start <= offset <= end <= window_end:
            gap, largest = (
                (_LOCAL_GAP, _MAX_LOCAL_WINDOW) if self._files.is_local else (_GAP, _MAX_WINDOW)
            )
            is_near = self._window_start <= offset <= window_end + gap
            self._window_size = min(2 * self._window_size, largest) if is_near else _WINDOW
            stop = min(max(end, offset + self._window_size), self._file.size)
            block = max(_WINDOW, (stop - offset) // 4)
            blocks = self._files.iterate_blocks(self._file, offset, stop, block=block)
            self._window, self._window_start = b"".join(blocks), offset
        at = offset - self._window_start
        return self._window[at : at + end - offset]

    def batch(self, samples: Iterable[TarSample]) -> Iterator[list[TarSample]]:
        """Yield samples that are read together, in order."""
        limit = _LOCAL_BATCH_BYTES if self._files.is_local else _BATCH_BYTES
        batch: list[TarSample] = []
        size = 0
        for sample in samples:
            more = _count_read_bytes(sample)
            if batch and (size + more > limit or len(batch) >= _BATCH_SAMPLES):
                yield batch
                batch, size = [], 0
            batch.append(sample)
            size += more
        if batch:
            yield batch

    def fetch(self, batch: list[TarSample]) -> list[tuple[int, bytes]]:
        """Return the spans of the file that have the samples of a batch, with their offsets."""
        if self._held is not None:
            return [(0, self._held)]
        ranges = (
            (member.offset, member.offset + member.size)
            for sample in batch
            if not _is_large(sample)
            for member in sample.members
            if member.size
        )
        return SourceFileReader(self._files, self._file).fetch(ranges)

    def make_row(self, sample: TarSample, spans: list[tuple[int, bytes]]) -> Row:
        """Return the row of a sample, from the spans of its batch."""
        if sample.reason:
            where = f"{self._file.path}, {sample.key}"
            return BadRow(where, sample.reason, b"", sample.next_position)
        fields: dict[str, bytes | LargeFile] = {}
        is_large = _is_large(sample)
        for member in sample.members:
            if not member.size:
                fields[member.extension] = b""
            elif is_large:
                fields[member.extension] = self._make_large_file(member)
            else:
                span = bisect_right(spans, member.offset, key=lambda found: found[0]) - 1
                start, data = spans[span]
                at = member.offset - start
                fields[member.extension] = data[at : at + member.size]
        return Sample(sample.key, fields, sample.next_position)

    def _make_large_file(self, member: MemberData) -> LargeFile:
        start, end = member.offset, member.offset + member.size
        held = self._held
        if held is not None:
            return LargeFile(member.size, lambda: iter([held[start:end]]))
        return LargeFile(member.size, lambda: self._files.iterate_blocks(self._file, start, end))


def _is_large(sample: TarSample) -> bool:
    """Decide whether the members of a sample are read block by block."""
    return sample.size > LARGE_SAMPLE_BYTES


def _count_read_bytes(sample: TarSample) -> int:
    return 0 if _is_large(sample) else sample.size
