"""Bytes and ranges of text files, which may be compressed."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from millrace.datasets.sources.compressed import find_compression, iterate_compressed_sections
from millrace.datasets.sources.files import SourceFiles, drop_etag
from millrace.datasets.sources.lines import Line, Lines, Section, split_lines
from millrace.datasets.sources.ranges import FileRange
from millrace.datasets.sources.table import FileTable, iterate_files
from millrace.keys.datasets import DatasetKeys
from millrace.schemas.dataset import ByteRange, CompressedRange, FileRef
from millrace.storage import Store
from millrace.storage.answers import READ_BLOCK_SIZE

_BLOCK = 4 << 20  # bytes of a plain file that are read at a time
_TAIL = 256 << 10  # bytes that are read at a time after the end of a range
_BOM = b"\xef\xbb\xbf"

TextRange = ByteRange | CompressedRange


class TextFiles:
    """Files of text lines, which are read from any cursor.

    Args:
        files: Files of the source.
        store: Store of the dataset, for the seek points of compressed files. None reads and stores
            no seek points.
        any_version: Whether a file is also read if it was written again after the plan was made.
    """

    def __init__(self, files: SourceFiles, store: Store | None, *, any_version: bool) -> None:
        self._files, self._store, self._any_version = files, store, any_version

    def iterate_sections(
        self,
        source_range: TextRange,
        cursor: int,
        *,
        from_start: bool = False,
        block: int | None = None,
    ) -> Iterator[Section]:
        """Yield the bytes of a file from a cursor on, to the end of the file.

        Args:
            source_range: Range of the file.
            cursor: Cursor of a row. A cursor before the range gives the bytes from at least one
                byte before the range on.
            from_start: Whether a cursor before the range gives the whole file.
            block: Bytes of the file that are read at a time; None for the default.

        Raises:
            ChangedError: The file has changed since the plan was made.
            ConfigurationError: The file is damaged.
        """
        if self._any_version:
            file = drop_etag(source_range.file)
            source_range = replace(source_range, file=file)
        if isinstance(source_range, ByteRange):
            if cursor <= source_range.start:
                cursor = 0 if from_start else max(0, source_range.start - 1)
            yield from self._iterate_plain_sections(source_range, cursor, block)
            return
        seek = wanted = cursor
        if cursor == 0 and not from_start:
            # The end of the step before the range, since a row of the range may begin after it.
            seek = max(0, CompressedRange.make_cursor(source_range.start, 0) - 1)
        for section in iterate_compressed_sections(
            self._files,
            self._store,
            source_range,
            seek,
            store_states=not self._any_version,
            block=block or READ_BLOCK_SIZE,
        ):
            before = wanted - section.cursor
            if before <= 0:
                yield section
            elif before < len(section.data):
                yield Section(wanted, section.offset + before, section.data[before:])

    def iterate_batches(self, source_range: TextRange, cursor: int) -> Iterator[Lines]:
        """Yield the lines that begin within a range, from a cursor on, with all their bytes."""
        start, end = source_range.start_cursor, source_range.end_cursor
        if cursor >= end:
            return
        sections = self.iterate_sections(source_range, cursor)
        for lines in split_lines(sections, source_range.file.path, end):
            is_last = lines.reach(end)
            lines.keep(start, end)
            if lines.data:
                yield lines
            if is_last:
                return

    def iterate_lines(self, source_range: TextRange, cursor: int) -> Iterator[Line]:
        """Yield the lines that begin within a range, from a cursor on.

        Empty lines, a byte order mark, and a carriage return before a newline are left out.
        """
        for lines in self.iterate_batches(source_range, cursor):
            yield from strip_lines(lines)

    def _iterate_plain_sections(
        self, source_range: ByteRange, position: int, block: int | None
    ) -> Iterator[Section]:
        file, size = source_range.file, source_range.file.size
        end = max(source_range.end, position)
        for start, stop, most in ((position, end, block or _BLOCK), (end, size, block or _TAIL)):
            for data in self._files.iterate_blocks(file, start, stop, block=most):
                yield Section(position, position, data)
                position += len(data)


def strip_lines(lines: Lines) -> Iterator[Line]:
    """Yield each line, and remove its bytes from the lines.

    Empty lines, a byte order mark, and a carriage return before a newline are left out.
    """
    for line in lines.take():
        _, offset, _, held = line
        if offset == 0 or held[0].endswith(b"\r"):
            held[0] = _strip_line(held[0], offset)
        if held[0] and not held[0].isspace():
            yield line


def _strip_line(line: bytes, offset: int) -> bytes:
    if offset == 0 and line.startswith(_BOM):
        line = line[len(_BOM) :]
    return line[:-1] if line.endswith(b"\r") else line


def divide_files(
    files: SourceFiles,
    table: FileTable,
    partition_bytes: int,
    keys: DatasetKeys,
    *,
    whole: bool = False,
) -> list[FileRange]:
    """Divide the files of a source into ranges of about equal size.

    A file of which no part can be read alone becomes one range.

    Args:
        files: Files of the source.
        table: Table of these files.
        partition_bytes: Approximate bytes of a range.
        keys: Names of the dataset.
        whole: Whether each file becomes one range.

    Raises:
        ConfigurationError: A file is compressed, and no run could seek to a row.
    """
    ranges: list[FileRange] = []
    for number, file, reason in iterate_files(table, local=files.is_local):
        if not file.size:
            continue
        if not reason and find_compression(file.path):
            folder = keys.make_seek_points_folder(number)
            ranges.append(
                CompressedRange(
                    file=file, file_index=number, start=0, end=file.size, seek_points=folder
                )
            )
            continue
        is_one = whole or reason or file.path in files.unseekable
        ranges += _divide_file(file, number, file.size if is_one else partition_bytes, reason)
    return ranges


def _divide_file(file: FileRef, number: int, partition_bytes: int, reason: str) -> list[ByteRange]:
    parts = max(1, round(file.size / partition_bytes))
    edges = [file.size * i // parts for i in range(parts + 1)]
    return [
        ByteRange(file=file, file_index=number, start=start, end=end, reason=reason)
        for start, end in pairwise(edges)
        if end > start
    ]
