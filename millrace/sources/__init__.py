"""A sample on its way in: sources, and how each is cut into splits."""

import random
from enum import StrEnum
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from millrace import errors
from millrace.keys import DatasetKeys, split_name
from millrace.models.dataset import ByteRange, FileRef, Piece, SourceRecord, Split
from millrace.models.sample import BadRow, Row, Sample
from millrace.sources.base import Source
from millrace.sources.files import list_files, listing_sha256
from millrace.sources.folder import RESERVED, Folder, Group, encode_listing, groups_of, piece_of
from millrace.sources.jsonl import JsonLines, cut_file, divide
from millrace.storage import Store

__all__ = [
    "BadRow",
    "Cut",
    "Row",
    "Sample",
    "Source",
    "SourceKind",
    "SourceSettings",
    "cut",
    "open_source",
]

LARGEST_FILE = 1 << 30
T = TypeVar("T")


class SourceKind(StrEnum):
    """What a source is made of."""

    JSONL = "jsonl"
    FILES = "files"


class SourceSettings(BaseModel):
    """Which samples a source gives."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: SourceKind = Field(
        default=SourceKind.JSONL,
        description="`jsonl`: a sample a line. `files`: a sample a file, or a group of files that "
        "share their name up to the first dot.",
    )
    include: list[str] = Field(
        default=["*"], description="Patterns of the files to take, such as `*.jsonl`."
    )
    exclude: list[str] = Field(default=[], description="Patterns of the files to leave.")
    columns: dict[str, str] | None = Field(
        default=None,
        description="For `jsonl`: which column becomes which field, as `{txt: text}`. Left out, "
        "each row is kept whole as `json`.",
    )

    @field_validator("columns")
    @classmethod
    def _readable(cls, columns: dict[str, str] | None) -> dict[str, str] | None:
        for name in columns or {}:
            if not name or "/" in name or RESERVED.search(name) or not name.isprintable():
                raise ValueError(
                    f"webdataset could not read the field {name!r} back: write an extension such "
                    "as txt, without '/' and not like __this__"
                )
        if len({name.lower() for name in columns or {}}) < len(columns or {}):
            raise ValueError("two fields differ in upper and lower case only: readers see one")
        return columns


class Cut(BaseModel):
    """A source cut into splits.

    Attributes:
        record: The source at its revision.
        splits: In the order of their names.
        listings: What must be in the store before the plan is: key → body.
    """

    model_config = ConfigDict(frozen=True)

    record: SourceRecord
    splits: tuple[Split, ...]
    listings: dict[str, bytes]


def cut(
    settings: SourceSettings,
    store: Store,
    keys: DatasetKeys,
    *,
    split_bytes: int,
    seed: int | None,
    holdout: float,
) -> Cut:
    """Cut a source into splits: a pure function of its files and these arguments.

    Args:
        settings: Which samples.
        store: Where they are.
        keys: The dataset's names.
        split_bytes: About how many bytes of the source make a split.
        seed: Of the shuffle: of the splits for JSON lines, of all samples for files. None keeps
            the source's order.
        holdout: The share of the bytes that becomes the partition ``val``.

    Raises:
        NotFoundError: The source has no files.
        ConfigurationError: A file cannot be cut.
    """
    files = list_files(store, include=settings.include, exclude=settings.exclude)
    record = SourceRecord(
        kind=settings.kind.value,
        url=store.url,
        settings={"columns": settings.columns} if settings.kind is SourceKind.JSONL else {},
        files=len(files),
        size=sum(file.size for file in files),
        sha256=listing_sha256(files),
    )
    listings: dict[str, bytes] = {}
    splits: list[Split] = []
    match settings.kind:
        case SourceKind.JSONL:
            for partition, pieces in _cut_lines(files, split_bytes, seed, holdout).items():
                splits += [_split(partition, i, piece) for i, piece in enumerate(pieces)]
        case SourceKind.FILES:
            for partition, batches in _cut_groups(files, split_bytes, seed, holdout).items():
                for i, batch in enumerate(batches):
                    body = encode_listing(batch)
                    piece = piece_of(batch, "", body)
                    key = keys.listing(split_name(partition, i), piece.sha256)
                    listings[key] = body
                    splits.append(_split(partition, i, piece.model_copy(update={"listing": key})))
    return Cut(record=record, splits=tuple(splits), listings=listings)


def open_source(record: SourceRecord, store: Store, dataset: Store) -> Source:
    """The source that a plan names.

    Args:
        record: From the plan.
        store: Where the source's files are.
        dataset: Where the plan is.
    """
    match SourceKind(record.kind):
        case SourceKind.JSONL:
            return JsonLines(store, record.settings.get("columns"))
        case SourceKind.FILES:
            return Folder(store, dataset)


def _split(partition: str, number: int, piece: Piece) -> Split:
    return Split(name=split_name(partition, number), partition=partition, piece=piece)


def _cut_lines(
    files: list[FileRef], split_bytes: int, seed: int | None, holdout: float
) -> dict[str, list[ByteRange]]:
    ranges = [piece for i, file in enumerate(files) for piece in cut_file(file, i, split_bytes)]
    _shuffle(ranges, seed)
    wanted = round(sum(piece.size for piece in ranges) * holdout)
    held: list[ByteRange] = []
    while wanted > 0:
        piece = ranges.pop()
        if piece.size > wanted:
            first, piece = divide(piece, piece.size - wanted)
            ranges.append(first)
        held.append(piece)
        wanted -= piece.size
    return {"train": ranges, "val": held}


def _cut_groups(
    files: list[FileRef], split_bytes: int, seed: int | None, holdout: float
) -> dict[str, list[list[Group]]]:
    groups = groups_of(files)
    for group in groups:
        if group.size > LARGEST_FILE:
            raise errors.ConfigurationError(
                f"{group.files[0].path}: a sample of {group.size} bytes is larger than a shard can "
                f"be ({LARGEST_FILE} bytes). Leave it out with exclude, or cut it up."
            )
    _shuffle(groups, seed)
    wanted = round(sum(group.size for group in groups) * holdout)
    held: list[Group] = []
    while wanted > 0:
        held.append(groups.pop())
        wanted -= held[-1].size
    return {"train": _batches(groups, split_bytes), "val": _batches(held, split_bytes)}


def _batches(groups: list[Group], size: int) -> list[list[Group]]:
    batches: list[list[Group]] = []
    room = 0
    for group in groups:
        if room <= 0:
            batches.append([])
            room = size
        batches[-1].append(group)
        room -= group.size
    return batches


def _shuffle(items: list[T], seed: int | None) -> None:
    if seed is not None:
        random.Random(seed).shuffle(items)
