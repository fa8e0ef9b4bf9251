"""Records of the pages of parquet files, for loaders."""

from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from millrace.digest import OwnDigest
from millrace.records import Record, RecordPart
from millrace.schemas.dataset import ObjectKey

_MAX_GROUPS = 1 << 20  # row groups of a file: readers hold a number for each
_MAX_ROWS = (1 << 31) - 1  # of a row group


def _check_row_groups(runs: tuple[int, ...]) -> tuple[int, ...]:
    """Return runs of row groups that a reader can expand in memory.

    Raises:
        ValueError: The runs are those of no file.
    """
    rows, counts = runs[::2], runs[1::2]
    is_possible = len(rows) == len(counts) and min(runs, default=0) >= 0
    if not is_possible or max(rows, default=0) > _MAX_ROWS or sum(counts) > _MAX_GROUPS:
        raise ValueError("no file has these row groups")
    return runs


class IndexedFile(RecordPart):
    """A file with the place of its layout.

    Attributes:
        path: Path below the URL of the files.
        size: Bytes of the file.
        etag: ETag of the file when its layout was read.
        row_groups: Runs of equal row groups: the rows of a group, and the number of groups, in
            turn.
        start: Offset of its layout in the object with all layouts.
        end: Offset after its layout.
        has_checksums: Whether its layout has checksums of the pages.
    """

    path: str
    size: int = Field(ge=0)
    etag: str
    row_groups: Annotated[tuple[int, ...], AfterValidator(_check_row_groups)]
    start: int = Field(ge=0)
    end: int = Field(ge=0)
    has_checksums: bool


class PageIndex(Record):
    """Index of the pages of a column in all files below a URL.

    Attributes:
        column: Column of the pages.
        layouts: Key of the object with all layouts, below the URL of the files.
        size: Bytes of this object.
        digest: Digest of this object.
        files: Files, each once.
    """

    record_kind: ClassVar[str] = "page-index"
    record_version: ClassVar[int] = 2  # with checksums
    record_bytes: ClassVar[int] = 64 << 20
    column: str
    layouts: ObjectKey
    size: int = Field(ge=0)
    digest: OwnDigest
    files: tuple[IndexedFile, ...]
