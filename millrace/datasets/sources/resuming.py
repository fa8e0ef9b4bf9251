"""Position from which a run that continues reads each kind of source, wherever its files are.

The table in docs/guides/datasets.md is generated from these facts, and
tests/integration/datasets/sources/test_resuming.py counts the bytes that each of them allows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from millrace.datasets.sources.settings import SourceKind


class LocationKind(StrEnum):
    """Kind of the location of a source's files."""

    FOLDER = "folder"
    BUCKET = "bucket"
    HUB = "Hub"
    SERVER = "web server"
    SERVER_WITHOUT_PARTS = "web server without parts"


class ResumePoint(StrEnum):
    """Position in a file from which a run that continues reads it."""

    ROW = "row"
    SAMPLE = "sample"
    SEEK_POINT = "seek point"
    FRAME = "frame"
    ROW_GROUP = "row group"
    FILE = "file"


MEANINGS: Mapping[ResumePoint, str] = {
    ResumePoint.ROW: "the first row that is not in a committed shard; nothing is read again",
    ResumePoint.SAMPLE: "the first sample that is not in a committed shard; nothing is read again",
    ResumePoint.SEEK_POINT: "the last seek point before this row, of which there is one about "
    "every 32 MiB",
    ResumePoint.FRAME: "the last frame of zstd with a seek point, or the file if it is one frame",
    ResumePoint.ROW_GROUP: "the row group of this row",
    ResumePoint.FILE: "the beginning of the file",
}
"""Description of each position."""


@dataclass(frozen=True, slots=True)
class FileResume:
    """Positions from which the files of a source with similar names are read.

    Attributes:
        files: Description of the files; empty for all files of the kind.
        points: Position for each kind of location. Other locations are refused.
    """

    files: str
    points: Mapping[LocationKind, ResumePoint]


def _resume(
    files: str, point: ResumePoint, *, without_parts: ResumePoint | None = ResumePoint.FILE
) -> FileResume:
    """Return the positions for files that can be anywhere.

    Args:
        files: Description of the files.
        point: Position where parts of a file can be read.
        without_parts: Position where only whole files can be read; None if they are refused.
    """
    points = dict.fromkeys(LocationKind, point)
    del points[LocationKind.SERVER_WITHOUT_PARTS]
    if without_parts is not None:
        points[LocationKind.SERVER_WITHOUT_PARTS] = without_parts
    return FileResume(files, points)


_TEXTS = (
    _resume("not compressed", ResumePoint.ROW),
    _resume("`.gz`", ResumePoint.SEEK_POINT),
    _resume("`.zst`", ResumePoint.FRAME),
)

RESUMES: Mapping[SourceKind, tuple[FileResume, ...]] = {
    SourceKind.JSONL: _TEXTS,
    SourceKind.CSV: _TEXTS,
    SourceKind.PARQUET: (_resume("", ResumePoint.ROW_GROUP, without_parts=None),),
    SourceKind.HUGGINGFACE: (
        FileResume("parquet", {LocationKind.HUB: ResumePoint.ROW_GROUP}),
        FileResume("others", {LocationKind.HUB: ResumePoint.FILE}),
    ),
    SourceKind.URLS: (*_TEXTS, _resume("parquet", ResumePoint.ROW_GROUP, without_parts=None)),
    SourceKind.FILES: (_resume("", ResumePoint.SAMPLE, without_parts=ResumePoint.SAMPLE),),
    SourceKind.WEBDATASET: (_resume("", ResumePoint.SAMPLE, without_parts=None),),
}
"""Positions of each kind of source."""
